"""Attention of packed rows: each prompt stands once, every completion sees its prompt and itself.

Owns the two-part attention of a packed row, forward and backward: a prompt part and a completion part, joined by
their normalisers. No mask of the row's length squared is made, and of every layer only queries, keys, values, output
and one float32 normaliser a head and token are kept. Must not know models, or how rows were packed.

A part's backward needs only its own scores, the final output and the final normaliser, as in FlashAttention
(arXiv:2205.14135, section 3.1), so parts may be computed by different kernels: torch's flash kernel, or plain
products in pieces where that has no such argument (softcap, window) or is slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpofit.types import PackedGroup

_FLASH_BACKWARD_FROM = 256 * 256
"""Scores a head from which the CPU's flash backward is faster than plain products: it sets up its matrix products
anew for every row and head, which short completions do not pay back (measured: 11 against 3 ms at 4 x 127 tokens)."""
_PIECE_SCORES = {"cpu": 1 << 21, "meta": 1 << 21, "cuda": 1 << 26}
"""Scores that plain products hold at once: on a CPU about its cache, on a card 256 MiB in float32."""


class Packing:
    """The groups of a packed row with the indices that attention needs, made once for all layers."""

    def __init__(self, groups: Sequence[PackedGroup], device: torch.device) -> None:
        self.groups = [_Group(group, device) for group in groups]


class _Group:
    """Where a group's tokens stand, and how its completions are laid out as rows of equal length."""

    def __init__(self, group: PackedGroup, device: torch.device) -> None:
        lengths = group.completion_tokens
        end = group.start + group.prompt_tokens
        self.prompt = slice(group.start, end)
        self.completions = slice(end, end + sum(lengths))
        self.rows, self.width = len(lengths), max(lengths, default=0)
        within = [torch.arange(n) for n in lengths]
        self.positions = (group.prompt_tokens + torch.cat(within)).to(device) if lengths else None
        self._take = self._give = self._real = None
        if lengths and min(lengths) < self.width:
            starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
            count = torch.tensor(lengths)
            column = torch.arange(self.width)
            # Places past a completion's end repeat its last token: any finite value does, nothing sees them.
            take = starts[:, None] + torch.minimum(column, count[:, None] - 1)
            self._take = take.flatten().to(device)
            self._give = torch.cat([i * self.width + part for i, part in enumerate(within)]).to(device)
            self._real = (column < count[:, None]).view(self.rows, 1, self.width, 1).to(device)

    def to_rows(self, flat: Tensor, *, zero_padding: bool = False) -> Tensor:
        """[1, heads, N, D] of the completions' tokens -> [rows, heads, width, D]."""
        heads, last = flat.shape[1], flat.shape[3]
        if self._take is not None:
            flat = flat.index_select(2, self._take)
        rows = flat.view(heads, self.rows, self.width, last).transpose(0, 1)
        return rows * self._real if zero_padding and self._real is not None else rows

    def from_rows(self, rows: Tensor) -> Tensor:
        """Inverse of `to_rows`."""
        flat = rows.transpose(0, 1).reshape(1, rows.shape[1], -1, rows.shape[3])
        return flat if self._give is None else flat.index_select(2, self._give)


@dataclass(frozen=True, slots=True)
class _Spec:
    """`window`: a query sees so many positions, its own included; `softcap`: scores become c tanh(s / c)."""

    scale: float
    window: int | None
    softcap: float | None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention in a packed row.

    Args:
        query: [1, heads, S, D].
        key, value: [1, key heads, S, D]; `heads` is a multiple of `key heads`, in blocks of neighbours.
        packing: where the S tokens stand. Every token must belong to a group.
        scale: factor of the scores.
        window: how many positions a query sees, its own included; positions of every completion follow the prompt's.
        softcap: scores become softcap tanh(score / softcap) (Gemma 2).

    Returns:
        [1, S, heads, D].
    """
    out: Tensor = _PackedAttention.apply(query, key, value, packing, _Spec(scale, window, softcap))  # type: ignore[no-untyped-call]
    return out


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: _Spec) -> Tensor:
        _, heads, tokens, size = q.shape
        out = q.new_empty(1, tokens, heads, size)
        lse = q.new_empty(1, heads, tokens, dtype=_wide(q))
        for group in packing.groups:
            for rows, (part_out, part_lse) in _group_forward(group, q, k, v, spec):
                out[:, rows] = part_out.transpose(1, 2)
                lse[:, :, rows] = part_lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing, ctx.spec = packing, spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for group in ctx.packing.groups:
            _group_backward(group, q, k, v, out.transpose(1, 2), lse, grad_out.transpose(1, 2), ctx.spec, grads)
        return (*grads, None, None)


def _group_forward(
    group: _Group, q: Tensor, k: Tensor, v: Tensor, spec: _Spec
) -> list[tuple[slice, tuple[Tensor, Tensor]]]:
    prompt, rows = group.prompt, group.completions
    prompt_k, prompt_v = k[:, :, prompt], v[:, :, prompt]
    done = [(prompt, _part_forward(q[:, :, prompt], prompt_k, prompt_v, spec, causal=True))]
    if group.positions is not None:
        far = _part_forward(q[:, :, rows], prompt_k, prompt_v, spec, causal=False, positions=group.positions)
        own_out, own_lse = _part_forward(*(group.to_rows(x[:, :, rows]) for x in (q, k, v)), spec, causal=True)
        own = group.from_rows(own_out), group.from_rows(own_lse.unsqueeze(-1)).squeeze(-1)
        done.append((rows, _join(far, own)))
    return done


def _join(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of two sets of keys, from each set's output and normaliser."""
    lse = torch.logaddexp(one[1], other[1])
    shares = ((out, (part - lse).exp_().unsqueeze(-1)) for out, part in (one, other))
    (first, share), (second, rest) = shares
    return (first * share).add_(second * rest), lse


