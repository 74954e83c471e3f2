"""Decoding: the policy's own forward, run token by token over the rows of a rollout.

Owns prefill, the KV cache and which rows are in the batch. Must not know how tokens are drawn nor when a row ends.

Two implementations of one protocol. `GroupDecoder` keeps each prompt's keys and values once for its whole group, in
buffers written in place, and replaces the model's attention while it decodes. `PlainDecoder` uses transformers' own
`DynamicCache` and attention, for architectures on which the first would not give the model's own logits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from grpofit.rollout.cache import GroupCache, decoding
from grpofit.rollout.runner import Runner

_PREFILL_TOKENS = 8192
"""Prompt tokens the model reads at once: enough to keep any card busy, little next to a training step's memory."""
_DROP_AT_FRAC = 0.125
"""Finished rows leave the batch when this share of it has finished; leaving costs next to nothing."""
_DROP_AT_FRAC_STATIC = 0.5
"""The same where each new number of rows is captured as another graph."""
_SHRINK_AT_FRAC = 0.75
"""Freeing the keys of rows that left costs a copy of the others, so it waits until at most this share is needed."""

TokenIds = tuple[int, ...]


class Decoder(Protocol):
    """Rows on their way through the model. Once made with their prompts, it has read them.

    Attributes:
        logits: [B, V] of the token after each row's prompt.
        drop_at_frac: rows are worth dropping when this share of them has finished.
    """

    logits: Tensor
    drop_at_frac: float

    def step(self, token_ids: Tensor) -> Tensor:
        """Feed the sampled tokens [B] int64; logits [B, V] of the ones after, valid until the next step."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """From now on the batch has these of its rows, in this order."""
        ...


class GroupDecoder:
    """One copy of each prompt's keys and values, in-place writes, no masks and no repeated heads."""

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Sequence[int | None],
        prompts: Sequence[TokenIds],
        max_completion_tokens: int,
        runner: Runner,
    ) -> None:
        """`prompts`: of each row [B]; `windows`: of each layer, from `attention_windows`."""
        self._model, self._runner, self._device = model, runner, model.device
        self.drop_at_frac = _DROP_AT_FRAC_STATIC if runner.static else _DROP_AT_FRAC
        distinct, self._slots, self._slot_of_row = _arrange(prompts)
        self._cache = GroupCache(
            windows,
            torch.tensor([len(prompt) for prompt in distinct], device=self._device),
            slots=self._slots,
            # The last token that is sampled is never fed.
            completion_tokens=max(max_completion_tokens - 1, 1),
            # On a CPU products of small bfloat16 matrices are slower than of float32 ones.
            dtype=torch.float32 if self._device.type == "cpu" else model.dtype,
        )
        self._step = 0
        self._layout = 0  # names the buffers of a step, together with what is read of the cache
        self.logits = self._prefill(distinct)
        self._lay_out()

    def kv_bytes(self) -> int:
        """Memory of keys and values."""
        return self._cache.kv_bytes()

    def step(self, token_ids: Tensor) -> Tensor:
        """See `Decoder.step`."""
        self._input_ids.copy_(token_ids[:, None])
        self._cache.begin_step(self._step, static=self._runner.static)
        self._step += 1
        return self._runner.run((self._layout, self._cache.extent), self._forward)

    def keep(self, rows: Sequence[int]) -> None:
        """See `Decoder.keep`."""
        self._slot_of_row = [self._slot_of_row[row] for row in rows]
        if not self._runner.static:
            self._shrink()
        self._lay_out()

    def _prefill(self, prompts: Sequence[TokenIds]) -> Tensor:
        """Read each distinct prompt once, padded on the right: a causal model never looks there, so no mask."""
        logits: list[Tensor] = []
        start = 0
        while start < len(prompts):
            stop, longest = start + 1, len(prompts[start])
            while stop < len(prompts):
                longest_with = max(longest, len(prompts[stop]))
                if longest_with * (stop + 1 - start) > _PREFILL_TOKENS:
                    break
                stop, longest = stop + 1, longest_with
            logits.append(self._read(prompts[start:stop], slice(start, stop)))
            start = stop
        entry = torch.tensor([slot // self._slots for slot in self._slot_of_row], device=self._device)
        return torch.cat(logits)[entry]

    def _read(self, prompts: Sequence[TokenIds], place: slice) -> Tensor:
        longest = max(map(len, prompts))
        padded = torch.tensor([prompt + prompt[-1:] * (longest - len(prompt)) for prompt in prompts])
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        rows = torch.arange(len(prompts), device=self._device)

        def keep_last(head: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            return (args[0][rows, last][:, None],)

        # Logits of every prompt token would be the largest tensor of all.
        hook = self._model.get_output_embeddings().register_forward_pre_hook(keep_last)
        self._cache.prefilling = place
        try:
            return self._call(padded.to(self._device), torch.arange(longest, device=self._device).expand_as(padded))
        finally:
            self._cache.prefilling = None
            hook.remove()

    def _forward(self) -> Tensor:
        with decoding(self._model, self._cache):
            return self._call(self._input_ids, self._row_lengths + self._cache.step)

    def _call(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=input_ids,
            # Every token counts. Without a mask some models look for padding, which a graph cannot hold.
            attention_mask=torch.ones_like(input_ids, dtype=torch.bool),
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        return logits[:, -1]

    def _lay_out(self) -> None:
        """Buffers for the rows that there are now."""
        self._cache.select_rows(self._slot_of_row)
        entry = torch.tensor([slot // self._slots for slot in self._slot_of_row], device=self._device)
        self._row_lengths = self._cache.lengths[entry][:, None]
        self._input_ids = torch.zeros(len(entry), 1, dtype=torch.int64, device=self._device)
        self._layout += 1

    def _shrink(self) -> None:
        """Free the keys of finished rows, when enough of them are."""
        used: defaultdict[int, list[int]] = defaultdict(list)
        for slot in self._slot_of_row:
            used[slot // self._slots].append(slot % self._slots)
        most = max(map(len, used.values()))
        if len(used) * most > _SHRINK_AT_FRAC * self._cache.prompts * self._slots:
            return
        entries = sorted(used)
        self._cache.shrink(entries, [used[entry] + used[entry][:1] * (most - len(used[entry])) for entry in entries])
        moved = {
            entry * self._slots + slot: new * most + i
            for new, entry in enumerate(entries)
            for i, slot in enumerate(used[entry])
        }
        self._slot_of_row = [moved[slot] for slot in self._slot_of_row]
        self._slots = most


def _arrange(prompts: Sequence[TokenIds]) -> tuple[list[TokenIds], int, list[int]]:
    """The prompts to read, how many slots each has, and the slot of each row (counted over all prompts).

    A prompt with more rows than the average is read more than once, so that slots are never many more than rows.
    """
    rows_of: defaultdict[TokenIds, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows_of[prompt].append(row)
    slots = math.ceil(len(prompts) / len(rows_of))
    entries: list[TokenIds] = []
    slot_of_row = [0] * len(prompts)
    for prompt, rows in rows_of.items():
        for i, row in enumerate(rows):
            if i % slots == 0:
                entries.append(prompt)
            slot_of_row[row] = (len(entries) - 1) * slots + i % slots
    return entries, slots, slot_of_row


class PlainDecoder:
    """Transformers' own cache, mask and attention. Padding on the left."""

    drop_at_frac = _DROP_AT_FRAC

    def __init__(self, model: PreTrainedModel, prompts: Sequence[TokenIds]) -> None:
        """`prompts`: of each row [B]."""
        self._model = model
        distinct = list(dict.fromkeys(prompts))
        longest = max(map(len, distinct))
        input_ids = torch.tensor([prompt[:1] * (longest - len(prompt)) + prompt for prompt in distinct])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in distinct])
        self._cache = DynamicCache(config=model.config)
        self._mask = mask.to(model.device)
        self.logits = self._forward(input_ids.to(model.device))
        if len(distinct) < len(prompts):
            place = {prompt: i for i, prompt in enumerate(distinct)}
            rows = [place[prompt] for prompt in prompts]
            self.logits = self.logits[rows]
            self.keep(rows)

    def step(self, token_ids: Tensor) -> Tensor:
        """See `Decoder.step`."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(token_ids), 1)], dim=1)
        return self._forward(token_ids[:, None])

    def keep(self, rows: Sequence[int]) -> None:
        """See `Decoder.keep`."""
        select = torch.tensor(rows, device=self._mask.device)
        self._cache.batch_select_indices(select)
        self._mask = self._mask[select]

    def _forward(self, input_ids: Tensor) -> Tensor:
        new = input_ids.shape[1]
        logits: Tensor = self._model(
            input_ids=input_ids,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(-1) - 1).clamp_min(0)[:, -new:],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]
