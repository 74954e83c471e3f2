"""Losses by hand, against a slow reference, and the invariances that memory levers rely on."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_reference import reference_loss, slope
from torch import Tensor

from grpofit.algo.losses import ALGORITHMS, Denominator, LossOutput, LossSpec, count_denominator, policy_loss

LOSSES = sorted(ALGORITHMS)
INVARIANT = [name for name in LOSSES if name != "bnpo"]


def spec_of(loss: str, **changes: object) -> LossSpec:
    """The algorithm with its own ratio and clips, GSPO's widened so that both clipped and free rows occur."""
    row = ALGORITHMS[loss]
    clips = {"gspo": (0.05, 0.08), "cispo": (0.2, 1.1)}.get(loss, (row.clip_low, row.clip_high))
    base = LossSpec(loss=loss, max_completion_tokens=9, ratio=row.ratio, clip_low=clips[0], clip_high=clips[1])
    return replace(base, **changes)


def log_rows(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


# By hand. Two rows, three columns; row 0 has two tokens, row 1 three. Old probabilities are 0.5 everywhere, so the
# ratios are 1.5, 1.0 | 0.5, 1.0, 2.0; advantages +2 and -1; clips 0.2.

POLICY = log_rows([0.75, 0.5, 0.9], [0.25, 0.5, 1.0])
OLD = log_rows([0.5, 0.5, 0.1], [0.5, 0.5, 0.5])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
ADVANTAGES = torch.tensor([2.0, -1.0], dtype=torch.float64)
# row 0: -min(3, 2.4), -2; row 1: -min(-0.5, -0.8), 1, -min(-2, -1.2)
ROW_0, ROW_1 = [-2.4, -2.0], [0.8, 1.0, 2.0]

BY_HAND = {
    "dapo": (sum(ROW_0) + sum(ROW_1)) / 5,
    "bnpo": (sum(ROW_0) + sum(ROW_1)) / 5,
    "dr_grpo": (sum(ROW_0) + sum(ROW_1)) / (2 * 9),
    "grpo": (sum(ROW_0) / 2 + sum(ROW_1) / 3) / 2,
    # geometric mean ratios: sqrt(1.5) = 1.2247 clipped to 1.08, and (0.5 * 1 * 2) ** (1/3) = 1
    "gspo": (-2 * 1.08 + 1) / 2,
    # ratio capped at 1.1, times advantage, times log-probability
    "cispo": -(
        1.1 * 2 * math.log(0.75) + 2 * math.log(0.5) - 0.5 * math.log(0.25) - math.log(0.5) - 1.1 * math.log(1.0)
    )
    / 5,
    "reinforce": -(2 * math.log(0.75) + 2 * math.log(0.5) - math.log(0.25) - math.log(0.5) - math.log(1.0)) / 5,
    # 4 / tau * sigmoid(tau (ratio - 1)): tau 1 in row 0, 1.05 in row 1
    "sapo": (
        -2 * (4 / (1 + math.exp(-0.5)) + 2) / 2
        + 4 / 1.05 * (1 / (1 + math.exp(1.05 * 0.5)) + 0.5 + 1 / (1 + math.exp(-1.05))) / 3
    )
    / 2,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_by_hand(loss: str) -> None:
    denominator = count_denominator([2, 3], micro_batches=1)
    output = policy_loss(spec_of(loss), POLICY, OLD, ADVANTAGES, MASK, denominator)
    assert output.loss.item() == pytest.approx(BY_HAND[loss], rel=1e-9)


def test_the_ratio_is_new_over_old_not_the_probability_itself() -> None:
    # Guide A's slip was ratio = exp(logprobs). With logprobs = old_logprobs the surrogate is -A whatever they are.
    denominator = count_denominator([3, 3], micro_batches=1)
    output = policy_loss(spec_of("dapo"), OLD, OLD, ADVANTAGES, torch.ones_like(MASK), denominator)
    assert output.loss.item() == pytest.approx(-(3 * 2 - 3 * 1) / 6)
    assert output.metrics["ratio"].tolist() == [6, 6]


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_kl_by_hand(kl: str) -> None:
    # no advantage, so the loss is beta times the mean estimate: policy 0.75 and 0.5 against reference 0.25 and 0.5
    gap = math.log(0.75 / 0.25)
    expected = {"k1": gap, "k2": gap**2 / 2, "k3": 1 / 3 + gap - 1}[kl]
    spec = spec_of("dapo", beta=0.4, kl=kl)
    output = policy_loss(
        spec,
        POLICY[:1],
        None,
        torch.zeros(1),
        MASK[:1],
        count_denominator([2], micro_batches=1),
        ref_logprobs=log_rows([0.25, 0.5, 0.5]),
    )
    assert output.loss.item() == pytest.approx(0.4 * expected / 2)
    assert output.metrics["kl"].tolist() == pytest.approx([expected, 2])


def test_entropy_bonus_by_hand_takes_the_losss_own_mean() -> None:
    entropy = torch.tensor([[1.0, 2.0, 99.0], [3.0, 4.0, 5.0]], dtype=torch.float64)
    arguments = (POLICY, OLD, torch.zeros(2), MASK, count_denominator([2, 3], micro_batches=1))
    token_mean = policy_loss(spec_of("dapo", entropy_bonus=0.1), *arguments, entropy=entropy)
    sequence_mean = policy_loss(spec_of("grpo", entropy_bonus=0.1), *arguments, entropy=entropy)
    assert token_mean.loss.item() == pytest.approx(-0.1 * 15 / 5)
    assert sequence_mean.loss.item() == pytest.approx(-0.1 * (1.5 + 4) / 2)
    assert token_mean.metrics["entropy"].tolist() == [15, 5]


def test_delta_bounds_only_the_free_branch() -> None:
    # ratio 2 at A = -1: without delta 2; delta 1.5 gives 1.5. At A = +2 the clip at 1.2 stays in charge.
    denominator = count_denominator([2, 3], micro_batches=1)
    output = policy_loss(spec_of("dapo", clip_delta=1.5), POLICY, OLD, ADVANTAGES, MASK, denominator)
    assert output.loss.item() == pytest.approx((sum(ROW_0) + sum(ROW_1) - 0.5) / 5)
    assert output.metrics["clip_delta"].tolist() == [1, 5]


def test_clip_counts_by_hand() -> None:
    denominator = count_denominator([2, 3], micro_batches=1)
    metrics, of_gspo, of_cispo = (
        policy_loss(spec_of(loss), POLICY, OLD, ADVANTAGES, MASK, denominator).metrics
        for loss in ("dapo", "gspo", "cispo")
    )
    assert metrics["clip_low"].tolist() == [1, 5]  # ratio 0.5 at A < 0
    assert metrics["clip_high"].tolist() == [1, 5]  # ratio 1.5 at A > 0; ratio 2 at A < 0 is free
    assert metrics["clip_region"].tolist() == [2, 5]
    assert metrics["ratio"].tolist() == pytest.approx([6, 5])
    assert of_gspo["clip_high"].tolist() == [2, 5]  # the whole row of two
    assert of_cispo["clip_high"].tolist() == [2, 5]  # ratios 1.5 and 2 over the cap of 1.1


def test_a_truncated_row_masked_as_a_whole_counts_as_a_row_but_not_in_tokens() -> None:
    mask = MASK.clone()
    mask[1] = 0
    denominator = count_denominator([2, 0], micro_batches=1)
    assert denominator == Denominator(rows=2, tokens=2, micro_batches=1)
    values = {
        loss: policy_loss(spec_of(loss), POLICY, OLD, ADVANTAGES, mask, denominator).loss.item()
        for loss in ("grpo", "dapo", "dr_grpo")
    }
    assert values == pytest.approx({"grpo": -2.2 / 2, "dapo": -4.4 / 2, "dr_grpo": -4.4 / 18})


def test_rows_without_signal_can_be_left_out_of_the_denominator() -> None:
    counted = count_denominator([2, 3, 4], micro_batches=2, counted=[True, False, True])
    assert counted == Denominator(rows=2, tokens=6, micro_batches=2)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_empty_mask_gives_zero_loss_and_zero_gradient(loss: str) -> None:
    logprobs = POLICY.clone().requires_grad_()
    denominator = count_denominator([0, 0], micro_batches=1)
    output = policy_loss(spec_of(loss), logprobs, OLD, ADVANTAGES, torch.zeros_like(MASK), denominator)
    output.loss.backward()
    assert output.loss.item() == 0
    assert logprobs.grad.tolist() == [[0] * 3] * 2


# Against the slow reference.

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


class Step:
    """Random rollouts of one step, float64: [6, 5], ragged, row 3 masked as a whole, ratios from 0.4 to 2.5."""

    def __init__(self, seed: int = 0, rows: int = 6, width: int = 5, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        self.old = (-3 * draw(rows, width)).to(dtype)
        self.logprobs = (self.old + 1.8 * draw(rows, width) - 0.9).to(dtype)
        self.ref = (self.old + draw(rows, width) - 0.5).to(dtype)
        self.entropy = (2 * draw(rows, width)).to(dtype)
        self.advantages = (4 * draw(rows) - 2).to(dtype)
        self.lengths = [1 + int(width * draw(1)) for _ in range(rows)]
        self.lengths[3 % rows] = 0
        self.mask = torch.tensor([[int(t < n) for t in range(width)] for n in self.lengths])

    def gradient(self, spec: LossSpec, parts: list[list[int]], on_policy: bool = False) -> tuple[float, Tensor, Tensor]:
        """Loss and gradients of logprobs and entropies, summed over micro batches of these rows."""
        logprobs, entropy = self.logprobs.clone().requires_grad_(), self.entropy.clone().requires_grad_()
        denominator = count_denominator(self.lengths, micro_batches=len(parts))
        total = 0.0
        for part in parts:
            output = self.part(spec, logprobs, entropy, part, denominator, on_policy)
            output.loss.backward()
            total += output.loss.item()
        entropy_gradient = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
        return total, logprobs.grad, entropy_gradient

    def part(
        self,
        spec: LossSpec,
        logprobs: Tensor,
        entropy: Tensor,
        rows: list[int],
        denominator: Denominator,
        on_policy: bool = False,
    ) -> LossOutput:
        return policy_loss(
            spec,
            logprobs[rows],
            None if on_policy else self.old[rows],
            self.advantages[rows],
            self.mask[rows],
            denominator,
            ref_logprobs=self.ref[rows],
            entropy=entropy[rows],
        )


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


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("gap", [90.0, -90.0, 1e5])
def test_extreme_log_ratios_stay_finite(loss: str, gap: float) -> None:
    logprobs = (OLD + gap).float().requires_grad_()
    spec = spec_of(loss, beta=0.1)
    denominator = count_denominator([3, 3], micro_batches=1)
    mask = torch.ones_like(MASK)
    output = policy_loss(spec, logprobs, OLD.float(), ADVANTAGES.float(), mask, denominator, ref_logprobs=OLD.float())
    output.loss.backward()
    assert output.loss.isfinite() and logprobs.grad.isfinite().all()


def test_k3_still_pulls_back_a_policy_far_above_the_reference() -> None:
    # logprob -1 where the reference has -40: the estimator's slope is 1 - e^-39, not 0
    logprobs = torch.full((1, 1), -1.0, requires_grad=True)
    spec = spec_of("dapo", beta=1.0)
    reference = torch.full((1, 1), -40.0)
    mask = torch.ones(1, 1)
    policy_loss(
        spec, logprobs, None, torch.zeros(1), mask, Denominator(1, 1, 1), ref_logprobs=reference
    ).loss.backward()
    assert logprobs.grad.item() == pytest.approx(1.0)


def test_an_advantage_per_token_is_taken_as_it_is() -> None:
    step, spec = Step(), spec_of("grpo")
    denominator = count_denominator(step.lengths, micro_batches=1)
    spread = step.advantages.unsqueeze(1).expand(-1, 5)
    by_token = policy_loss(spec, step.logprobs, step.old, spread, step.mask, denominator).loss
    by_row = policy_loss(spec, step.logprobs, step.old, step.advantages, step.mask, denominator).loss
    assert by_token.item() == by_row.item()


@pytest.mark.parametrize("loss", LOSSES)
def test_runs_on_meta_so_nothing_is_read_back_to_the_host(loss: str) -> None:
    logprobs = torch.empty(4, 3, device="meta", requires_grad=True)
    other = torch.empty(4, 3, device="meta")
    spec = spec_of(loss, beta=0.1, entropy_bonus=0.1, clip_delta=1.5)
    advantages = torch.empty(4, device="meta")
    output = policy_loss(
        spec, logprobs, other, advantages, other, Denominator(4, 12, 1), ref_logprobs=other, entropy=other
    )
    output.loss.backward()
    assert logprobs.grad.shape == (4, 3) and output.loss.shape == ()
    assert all(value.shape == (2,) for value in output.metrics.values())


def test_missing_inputs_are_refused() -> None:
    denominator = Denominator(2, 5, 1)
    with pytest.raises(AssertionError, match=r"beta 0\.1 needs ref_logprobs"):
        policy_loss(spec_of("dapo", beta=0.1), POLICY, OLD, ADVANTAGES, MASK, denominator)
    with pytest.raises(AssertionError, match=r"entropy_bonus 0\.1 needs entropy"):
        policy_loss(spec_of("dapo", entropy_bonus=0.1), POLICY, OLD, ADVANTAGES, MASK, denominator)
    with pytest.raises(AssertionError, match="loss 'ppo'"):
        LossSpec(loss="ppo", max_completion_tokens=1)
    with pytest.raises(AssertionError, match=r"\(2, 3\) != \(2, 2\)"):
        policy_loss(spec_of("dapo"), POLICY, OLD, ADVANTAGES, MASK[:, :2], denominator)
