"""Random models of real architectures, as folders that grpofit and TRL load like any other model.

Nothing is downloaded. Owns shapes, the tokenizer and rollouts made up for them. Must not know
what is checked or measured.

A tokenizer's word `t17` is the token 17, so a text of n words is a prompt of n tokens.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import grpofit.models.load as loading
from grpofit.config import load
from grpofit.training.clock import Clock
from grpofit.training.setup import build_evaluator, build_parts, choose_device, set_threads
from grpofit.training.step import StepParts
from grpofit.types import Completion, FinishReason, Prompt, Rollout

# name -> model type, and the numbers of the published configuration.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": ("qwen2", {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2.5-1.5b": ("qwen2", {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen3-0.6b": ("qwen3", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}),
    "llama-3.2-1b": ("llama", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
        "rope_theta": 5e5}),
    "mistral-7b": ("mistral", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False, "sliding_window": 4096}),
    "phi-3-mini": ("phi3", {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32064, "tie_word_embeddings": False, "sliding_window": 2047}),
    "gemma-3-270m": ("gemma3_text", {
        "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "query_pre_attn_scalar": 256,
        "sliding_window": 512, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3}),
    "gemma-2-2b": ("gemma2", {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512, "num_hidden_layers": 2,
}  # fmt: skip
_SPECIAL = {"<pad>": 0, "<eos>": 1}
_FIRST_WORD = 2
_MAX_PROMPT_TOKENS = 2048


def make_folder(
    name: str,
    folder: Path,
    *,
    tiny: bool,
    layers: int | None = None,
    max_vocab: int | None = None,
    window: int | None = None,
    eos_every: int = 0,
) -> Path:
    """A random float32 model with its tokenizer, saved for `from_pretrained`.

    Args:
        tiny: the same architecture, a few thousand weights wide: for a CPU.
        layers: that many layers instead of all; where there are two kinds of layer they alternate.
        max_vocab: at most so many tokens, for models that are all vocabulary.
        window: another sliding window, so that rows of a check are longer than it.
        eos_every: every so many-th token is an EOS, so that rows of a rollout end early; 0: one EOS, hardly ever drawn.
    """
    model_type, published = ARCHITECTURES[name]
    shape = {**published, **({k: v for k, v in _TINY.items() if k in published or k == "head_dim"} if tiny else {})}
    if layers is not None and not tiny:
        shape["num_hidden_layers"] = layers
    shape["vocab_size"] = min(shape["vocab_size"], max_vocab or shape["vocab_size"])
    if model_type.startswith("gemma") and len(shape.get("layer_types", ())) != shape["num_hidden_layers"]:
        kinds = ["sliding_attention", "full_attention"]
        shape["layer_types"] = [kinds[i % 2] for i in range(shape["num_hidden_layers"])]
    if window is not None and "sliding_window" in shape:
        shape["sliding_window"] = window
    eos = list(range(_SPECIAL["<eos>"], shape["vocab_size"], eos_every)) if eos_every else _SPECIAL["<eos>"]
    config = AutoConfig.for_model(
        model_type,
        **shape,
        # Large enough that a missing scale or softcap shows in the logits.
        initializer_range=1 / math.sqrt(shape["hidden_size"]),
        max_position_embeddings=4096,
        pad_token_id=_SPECIAL["<pad>"],
        bos_token_id=None,
        eos_token_id=eos,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = _SPECIAL["<pad>"]
    folder.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    make_tokenizer(shape["vocab_size"]).save_pretrained(folder)
    return folder


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Words `t2`, `t3`, ... for the tokens 2, 3, ..."""
    words = {**_SPECIAL, **{f"t{i}": i for i in range(_FIRST_WORD, vocab_size)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def write_prompts(path: Path, lengths: Sequence[int], vocab_size: int, seed: int = 0) -> Path:
    """One row per prompt of the given length in tokens."""
    rng = random.Random(seed)
    rows = [" ".join(f"t{rng.randrange(_FIRST_WORD, vocab_size)}" for _ in range(length)) for length in lengths]
    path.write_text("".join(json.dumps({"prompt": row, "answer": ""}) + "\n" for row in rows))
    return path


def open_parts(folder: Path, prompts: Path, rollout: Mapping[str, int], overrides: Mapping[str, Any]) -> StepParts:
    """The parts of a step, built as `grpofit train` builds them. Close `parts.rewards` when done.

    Args:
        rollout: `prompts_per_step`, `group_size`, `max_completion_tokens`.
        overrides: dotted keys of the configuration.
    """
    config = {
        "model": {"name": str(folder)},
        "task": {"file": str(prompts), "eval_file": str(prompts), "eval_size": 1, "template": "none"},
        "rewards": [{"function": f"{Path(__file__).parents[1] / 'vs_trl_rewards.py'}:every_group"}],
        "rollout": {"max_prompt_tokens": _MAX_PROMPT_TOKENS, **rollout},
        "algo": {"loss": "dapo"},
        "optim": {"lr": 1e-5, "max_grad_norm": None},
        "run": {"compile": "none"},
    }
    resolved = load(config, overrides)
    set_threads(resolved.config.run.threads)
    # Auto classes choose a tokenizer by architecture, whatever the folder holds; the words here are not those.
    with patch.object(loading, "AutoTokenizer", PreTrainedTokenizerFast):
        evaluator, chosen = build_evaluator(resolved, choose_device(resolved.config.run.device))
    return build_parts(resolved, evaluator, chosen, Clock())


def made_up_rollouts(
    prompts: Sequence[Prompt], group_size: int, lengths: Sequence[int], vocab_size: int, seed: int = 3
) -> list[Rollout]:
    """Random completions with random advantages, lengths taken in turn; one group in four has no signal."""
    rng = random.Random(seed)
    rollouts: list[Rollout] = []
    for group, prompt in enumerate(prompts):
        for sample in range(group_size):
            count = lengths[len(rollouts) % len(lengths)]
            ids = tuple(rng.randrange(_FIRST_WORD, vocab_size) for _ in range(count))
            gaps = tuple(-rng.random() * 5 for _ in ids)
            rollouts.append(Rollout(prompt, Completion(ids, gaps, FinishReason.STOP, ""), group, sample))
            rollouts[-1].advantage = 0.0 if group % 4 == 3 else rng.gauss(0, 1)
    return rollouts
