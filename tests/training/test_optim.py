"""The optimizer against torch's own, masters in float32, the schedule by hand, a state that goes on bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpofit.config import OptimConfig
from grpofit.memory.ledger import Ledger
from grpofit.training.optim import _PIECE_WEIGHTS, MasterAdamW, learning_rate

KERNELS = ["fused", "foreach", "loop"]
SHAPES = {"matrix": (33, 7), "vector": (5,), "scalar": ()}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def backward(weights: dict[str, nn.Parameter], step: int) -> None:
    """Through autograd, so that the hooks run."""
    for name, gradient in gradients(step).items():
        (weights[name] * gradient.to(weights[name].dtype)).sum().backward()


def optimizer(weights: dict[str, nn.Parameter], *, master: bool = True, **options: object) -> MasterAdamW:
    return MasterAdamW(weights.items(), OptimConfig(**{"weight_decay": 0.1, **options}), master=master)


# learning_rate

COS_30 = math.cos(math.radians(30))


def rates(total_steps: int, **options: object) -> list[float]:
    config = OptimConfig(lr=8e-6, **options)
    return [learning_rate(config, step, total_steps) / 1e-6 for step in range(total_steps)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [8, 8, 8, 8, 8, 8, 8]),
        ({"warmup_steps": 3}, [2, 4, 6, 8, 8, 8, 8]),
        ({"schedule": "linear", "warmup_steps": 2}, [8 / 3, 16 / 3, 8, 6, 4, 2, 0]),
        ({"schedule": "linear", "warmup_steps": 2, "min_lr_frac": 0.5}, [8 / 3, 16 / 3, 8, 7, 6, 5, 4]),
        ({"schedule": "cosine"}, [8, 4 + 4 * COS_30, 6, 4, 2, 4 - 4 * COS_30, 0]),
        ({"schedule": "cosine", "min_lr_frac": 0.25}, [8, 5 + 3 * COS_30, 6.5, 5, 3.5, 5 - 3 * COS_30, 2]),
        # All of it is warm-up, or all but the last step.
        ({"schedule": "linear", "warmup_steps": 7}, [1, 2, 3, 4, 5, 6, 7]),
        ({"schedule": "linear", "warmup_steps": 6}, [8 / 7 * i for i in range(1, 7)] + [8]),
    ],
)
def test_rates_by_hand(options: dict[str, object], expected: list[float]) -> None:
    assert rates(7, **options) == pytest.approx(expected, abs=1e-9)


def test_a_single_step_is_at_the_full_rate() -> None:
    assert rates(1, schedule="cosine") == pytest.approx([8])


# float32: torch's AdamW


@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_equals_torch(kernel: str) -> None:
    ours, theirs, loop = parameters(), parameters(), parameters()
    own = optimizer(ours, implementation=kernel, betas=(0.8, 0.9), eps=1e-6)
    flags = {"fused": kernel == "fused", "foreach": kernel == "foreach"}
    settings = {"lr": 1.0, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    torchs = torch.optim.AdamW(theirs.values(), **settings, **flags)
    plain = torch.optim.AdamW(loop.values(), **settings, fused=False, foreach=False)
    for step in range(5):
        rate = 0.01 * (step + 1)
        own.zero_grad()
        backward(ours, step)
        for weights, other in ((theirs, torchs), (loop, plain)):
            other.zero_grad()
            backward(weights, step)
            other.param_groups[0]["lr"] = rate
            other.step()
        own.step(rate)
        for name in SHAPES:
            assert torch.equal(ours[name], theirs[name]), f"{name} after step {step}"
            torch.testing.assert_close(ours[name], loop[name], atol=1e-7, rtol=5e-7)


def test_auto_is_fused() -> None:
    auto, fused = parameters(), parameters()
    for weights, kernel in ((auto, "auto"), (fused, "fused")):
        own = optimizer(weights, implementation=kernel)
        backward(weights, 0)
        own.step(0.1)
    assert all(torch.equal(auto[name], fused[name]) for name in SHAPES)


def test_frozen_weights_are_left_out() -> None:
    weights = parameters()
    weights["vector"].requires_grad_(False)
    before = weights["vector"].clone()
    own = optimizer(weights)
    (weights["matrix"].sum() + weights["scalar"]).backward()
    own.step(0.1)
    assert own.count_weights() == 33 * 7 + 1
    assert torch.equal(weights["vector"], before)
    assert not any("vector" in name for name in own.state_tensors())


# bfloat16 with float32 masters


@pytest.mark.parametrize("kernel", KERNELS)
def test_masters_follow_torchs_float32(kernel: str) -> None:
    # The weights are the rounding of what float32 AdamW does with the same gradients.
    weights = parameters(torch.bfloat16)
    full = {name: nn.Parameter(weight.detach().float()) for name, weight in weights.items()}
    own = optimizer(weights, implementation=kernel)
    theirs = torch.optim.AdamW(full.values(), lr=1.0, weight_decay=0.1)
    for step in range(5):
        own.zero_grad()
        backward(weights, step)
        for name, gradient in gradients(step).items():
            full[name].grad = gradient.bfloat16().float()
        theirs.param_groups[0]["lr"] = 0.01
        theirs.step()
        own.step(0.01)
    masters = own.state_tensors()
    for name in SHAPES:
        torch.testing.assert_close(masters[f"master/{name}"], full[name].detach(), atol=1e-7, rtol=5e-7)
        assert torch.equal(weights[name].detach(), masters[f"master/{name}"].bfloat16())


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    own = optimizer({"weight": weight})
    for gradient in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        (weight * gradient).sum().backward()
    assert weight.grad is None
    assert own.gradients()["weight"].dtype == torch.float32
    assert float(own.clip(None)) == 258.0
    own.zero_grad()
    assert float(own.clip(None)) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_micro_batch_keeps_its_gradient_as_it_is(dtype: torch.dtype) -> None:
    # Widened in the update: the same numbers as widened at once, at half the memory.
    weights, wide = parameters(dtype), parameters(dtype)
    own, other = optimizer(weights), optimizer(wide)
    backward(weights, 0)
    assert {gradient.dtype for gradient in own.gradients().values()} == {dtype}
    backward(wide, 0)
    for name, gradient in other.gradients().items():
        other._gradients[name] = gradient.float()
    norms = [each.clip(1.0) for each in (own, other)]
    assert torch.equal(*norms)
    assert int(own.step(0.01)) == int(other.step(0.01)) > 0
    assert own.gradients() == {}
    for name, tensor in own.state_tensors().items():
        assert torch.equal(tensor, other.state_tensors()[name]), name


def test_a_missing_gradient_counts_as_zero() -> None:
    # As in torch where the gradient is a tensor of zeros: averages decay, and a weight goes on moving.
    ours, theirs = parameters(), parameters()
    own = optimizer(ours, implementation="loop")
    torchs = torch.optim.AdamW(theirs.values(), lr=0.01, weight_decay=0.1, foreach=False)
    for step in range(3):
        if step != 1:
            backward(ours, step)
            backward(theirs, step)
        torchs.step()
        own.step(0.01)
        torchs.zero_grad(set_to_none=False)
    for name in SHAPES:
        assert torch.equal(ours[name], theirs[name])


# piece by piece


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pieces_make_no_difference(kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # 33 x 7 weights in pieces of 16 or 100, the last one shorter. Kernels take several weights at once and the rest
    # one by one, which may round the last digit differently.
    states = []
    for size in (1 << 19, 16, 100):
        monkeypatch.setitem(_PIECE_WEIGHTS, "cpu", size)
        weights = parameters(dtype)
        own = optimizer(weights, implementation=kernel)
        norms, changed = [], []
        for step in range(3):
            backward(weights, step)
            backward(weights, step + 10)
            norms.append(own.clip(1.0))
            changed.append(int(own.step(0.01)))
        assert min(changed) > 100
        states.append({**own.state_tensors(), "norms": torch.stack(norms), "changed": torch.tensor(changed) / 237})
    for other in states[1:]:
        for name, whole in states[0].items():
            torch.testing.assert_close(other[name], whole, rtol=2e-6, atol=1e-6 if name != "changed" else 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_update_needs_memory_for_a_piece(
    dtype: torch.dtype, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_PIECE_WEIGHTS, "cpu", 1000)
    weights = {str(i): nn.Parameter(torch.ones(50, 1000, dtype=dtype)) for i in range(3)}
    own = optimizer(weights)
    with Ledger() as ledger:
        for _ in range(micro_batches):
            for weight in weights.values():
                (weight * weight.detach()).sum().backward()
        held = ledger.alive_bytes
        assert held == 150_000 * (4 if micro_batches == 2 else dtype.itemsize)
        ledger.restart()
        own.clip(1.0)
        own.step(0.01)
    assert ledger.peak().alive_bytes < held + 30 * 1000
    assert ledger.alive_bytes < 1000  # gradients are gone


def test_a_bfloat16_master_takes_two_bytes() -> None:
    weights = {"weight": nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))}
    with Ledger() as ledger:
        own = optimizer(weights)
    assert ledger.alive_bytes == 10_000 * (2 + 8)
    assert own.count_weights() == 10_000


def test_weights_in_another_order_of_memory() -> None:
    ours, theirs = ({"weight": nn.Parameter(torch.arange(12.0).view(3, 4).t())} for _ in range(2))
    own = optimizer(ours)
    torchs = torch.optim.AdamW(theirs.values(), lr=0.01, weight_decay=0.1, fused=True)
    for weights in (ours, theirs):
        (weights["weight"] * torch.arange(12.0).view(4, 3)).sum().backward()
    own.step(0.01)
    torchs.step()
    torch.testing.assert_close(ours["weight"], theirs["weight"], rtol=1e-6, atol=0)


def count_changed(weights: dict[str, nn.Parameter], before: dict[str, Tensor]) -> int:
    return sum(int((weights[name] != before[name]).sum()) for name in weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_steps_reach_the_masters_and_are_counted(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 64, generator=generator)
    values[0] *= 1e-5  # weights small enough that a step of 1e-6 is not rounded away
    weights = {"weight": nn.Parameter(values.to(dtype))}
    own = optimizer(weights, weight_decay=0.0)
    before = {"weight": weights["weight"].detach().clone()}
    master_before = own.state_tensors()["master/weight"].clone()
    (weights["weight"] * torch.randn(64, 64, generator=generator).to(dtype)).sum().backward()
    changed = int(own.step(1e-6))
    assert changed == count_changed(weights, before)
    moved = (own.state_tensors()["master/weight"] != master_before).float().mean()
    assert moved > 0.95  # in float32 as well, 1e-6 is 8 units in the last place of a weight near 1
    if dtype == torch.bfloat16:
        assert 10 < changed < 0.05 * 64 * 64
    else:
        assert changed > 0.95 * 64 * 64


def test_small_steps_add_up_only_with_masters() -> None:
    # 400 steps of 1e-5 are 0.004; bfloat16 below 1 moves in steps of 1/256.
    final = {}
    for master in (True, False):
        weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        own = optimizer({"weight": weight}, master=master, weight_decay=0.0)
        for _ in range(400):
            own.zero_grad()
            weight.sum().backward()
            own.step(1e-5)
        final[master] = weight.item()
    assert final == {True: 1 - 1 / 256, False: 1.0}


# state


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.float16, {}),
        (torch.bfloat16, {"master": False}),
        (torch.bfloat16, {"master": False, "rounding": "stochastic"}),
    ],
)
def test_state_goes_on_bit_by_bit(kernel: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    def train(weights: dict[str, nn.Parameter], own: MasterAdamW, steps: range) -> None:
        for step in steps:
            own.zero_grad()
            backward(weights, step)
            own.clip(1.0)
            own.step(0.01)

    weights = parameters(dtype)
    own = optimizer(weights, implementation=kernel, **options)
    train(weights, own, range(3))
    saved = {name: tensor.clone() for name, tensor in own.state_tensors().items()}
    train(weights, own, range(3, 6))

    resumed = {name: nn.Parameter(torch.zeros_like(weight)) for name, weight in weights.items()}
    other = optimizer(resumed, implementation=kernel, **options)
    other.load_state_tensors(saved)
    train(resumed, other, range(3, 6))
    for name in SHAPES:
        assert torch.equal(resumed[name], weights[name])
    expected = own.state_tensors()
    assert other.state_tensors().keys() == expected.keys()
    for name, tensor in other.state_tensors().items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype == (dtype if "master/" in name and not options.get("master", True) else torch.float32)


# clip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("max_norm", "factor"),
    [(None, 1.0), (10.0, 1.0), (1.0, 0.2)],
)
def test_clip(kernel: str, dtype: torch.dtype, max_norm: float | None, factor: float) -> None:
    weights = {"a": nn.Parameter(torch.zeros(1, dtype=dtype)), "b": nn.Parameter(torch.zeros(2, dtype=dtype))}
    own = optimizer(weights, implementation=kernel)
    (3 * weights["a"].sum() + 4 * weights["b"][0]).backward()
    assert float(own.clip(max_norm)) == pytest.approx(5.0)  # the norm before clipping
    assert float(own.clip(None)) == pytest.approx(5.0 * factor, rel=1e-5)
