"""Loading a policy: weights in the wanted dtype, tokenizer, EOS ids, limits.

Owns what has to be true of a model before it can be trained. Must not know about tasks, losses or optimizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpofit.config import ModelConfig
from grpofit.errors import ModelError
from grpofit.models.attention import why_not_packed
from grpofit.models.gguf import unpacked_folder
from grpofit.models.head import Head, find_head
from grpofit.models.source import ModelSource, find_source

# What rollouts and training pass besides the tokens.
_NEEDED_INPUTS = ("position_ids", "past_key_values", "logits_to_keep")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(slots=True)
class Policy:
    """A model ready to sample from and to train.

    Attributes:
        head: from hidden states to logprobs; None where the full logits of the model must be used.
        eos_token_ids: every id that ends a completion.
        packs: whether it reads packed rows.
        max_positions: longest prompt plus completion; None where the architecture sets no limit.
        notes: what a user should be told about how it was loaded.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    head: Head | None
    eos_token_ids: tuple[int, ...]
    max_positions: int | None
    notes: list[str]
    packs: bool = False

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def pad_token_id(self) -> int:
        """Fills unused positions. Never looked for by value: masks are made from lengths."""
        return self.eos_token_ids[0]

    @property
    def vocab_size(self) -> int:
        """Logits of a token, padding of the vocabulary included."""
        return int(self.model.config.get_text_config().vocab_size)

    def count_parameters(self) -> int:
        """Parameters, tied weights once."""
        return sum(p.numel() for p in self.model.parameters())


def resolve_dtype(name: str) -> torch.dtype:
    """`auto` is bfloat16."""
    return torch.bfloat16 if name == "auto" else _DTYPES[name]


