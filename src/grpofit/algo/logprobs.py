"""Log-probabilities and entropies of sampled tokens, plain and in chunks.

Owns the softmax over the vocabulary, which is where GRPO's memory goes. Must not know models: it gets hidden states
and the head's weight. Temperature divides the logits, never the logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_PRODUCT_ROWS = 4096
"""Vocabulary rows of the weight's gradient multiplied at once, where the product must be widened before it is added:
whole, the product and its wide copy would be two more [V, H], and on a CPU three times slower (out of cache)."""
_CPU_BLOCK_BYTES, _BLOCK_BYTES = 1 << 20, 64 << 20
"""Float32 logits worked on at once. On a CPU the passes over a block stay in the cache; elsewhere a block is small
beside a chunk and still large enough to fill the device."""


def logprobs_from_logits(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature).

    Args:
        logits: [N, V], any float dtype, finite.
        token_ids: [N] int64.
        temperature: > 0.

    Returns:
        [N] float32 (float64 logits: float64).
    """
    log_softmax = torch.log_softmax(_at_temperature(logits, temperature), dim=-1)
    return log_softmax.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / temperature).

    Args:
        logits: [N, V], any float dtype, finite.
        temperature: > 0.

    Returns:
        [N] float32 (float64 logits: float64).
    """
    log_softmax = torch.log_softmax(_at_temperature(logits, temperature), dim=-1)
    return -(log_softmax.exp() * log_softmax).sum(-1)


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    assert temperature > 0, f"temperature {temperature} must be positive"
    return logits.to(_compute_dtype(logits)) / temperature


def _compute_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_tokens: int | None,
    with_entropy: bool,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (and entropy) of each token from the last hidden states, never holding all logits.

    The distribution is softmax(f(scale (hidden weight^T + bias)) / temperature) with f(z) = softcap tanh(z / softcap),
    or f(z) = z without a softcap. At most `chunk_tokens` x V logits exist at any moment, in forward and in backward,
    which computes them again: one buffer in the model's dtype, of which a block of rows at a time is widened to float32
    (up to three such blocks for entropies, their gradient and a softcap). In between, two or three numbers a token are
    kept.

    Written as an autograd function rather than with activation checkpointing for two reasons. A checkpointed chunk
    adds its gradient to the weight's in the weight's own dtype: in bfloat16 that loses bits with every chunk, here
    the chunks add up in float32. And autograd's own backward of a chunk holds several float32 [chunk, V] buffers.

    Args:
        hidden: [N, H], the model's dtype.
        weight: [V, H], same dtype. A frozen weight costs no gradient.
        token_ids: [N] int64.
        temperature: > 0, of the sampler.
        bias: [V] or None.
        softcap: final logit softcapping (Gemma 2), applied before the temperature.
        scale: factor of the logits (Granite, Cohere), applied before the softcap.
        chunk_tokens: rows of logits at once; None: all N.
        with_entropy: also return entropies.
        entropy_gradient: whether the entropies carry a gradient (needed for an entropy bonus only).

    Returns:
        ([N], [N] or None), float32 (float64 inputs: float64).
    """
    assert temperature > 0, f"temperature {temperature} must be positive"
    assert chunk_tokens is None or chunk_tokens >= 1, f"chunk_tokens {chunk_tokens} must be at least 1"
    assert with_entropy or not entropy_gradient, "entropy_gradient needs with_entropy"
    head = _Head(scale, softcap, temperature)
    chunk = max(hidden.shape[0], 1) if chunk_tokens is None else chunk_tokens
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, token_ids, head, chunk, with_entropy, entropy_gradient
    )
    return logprobs, entropy


class _Head:
    """What happens to a chunk of raw logits before the softmax, and the derivative of it."""

    def __init__(self, scale: float, softcap: float | None, temperature: float) -> None:
        self.scale, self.softcap, self.temperature = scale, softcap, temperature
        self.slope = scale / temperature  # d logits / d raw, where the softcap does not bend it

    def __call__(self, raw: Tensor) -> Tensor:
        """[n, V] logits over temperature, in float32 at least; callers may write to it, and then `raw` is gone."""
        logits = raw.to(_compute_dtype(raw))
        if self.softcap is not None:
            return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return logits if self.slope == 1 else logits.mul_(self.slope)

    def bend(self, logits: Tensor) -> Tensor | None:
        """[n, V] by which the softcap lessens the slope: 1 - tanh^2, from what `__call__` returned."""
        if self.softcap is None:
            return None
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1)


