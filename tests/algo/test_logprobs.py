"""Chunked logprobs against the plain path: values, every gradient, and how many logits ever exist."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpofit.algo.logprobs import chunked_logprobs, entropy_from_logits, logprobs_from_logits

V, H, N = 37, 13, 11
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 2.0},
    "everything": {"bias": True, "temperature": 1.3, "softcap": 3.0, "scale": 0.4},
}


def inputs(dtype: torch.dtype, with_bias: bool = False, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return draw(N, H), draw(V, H), torch.randint(V, (N,), generator=generator), draw(V) if with_bias else None


def plain_path(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logprobs_from_logits(logits, token_ids, temperature), entropy_from_logits(logits, temperature)


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of one fixed random combination of the outputs."""
    generator = torch.Generator().manual_seed(1)
    total = sum((o * torch.randn(o.shape, generator=generator).to(o.dtype)).sum() for o in outputs)
    return list(torch.autograd.grad(total, leaves))


def test_by_hand() -> None:
    # logits log(1, 2, 5) at temperature 1: probabilities 1/8, 2/8, 5/8; at 0.5 they are squared: 1, 4, 25 over 30
    logits = torch.tensor([[1.0, 2, 5]] * 3).log()
    ids = torch.tensor([0, 1, 2])
    torch.testing.assert_close(logprobs_from_logits(logits, ids, 1.0), torch.tensor([1 / 8, 1 / 4, 5 / 8]).log())
    torch.testing.assert_close(logprobs_from_logits(logits, ids, 0.5), torch.tensor([1 / 30, 4 / 30, 25 / 30]).log())
    entropy = -sum(p * math.log(p) for p in (1 / 8, 1 / 4, 5 / 8))
    torch.testing.assert_close(entropy_from_logits(logits, 1.0), torch.full((3,), entropy))
    # the same through a head: hidden states are one-hot, the weight's columns are the logits
    hidden, weight = torch.eye(3), logits[0].repeat(3, 1).T.contiguous()
    logprobs, entropies = chunked_logprobs(
        hidden, weight, ids, temperature=0.5, chunk_tokens=2, with_entropy=True
    )  # fmt: skip
    torch.testing.assert_close(logprobs, torch.tensor([1 / 30, 4 / 30, 25 / 30]).log())
    squared = -sum(p * math.log(p) for p in (1 / 30, 4 / 30, 25 / 30))
    torch.testing.assert_close(entropies, torch.full((3,), squared))


def test_temperature_divides_logits_not_logprobs() -> None:
    # prime-rl#697: log p / T is not a distribution
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    every = torch.stack([logprobs_from_logits(logits, torch.full((4,), v), 0.5) for v in range(V)], dim=1)
    torch.testing.assert_close(every.exp().sum(1), torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 3, N - 1, N, N + 1, None])
@pytest.mark.parametrize("head", HEADS)
def test_chunks_equal_the_plain_path_forward_and_every_gradient(
    head: str, chunk: int | None, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"temperature": 1.0, **HEADS[head]}
    hidden, weight, ids, bias = inputs(dtype, options.pop("bias", False))
    leaves = [hidden, weight] if bias is None else [hidden, weight, bias]
    expected = plain_path(hidden, weight, ids, bias=bias, **options)
    actual = chunked_logprobs(
        hidden, weight, ids, bias=bias, chunk_tokens=chunk, with_entropy=True, entropy_gradient=True, **options
    )
    rounding = {torch.float32: 2e-6, torch.float64: 1e-12}[dtype]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding)
        assert a.dtype == dtype and a.shape == (N,)
    for a, b in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=10 * rounding, atol=10 * rounding)


@pytest.mark.parametrize("head", ["plain", "everything"])
def test_gradcheck_in_float64(head: str) -> None:
    options: dict[str, Any] = {"temperature": 1.0, **HEADS[head]}
    hidden, weight, ids, bias = inputs(torch.float64, options.pop("bias", False))

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        h, w = tensors[:2]
        b = tensors[2] if len(tensors) == 3 else None
        return chunked_logprobs(
            h, w, ids, bias=b, chunk_tokens=3, with_entropy=True, entropy_gradient=True, **options
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, (hidden, weight) if bias is None else (hidden, weight, bias))


@pytest.mark.parametrize("chunk", [3, None])
def test_bfloat16_inputs_give_float32_outputs_within_bfloat16s_rounding(chunk: int | None) -> None:
    hidden, weight, ids, _ = inputs(torch.bfloat16)
    exact_hidden, exact_weight = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    expected = plain_path(exact_hidden, exact_weight, ids, temperature=0.9)
    options: dict[str, Any] = {"temperature": 0.9, "with_entropy": True, "entropy_gradient": True}
    actual = chunked_logprobs(hidden, weight, ids, chunk_tokens=chunk, **options)
    eps = torch.finfo(torch.bfloat16).eps
    largest_logit = (exact_hidden @ exact_weight.T).abs().max().item()
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=eps * largest_logit)
    pairs = zip(gradients(actual, [hidden, weight]), gradients(expected, [exact_hidden, exact_weight]), strict=True)
    for a, b in pairs:
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).norm() < 4 * eps * b.norm()


