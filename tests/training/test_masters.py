"""Masters of every kind: no digit is lost, weights are the nearest rounding, chance is right on average."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from grpofit.config import OptimConfig
from grpofit.training.masters import ByChance, Copy, Itself, LowerBits, Master, Nearest, Scratch, make_master
from grpofit.training.optim import MasterAdamW

CPU = torch.device("cpu")
# Any finite number that rounds to a finite bfloat16, as the bits of its float32.
BITS = st.integers(0, 0x7F7F7FFF)


def write(master: Master, values: Tensor, piece_weights: int = 100) -> None:
    scratch = Scratch(piece_weights, CPU)
    for piece in scratch.pieces(values.numel()):
        held = master.read(piece, scratch)
        master.write(piece, held.copy_(values[piece]), scratch, 1)


def read(master: Master, count: int, piece_weights: int = 100) -> Tensor:
    scratch = Scratch(piece_weights, CPU)
    return torch.cat([master.read(piece, scratch).clone() for piece in scratch.pieces(count)])


def floats(bits: list[int], signs: list[bool]) -> Tensor:
    words = np.array([word | (sign << 31) for word, sign in zip(bits, signs, strict=True)], dtype=np.uint32)
    return torch.from_numpy(words.view(np.float32).copy())


@pytest.mark.parametrize(
    ("dtype", "keep", "rounding", "kind"),
    [
        (torch.float32, True, "nearest", Itself),
        (torch.float32, False, "nearest", Itself),
        (torch.bfloat16, True, "nearest", LowerBits),
        (torch.float16, True, "nearest", Copy),
        (torch.bfloat16, False, "nearest", Nearest),
        (torch.bfloat16, False, "stochastic", ByChance),
    ],
)
def test_kind(dtype: torch.dtype, keep: bool, rounding: str, kind: type) -> None:
    parameter = nn.Parameter(torch.linspace(-3, 3, 250, dtype=dtype).view(10, 25))
    before = parameter.detach().clone()
    master = make_master(parameter, keep=keep, rounding=rounding, key=(1, 0))  # type: ignore[arg-type]
    assert type(master) is kind
    assert torch.equal(read(master, 250), before.float().flatten())
    # What is read and written back unchanged is unchanged, chance or not.
    write(master, before.float().flatten(), 64)
    assert torch.equal(parameter, before)
    assert torch.equal(master.whole(Scratch(64, CPU)).float(), before.float())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(BITS, st.booleans()), min_size=1, max_size=7))
def test_no_digit_is_lost(numbers: list[tuple[int, bool]]) -> None:
    values = floats(*zip(*numbers, strict=True))  # type: ignore[arg-type]
    parameter = nn.Parameter(torch.zeros(len(values), dtype=torch.bfloat16))
    master = LowerBits(parameter)
    write(master, values.clone(), 3)
    assert torch.equal(read(master, len(values), 2).view(torch.int32), values.view(torch.int32))
    # Nearest: no other bfloat16 is nearer, by whole steps of the bits (numbers of one sign lie in their bits' order).
    apart = (parameter.detach().float().view(torch.int32).long() - values.view(torch.int32).long()).abs()
    assert int(apart.max()) <= 0x8000


def test_every_pattern_of_the_lower_half() -> None:
    # Around 1.0078125 = 0x3F81 and its negative: all 65536 numbers that share the upper half, in both signs.
    upper = torch.tensor([0x3F81, 0xBF81 - 0x10000], dtype=torch.int32) << 16
    values = (upper[:, None] + torch.arange(1 << 16, dtype=torch.int32)).flatten().view(torch.float32)
    parameter = nn.Parameter(torch.zeros(len(values), dtype=torch.bfloat16))
    master = LowerBits(parameter)
    write(master, values.clone(), 1 << 15)
    assert torch.equal(read(master, len(values), 50_000), values)
    assert torch.equal(master.whole(Scratch(999, CPU)), values)
    halves = values.view(torch.int32) & 0xFFFF == 0x8000
    assert int(halves.sum()) == 2
    assert torch.equal(parameter[~halves], values[~halves].bfloat16())
    assert parameter[halves].tolist() == [1.015625, -1.015625]  # away from zero


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.9])
def test_chance_is_right_on_average(sign: float, share: float) -> None:
    # `share` of the way from 1 to the next bfloat16, 1 + 2^-7: taken up so often.
    count = 40_000
    value = sign * (1 + share * 2**-7)
    parameter = nn.Parameter(torch.zeros(count, dtype=torch.bfloat16))
    write(ByChance(parameter, (7, 3)), torch.full((count,), value), 9_999)
    assert set(parameter.detach().abs().tolist()) <= {1.0, 1 + 2**-7}
    up = float((parameter.detach().abs() > 1).float().mean())
    assert abs(up - share) <= 4 * (share * (1 - share) / count) ** 0.5


def test_draws_differ_from_piece_to_piece() -> None:
    parameter = nn.Parameter(torch.zeros(2000, dtype=torch.bfloat16))
    write(ByChance(parameter, (7, 3)), torch.full((2000,), 1 + 2**-8), 1000)
    first, second = parameter.detach().split(1000)
    assert 0.4 < float((first != second).float().mean()) < 0.6


# the optimizer without masters


def by_chance(weights: dict[str, nn.Parameter], seed: int = 1) -> MasterAdamW:
    config = OptimConfig(rounding="stochastic", lr=1e-6)
    return MasterAdamW(weights.items(), config, master=False, seed=seed)


def test_small_steps_move_weights_on_average() -> None:
    # 0.05 in bfloat16 moves in steps of 2^-12; at a rate of 1e-6 a step is taken once in 244 updates.
    moved = {}
    for rounding in ("nearest", "stochastic"):
        weights = {"weight": nn.Parameter(torch.full((64, 64), 0.05, dtype=torch.bfloat16))}
        start = weights["weight"].detach().float()
        config = OptimConfig(rounding=rounding)
        own = MasterAdamW(weights.items(), config, master=False, seed=1)
        changed = []
        for _ in range(20):
            weights["weight"].sum().backward()
            changed.append(int(own.step(1e-6)))
        moved[rounding] = float((weights["weight"].detach().float() - start).mean())
        if rounding == "nearest":
            assert changed == [0] * 20
        else:
            assert sum(changed) / (20 * 64 * 64) == pytest.approx(1e-6 * 2**12, rel=0.2)
    assert moved["nearest"] == 0
    # 334 of 4096 weights are expected to have moved, give or take 18.
    assert moved["stochastic"] == pytest.approx(-20e-6, rel=0.2)


def test_chance_follows_float32_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    start = 0.1 * torch.randn(20_000, generator=generator)
    weights = {"weight": nn.Parameter(start.bfloat16())}
    full = nn.Parameter(weights["weight"].detach().float())
    own = by_chance(weights)
    theirs = torch.optim.AdamW([full], lr=1e-4, weight_decay=0.0)
    for step in range(10):
        gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(step)) + 0.3
        (weights["weight"] * gradient.bfloat16()).sum().backward()
        full.grad = gradient.bfloat16().float()
        own.step(1e-4)
        theirs.step()
    apart = weights["weight"].detach().float() - full.detach()
    assert abs(float(apart.mean())) < 4 * float(apart.std()) / 20_000**0.5
    assert float((full.detach() - start.bfloat16().float()).mean()) < -1e-4  # which rounding must not lose


def test_draws_are_keyed() -> None:
    def train(seed: int, names: list[str]) -> tuple[dict[str, Tensor], list[Tensor]]:
        weights = {name: nn.Parameter(torch.full((40, 30), 0.05, dtype=torch.bfloat16)) for name in names}
        own = by_chance(weights, seed)
        seen = []
        for _ in range(2):
            for weight in weights.values():
                weight.sum().backward()
            own.step(1e-5)
            seen.append(weights[names[0]].detach().clone())
        return {name: weight.detach() for name, weight in weights.items()}, seen

    first, (once, twice) = train(1, ["a", "b"])
    assert all(torch.equal(first[name], again) for name, again in train(1, ["a", "b"])[0].items())
    assert not torch.equal(first["a"], first["b"])  # another parameter
    assert not torch.equal(first["a"], train(2, ["a", "b"])[0]["a"])  # another seed
    start = torch.full((40, 30), 0.05, dtype=torch.bfloat16)
    assert not torch.equal(once != start, twice != once)  # another update
    assert torch.equal(first["a"], train(1, ["a"])[0]["a"])
