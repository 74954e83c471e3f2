"""From rollouts to micro batches of tensors.

Owns which completions share a forward pass, packing, padding, masks and indices. Must not know about models or losses.

A micro batch holds one packed row, [prompt, completion, completion, ..., prompt, ...], in which a prompt stands once
for all its completions and positions go on after the prompt in each. Where an architecture cannot read packed rows it
holds plain ones, [prompt, completion, padding]: causal attention never looks right, so padding there needs no mask.
Masks are made from lengths, never by looking for a token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpofit.types import PackedGroup, Rollout


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward.

    Attributes:
        input_ids: [B, S] int64; [1, S] if packed.
        position_ids: int64 of the same shape.
        predict_index: [N] int64, into the flattened [B * S]: the positions whose next token is a completion token.
        target_ids: [N] int64, those next tokens.
        place: [N] int64, into the flattened [B * T]: where the N tokens stand in the [B, T] layout.
        completion_mask: [B, T] float32, 1 on completion tokens that enter the loss.
        sampler_logprobs: [B, T] float32, 0 outside completions.
        advantages: [B] float32.
        rows: which rollouts, in the order of B.
        packing: what stands where in a packed row; None for plain rows.
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
    packing: tuple[PackedGroup, ...] | None = None

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


def pack_groups(
    prompt_tokens: Sequence[int],
    completion_tokens: Sequence[int],
    groups: Sequence[int],
    budget_tokens: int | None,
    whole_group_tokens: int = 0,
) -> list[list[list[int]]]:
    """Put completions into packed rows of at most `budget_tokens`: rows of pieces of indices, longest row first.

    A piece is a prompt with completions of its group. A group over the budget becomes several pieces, each with the
    prompt; a completion that is over it even alone with its prompt gets a row of its own. Pieces are put into rows
    longest first, each into the first row with room. None: one row.

    Args:
        prompt_tokens, completion_tokens: per completion, tokens that its prompt and itself take in a row.
        groups: per completion, its group; completions of a group have the same prompt.
        whole_group_tokens: a group of up to so many tokens is not split, be it over the budget.
    """
    if budget_tokens is None:
        budget_tokens = sum(prompt_tokens) + sum(completion_tokens)
    members: dict[int, list[int]] = {}
    for i in sorted(range(len(groups)), key=lambda i: (-completion_tokens[i], i)):
        members.setdefault(groups[i], []).append(i)
    pieces: list[tuple[int, list[int]]] = []
    for indices in members.values():
        size, piece = prompt_tokens[indices[0]], list[int]()
        for i in indices:
            if piece and size + completion_tokens[i] > max(budget_tokens, whole_group_tokens):
                pieces.append((size, piece))
                size, piece = prompt_tokens[i], []
            size += completion_tokens[i]
            piece.append(i)
        pieces.append((size, piece))
    rows: list[tuple[int, list[list[int]]]] = []
    for size, piece in sorted(pieces, key=lambda sized: (-sized[0], sized[1][0])):
        for at, (used, row) in enumerate(rows):
            if used + size <= budget_tokens:
                row.append(piece)
                rows[at] = (used + size, row)
                break
        else:
            rows.append((size, [piece]))
    return [row for _, row in sorted(rows, key=lambda sized: -sized[0])]


def make_micro_batches(
    rollouts: Sequence[Rollout],
    *,
    packed: bool = False,
    budget_tokens: int | None,
    whole_group_tokens: int = 0,
    pad_token_id: int,
    mask_truncated: bool,
    device: torch.device,
) -> list[MicroBatch]:
    """All rollouts as micro batches; `rows` index into `rollouts`."""
    prompts = [len(r.prompt.token_ids) for r in rollouts]
    completions = [len(r.completion.token_ids) for r in rollouts]
    if packed:
        # The last token of a completion predicts nothing, so it is not in a packed row.
        inputs = [count - 1 for count in completions]
        packing = pack_groups(prompts, inputs, [r.group for r in rollouts], budget_tokens, whole_group_tokens)
        return [_packed(rollouts, pieces, mask_truncated, device) for pieces in packing]
    lengths = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    return [_plain(rollouts, rows, pad_token_id, mask_truncated, device) for rows in split_rows(lengths, budget_tokens)]


def _packed(
    rollouts: Sequence[Rollout], pieces: Sequence[Sequence[int]], mask_truncated: bool, device: torch.device
) -> MicroBatch:
    input_ids: list[int] = []
    position_ids: list[int] = []
    predict_index: list[int] = []
    packing = []
    for piece in pieces:
        prompt = rollouts[piece[0]].prompt.token_ids
        start = len(input_ids)
        input_ids += prompt
        position_ids += range(len(prompt))
        lengths = []
        for row in piece:
            inputs = rollouts[row].completion.token_ids[:-1]
            # The prompt's last token predicts the first token of every completion.
            predict_index += [start + len(prompt) - 1, *range(len(input_ids), len(input_ids) + len(inputs))]
            input_ids += inputs
            position_ids += range(len(prompt), len(prompt) + len(inputs))
            lengths.append(len(inputs))
        packing.append(PackedGroup(start, len(prompt), tuple(n for n in lengths if n)))
    rows = [row for piece in pieces for row in piece]
    return _micro_batch(
        rollouts, rows, torch.tensor([input_ids]), torch.tensor([position_ids]), predict_index, mask_truncated, device,
        tuple(packing),
    )  # fmt: skip


def _plain(
    rollouts: Sequence[Rollout], rows: Sequence[int], pad_token_id: int, mask_truncated: bool, device: torch.device
) -> MicroBatch:
    texts = [rollouts[row].prompt.token_ids + rollouts[row].completion.token_ids for row in rows]
    width = max(len(text) for text in texts)
    input_ids = torch.full((len(rows), width), pad_token_id)
    predict_index: list[int] = []
    for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
        input_ids[i, : len(text)] = torch.tensor(text)
        first = i * width + len(rollouts[row].prompt.token_ids) - 1  # a token is predicted at the position before it
        predict_index += range(first, i * width + len(text) - 1)
    position_ids = torch.arange(width).expand(len(rows), width)
    return _micro_batch(rollouts, rows, input_ids, position_ids, predict_index, mask_truncated, device)


def _micro_batch(
    rollouts: Sequence[Rollout],
    rows: Sequence[int],
    input_ids: Tensor,
    position_ids: Tensor,
    predict_index: list[int],
    mask_truncated: bool,
    device: torch.device,
    packing: tuple[PackedGroup, ...] | None = None,
) -> MicroBatch:
    """What both layouts share: tokens to predict and the [B, T] layout of the loss."""
    chosen = [rollouts[row] for row in rows]
    longest = max(len(r.completion.token_ids) for r in chosen)
    completion_mask = torch.zeros(len(rows), longest)
    sampler_logprobs = torch.zeros(len(rows), longest)
    place: list[int] = []
    for i, rollout in enumerate(chosen):
        count = len(rollout.completion.token_ids)
        completion_mask[i, :count] = 0.0 if mask_truncated and rollout.truncated else 1.0
        sampler_logprobs[i, :count] = torch.tensor(rollout.completion.sampler_logprobs)
        place += range(i * longest, i * longest + count)
    target_ids = [token_id for r in chosen for token_id in r.completion.token_ids]
    return MicroBatch(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        predict_index=torch.tensor(predict_index, device=device),
        target_ids=torch.tensor(target_ids, device=device),
        place=torch.tensor(place, device=device),
        completion_mask=completion_mask.to(device),
        sampler_logprobs=sampler_logprobs.to(device),
        advantages=torch.tensor([r.advantage for r in chosen], device=device),
        rows=tuple(rows),
        packing=packing,
    )
