"""Packed attention against one softmax over a mask of the row's length squared, made token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpofit.algo import attention
from grpofit.algo.attention import packed_attention
from grpofit.algo.packing import Packing
from grpofit.types import PackedGroup

SCALE = 0.3
CPU = torch.device("cpu")


def lay_out(groups: Sequence[tuple[int, Sequence[int]]]) -> list[PackedGroup]:
    packed, start = [], 0
    for prompt, completions in groups:
        packed.append(PackedGroup(start, prompt, tuple(completions)))
        start += prompt + sum(completions)
    return packed


def sees(groups: Sequence[PackedGroup], window: int | None) -> Tensor:
    """[S, S] bool: whether the token of the row sees the token of the column."""
    tokens = []  # (group, completion or -1 for the prompt, position)
    for g, group in enumerate(groups):
        tokens += [(g, -1, i) for i in range(group.prompt_tokens)]
        for c, count in enumerate(group.completion_tokens):
            tokens += [(g, c, group.prompt_tokens + i) for i in range(count)]

    def one(query: tuple[int, int, int], key: tuple[int, int, int]) -> bool:
        distance = query[2] - key[2]
        related = query[0] == key[0] and key[1] in (-1, query[1])
        return related and distance >= 0 and (window is None or distance < window)

    return torch.tensor([[one(query, key) for key in tokens] for query in tokens])


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, softcap: float | None) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeat, 1).transpose(-1, -2) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return (weights @ v.repeat_interleave(repeat, 1)).transpose(1, 2)


def inputs(tokens: int, heads: int, key_heads: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(tokens)
    # As models hand them over: a transposed view of [1, S, heads, D].
    return [torch.randn(1, tokens, h, size, dtype=dtype).transpose(1, 2) for h in (heads, key_heads, key_heads)]


def compare(
    groups: Sequence[tuple[int, Sequence[int]]],
    *,
    window: int | None = None,
    softcap: float | None = None,
    heads: int = 4,
    key_heads: int = 2,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
) -> None:
    """Output and the three gradients, relative to their size."""
    packed = lay_out(groups)
    allowed = sees(packed, window)
    tensors = [x.requires_grad_() for x in inputs(len(allowed), heads, key_heads, 8, dtype)]
    weight = torch.randn(1, len(allowed), heads, 8, dtype=dtype)
    ours = packed_attention(*tensors, Packing(packed, CPU), scale=SCALE, window=window, softcap=softcap)
    theirs = dense(*tensors, allowed, softcap)
    ours_grad = torch.autograd.grad((ours * weight).sum(), tensors)
    theirs_grad = torch.autograd.grad((theirs * weight).sum(), tensors)
    for name, got, expected in zip("oqkv", (ours, *ours_grad), (theirs, *theirs_grad), strict=True):
        gap = (got - expected).norm() / expected.norm().clamp_min(1e-3)
        assert gap < tolerance, (name, groups, window, softcap, gap.item())


@pytest.fixture(params=["flash", "products", "products in pieces"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every kernel a part may be computed with."""
    if request.param == "flash":
        monkeypatch.setattr(attention, "_FLASH_BACKWARD_FROM", 0)
    else:
        monkeypatch.setattr(attention, "_flash_runs", lambda *_: False)
    if request.param == "products in pieces":
        monkeypatch.setitem(attention._PIECE_SCORES, "cpu", 40)
    return str(request.param)


GROUPS: dict[str, list[tuple[int, list[int]]]] = {
    "one completion": [(5, [3])],
    "equal lengths": [(7, [4, 4, 4])],
    "ragged": [(3, [1, 6, 2]), (9, [5, 5]), (1, [1])],
    "prompts alone": [(4, []), (6, [])],
    "one token each": [(1, [1, 1])],
    "alone among others": [(2, [3]), (5, []), (3, [2, 7, 1, 1])],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.usefixtures("kernel")
def test_packed_is_dense(groups: list[tuple[int, list[int]]]) -> None:
    compare(groups)
    compare(groups, heads=3, key_heads=1)
    compare(groups, key_heads=4, dtype=torch.float32, tolerance=1e-5)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("window", [1, 2, 4, 7, 100])
@pytest.mark.usefixtures("kernel")
def test_windows(groups: list[tuple[int, list[int]]], window: int) -> None:
    """Windows shorter than a completion, so that its last tokens no longer see the prompt, to longer than all."""
    compare(groups, window=window)
    compare(groups, window=window, softcap=0.7)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.usefixtures("kernel")
def test_softcap(groups: list[tuple[int, list[int]]]) -> None:
    compare(groups, softcap=0.7)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), max_size=4)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 20),
    softcap=st.none() | st.just(1.5),
)
def test_any_packing(groups: list[tuple[int, list[int]]], window: int | None, softcap: float | None) -> None:
    compare(groups, window=window, softcap=softcap)


def test_bfloat16_is_near(kernel: str) -> None:
    compare(GROUPS["ragged"], dtype=torch.bfloat16, tolerance=2e-2)


def test_flash_and_products_are_used_by_size() -> None:
    """Long parts take the flash backward, short completions the products; both in one call."""
    compare([(300, [5, 260])], dtype=torch.float32, tolerance=1e-5)


def test_no_tensor_of_the_rows_length_squared_is_made() -> None:
    """4,096 tokens: such a mask alone would be 16 MiB, scores of one head 64 MiB."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple) else (result,):
                if isinstance(value, Tensor):
                    largest = max(largest, value.untyped_storage().nbytes())
            return result

    packed = lay_out([(1024, [512, 512]), (1024, [1024])])
    tensors = [x.requires_grad_() for x in inputs(4096, 4, 2, 8, torch.float32)]
    with Watch():
        packed_attention(*tensors, Packing(packed, CPU), scale=SCALE, window=700).sum().backward()
    assert largest <= 4 * 2 * attention._PIECE_SCORES["cpu"]