def _group_backward(
    group: _Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    spec: _Spec,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Writes the group's part of `grads`; `out` and `grad` are [1, heads, S, D] here."""
    grad_q, grad_k, grad_v = grads
    prompt, rows = group.prompt, group.completions
    prompt_k, prompt_v = k[:, :, prompt], v[:, :, prompt]

    def of(tokens: slice) -> tuple[Tensor, Tensor, Tensor]:
        return out[:, :, tokens], lse[:, :, tokens], grad[:, :, tokens]

    grad_q[:, :, prompt], prompt_grad_k, prompt_grad_v = _part_backward(
        q[:, :, prompt], prompt_k, prompt_v, *of(prompt), spec, causal=True
    )
    if group.positions is not None:
        far_q, far_k, far_v = _part_backward(
            q[:, :, rows], prompt_k, prompt_v, *of(rows), spec, causal=False, positions=group.positions
        )
        prompt_grad_k, prompt_grad_v = prompt_grad_k + far_k, prompt_grad_v + far_v
        own = _part_backward(
            *(group.to_rows(x[:, :, rows]) for x in (q, k, v, out)),
            group.to_rows(lse[:, :, rows].unsqueeze(-1)).squeeze(-1),
            group.to_rows(grad[:, :, rows], zero_padding=True),
            spec,
            causal=True,
        )
        own_q, grad_k[:, :, rows], grad_v[:, :, rows] = (group.from_rows(x) for x in own)
        grad_q[:, :, rows] = far_q + own_q
    grad_k[:, :, prompt], grad_v[:, :, prompt] = prompt_grad_k, prompt_grad_v


# A part: queries [B, heads, L, D] with keys [B, key heads, K, D] at positions 0 .. K-1. Causal parts have L = K and the
# same positions; in the others every key comes before every query, whose `positions` [L] matter to a window only.


def _part_forward(
    q: Tensor, k: Tensor, v: Tensor, spec: _Spec, *, causal: bool, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, heads, L, D] and normaliser [B, heads, L] in float32 at least."""
    spec = _without_idle_window(spec, q, k, causal, positions)
    if _flash_runs(q, spec):
        k, v = _repeat(k, q), _repeat(v, q)
        if q.is_cuda:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal, False, scale=spec.scale
            )[:2]
            return out, lse
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=spec.scale)
        return out, lse
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=_wide(q))
    for piece, keys in _pieces(q, k, spec, causal, positions):
        scores, _ = _scores(q, k, spec, causal, positions, piece, keys)
        part_lse = scores.logsumexp(-1)
        # A query whose window has left the prompt behind sees nothing here: its share is exp(-inf) = 0.
        weights = scores.sub_(part_lse.clamp_min(torch.finfo(scores.dtype).min).unsqueeze(-1)).exp_().to(q.dtype)
        out[:, :, piece] = _unfold(weights @ v[:, :, keys], q)
        lse[:, :, piece] = _unfold(part_lse.unsqueeze(-1), q).squeeze(-1)
    return out, lse


def _part_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    spec: _Spec,
    *,
    causal: bool,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through this part, given the final `out` [B, heads, L, D] and `lse` [B, heads, L]."""
    spec = _without_idle_window(spec, q, k, causal, positions)
    if _flash_runs(q, spec) and (q.is_cuda or q.shape[2] * k.shape[2] >= _FLASH_BACKWARD_FROM):
        return _flash_backward(q, k, v, out, lse, grad, spec.scale, causal)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(k, dtype=_wide(k)), torch.zeros_like(v, dtype=_wide(v))
    for piece, keys in _pieces(q, k, spec, causal, positions):
        scores, slope = _scores(q, k, spec, causal, positions, piece, keys)
        folded_q, folded_grad = _fold(q[:, :, piece], k), _fold(grad[:, :, piece], k)
        delta = (folded_grad * _fold(out[:, :, piece], k)).sum(-1, keepdim=True, dtype=scores.dtype)
        weights = scores.sub_(_fold(lse[:, :, piece].unsqueeze(-1), k)).exp_()
        grad_v[:, :, keys] += weights.to(q.dtype).transpose(-1, -2) @ folded_grad
        grad_scores = (folded_grad @ v[:, :, keys].transpose(-1, -2)).to(scores.dtype).sub_(delta).mul_(weights)
        if slope is not None:
            grad_scores.mul_(slope)
        narrow = grad_scores.mul_(spec.scale).to(q.dtype)
        grad_q[:, :, piece] = _unfold(narrow @ k[:, :, keys], q)
        grad_k[:, :, keys] += narrow.transpose(-1, -2) @ folded_q
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide_k, wide_v = _repeat(k, q), _repeat(v, q)
    if q.is_cuda:
        none = torch.empty(0, dtype=torch.int64, device=q.device)  # seed and offset of dropout, which is 0
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, wide_k, wide_v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
        )
    else:
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, wide_k, wide_v, out, lse, 0.0, causal, scale=scale
        )
    shape = (k.shape[0], k.shape[1], -1, *k.shape[2:])
    return grad_q, grad_k.view(shape).sum(2), grad_v.view(shape).sum(2)


