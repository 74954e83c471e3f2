"""The record of a step: plain numbers from rollouts and updates, under TRL's names where the meaning is the same.

Owns names and averages. Must not import torch, nor know where a record goes. `docs/records.md` explains each key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from grpofit.training.evaluate import is_correct
from grpofit.types import Rollout

if TYPE_CHECKING:
    from grpofit.training.step import UpdateResult

_UPDATE_NAMES = {
    "ratio": "ratio_mean",
    "kl_old": "kl_old",
    "kl": "kl",
    "entropy": "entropy",
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "clip_region": "clip_ratio/region_mean",
    "clip_delta": "clip_ratio/delta_mean",
    "gap": "sampling/sampling_logp_difference/mean",
    "gap_max": "sampling/sampling_logp_difference/max",
}


def rollout_record(rollouts: Sequence[Rollout], group_size: int) -> dict[str, Any]:
    """Rewards, outcomes and lengths of a step's rollouts, and one of them to look at."""
    groups = [rollouts[start : start + group_size] for start in range(0, len(rollouts), group_size)]
    spreads = [_spread(r.reward for r in group) for group in groups]
    record: dict[str, Any] = {
        "reward": _mean(r.reward for r in rollouts),
        "reward_std": fmean(spreads),
        "frac_reward_zero_std": fmean(spread < 1e-6 for spread in spreads),
        "num_tokens": sum(len(r.prompt.token_ids) + len(r.completion.token_ids) for r in rollouts),
        **_lengths(rollouts),
    }
    for name in rollouts[0].scores:
        values = [r.scores[name].value for r in rollouts]
        record[f"rewards/{name}/mean"], record[f"rewards/{name}/std"] = _mean(values), _spread(values)
        for reason, count in sorted(Counter(r.scores[name].reason.value for r in rollouts).items()):
            record[f"reasons/{name}/{reason}"] = count / len(rollouts)
    record["sample"] = _sample(groups)
    return record


def update_record(results: Sequence[UpdateResult], rollouts: int, lr: float) -> dict[str, Any]:
    """Loss, gradient and ratios, averaged over the step's optimizer updates; they cover the rows that were trained."""
    record: dict[str, Any] = {
        "loss": fmean(r.loss for r in results),
        "grad_norm": fmean(r.grad_norm for r in results),
        "learning_rate": lr,
        "trained_rows_frac": results[0].rows / rollouts,
        "trained_tokens": sum(r.tokens for r in results),
        "micro_batches": results[0].micro_batches,
        "weights_changed_frac": results[-1].weights_changed_frac,
    }
    for key, name in _UPDATE_NAMES.items():
        values = [r.metrics[key] for r in results if key in r.metrics]
        if values:
            record[name] = max(values) if key.endswith("max") else fmean(values)
    return record


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    lengths = [len(r.completion.token_ids) for r in rollouts]
    ended = [len(r.completion.token_ids) for r in rollouts if not r.truncated]
    return {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/mean_terminated_length": fmean(ended) if ended else 0.0,
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
    }


def _sample(groups: Sequence[Sequence[Rollout]]) -> dict[str, Any]:
    """The best completion of the first group that holds both good and bad ones, else of the first group."""
    group = next((g for g in groups if _spread(r.reward for r in g) > 0), groups[0])
    best = max(group, key=lambda r: -float("inf") if r.reward is None else r.reward)
    return {
        "prompt": best.prompt.text,
        "completion": best.completion.text,
        "reward": best.reward,
        "reason": next((s.reason.value for s in best.scores.values()), ""),
        "group_correct": sum(map(is_correct, group)),
        "group_size": len(group),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def _spread(values: Iterable[float | None]) -> float:
    """Standard deviation (ddof 1) of the values that are there; 0 for fewer than two."""
    known = [v for v in values if v is not None]
    return stdev(known) if len(known) > 1 else 0.0