def test_the_weight_gradient_adds_up_in_float32_over_chunks() -> None:
    # 512 tokens in chunks of one: a bfloat16 sum would lose what is below 1/256 of it at every chunk.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(512, H, generator=generator).bfloat16() + 1
    weight = torch.zeros(V, H, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(512, dtype=torch.long)
    options: dict[str, Any] = {"temperature": 1.0, "with_entropy": False}
    (chunked,) = torch.autograd.grad(chunked_logprobs(hidden, weight, ids, chunk_tokens=1, **options)[0].sum(), weight)
    # uniform probabilities: the gradient is sum_n (onehot - 1/V) hidden_n
    exact = -hidden.double().sum(0) / V * torch.ones(V, 1, dtype=torch.float64)
    exact[0] += hidden.double().sum(0)
    error = (chunked.double() - exact).norm() / exact.norm()
    assert error < 4e-3  # one rounding of the probabilities, one of the result: 2^-9 each
    naive = torch.zeros_like(weight)
    for n in range(512):
        one = (torch.eye(V)[0] - 1 / V).bfloat16()
        naive = naive + torch.outer(one, hidden[n])
    assert (naive.double() - exact).norm() / exact.norm() > 20 * error


class LogitBuffers(TorchDispatchMode):
    """Counts the live buffers that hold logits: rows x V numbers, views counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[weakref.ref[Tensor]] = []
        self.most_rows = self.most_buffers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() % V == 0 and result.numel() not in (V, V * H):
            self.tensors.append(weakref.ref(result))
            self.most_rows = max(self.most_rows, result.numel() // V)
        alive = {tensor.data_ptr() for reference in self.tensors if (tensor := reference()) is not None}
        self.most_buffers = max(self.most_buffers, len(alive))
        return result


@pytest.mark.parametrize(
    ("options", "forward_buffers", "backward_buffers"),
    [
        ({"with_entropy": False}, 1, 1),
        ({"with_entropy": True}, 2, 1),
        ({"with_entropy": False, "softcap": 3.0}, 1, 2),
        ({"with_entropy": True, "entropy_gradient": True}, 2, 2),
        ({"with_entropy": True, "entropy_gradient": True, "softcap": 3.0}, 2, 3),
    ],
)
def test_one_chunk_of_logits_at_a_time_forward_and_backward(
    options: dict[str, Any], forward_buffers: int, backward_buffers: int
) -> None:
    hidden, weight, ids, _ = inputs(torch.float32)
    with LogitBuffers() as forward:
        outputs = chunked_logprobs(hidden, weight, ids, temperature=0.9, chunk_tokens=3, **options)
    total = sum(output.sum() for output in outputs if output is not None and output.requires_grad)
    with LogitBuffers() as backward:
        total.backward()
    assert (forward.most_rows, forward.most_buffers) == (3, forward_buffers)
    assert (backward.most_rows, backward.most_buffers) == (3, backward_buffers)
    with LogitBuffers() as plain:
        plain_path(hidden, weight, ids)
    assert plain.most_rows == N  # so that the counts above mean something


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_within_a_chunk_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, ids, bias = inputs(dtype, with_bias=True)
    assert bias is not None
    options: dict[str, Any] = {"bias": bias, "softcap": 3.0, "with_entropy": True, "entropy_gradient": True}

    def run() -> list[Tensor]:
        logprobs, entropy = chunked_logprobs(hidden, weight, ids, temperature=0.9, chunk_tokens=5, **options)
        assert entropy is not None
        total = logprobs.square().sum() + entropy.square().sum()
        return [logprobs, entropy, *torch.autograd.grad(total, [hidden, weight, bias])]

    whole = run()
    monkeypatch.setattr("grpofit.algo.logprobs._CPU_BLOCK_BYTES", 2 * V * 4)  # blocks of 2, 2 and 1 of 5 rows
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2  # the bias's sum adds up in another order
    for actual, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_a_frozen_weight_costs_no_gradient() -> None:
    hidden, weight, ids, _ = inputs(torch.float32)
    weight = weight.detach()
    logprobs, _ = chunked_logprobs(hidden, weight, ids, temperature=1.0, chunk_tokens=3, with_entropy=False)
    seen: list[tuple[int, ...]] = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            # A transposed weight is a view; a new [V, H] tensor would be a gradient.
            if isinstance(result, Tensor) and result.shape == (V, H) and not result._is_view():
                seen.append(tuple(result.shape))
            return result

    with Shapes():
        (grad,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert seen == []
    (expected,) = torch.autograd.grad(plain_path(hidden, weight, ids)[0].sum(), hidden)
    torch.testing.assert_close(grad, expected)


def test_entropy_carries_a_gradient_only_when_asked() -> None:
    hidden, weight, ids, _ = inputs(torch.float32)
    options: dict[str, Any] = {"temperature": 1.0, "chunk_tokens": 3}
    logprobs, entropy = chunked_logprobs(hidden, weight, ids, with_entropy=True, **options)
    assert logprobs.requires_grad and not entropy.requires_grad
    assert chunked_logprobs(hidden, weight, ids, with_entropy=False, **options)[1] is None
    logprobs, entropy = chunked_logprobs(hidden, weight, ids, with_entropy=True, entropy_gradient=True, **options)
    (grad,) = torch.autograd.grad(entropy.sum(), hidden)  # the entropies alone
    (expected,) = torch.autograd.grad(plain_path(hidden, weight, ids)[1].sum(), hidden)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


def test_no_grad_and_no_tokens() -> None:
    hidden, weight, ids, _ = inputs(torch.float32)
    options: dict[str, Any] = {"temperature": 1.0, "with_entropy": True}
    with torch.no_grad():
        logprobs, _ = chunked_logprobs(hidden, weight, ids, chunk_tokens=4, **options)
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, plain_path(hidden, weight, ids)[0].detach())
    logprobs, entropy = chunked_logprobs(hidden[:0], weight, ids[:0], chunk_tokens=None, **options)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() == 0


def test_extreme_logits_stay_finite_and_exact() -> None:
    # a certain token and an impossible one, 300 apart: exp underflows, entropy must be 0 and gradients finite
    weight = torch.tensor([[300.0], [0.0], [-300.0]], requires_grad=True)
    hidden, ids = torch.ones(2, 1, requires_grad=True), torch.tensor([0, 2])
    logprobs, entropy = chunked_logprobs(
        hidden, weight, ids, temperature=1.0, chunk_tokens=1, with_entropy=True, entropy_gradient=True
    )
    assert logprobs.tolist() == [0, -600] and entropy.tolist() == [0, 0]
    for grad in torch.autograd.grad(logprobs.sum() + entropy.sum(), [hidden, weight]):
        assert grad.isfinite().all()


def test_arguments_are_unchanged() -> None:
    hidden, weight, ids, bias = inputs(torch.float32, with_bias=True)
    tensors = [hidden, weight, ids, bias]
    before = [tensor.detach().clone() for tensor in tensors]
    logprobs, entropy = chunked_logprobs(
        hidden, weight, ids, bias=bias, temperature=0.7, softcap=3.0, chunk_tokens=3, with_entropy=True,
        entropy_gradient=True,
    )  # fmt: skip
    (logprobs.sum() + entropy.sum()).backward()
    logits = (hidden @ weight.T).detach()
    copy = logits.clone()
    logprobs_from_logits(logits, ids, 0.7)
    entropy_from_logits(logits, 0.7)
    for tensor, old in zip([*tensors, logits], [*before, copy], strict=True):
        torch.testing.assert_close(tensor.detach(), old, rtol=0, atol=0)


def test_runs_on_meta_with_the_same_shapes() -> None:
    hidden = torch.empty(N, H, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(V, H, device="meta", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.empty(N, device="meta", dtype=torch.long)
    logprobs, entropy = chunked_logprobs(
        hidden, weight, ids, temperature=0.9, softcap=30.0, chunk_tokens=3, with_entropy=True, entropy_gradient=True
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (N,) and logprobs.dtype == torch.float32
    assert hidden.grad.shape == (N, H) and weight.grad.shape == (V, H) and weight.grad.dtype == torch.bfloat16


def test_nonsense_is_refused() -> None:
    hidden, weight, ids, _ = inputs(torch.float32)
    with pytest.raises(AssertionError, match="temperature 0 must be positive"):
        chunked_logprobs(hidden, weight, ids, temperature=0, chunk_tokens=3, with_entropy=False)
    with pytest.raises(AssertionError, match="chunk_tokens 0"):
        chunked_logprobs(hidden, weight, ids, temperature=1, chunk_tokens=0, with_entropy=False)
    with pytest.raises(AssertionError, match="entropy_gradient needs with_entropy"):
        chunked_logprobs(
            hidden, weight, ids, temperature=1, chunk_tokens=3, with_entropy=False, entropy_gradient=True
        )  # fmt: skip
