"""Losses against a slow reference, and the invariances that memory levers rely on."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import INVARIANT, LOSSES, Step, spec_of
from loss_reference import reference_loss, slope

from grpofit.algo.losses import count_denominator, policy_loss

VARIANTS = {
    "off-policy": {},
    "on-policy": {"on_policy": True},
    "other ratio": {"ratio": None},
    "delta": {"clip_delta": 1.3, "clip_high": 0.28},
    "delta below the clip": {"clip_delta": 1.05, "clip_high": 0.28},
    "k1": {"beta": 0.3, "kl": "k1"},
    "k2": {"beta": 0.3, "kl": "k2"},
    "k3": {"beta": 0.3, "kl": "k3"},
    "entropy": {"entropy_bonus": 0.2},
    "everything": {"beta": 0.3, "entropy_bonus": 0.2, "clip_delta": 1.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_against_the_slow_reference(loss: str, variant: str) -> None:
    changes = dict(VARIANTS[variant])
    on_policy = bool(changes.pop("on_policy", False))
    spec = spec_of(loss)
    if "ratio" in changes:
        changes["ratio"] = "token" if spec.ratio == "sequence" else "sequence"
    if loss in ("cispo", "gspo"):
        changes.pop("clip_high", None)
    spec = replace(spec, **changes)
    step = Step()
    held = step.logprobs.tolist()
    old = None if on_policy else step.old.tolist()
    rest = (step.advantages.tolist(), step.mask.tolist(), step.ref.tolist())

    def of_logprobs(live: list[list[float]]) -> float:
        return reference_loss(asdict(spec), live, held, old, *rest, step.entropy.tolist())

    def of_entropy(entropy: list[list[float]]) -> float:
        return reference_loss(asdict(spec), held, held, old, *rest, entropy)

    loss_value, logprob_gradient, entropy_gradient = step.gradient(spec, [list(range(6))], on_policy)
    assert loss_value == pytest.approx(of_logprobs(held), rel=1e-9)
    assert logprob_gradient.abs().max() > 0
    torch.testing.assert_close(logprob_gradient, torch.tensor(slope(of_logprobs, held)).double(), rtol=1e-6, atol=1e-8)
    expected = torch.tensor(slope(of_entropy, step.entropy.tolist())).double()
    torch.testing.assert_close(entropy_gradient, expected, rtol=1e-6, atol=1e-8)


def test_bnpo_is_the_mean_over_micro_batches_of_their_own_token_mean() -> None:
    step, spec, parts = Step(), spec_of("bnpo"), [[0], [2, 3, 1, 4, 5]]
    total, _, _ = step.gradient(spec, parts)
    means = []
    for rows in parts:
        arguments = [x[rows].tolist() for x in (step.logprobs, step.logprobs, step.old, step.advantages, step.mask)]
        means.append(reference_loss(asdict(spec), *arguments, step.ref[rows].tolist(), step.entropy[rows].tolist()))
    assert total == pytest.approx(sum(means) / 2)
    assert total != pytest.approx(step.gradient(spec, [list(range(6))])[0], rel=1e-3)


# Invariances: what makes memory levers exact.

SPECS = {name: spec_of(name, beta=0.1, entropy_bonus=0.05, clip_delta=1.6) for name in INVARIANT} | {
    f"{name}, other ratio": spec_of(name, ratio="sequence") for name in ("dapo", "cispo", "sapo", "dr_grpo")
}


@st.composite
def splits(draw: st.DrawFn, rows: int = 7) -> list[list[int]]:
    """Any order of the rows, cut at any places."""
    order = draw(st.permutations(range(rows)))
    cuts = sorted(draw(st.sets(st.integers(1, rows - 1))))
    return [order[a:b] for a, b in itertools.pairwise([0, *cuts, rows])]


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=12, deadline=None)
@given(parts=splits(), seed=st.integers(0, 99), on_policy=st.booleans())
def test_any_order_and_split_give_the_same_loss_and_gradient(
    name: str, parts: list[list[int]], seed: int, on_policy: bool
) -> None:
    step = Step(seed, rows=7, dtype=torch.float32)
    whole = step.gradient(SPECS[name], [list(range(7))], on_policy)
    split = step.gradient(SPECS[name], parts, on_policy)
    scale = float(whole[1].abs().max())
    assert split[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)  # terms of size 1 may cancel
    for a, b in zip(split[1:], whole[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("name", [*SPECS, "bnpo"])
@settings(max_examples=10, deadline=None)
@given(
    extra=st.integers(1, 4),
    garbage=st.sampled_from([0.0, 1e4, -1e30, math.inf, -math.inf, math.nan]),
    seed=st.integers(0, 99),
)
def test_padding_changes_nothing_whatever_it_holds(name: str, extra: int, garbage: float, seed: int) -> None:
    spec = SPECS.get(name) or spec_of("bnpo", beta=0.1, entropy_bonus=0.05)
    step, padded = Step(seed, dtype=torch.float32), Step(seed, dtype=torch.float32)
    filler = torch.full((6, extra), garbage)
    for field in ("old", "logprobs", "ref", "entropy"):
        values = torch.cat([getattr(step, field), filler], dim=1)
        values[:, :5].masked_fill_(step.mask == 0, garbage)
        setattr(padded, field, values)
    padded.mask = torch.cat([step.mask, torch.zeros_like(filler, dtype=torch.long)], dim=1)
    padded.advantages = step.advantages.masked_fill(step.mask.sum(1) == 0, garbage)
    plain, garbled = step.gradient(spec, [list(range(6))]), padded.gradient(spec, [list(range(6))])
    assert garbled[0] == pytest.approx(plain[0], rel=1e-6, abs=1e-6)  # terms of size 1 may cancel
    for a, b in zip(garbled[1:], plain[1:], strict=True):
        torch.testing.assert_close(a[:, :5], b, rtol=1e-6, atol=1e-9)
        assert (a[padded.mask == 0] == 0).all()


def test_metrics_of_micro_batches_add_up_to_those_of_the_whole() -> None:
    step, spec = Step(3, rows=7), SPECS["dapo"]
    denominator = count_denominator(step.lengths, micro_batches=3)
    whole = step.part(spec, step.logprobs, step.entropy, list(range(7)), denominator).metrics
    shares = [
        step.part(spec, step.logprobs, step.entropy, rows, denominator).metrics for rows in ([5, 0], [3], [1, 6, 4, 2])
    ]
    assert set(whole) == {
        "ratio", "kl_old", "clip_low", "clip_high", "clip_region", "clip_delta", "kl", "entropy"
    }  # fmt: skip
    for name, value in whole.items():
        torch.testing.assert_close(sum(share[name] for share in shares), value, rtol=1e-5, atol=1e-6)
        assert value.dtype == torch.float32 and value[1] == sum(step.lengths)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.long, torch.float32])
@pytest.mark.parametrize("loss", LOSSES)
def test_arguments_are_unchanged_and_any_mask_dtype_will_do(loss: str, mask_dtype: torch.dtype) -> None:
    step = Step(dtype=torch.float32)
    tensors = [step.logprobs, step.old, step.advantages, step.mask.to(mask_dtype), step.ref, step.entropy]
    before = [tensor.clone() for tensor in tensors]
    spec = spec_of(loss, beta=0.1, entropy_bonus=0.1, clip_delta=1.5)
    logprobs, old, advantages, mask, ref, entropy = tensors
    denominator = count_denominator(step.lengths, micro_batches=1)
    output = policy_loss(spec, logprobs, old, advantages, mask, denominator, ref_logprobs=ref, entropy=entropy)
    assert output.loss.item() == pytest.approx(step.gradient(spec, [list(range(6))])[0])
    for tensor, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_bfloat16_arguments_are_computed_in_float32(loss: str) -> None:
    step = Step(dtype=torch.bfloat16)
    exact = Step(dtype=torch.bfloat16)
    for field in ("old", "logprobs", "ref", "entropy", "advantages"):
        setattr(exact, field, getattr(step, field).float())
    spec, everything = spec_of(loss, beta=0.1), [list(range(6))]
    assert step.gradient(spec, everything)[0] == exact.gradient(spec, everything)[0]
