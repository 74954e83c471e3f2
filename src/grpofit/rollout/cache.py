"""The KV cache of a group rollout: each prompt once, each completion its own, and the attention that reads both.

Owns how keys and values lie in memory, the attention over them, and how transformers is made to call it. Must not
know how tokens are drawn, nor when a row is finished.

Keys of `P` prompts lie in [P, K, D, S] and values in [P, K, S, D] (K: KV heads, S: longest prompt, padded on the
right, D: head dimension). Completions lie in slots, both in [T, P, K, R, D]: R slots for each prompt, T the most
tokens a completion can have. Tokens come first, so that a step writes one block and reads what was written as one.
All rows of a batch are at the same completion token: one number, `step`, says where the next one goes. A row of the
batch is a completion still being sampled; which slot it has is two index tensors, so that finished rows leave the
batch without a copy of any key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache

_NAME = "grpofit_group_decode"
_KNOWN_TENSORS = ("position_ids", "cache_position")  # already in the queries and keys
_active: ContextVar[GroupCache] = ContextVar(_NAME)


class _Layer:
    """Keys and values of one layer; allocated when the first prompts arrive and the shapes are known."""

    is_compileable = False

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.is_sliding = window is not None
        self.prompt_keys = self.prompt_values = self.keys = self.values = torch.empty(0)


class GroupCache(Cache):
    """Holds `P` prompts of at most `S` tokens with `R` slots of `T` tokens each. See the module's docstring."""

    def __init__(
        self,
        windows: Sequence[int | None],
        prompt_lengths: Tensor,
        *,
        slots: int,
        completion_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        """`windows`: of each layer, None where it sees everything. `prompt_lengths`: [P] int64, on the device."""
        self._kv = [_Layer(window) for window in windows]
        super().__init__(layers=self._kv)  # type: ignore[arg-type]
        self.lengths, self.prompts = prompt_lengths, len(prompt_lengths)
        self.longest = int(prompt_lengths.max())
        self.slots = slots
        self.tokens = completion_tokens
        self.dtype = dtype
        self.prefilling: slice | None = None  # which of the prompts the model is reading
        self.step = torch.zeros(1, dtype=torch.int64, device=prompt_lengths.device)
        self.place: slice | Tensor = slice(0, 1)  # where along T the next token goes
        self.extent = 0  # so many of the T are read
        self.row_of_slot: Tensor | None = None
        self.slot_of_row: Tensor | None = None
        self._masks: dict[int | None, Tensor | None] = {}
        self._needs_mask = len(set(prompt_lengths.tolist())) > 1
        self._current = self._kv[0]

    @property
    def window(self) -> int | None:
        """Sliding window of the layer that is being computed."""
        return self._current.window

    def kv_bytes(self) -> int:
        """What keys and values take in memory."""
        return sum(
            tensor.untyped_storage().nbytes()
            for layer in self._kv
            for tensor in (layer.prompt_keys, layer.prompt_values, layer.keys, layer.values)
        )

    def begin_step(self, step: int, *, static: bool) -> None:
        """Say which completion token is fed next.

        `static`: shapes and memory addresses stay the same over many steps, as a CUDA graph needs: the place is
        then read from a tensor, and more of the cache is read than is filled.
        """
        assert step < self.tokens, f"no room for completion token {step} of {self.tokens}"
        self.step.fill_(step)
        self.place = self.step if static else slice(step, step + 1)
        self.extent = _rounded_extent(step + 1, self.tokens) if static else step + 1
        self._masks.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention with the new keys and values, [B, K, new, D]; stores them."""
        layer = self._current = self._kv[layer_idx]
        if self.prefilling is not None:
            if layer.prompt_keys.numel() == 0:
                self._allocate(layer, key_states, value_states)
            new = slice(0, key_states.shape[2])
            layer.prompt_keys[self.prefilling, :, :, new] = key_states.transpose(2, 3)
            layer.prompt_values[self.prefilling, :, new] = value_states
        else:
            self._write(layer.keys, key_states)
            self._write(layer.values, value_states)
        return key_states, value_states

    def _allocate(self, layer: _Layer, keys: Tensor, values: Tensor) -> None:
        # Zeros, since what no token was written to is multiplied by a weight of 0, and 0 times NaN is NaN.
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=keys.device)

        heads, key_dim, value_dim = keys.shape[1], keys.shape[-1], values.shape[-1]
        layer.prompt_keys = zeros(self.prompts, heads, key_dim, self.longest)
        layer.prompt_values = zeros(self.prompts, heads, self.longest, value_dim)
        layer.keys = zeros(self.tokens, self.prompts, heads, self.slots, key_dim)
        layer.values = zeros(self.tokens, self.prompts, heads, self.slots, value_dim)

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        """Put one token's keys or values [B, K, 1, D] at its place in [T, P, K, R, D]."""
        new = self._to_slots(states).transpose(1, 2)[None]
        # A slice converts while it copies; an index tensor wants the dtype right.
        buffer[self.place] = new if isinstance(self.place, slice) else new.to(self.dtype)

    def _to_slots(self, states: Tensor) -> Tensor:
        """[B, heads, 1, D] -> [P, R, heads, D]."""
        flat = states[:, :, 0]
        if self.row_of_slot is not None:
            flat = flat.index_select(0, self.row_of_slot)
        return flat.view(self.prompts, self.slots, *flat.shape[1:])

    def attend(self, query: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """Attention of one new token per row over its prompt and its completion so far.

        Args:
            query: [B, H, 1, D], H a multiple of the KV heads.

        Returns:
            [B, 1, H, D of the values], in the query's dtype.
        """
        layer = self._current
        heads = layer.keys.shape[2]
        share, dim = query.shape[1] // heads, query.shape[-1]  # so many query heads share a KV head
        # The queries of a group, and of the heads that share a KV head, are the rows of one product with the prompt.
        by_prompt = (self.prompts * heads, self.slots * share)
        by_slot = (self.prompts * heads * self.slots, share)
        slots = self._to_slots(query).view(self.prompts, self.slots, heads, share, dim).transpose(1, 2)
        q = _laid_out(slots, self.dtype)
        keys = layer.keys[: self.extent].flatten(1, 3).permute(1, 2, 0)
        values = layer.values[: self.extent].flatten(1, 3).transpose(0, 1)

        to_prompt = torch.bmm(q.view(*by_prompt, dim), layer.prompt_keys.flatten(0, 1))
        to_completion = torch.bmm(q.view(*by_slot, dim), keys)
        scores = torch.cat([to_prompt, to_completion.view(*by_prompt, self.extent)], dim=-1)
        weights = self._scaled(scores, scaling, softcap, self._mask(layer.window)).softmax(-1).to(self.dtype)
        out = torch.bmm(weights[..., : self.longest], layer.prompt_values.flatten(0, 1))
        own_weights = weights.view(*by_slot, -1)[..., self.longest :]
        out = torch.baddbmm(out.view(*by_slot, -1), own_weights, values)

        out = out.view(self.prompts, heads, self.slots, share, -1).transpose(1, 2)
        out = _laid_out(out, query.dtype).view(-1, 1, heads * share, out.shape[-1])
        return out if self.slot_of_row is None else out.index_select(0, self.slot_of_row)

    def _scaled(self, scores: Tensor, scaling: float, softcap: float | None, mask: Tensor | None) -> Tensor:
        """Scores [P * K, R * share, S + extent] as the softmax wants them, float32."""
        scores = scores.to(torch.float32)
        if softcap is not None:
            scores, scaling = torch.tanh(scores * (scaling / softcap)), softcap
        if mask is None:
            return scores * scaling
        return torch.add(mask, scores.view(self.prompts, -1, scores.shape[-1]), alpha=scaling).view_as(scores)

    def _mask(self, window: int | None) -> Tensor | None:
        """[P, 1, S + extent] float32, 0 where a token is seen and -inf where not; None if every one is."""
        if window is None and not self._needs_mask and isinstance(self.place, slice):
            return None
        if window not in self._masks:
            prompt = torch.arange(self.longest, device=self.lengths.device)
            own = torch.arange(self.extent, device=self.lengths.device)
            age = torch.cat([self.lengths[:, None] + self.step - prompt, (self.step - own).expand(self.prompts, -1)], 1)
            seen = age >= 0 if window is None else (age >= 0) & (age < window)
            seen[:, : self.longest] &= prompt < self.lengths[:, None]
            self._masks[window] = torch.zeros_like(age, dtype=torch.float32).masked_fill_(~seen, -torch.inf)[:, None]
        return self._masks[window]

    def select_rows(self, slot_of_row: Sequence[int]) -> None:
        """From now on the batch has the rows in these slots, in this order; each slot has at most one row."""
        count = self.prompts * self.slots
        if list(slot_of_row) == list(range(count)):
            self.slot_of_row = self.row_of_slot = None
            return
        row_of_slot = [0] * count  # a slot without a row computes row 0 again, for nobody
        for row, slot in enumerate(slot_of_row):
            row_of_slot[slot] = row
        device = self.lengths.device
        self.slot_of_row = torch.tensor(slot_of_row, device=device)
        self.row_of_slot = torch.tensor(row_of_slot, device=device)

    def shrink(self, prompts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        """Keep only these prompts, and of each the named slots [P', R'], the same number for all; the rest is freed.

        `select_rows` has to follow, since slots are counted anew.
        """
        device = self.lengths.device
        chosen = torch.tensor(prompts, device=device)
        inside = torch.tensor(slots, device=device)
        for layer in self._kv:
            if len(prompts) < self.prompts:
                layer.prompt_keys, layer.prompt_values = layer.prompt_keys[chosen], layer.prompt_values[chosen]
            # [P', R', T, K, D] -> [T, P', K, R', D]
            layer.keys = layer.keys[:, chosen[:, None], :, inside].permute(2, 0, 3, 1, 4).contiguous()
            layer.values = layer.values[:, chosen[:, None], :, inside].permute(2, 0, 3, 1, 4).contiguous()
        self.lengths, self.prompts, self.slots = self.lengths[chosen], len(prompts), inside.shape[1]

    # What the models' own code asks a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the ones fed now; positions are always passed, so nothing depends on it."""
        return 0 if self.prefilling is not None else self.longest + self.extent - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys, offset) of a mask; the decode's mask function does not build one."""
        return self.get_seq_length() + query_length, 0


def _laid_out(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype` and contiguous, by one copy at most (where the dtype is right, `to` copies nothing)."""
    return tensor.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _rounded_extent(tokens: int, limit: int) -> int:
    """The next power of two from 64 on: few different shapes, and at most twice the reading."""
    extent = 64
    while extent < tokens:
        extent *= 2
    return min(extent, limit)


@contextmanager
def decoding(model: PreTrainedModel, cache: GroupCache) -> Iterator[None]:
    """Inside, the model's attention reads `cache`; the attention implementation is put back however it ends."""
    config = model.config
    parts = {key: getattr(config, key, None) for key in config.sub_configs}  # their setting may differ from the whole's
    usual = {"": config._attn_implementation}
    usual |= {key: part._attn_implementation for key, part in parts.items() if part is not None}
    token = _active.set(cache)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        _active.reset(token)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention; `key` and `value` are in the cache already.

    Raises:
        NotImplementedError: the model's attention has a part that is not done here (sinks, position biases).
    """
    cache = _active.get()
    for name, part in kwargs.items():
        if isinstance(part, Tensor) and name not in _KNOWN_TENSORS:
            raise NotImplementedError(f"its attention takes {name}")
    if kwargs.get("sliding_window") not in (None, cache.window):
        raise NotImplementedError(f"a sliding window of {kwargs['sliding_window']} where {cache.window} was configured")
    return cache.attend(query, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap), None


def _no_mask(**kwargs: Any) -> None:
    """The cache knows the lengths; a mask built by transformers at every step would be read by nobody."""


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _no_mask)
