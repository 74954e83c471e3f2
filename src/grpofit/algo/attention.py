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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpofit.algo.packing import Bundle, Packing, Rows

_FLASH_BACKWARD_FROM = 256 * 256
"""Scores a head from which the CPU's flash backward is faster than plain products: it sets up its matrix products
anew for every row and head, which short completions do not pay back (measured: 11 against 3 ms at 4 x 127 tokens)."""
_PIECE_SCORES = {"cpu": 1 << 21, "meta": 1 << 21, "cuda": 1 << 26}
"""Scores that plain products hold at once: on a CPU about its cache, on a card 256 MiB in float32."""


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
        lse = q.new_empty(1, heads, tokens, 1, dtype=_wide(q))
        for bundle in packing.bundles:
            _bundle_forward(bundle, q, k, v, spec, out.transpose(1, 2), lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing, ctx.spec = packing, spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        given = _Given(q, k, v, out.transpose(1, 2), lse, grad_out.transpose(1, 2))
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for bundle in ctx.packing.bundles:
            _bundle_backward(bundle, given, ctx.spec, *grads)
        return (*grads, None, None)


def _bundle_forward(bundle: Bundle, q: Tensor, k: Tensor, v: Tensor, spec: _Spec, out: Tensor, lse: Tensor) -> None:
    """Writes the bundle's tokens of `out` [1, heads, S, D] and `lse` [1, heads, S, 1]."""
    prompts = bundle.prompts
    for part, place in zip(_part_forward(prompts.of(q), prompts.of(k), prompts.of(v), spec), (out, lse), strict=True):
        prompts.put(part, place)
    if bundle.asked is None:
        return
    asking, own = bundle.asking, bundle.completions
    far_out, far_lse = _part_forward(
        asking.of(q), bundle.asked.of(k), bundle.asked.of(v), spec, _Past(bundle.asked.lengths, bundle.positions)
    )
    own_out, own_lse = _part_forward(own.of(q), own.of(k), own.of(v), spec)
    # Attention over the union of two sets of keys follows from each set's output and normaliser. The far part waits
    # in place until the other, laid out in other rows, is there.
    asking.put(far_out, out)
    asking.put(far_lse, lse)
    far_lse = own.of(lse)
    both = torch.logaddexp(far_lse, own_lse)
    joined = (own.of(out) * (far_lse - both).exp_()).add_(own_out * (own_lse - both).exp_())
    own.put(joined, out)
    own.put(both, lse)


@dataclass(frozen=True, slots=True)
class _Given:
    """What backward starts from, of the row or of a part; output and normaliser are the final ones, over all parts."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor

    def of(self, queries: Rows, keys: Rows) -> _Given:
        return _Given(
            queries.of(self.q), keys.of(self.k), keys.of(self.v), queries.of(self.out), queries.of(self.lse),
            # Padding must not pull at keys and values.
            queries.of(self.grad, zero_padding=True),
        )  # fmt: skip


def _bundle_backward(
    bundle: Bundle, given: _Given, spec: _Spec, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
) -> None:
    """Writes the bundle's tokens of the three gradients."""
    for rows in (bundle.prompts, bundle.completions if bundle.asked else None):
        if rows is not None:
            for part, place in zip(_part_backward(given.of(rows, rows), spec), (grad_q, grad_k, grad_v), strict=True):
                rows.put(part, place)
    if bundle.asked is not None:
        past = _Past(bundle.asked.lengths, bundle.positions)
        far_q, far_k, far_v = _part_backward(given.of(bundle.asking, bundle.asked), spec, past)
        bundle.asking.put(far_q, grad_q, add=True)
        bundle.asked.put(far_k, grad_k, add=True)
        bundle.asked.put(far_v, grad_v, add=True)


# A part: queries [B, heads, L, D] with keys [B, key heads, K, D] at positions 0 .. K-1. Without `_Past` it is causal:
# L = K and the same positions.


@dataclass(frozen=True, slots=True)
class _Past:
    """Every key comes before every query.

    Attributes:
        key_counts: [B], keys past these are padding; None: all count.
        positions: [B, L] of the queries; they matter to a window only.
    """

    key_counts: Tensor | None
    positions: Tensor


def _part_forward(q: Tensor, k: Tensor, v: Tensor, spec: _Spec, past: _Past | None = None) -> tuple[Tensor, Tensor]:
    """Output [B, heads, L, D] and normaliser [B, heads, L, 1] in float32 at least."""
    spec = _without_idle_window(spec, q, k, past)
    if _flash_runs(q, spec, past):
        return _flash_forward(q, k, v, spec.scale, causal=past is None)
    out = torch.empty_like(q)
    lse = q.new_empty(*q.shape[:3], 1, dtype=_wide(q))
    for piece, keys in _pieces(q, k, spec, past):
        scores, _ = _scores(q, k, spec, past, piece, keys)
        part_lse = scores.logsumexp(-1, keepdim=True)
        # A query whose window has left the prompt behind sees nothing here: its share is exp(-inf) = 0.
        weights = scores.sub_(part_lse.clamp_min(torch.finfo(scores.dtype).min)).exp_().to(q.dtype)
        out[:, :, piece] = _unfold(weights @ v[:, :, keys], q)
        lse[:, :, piece] = _unfold(part_lse, q)
    return out, lse


def _part_backward(given: _Given, spec: _Spec, past: _Past | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through this part."""
    q, k, v = given.q, given.k, given.v
    spec = _without_idle_window(spec, q, k, past)
    if _flash_runs(q, spec, past) and (q.is_cuda or q.shape[2] * k.shape[2] >= _FLASH_BACKWARD_FROM):
        return _flash_backward(given, spec.scale, past is None)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(k, dtype=_wide(k)), torch.zeros_like(v, dtype=_wide(v))
    for piece, keys in _pieces(q, k, spec, past):
        scores, slope = _scores(q, k, spec, past, piece, keys)
        folded_q, folded_grad = _fold(q[:, :, piece], k), _fold(given.grad[:, :, piece], k)
        delta = (folded_grad * _fold(given.out[:, :, piece], k)).sum(-1, keepdim=True, dtype=scores.dtype)
        weights = scores.sub_(_fold(given.lse[:, :, piece], k)).exp_()
        grad_v[:, :, keys] += weights.to(q.dtype).transpose(-1, -2) @ folded_grad
        grad_scores = (folded_grad @ v[:, :, keys].transpose(-1, -2)).to(scores.dtype).sub_(delta).mul_(weights)
        if slope is not None:
            grad_scores.mul_(slope)
        narrow = grad_scores.mul_(spec.scale).to(q.dtype)
        grad_q[:, :, piece] = _unfold(narrow @ k[:, :, keys], q)
        grad_k[:, :, keys] += narrow.transpose(-1, -2) @ folded_q
    return grad_q, grad_k, grad_v


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    flash_q, k, v = (_repeated if causal else _folded)(q, k, v)
    if q.is_cuda:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = flash(flash_q, k, v, 0.0, causal, False, scale=scale)[:2]
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(flash_q, k, v, 0.0, causal, scale=scale)
    return (out, lse.unsqueeze(-1)) if causal else (_unfold(out, q), _unfold(lse.unsqueeze(-1), q))


def _flash_backward(given: _Given, scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k = given.q, given.k
    flash_q, wide_k, wide_v = (_repeated if causal else _folded)(q, k, given.v)
    out, lse, grad = (x if causal else _fold(x, k) for x in (given.out, given.lse, given.grad))
    lse = lse.squeeze(-1).contiguous()
    if q.is_cuda:
        none = torch.empty(0, dtype=torch.int64, device=q.device)  # seed and offset of dropout, which is 0
        lengths = (flash_q.shape[2], k.shape[2])
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, flash_q, wide_k, wide_v, out, lse, None, None, *lengths, 0.0, causal, none, none, scale=scale
        )
    else:
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, flash_q, wide_k, wide_v, out, lse, 0.0, causal, scale=scale
        )
    if not causal:
        return _unfold(grad_q, q), grad_k, grad_v
    shape = (k.shape[0], k.shape[1], -1, *k.shape[2:])
    return grad_q, grad_k.reshape(shape).sum(2), grad_v.reshape(shape).sum(2)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Key heads repeated for the query heads that share them; copies that live as long as the call."""
    times = q.shape[1] // k.shape[1]
    return (q, k, v) if times == 1 else (q, k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))


def _folded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where every query sees every key, those that share a key head may as well follow one another: no copies of
    keys, and longer blocks, in which the CPU's backward is a fifth faster."""
    return _fold(q, k), k, v


def _flash_runs(q: Tensor, spec: _Spec, past: _Past | None) -> bool:
    if spec.window is not None or spec.softcap is not None or (past is not None and past.key_counts is not None):
        return False
    if q.is_cuda:
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    return q.dtype != torch.float16


def _without_idle_window(spec: _Spec, q: Tensor, k: Tensor, past: _Past | None) -> _Spec:
    """A window that no query of the part reaches the edge of is none: decided from lengths, never from values."""
    if spec.window is None:
        return spec
    reach = k.shape[2] if past is None else k.shape[2] + q.shape[2]
    return _Spec(spec.scale, None, spec.softcap) if reach <= spec.window else spec


def _pieces(q: Tensor, k: Tensor, spec: _Spec, past: _Past | None) -> list[tuple[slice, slice]]:
    """Pieces of queries with the range of keys each may see."""
    batch, heads, length, _ = q.shape
    keys = k.shape[2]
    step = max(_PIECE_SCORES[q.device.type] // max(batch * heads * keys, 1), 1)
    pieces = []
    for start in range(0, length, step):
        end = min(start + step, length)
        if past is not None:
            # Prompts shorter than the longest begin their windows earlier, so a batch of unequal ones has no band.
            first = keys - spec.window + 1 if spec.window is not None and past.key_counts is None else 0
            pieces.append((slice(start, end), slice(min(max(first, 0), keys - 1), keys)))
        else:
            first = 0 if spec.window is None else max(start - spec.window + 1, 0)
            pieces.append((slice(start, end), slice(first, end)))
    return pieces


def _scores(
    q: Tensor, k: Tensor, spec: _Spec, past: _Past | None, piece: slice, keys: slice
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, key heads, repeat * l, kk] in float32 at least, -inf where unseen; and the softcap's slope."""
    raw = _fold(q[:, :, piece], k) @ k[:, :, keys].transpose(-1, -2)
    scores, slope = raw.to(_wide(raw)).mul_(spec.scale), None
    if spec.softcap is not None:
        bent = scores.div_(spec.softcap).tanh_()
        slope = (bent * bent).neg_().add_(1)
        scores = bent.mul_(spec.softcap)
    unseen = _unseen(spec, past, piece, keys, q.device)
    if unseen is not None:
        scores.view(*scores.shape[:2], -1, *unseen.shape[-2:]).masked_fill_(unseen, -math.inf)
    return scores, slope


def _unseen(spec: _Spec, past: _Past | None, piece: slice, keys: slice, device: torch.device) -> Tensor | None:
    """[B or 1, 1, 1, l or 1, kk] bool."""
    key = torch.arange(keys.start, keys.stop, device=device)
    if past is None:
        distance = torch.arange(piece.start, piece.stop, device=device)[:, None] - key
        unseen = distance < 0
        if spec.window is not None:
            unseen |= distance >= spec.window
        return unseen[None, None, None]
    parts = []
    if past.key_counts is not None:
        parts.append((key >= past.key_counts[:, None])[:, None, None, None])
    if spec.window is not None:
        parts.append((past.positions[:, piece, None] - key >= spec.window)[:, None, None])
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] | parts[1]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _fold(q: Tensor, k: Tensor) -> Tensor:
    """[B, heads, l, D] -> [B, key heads, repeat * l, D]: queries that share a key head in one product."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])


def _unfold(folded: Tensor, q: Tensor) -> Tensor:
    """Inverse of `_fold`."""
    return folded.reshape(folded.shape[0], q.shape[1], -1, folded.shape[3])
