"""Losses by hand, and their edge cases by name."""

from __future__ import annotations

import math

import pytest
import torch
from loss_cases import LOSSES, Step, spec_of
from torch import Tensor

from grpofit.algo.losses import ALGORITHMS, Denominator, LossSpec, count_denominator, policy_loss
from grpofit.config import resolved_clips, resolved_ratio
from grpofit.config.tree import AlgoConfig


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
        spec, logprobs, other, advantages, other, Denominator(4, 12, 1), ref_logprobs=other, entropy=logprobs * 2
    )
    output.loss.backward()
    assert logprobs.grad.shape == (4, 3) and output.loss.shape == ()
    assert all(value.shape == (2,) for value in output.metrics.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_table_and_the_configurations_auto_agree(loss: str) -> None:
    row, algo = ALGORITHMS[loss], AlgoConfig(loss=loss)
    assert resolved_ratio(algo) == row.ratio
    low, high = resolved_clips(algo)
    used = policy_loss(spec_of(loss), POLICY, OLD, ADVANTAGES, MASK, Denominator(2, 5, 1)).metrics
    if "clip_high" in used:
        assert high == row.clip_high
    if "clip_low" in used:
        assert low == row.clip_low


def test_missing_inputs_are_refused() -> None:
    denominator = Denominator(2, 5, 1)
    with pytest.raises(AssertionError, match=r"beta 0\.1 needs ref_logprobs"):
        policy_loss(spec_of("dapo", beta=0.1), POLICY, OLD, ADVANTAGES, MASK, denominator)
    with pytest.raises(AssertionError, match=r"entropy_bonus 0\.1 needs entropy"):
        policy_loss(spec_of("dapo", entropy_bonus=0.1), POLICY, OLD, ADVANTAGES, MASK, denominator)
    with pytest.raises(AssertionError, match="needs entropies that carry a gradient"):
        live, held = POLICY.clone().requires_grad_(), POLICY
        policy_loss(spec_of("dapo", entropy_bonus=0.1), live, OLD, ADVANTAGES, MASK, denominator, entropy=held)
    with pytest.raises(AssertionError, match="loss 'ppo'"):
        LossSpec(loss="ppo", max_completion_tokens=1)
    with pytest.raises(AssertionError, match=r"\(2, 3\) != \(2, 2\)"):
        policy_loss(spec_of("dapo"), POLICY, OLD, ADVANTAGES, MASK[:, :2], denominator)
