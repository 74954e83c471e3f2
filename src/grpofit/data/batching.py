"""From rollouts to micro batches of tensors.

Owns which rows share a forward pass, padding, masks and indices. A micro batch holds plain rows, [prompt,
completion, padding]; padding is on the right, so causal attention never sees it and no mask is needed. Masks are made
from lengths, never by looking for a token id. Must not know about models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpofit.types import Rollout


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward.

    Attributes:
        input_ids: [B, S] int64.
        position_ids: [B, S] int64, 0 .. S-1 in every row.
        predict_index: [N] int64, into the flattened [B * S]: the positions whose next token is a completion token.
        target_ids: [N] int64, those next tokens.
        place: [N] int64, into the flattened [B * T]: where the N tokens stand in the [B, T] layout.
        completion_mask: [B, T] float32, 1 on completion tokens that enter the loss.
        sampler_logprobs: [B, T] float32, 0 outside completions.
        advantages: [B] float32.
        rows: which rollouts, in the order given.
    """

    input_ids: Tensor
    position_ids: Tensor
    predict_index: Tensor
    target_ids: Tensor
    place: Tensor
    completion_mask: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    rows: tuple[int, ...]

    def to_rows(self, flat: Tensor) -> Tensor:
        """Lay flat values [N] out as [B, T], 0 elsewhere; differentiable."""
        shape = self.completion_mask.shape
        return flat.new_zeros(shape.numel()).index_copy(0, self.place, flat).view(shape)


def split_rows(lengths: Sequence[int], budget_tokens: int | None) -> list[list[int]]:
    """Group rows into micro batches whose padded size is at most `budget_tokens`, longest first.

    Longest first shows at the start of an update whether it fits, and puts like lengths together. A row longer than
    the budget goes alone. None: one micro batch.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if budget_tokens is None:
        return [order] if order else []
    batches: list[list[int]] = []
    for row in order:
        # The first row of a batch is its longest, so it sets the padded length.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def make_micro_batches(
    rollouts: Sequence[Rollout],
    *,
    budget_tokens: int | None,
    pad_token_id: int,
    mask_truncated: bool,
    device: torch.device,
) -> list[MicroBatch]:
    """All rollouts as micro batches; `rows` index into `rollouts`."""
    lengths = [len(r.prompt.token_ids) + len(r.completion.token_ids) for r in rollouts]
    return [
        _build([rollouts[row] for row in rows], tuple(rows), pad_token_id, mask_truncated, device)
        for rows in split_rows(lengths, budget_tokens)
    ]


def _build(
    rollouts: Sequence[Rollout], rows: tuple[int, ...], pad_token_id: int, mask_truncated: bool, device: torch.device
) -> MicroBatch:
    width = max(len(r.prompt.token_ids) + len(r.completion.token_ids) for r in rollouts)
    longest = max(len(r.completion.token_ids) for r in rollouts)
    input_ids = torch.full((len(rollouts), width), pad_token_id)
    completion_mask = torch.zeros(len(rollouts), longest)
    sampler_logprobs = torch.zeros(len(rollouts), longest)
    predict_index: list[int] = []
    target_ids: list[int] = []
    place: list[int] = []
    for i, rollout in enumerate(rollouts):
        prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids
        count = len(completion)
        input_ids[i, : len(prompt) + count] = torch.tensor(prompt + completion)
        completion_mask[i, :count] = 0.0 if mask_truncated and rollout.truncated else 1.0
        sampler_logprobs[i, :count] = torch.tensor(rollout.completion.sampler_logprobs)
        first = i * width + len(prompt) - 1  # a token is predicted at the position before it
        predict_index += range(first, first + count)
        target_ids += completion
        place += range(i * longest, i * longest + count)
    return MicroBatch(
        input_ids=input_ids.to(device),
        position_ids=torch.arange(width, device=device).expand(len(rollouts), width),
        predict_index=torch.tensor(predict_index, device=device),
        target_ids=torch.tensor(target_ids, device=device),
        place=torch.tensor(place, device=device),
        completion_mask=completion_mask.to(device),
        sampler_logprobs=sampler_logprobs.to(device),
        advantages=torch.tensor([r.advantage for r in rollouts], device=device),
        rows=rows,
    )
