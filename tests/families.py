"""Tiny random models of many architectures, built in memory, and ragged rollouts to run through them.

Weights are large enough that a missing scale, softcap, bias or window is seen in the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tiny import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpofit.models.attention import why_not_packed
from grpofit.models.head import find_head
from grpofit.models.load import Policy
from grpofit.training.step import StepParts
from grpofit.types import Completion, FinishReason, Prompt, Rollout

VOCAB_SIZE = 260  # of the tiny tokenizer
EOS_ID = 256
WINDOW = 4  # of the models with sliding-window attention: shorter than every sequence here

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_MIXED = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# name -> model type, then what it adds to the shape above
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi": ("phi", {}),  # its head has a bias
    # sdpa would leave its softcapping of attention scores out
    "gemma2": (
        "gemma2",
        {
            **_MIXED,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 2.0,
            "attn_logit_softcapping": 3.0,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": ("gemma3_text", {**_MIXED, "query_pre_attn_scalar": 8}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "granite": ("granite", {"logits_scaling": 3.0}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}


def build_model(model_type: str, *, attn_implementation: str = "sdpa", **options: Any) -> PreTrainedModel:
    """A random float32 model in evaluation mode; the same arguments give the same weights."""
    shape = {} if model_type == "gpt2" else _SHAPE
    config = AutoConfig.for_model(
        model_type,
        **{**shape, "vocab_size": VOCAB_SIZE, "initializer_range": 0.2, "bos_token_id": None,
           "eos_token_id": EOS_ID, "pad_token_id": EOS_ID, **options},
    )  # fmt: skip
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attn_implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases start at 0 or 1, where much cancels
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@cache
def _family(name: str) -> PreTrainedModel:
    model_type, options = FAMILIES[name]
    return build_model(model_type, **options)


def family(name: str) -> PreTrainedModel:
    """A model of `FAMILIES` that the caller may change."""
    return copy.deepcopy(_family(name))


def policy_of(model: PreTrainedModel, eos_token_ids: Sequence[int] = (EOS_ID,)) -> Policy:
    """The model as a policy with the tiny tokenizer."""
    packs = why_not_packed(model) is None
    return Policy(model, tiny_tokenizer(), find_head(model), tuple(eos_token_ids), 64, ["built in memory"], packs)


def random_prompt(row_id: int, length: int) -> Prompt:
    """`length` random byte tokens; the same row_id gives the same prompt."""
    ids = torch.randint(EOS_ID, (length,), generator=torch.Generator().manual_seed(1000 + row_id))
    return Prompt(row_id, "", "", tuple(ids.tolist()), {})


def random_rollout(prompt: Prompt, group: int, sample: int, length: int, finish: FinishReason) -> Rollout:
    """A rollout whose completion is `length` random byte tokens, with made-up sampler logprobs."""
    generator = torch.Generator().manual_seed(100 * group + sample)
    ids = torch.randint(EOS_ID, (length,), generator=generator)
    logprobs = -5 * torch.rand(length, generator=generator)
    return Rollout(prompt, Completion(tuple(ids.tolist()), tuple(logprobs.tolist()), finish, ""), group, sample)


def ragged_rollouts(prompts: Sequence[int], completions: Sequence[int]) -> list[Rollout]:
    """One rollout per pair of lengths in tokens, each of its own group."""
    return [
        random_rollout(random_prompt(i, prompt), i, 0, completion, FinishReason.STOP)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def plain_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies [T] of one completion from the model's own full logits: one row, no padding, autograd."""
    prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    log_softmax = (logits / temperature).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, torch.tensor(completion)[:, None])[:, 0], entropy


def gradients_seen(parts: StepParts) -> dict[str, torch.Tensor]:
    """Filled by the next update: the sums that its (last) optimizer update starts from, which uses them up."""
    optimizer, seen = parts.optimizer, dict[str, torch.Tensor]()
    plain = optimizer.step

    def step(lr: float) -> torch.Tensor:
        found = optimizer.gradients()
        seen.update({n: found[n].clone() for n, _ in parts.policy.model.named_parameters() if n in found})
        return plain(lr)

    optimizer.step = step  # type: ignore[method-assign]
    return seen