def _blocks(rows: slice, raw: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of a chunk `raw` [n, V], which stands for `rows` of all tokens: their rows of all, and their logits."""
    block_bytes = _CPU_BLOCK_BYTES if raw.device.type == "cpu" else _BLOCK_BYTES
    size = max(block_bytes // (4 * raw.shape[1]), 1)
    for start in range(0, raw.shape[0], size):
        block = raw[start : start + size]
        yield slice(rows.start + start, rows.start + start + block.shape[0]), block


def _block_statistics(logits: Tensor, token_ids: Tensor, with_entropy: bool) -> list[Tensor]:
    """Of a block [n, V] (written over): chosen logprobs, both parts of the normaliser and perhaps entropies, each [n].

    The normaliser stays in two parts, largest logit and log of the rest: their sum would round away the last digits.
    """
    largest = logits.amax(-1)
    logits.sub_(largest.unsqueeze(-1))
    chosen = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    weights = logits.exp() if with_entropy else logits.exp_()
    total = weights.sum(-1)
    log_sum = total.log()
    statistics = [chosen - log_sum, largest, log_sum]
    if with_entropy:
        statistics.append(log_sum - weights.mul_(logits).sum(-1) / total)
    return statistics


def _block_gradient(
    logits: Tensor,
    bend: Tensor | None,
    token_ids: Tensor,
    largest: Tensor,
    log_sum: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient of a block's raw logits [n, V], written over `logits`; the other tensors are [n] but `bend`."""
    grad = logits.sub_(largest.unsqueeze(-1)).sub_(log_sum.unsqueeze(-1))
    if entropy is None or grad_entropy is None:
        grad.exp_().mul_(-grad_logprobs.unsqueeze(-1))
    else:
        factor = (grad + entropy.unsqueeze(-1)).mul_(grad_entropy.unsqueeze(-1)).add_(grad_logprobs.unsqueeze(-1))
        grad.exp_().mul_(factor.neg_())
    grad.scatter_add_(-1, token_ids.unsqueeze(-1), grad_logprobs.unsqueeze(-1))
    return grad if bend is None else grad.mul_(bend)


class _ChunkedLogprobs(torch.autograd.Function):
    """See `chunked_logprobs`. With z the logits, p = softmax(z), H the entropy, y the token:

    d logprob / dz = onehot(y) - p        dH / dz = -p (log p + H)

    Work on a chunk happens in functions of its own, so that its buffers are gone before the next chunk's come.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        head: _Head,
        chunk: int,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        n = hidden.shape[0]
        columns = [hidden.new_empty(n, dtype=_compute_dtype(hidden)) for _ in range(4 if with_entropy else 3)]

        def fill(rows: slice) -> None:  # a function, so that a chunk is gone before the next one is computed
            for block, raw in _blocks(rows, F.linear(hidden[rows], weight, bias)):
                statistics = _block_statistics(head(raw), token_ids[block], with_entropy)
                for column, values in zip(columns, statistics, strict=True):
                    column[block] = values

        for start in range(0, n, chunk):
            fill(slice(start, start + chunk))
        logprobs, largest, log_sum = columns[:3]
        entropy = columns[3] if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, token_ids, largest, log_sum, entropy)
        ctx.head, ctx.chunk = head, chunk
        ctx.set_materialize_grads(False)
        if entropy is not None and not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, largest, log_sum, entropy = ctx.saved_tensors
        # The constant part of the slope goes into [N] numbers, not into [n, V].
        grads = torch.zeros_like(largest) if grad_logprobs is None else grad_logprobs * ctx.head.slope
        entropy_grads = None if grad_entropy is None else grad_entropy * ctx.head.slope
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sum_dtype = largest.dtype if ctx.chunk < hidden.shape[0] else weight.dtype
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=largest.dtype) if needs_bias else None

        def logit_gradient(rows: slice) -> Tensor:
            raw = F.linear(hidden[rows], weight, bias)
            for block, part in _blocks(rows, raw):
                logits = ctx.head(part)
                grad = _block_gradient(
                    logits,
                    ctx.head.bend(logits),
                    token_ids[block],
                    largest[block],
                    log_sum[block],
                    grads[block],
                    None if entropy is None else entropy[block],
                    None if entropy_grads is None else entropy_grads[block],
                )
                if grad_bias is not None:
                    grad_bias.add_(grad.sum(0))
                part.copy_(grad)
            return raw

        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            grad = logit_gradient(rows)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[rows])
            del grad
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total [V, H] += grad [n, V] transposed times hidden [n, H], whose dtype may be narrower than the total's."""
    if total.dtype == hidden.dtype:
        total.addmm_(grad.T, hidden)
        return
    for start in range(0, total.shape[0], _PRODUCT_ROWS):
        rows = slice(start, start + _PRODUCT_ROWS)
        total[rows].add_(grad[:, rows].T @ hidden)
