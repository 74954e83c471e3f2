"""Where the tokens of a packed row stand, and how attention takes them in batches.

Owns the indices between a packed row and rows of equal width. Must not know what is computed with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from grpofit.types import PackedGroup

_FEW_SCORES = 1 << 16
_LARGE_GROUP_SCORES = 1 << 17
"""Scores a head below which padding is cheaper than more calls, and from which a group gets its own calls."""


class Packing:
    """The groups of a packed row with the indices that attention needs, made once for all layers.

    Small groups are bundled: their parts are padded to one batch, so that a layer costs a few operations however many
    groups there are. Large ones stand alone, since padding would cost more than it saves.
    """

    def __init__(self, groups: Sequence[PackedGroup], device: torch.device) -> None:
        self.bundles = [Bundle(bundle, device) for bundle in _bundles(groups)]


def _bundles(groups: Sequence[PackedGroup]) -> list[list[PackedGroup]]:
    """Groups of like size together, as long as the padded scores stay few or near the real ones."""

    def area(group: PackedGroup) -> int:
        return group.prompt_tokens * (group.prompt_tokens + sum(group.completion_tokens))

    bundles: list[list[PackedGroup]] = []
    for group in sorted(groups, key=lambda group: (-area(group), group.start)):
        if bundles:
            together = [*bundles[-1], group]
            prompt = max(g.prompt_tokens for g in together)
            padded = len(together) * prompt * (prompt + max(sum(g.completion_tokens) for g in together))
            if padded <= max(_FEW_SCORES, 1.25 * sum(map(area, together))) and area(together[0]) < _LARGE_GROUP_SCORES:
                bundles[-1].append(group)
                continue
        bundles.append([group])
    return bundles


class Rows:
    """Stretches of a packed row, laid out as rows of equal width."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.count, self.width = len(lengths), max(lengths)
        begin, length = torch.tensor(starts), torch.tensor(lengths)
        ends = begin + length
        self._real: Tensor | None = None  # [count, 1, width, 1]: 1 on tokens, 0 on padding
        self.lengths = None if min(lengths) == self.width else length.to(device)
        column = torch.arange(self.width)
        if self.lengths is not None:
            self._real = (column < length[:, None]).view(self.count, 1, self.width, 1).to(device)
        # Padding repeats a row's last token: any finite values do, since nothing sees them.
        self._take: Tensor | slice = (begin[:, None] + torch.minimum(column, length[:, None] - 1)).flatten()
        within = [torch.arange(n) for n in lengths]
        self._give = (
            None if self.lengths is None else torch.cat([i * self.width + part for i, part in enumerate(within)])
        )
        self._tokens: Tensor | slice = torch.cat([at + part for at, part in zip(starts, within, strict=True)])
        if bool((begin[1:] == ends[:-1]).all()):
            self._tokens = slice(int(begin[0]), int(ends[-1]))
            if self.lengths is None:
                self._take = self._tokens
        self._take, self._tokens = _on(self._take, device), _on(self._tokens, device)
        self._give = None if self._give is None else self._give.to(device)

    def of(self, flat: Tensor, *, zero_padding: bool = False) -> Tensor:
        """[1, heads, S, D] -> [count, heads, width, D]."""
        chosen = flat[:, :, self._take] if isinstance(self._take, slice) else flat.index_select(2, self._take)
        rows = chosen.reshape(flat.shape[1], self.count, self.width, flat.shape[3]).transpose(0, 1)
        return rows * self._real if zero_padding and self._real is not None else rows

    def put(self, rows: Tensor, flat: Tensor, *, add: bool = False) -> None:
        """Write (or add) [count, heads, width, D] to its places in [1, heads, S, D]."""
        values = rows.transpose(0, 1).reshape(1, rows.shape[1], -1, rows.shape[3])
        values = values if self._give is None else values.index_select(2, self._give)
        if isinstance(self._tokens, slice):
            place = flat[:, :, self._tokens]
            place.add_(values) if add else place.copy_(values)
        elif add:
            flat.index_add_(2, self._tokens, values.to(flat.dtype))
        else:
            flat.index_copy_(2, self._tokens, values.to(flat.dtype))


def _on(index: Tensor | slice, device: torch.device) -> Tensor | slice:
    return index if isinstance(index, slice) else index.to(device)


class Bundle:
    """Groups whose parts are computed as one batch.

    Attributes:
        prompts: every prompt a row.
        asked: the prompts of groups with completions; `asking`: of each, all tokens of its completions.
        completions: every completion a row.
        positions: [groups, width] of `asking`, for windows.
    """

    def __init__(self, groups: Sequence[PackedGroup], device: torch.device) -> None:
        self.prompts = Rows([g.start for g in groups], [g.prompt_tokens for g in groups], device)
        full = [g for g in groups if g.completion_tokens]
        self.asked: Rows | None = None
        if not full:
            return
        whole = len(full) == len(groups)
        self.asked = self.prompts if whole else Rows([g.start for g in full], [g.prompt_tokens for g in full], device)
        ends = [g.start + g.prompt_tokens for g in full]
        self.asking = Rows(ends, [sum(g.completion_tokens) for g in full], device)
        starts = [
            end + before
            for end, g in zip(ends, full, strict=True)
            for before in accumulate(g.completion_tokens[:-1], initial=0)
        ]
        self.completions = Rows(starts, [n for g in full for n in g.completion_tokens], device)
        self.positions = torch.zeros(len(full), self.asking.width, dtype=torch.int64)
        for i, g in enumerate(full):
            at = torch.cat([g.prompt_tokens + torch.arange(n) for n in g.completion_tokens])
            self.positions[i, : len(at)] = at
        self.positions = self.positions.to(device)
