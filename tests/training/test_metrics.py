"""The record of a step, computed by hand from rollouts made by hand."""

from __future__ import annotations

import math

import pytest

from grpofit.training.metrics import rollout_record, update_record
from grpofit.training.step import UpdateResult
from grpofit.types import Completion, FinishReason, Prompt, Reason, Rollout, Score


def rollout(group: int, sample: int, tokens: int, reward: float | None, reason: Reason, cut: bool = False) -> Rollout:
    prompt = Prompt(group, f"prompt {group}", f"prompt {group}", (1,) * (2 + group), {})
    finish = FinishReason.LENGTH if cut else FinishReason.STOP
    completion = Completion((5,) * tokens, (0.0,) * tokens, finish, f"text {group}{sample}")
    scores = {"math": Score(reward, reason), "form": Score(0.25 * sample, Reason.SCORED)}
    return Rollout(prompt, completion, group, sample, scores, reward)


def two_groups() -> list[Rollout]:
    """Group 0: rewards 1, 1, 1; group 1: rewards 0, 1, none."""
    return [
        rollout(0, 0, 3, 1.0, Reason.CORRECT),
        rollout(0, 1, 5, 1.0, Reason.CORRECT),
        rollout(0, 2, 8, 1.0, Reason.CORRECT, cut=True),
        rollout(1, 0, 8, 0.0, Reason.TRUNCATED, cut=True),
        rollout(1, 1, 4, 1.0, Reason.CORRECT),
        rollout(1, 2, 2, None, Reason.ERROR),
    ]


def test_record_of_two_groups():
    record = rollout_record(two_groups(), group_size=3)
    assert record.pop("sample") == {
        "prompt": "prompt 1",
        "completion": "text 11",
        "reward": 1.0,
        "reason": "correct",
        "group_correct": 1,
        "group_size": 3,
    }
    assert record == pytest.approx(
        {
            "reward": 4 / 5,  # the failed one has none
            "reward_std": (0 + math.sqrt(0.5)) / 2,  # ddof 1 in each group, then their mean
            "frac_reward_zero_std": 0.5,
            "num_tokens": 3 * 2 + 3 * 3 + (3 + 5 + 8 + 8 + 4 + 2),
            "completions/mean_length": 5.0,
            "completions/min_length": 2,
            "completions/max_length": 8,
            "completions/mean_terminated_length": (3 + 5 + 4 + 2) / 4,
            "completions/clipped_ratio": 2 / 6,
            "rewards/math/mean": 4 / 5,
            "rewards/math/std": math.sqrt((4 * 0.2**2 + 0.8**2) / 4),
            "reasons/math/correct": 4 / 6,
            "reasons/math/truncated": 1 / 6,
            "reasons/math/error": 1 / 6,
            "rewards/form/mean": 0.25,
            "rewards/form/std": 0.25 * math.sqrt(4 / 5),
            "reasons/form/scored": 1.0,
        }
    )


def test_all_completions_cut():
    rollouts = [rollout(0, sample, 8, 0.0, Reason.TRUNCATED, cut=True) for sample in range(2)]
    record = rollout_record(rollouts, group_size=2)
    assert record["completions/clipped_ratio"] == 1.0
    assert record["completions/mean_terminated_length"] == 0.0
    assert record["frac_reward_zero_std"] == 1.0
    assert record["sample"]["group_correct"] == 0


def test_no_reward_at_all():
    rollouts = [rollout(0, sample, 2, None, Reason.ERROR) for sample in range(2)]
    record = rollout_record(rollouts, group_size=2)
    assert record["reward"] is None and record["rewards/math/mean"] is None
    assert record["reward_std"] == 0 and record["frac_reward_zero_std"] == 1.0
    assert record["sample"]["reward"] is None and record["sample"]["reason"] == "error"


def test_update_record_of_one_update():
    metrics = {"ratio": 1.0, "entropy": 2.5, "gap": 1e-7, "gap_max": 3e-7}
    result = UpdateResult(
        loss=0.5, grad_norm=2.0, rows=6, tokens=120, micro_batches=2, weights_changed_frac=0.75, metrics=metrics
    )
    assert update_record([result], rollouts=8, lr=1e-5) == {
        "loss": 0.5,
        "grad_norm": 2.0,
        "learning_rate": 1e-5,
        "trained_rows_frac": 0.75,
        "trained_tokens": 120,
        "micro_batches": 2,
        "weights_changed_frac": 0.75,
        "ratio_mean": 1.0,
        "entropy": 2.5,
        "sampling/sampling_logp_difference/mean": 1e-7,
        "sampling/sampling_logp_difference/max": 3e-7,
    }


def test_update_record_of_two_updates_averages_and_keeps_the_largest_gap():
    first = UpdateResult(1.0, 2.0, 4, 100, 2, 0.5, {"ratio": 1.0, "gap_max": 3.0, "clip_high": 0.0, "kl": 0.1})
    second = UpdateResult(3.0, 4.0, 4, 100, 2, 0.25, {"ratio": 1.5, "gap_max": 1.0, "clip_high": 0.5, "kl": 0.3})
    record = update_record([first, second], rollouts=4, lr=1.0)
    assert record["trained_tokens"] == 200 and record["micro_batches"] == 2
    assert record["loss"] == 2.0 and record["grad_norm"] == 3.0
    assert record["ratio_mean"] == 1.25 and record["clip_ratio/high_mean"] == 0.25
    assert record["kl"] == pytest.approx(0.2)
    assert record["sampling/sampling_logp_difference/max"] == 3.0
    assert record["weights_changed_frac"] == 0.25  # of the last update


def test_a_skipped_update_has_no_share_of_changed_weights():
    skipped = UpdateResult(math.nan, math.inf, 4, 100, 2, None)
    record = update_record([skipped], rollouts=4, lr=1.0)
    assert math.isnan(record["loss"]) and record["weights_changed_frac"] is None
    assert not skipped.finite