def _flash_runs(q: Tensor, spec: _Spec) -> bool:
    if spec.window is not None or spec.softcap is not None:
        return False
    if q.is_cuda:
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    return q.dtype != torch.float16


def _without_idle_window(spec: _Spec, q: Tensor, k: Tensor, causal: bool, positions: Tensor | None) -> _Spec:
    """A window that no query of the part reaches the edge of is none: decided from lengths, never from values."""
    if spec.window is None:
        return spec
    reach = k.shape[2] if causal else k.shape[2] + q.shape[2]
    return _Spec(spec.scale, None, spec.softcap) if reach <= spec.window else spec


def _pieces(
    q: Tensor, k: Tensor, spec: _Spec, causal: bool, positions: Tensor | None
) -> list[tuple[slice, slice]]:
    """Pieces of queries with the range of keys each may see."""
    batch, heads, length, _ = q.shape
    keys = k.shape[2]
    step = max(_PIECE_SCORES[q.device.type] // max(batch * heads * keys, 1), 1)
    pieces = []
    for start in range(0, length, step):
        end = min(start + step, length)
        first = 0 if spec.window is None else max((start if causal else keys) - spec.window + 1, 0)
        pieces.append((slice(start, end), slice(min(first, keys - 1), end if causal else keys)))
    return pieces


def _scores(
    q: Tensor, k: Tensor, spec: _Spec, causal: bool, positions: Tensor | None, piece: slice, keys: slice
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, key heads, repeat * l, kk] in float32 at least, -inf where unseen; and the softcap's slope."""
    raw = _fold(q[:, :, piece], k) @ k[:, :, keys].transpose(-1, -2)
    scores, slope = raw.to(_wide(raw)).mul_(spec.scale), None
    if spec.softcap is not None:
        bent = scores.div_(spec.softcap).tanh_()
        slope = (bent * bent).neg_().add_(1)
        scores = bent.mul_(spec.softcap)
    if causal or spec.window is not None:
        at = torch.arange(piece.start, piece.stop, device=q.device) if positions is None else positions[piece]
        distance = at[:, None] - torch.arange(keys.start, keys.stop, device=q.device)
        unseen = distance < 0
        if spec.window is not None:
            unseen |= distance >= spec.window
        scores.view(*scores.shape[:2], -1, *unseen.shape).masked_fill_(unseen, -math.inf)
    return scores, slope


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _repeat(k: Tensor, q: Tensor) -> Tensor:
    """Key heads repeated for the query heads that share them; a copy that lives as long as the call."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _fold(q: Tensor, k: Tensor) -> Tensor:
    """[B, heads, l, D] -> [B, key heads, repeat * l, D]: queries that share a key head in one product."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])


def _unfold(folded: Tensor, q: Tensor) -> Tensor:
    """Inverse of `_fold`."""
    return folded.view(folded.shape[0], q.shape[1], -1, folded.shape[3])