def load_tokenizer(config: ModelConfig, base_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer alone.

    Raises:
        ModelError: it cannot be found or read.
    """
    return _from_pretrained(AutoTokenizer, find_source(config.name, base_dir), config)  # type: ignore[no-any-return]


def load_policy(config: ModelConfig, base_dir: Path, device: torch.device) -> Policy:
    """Load model and tokenizer.

    Raises:
        ModelError: unknown model, not a decoder-only language model or not one with explicit positions, no EOS id,
            no such attention back end.
    """
    source = find_source(config.name, base_dir)
    tokenizer = load_tokenizer(config, base_dir)
    attention = "sdpa" if config.attention == "auto" else config.attention
    model = _from_pretrained(
        AutoModelForCausalLM, source, config, dtype=resolve_dtype(config.dtype), attn_implementation=attention
    )
    _check_inputs(model, config.name)
    notes = [source.said, *_switch_dropout_off(model), *_keep_softcapping(model, config)]
    model.to(device)
    head = find_head(model)
    if head is None:
        notes.append(f"{model.config.model_type}: logprobs from full logits (its head is not a plain linear layer)")
    unpackable = why_not_packed(model)
    if unpackable is not None:
        notes.append(f"{model.config.model_type}: no shared-prompt packing, rows are plain: {unpackable}")
    return Policy(
        model=model,
        tokenizer=tokenizer,
        head=head,
        eos_token_ids=_eos_token_ids(model, tokenizer, config.name),
        max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        notes=notes,
        packs=unpackable is None,
    )


def _keep_softcapping(model: PreTrainedModel, config: ModelConfig) -> list[str]:
    """Gemma 2 caps its attention scores; sdpa has no such argument and would leave it out without a word."""
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if not softcap or config.attention not in ("auto", "sdpa"):
        return []
    if config.attention == "sdpa":
        raise ModelError(
            f"model '{config.name}' cannot use sdpa attention",
            values=f"attn_logit_softcapping: {softcap}",
            why="sdpa has no softcapping of attention scores, so another model would be trained than was published",
            fix="--set model.attention=eager, or flash_attention_2 where it is installed",
        )
    model.set_attn_implementation("eager")
    return ["attention: eager, since sdpa would leave out this model's softcapping of attention scores"]


def load_reference(config: ModelConfig, base_dir: Path, device: torch.device) -> Policy:
    """A frozen second copy of the starting weights, for the KL term of full fine-tuning."""
    reference = load_policy(config, base_dir, device)
    reference.model.requires_grad_(False)
    reference.model.eval()
    return reference


def load_model_config(config: ModelConfig, base_dir: Path) -> PretrainedConfig:
    """The architecture alone, without weights."""
    return _from_pretrained(AutoConfig, find_source(config.name, base_dir), config)  # type: ignore[no-any-return]


def _from_pretrained(loader: Any, source: ModelSource, config: ModelConfig, **kwargs: Any) -> Any:
    try:
        name = source.name_or_path
        if source.gguf_file is not None:
            name = str(unpacked_folder(Path(name) / source.gguf_file))
        return loader.from_pretrained(
            name, revision=config.revision, trust_remote_code=config.trust_remote_code, **kwargs
        )
    except Exception as error:  # whatever the readers of damaged files raise: tokenizers a bare Exception, struct.error
        text = str(error).strip().splitlines()
        raise ModelError(
            f"model '{config.name}' cannot be loaded ({loader.__name__})",
            values="\n".join(text[:4]) or type(error).__name__,
            why=f"taken as: {source.said}",
            fix=_loading_cure(source, str(error)),
        ) from error


def _loading_cure(source: ModelSource, message: str) -> str:
    if "gated" in message or "401" in message or "403" in message:
        return "accept the model's terms on its hub page, run `hf auth login`, or set model.name to an open model"
    if "flash_attn" in message or "FlashAttention" in message:
        return "pip install flash-attn, or --set model.attention=sdpa"
    if "does not support an attention implementation" in message:
        return "--set model.attention=eager"
    if "Unrecognized configuration class" in message:
        return "set model.name to a decoder-only language model (one that AutoModelForCausalLM loads)"
    if "trust_remote_code" in message:
        return "read the model's code, then --set model.trust_remote_code=true; or choose another model"
    if source.is_local:
        return "check that the folder was written by save_pretrained and is complete"
    return (
        "check the spelling of model.name and the network (HF_HUB_OFFLINE set?), set model.name to a local folder, "
        "or use the packaged model: --set model.name=smollm2-135m"
    )


def _check_inputs(model: PreTrainedModel, name: str) -> None:
    accepted = inspect.signature(model.forward).parameters
    missing = [needed for needed in _NEEDED_INPUTS if needed not in accepted]
    if missing:
        raise ModelError(
            f"model '{name}' has an architecture that cannot be used: {model.config.model_type}",
            values=f"{type(model).__name__}.forward takes no {', no '.join(missing)}",
            why="prompts of different lengths share a batch and a KV cache, each row with its own positions",
            fix="set model.name to a model with explicit positions, such as a Llama, Qwen, Gemma, Mistral or Phi",
        )


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[int, ...]:
    """Union of what model, generation config and tokenizer call EOS: models often stop with several."""
    generation = getattr(model, "generation_config", None)
    candidates = (
        getattr(generation, "eos_token_id", None),
        model.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    )
    ids: dict[int, None] = {}
    for value in candidates:
        ids.update(dict.fromkeys(value if isinstance(value, Iterable) else [] if value is None else [value]))
    if not ids:
        raise ModelError(
            f"model '{name}' has no EOS id",
            values="eos_token_id is missing in config.json, generation_config.json and the tokenizer",
            why="no completion could ever end before the length limit, and no reward for stopping could be learned",
            fix='set eos_token_id in the model\'s generation_config.json, e.g. {"eos_token_id": 2}',
        )
    return tuple(ids)


def _switch_dropout_off(model: PreTrainedModel) -> list[str]:
    """Dropout would make the trained logprobs differ from the sampled ones; says so when there was any."""
    found: set[float] = set()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            found.add(module.p)
            module.p = 0.0
        # Many architectures keep rates as plain numbers that forward reads: dropout, attention_dropout, layerdrop.
        for name, rate in list(vars(module).items()):
            if "drop" in name and isinstance(rate, float) and rate > 0:
                found.add(rate)
                setattr(module, name, 0.0)
    if not found:
        return []
    return [f"dropout {', '.join(map(str, sorted(found)))} switched off: sampling and training must agree"]
