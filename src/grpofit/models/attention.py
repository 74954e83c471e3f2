"""Packed rows in a transformers model: the attention that reads them, and the check that an architecture can.

Owns the registration with transformers and the probe. Must not know how attention is computed (`algo.attention`) nor
how rows are packed (`data.batching`).

The attention function is known to transformers under a name of its own and gets the packing as a keyword argument
through the layers, so that recomputation in backward sees it, too. No mask function stands under that name:
transformers then makes no mask at all. With one it would take every restart of the positions as a new sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from grpofit.algo.attention import packed_attention
from grpofit.algo.packing import Packing
from grpofit.types import PackedGroup

NAME = "grpofit_packed"
_PROBE = PackedGroup(start=0, prompt_tokens=5, completion_tokens=(4, 1, 3))
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# What attention functions may be given that changes nothing here, or is used by name.
_KNOWN_ARGUMENTS = {"is_causal", "position_ids", "use_cache", "cache_position", "output_attentions"}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature; query, key, value [1, heads, S, D], returns [1, S, heads, D]."""
    assert attention_mask is None and dropout == 0
    if isinstance(packing, _Probe):
        packing.windows.append(sliding_window)
        packing.unknown |= {name for name, given in others.items() if given is not None} - _KNOWN_ARGUMENTS
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention(query, key, value, packing, scale=scale, window=sliding_window, softcap=softcap), None


# Loops over groups would be unrolled into graphs of their own for every packing.
AttentionInterface.register(NAME, torch.compiler.disable(_attention))


class _Probe(Packing):
    """A packing that also notes what the layers ask of their attention."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([_PROBE], device)
        self.windows: list[int | None] = []
        self.unknown: set[str] = set()


@contextmanager
def reading_packed_rows(*models: PreTrainedModel) -> Iterator[None]:
    """Inside, the models take packed rows and nothing else; backward must be inside, too, since it may recompute.

    Only the name that every layer reads at each call is changed: `set_attn_implementation` would walk all modules.
    """
    configs = [model.config.get_text_config() for model in models]
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


@torch.no_grad()
def why_not_packed(model: PreTrainedModel) -> str | None:
    """None where packed rows give what plain rows give, else the reason in words.

    Found by running both: architectures with state between tokens, other positions or their own attention fail.
    """
    if reason := _unknown_layers(model):
        return reason
    probe = _Probe(model.device)
    vocab_size = model.get_input_embeddings().get_parameter("weight").shape[0]
    count = _PROBE.prompt_tokens + sum(_PROBE.completion_tokens)
    ids = (1 + torch.arange(count, device=model.device) * 7919) % vocab_size
    was_training = model.training
    model.eval()
    try:
        with reading_packed_rows(model):
            packed = model.base_model(
                input_ids=ids[None], position_ids=_positions(_PROBE, model.device), use_cache=False, packing=probe
            ).last_hidden_state[0]
        gap = max(_gaps(model, ids, packed))
    except Exception as error:  # whatever an architecture that was not made for this raises
        return f"its layers do not take a packed row ({type(error).__name__})"
    finally:
        model.train(was_training)
    if not gap <= _PROBE_TOLERANCE.get(packed.dtype, 1e-4):
        return "packed and plain rows give different hidden states"
    if probe.unknown:
        return f"its attention takes {', '.join(sorted(probe.unknown))}"
    if _windows(model) != sum(window is not None for window in probe.windows):
        return "its attention is not told its sliding window"
    return None


def _positions(group: PackedGroup, device: torch.device) -> Tensor:
    start = group.prompt_tokens
    parts = [torch.arange(start), *(start + torch.arange(n) for n in group.completion_tokens)]
    return torch.cat(parts)[None].to(device)


def _gaps(model: PreTrainedModel, ids: Tensor, packed: Tensor) -> Iterator[float]:
    """Per completion: how far the packed hidden states are from those of [prompt, completion], in the latter's size."""
    first = _PROBE.prompt_tokens
    for length in _PROBE.completion_tokens:
        row = torch.cat([ids[: _PROBE.prompt_tokens], ids[first : first + length]])[None]
        positions = torch.arange(row.shape[1], device=ids.device)[None]
        plain = model.base_model(input_ids=row, position_ids=positions, use_cache=False).last_hidden_state[0]
        own = torch.cat([packed[: _PROBE.prompt_tokens], packed[first : first + length]])
        yield ((own - plain).float().norm() / plain.float().norm()).item()
        first += length


def _unknown_layers(model: PreTrainedModel) -> str | None:
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    return f"it has layers of kind {', '.join(sorted(kinds - _KNOWN_LAYERS))}" if kinds - _KNOWN_LAYERS else None


def _windows(model: PreTrainedModel) -> int:
    """How many layers have a sliding window, by the configuration. The probe is shorter than any window."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds)
    return config.num_hidden_layers if getattr(config, "sliding_window", None) else 0
