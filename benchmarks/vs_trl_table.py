"""Figures of `vs_trl.py`: medians of a run's steps, ratios between sides, goals, and how they are printed.

Owns the goals. Pure functions over the plain records that both sides give; must not run anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from vs_trl_rates import ModelSize, Trained, matmul_share
from vs_trl_shapes import Shape

from grpofit.units import GIB

GOALS: dict[str, dict[str, float]] = {
    "demo": {"step": 0.25, "peak": 0.60, "rest": 0.25},
    "guide_a": {"step": 0.25, "peak": 0.35, "rest": 0.25, "matmul": 0.40},
    "long_prompt": {"step": 0.20, "peak": 0.35, "rest": 0.25},
    "decode demo": {"decode": 2.5},
    "decode fixed": {"decode": 1.7},
}
_AT_LEAST = ("matmul", "decode")
_WORDS = {
    "step": "step {:.3f} of TRL's",
    "peak": "peak resident memory {:.3f} of TRL's",
    "rest": "peak minus weights, gradients, optimizer state {:.3f} of TRL's",
    "matmul": "training reaches {:.3f} of the matmul rate",
    "decode": "completion tokens/s {:.2f} times model.generate's",
}
# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True)
class Verdict:
    """One figure against its goal; `goal` is None where there is none."""

    where: str
    what: str
    value: float
    goal: float | None

    @property
    def met(self) -> bool:
        """True also without a goal."""
        if self.goal is None:
            return True
        return self.value >= self.goal if self.what in _AT_LEAST else self.value <= self.goal

    def line(self) -> str:
        """`guide_a  step 0.210 of TRL's, goal 0.25  met`."""
        text = f"{self.where:<13} {_WORDS[self.what].format(self.value)}"
        if self.goal is None:
            return text
        bound = "at least" if self.what in _AT_LEAST else "at most"
        return f"{text}, goal {bound} {self.goal:g}: {'met' if self.met else 'MISSED'}"


def verdict(where: str, what: str, value: float) -> Verdict:
    """The figure with its goal, if there is one."""
    return Verdict(where, what, value, GOALS.get(where, {}).get(what))


def summarise(run: dict[str, Any], shape: Shape) -> dict[str, float]:
    """Medians over the steps after the first of each run. Seconds, bytes, tokens/s.

    `sample_tokens_per_s`: completion tokens over the seconds of sampling. `train_tokens_per_s`: prompt and completion
    tokens of all rollouts over the seconds of forward and backward, whether a side computes each of them or not.
    """
    steps = [record for records in run["rounds"] for record in records[1:]]
    completion = [r["logs"]["completions/mean_length"] * shape.rows for r in steps]
    train_s = [r.get("forward", 0.0) + r["backward"] for r in steps]
    state = sum(run["state_bytes"].values())
    return {
        "steps": len(steps),
        "step_s": median(r["step_s"] for r in steps),
        "step_min_s": min(r["step_s"] for r in steps),
        "step_max_s": max(r["step_s"] for r in steps),
        "rollout_s": median(r["rollout"] for r in steps),
        "train_s": median(train_s),
        "update_s": median(r["update"] for r in steps),
        "sample_tokens_per_s": median(n / r["generate"] for n, r in zip(completion, steps, strict=True)),
        "train_tokens_per_s": median(
            r["logs"]["num_tokens"] / s if s > 0 else math.nan for r, s in zip(steps, train_s, strict=True)
        ),
        "completion_tokens": median(completion),
        "peak_bytes": run["peak_rss_bytes"],
        "state_bytes": state,
        "rest_bytes": run["peak_rss_bytes"] - state,
        "wall_s": run["wall_s"],
    }


def better(summaries: dict[str, dict[str, float]], key: str) -> str | None:
    """Name of TRL's best run by `key`; None without any."""
    return min((name for name in summaries if name != "grpofit"), key=lambda n: summaries[n][key], default=None)


def compare(shape: Shape, summaries: dict[str, dict[str, float]]) -> list[Verdict]:
    """grpofit against the fastest of TRL's runs: its time, and the memory of that same run."""
    fastest = better(summaries, "step_s")
    if fastest is None or "grpofit" not in summaries:
        return []
    ours, theirs = summaries["grpofit"], summaries[fastest]
    keys = {"step": "step_s", "peak": "peak_bytes", "rest": "rest_bytes"}
    return [verdict(shape.name, what, ours[key] / theirs[key]) for what, key in keys.items()]


def training_rate(run: dict[str, Any], size: ModelSize, rates: list[dict[str, Any]]) -> dict[str, float] | None:
    """FLOP/s of all measured training phases together against the matmul rate; None if nothing was trained.

    `rates`: measured before and after the run; averaged.
    """
    steps = [record for records in run["rounds"] for record in records[1:] if record["trained"]["tokens"]]
    if not steps:
        return None
    total = Trained(*(sum(r["trained"][key] for r in steps) for key in steps[0]["trained"]))
    return matmul_share(size, total, sum(r["backward"] for r in steps), _mean(rates))


def decode_bandwidth(run: dict[str, Any], weight_bytes: int, rates: list[dict[str, Any]]) -> dict[str, float]:
    """Bytes of weights read per second of sampling, against the copy rate. KV cache and prefill are not counted."""
    steps = [record for records in run["rounds"] for record in records[1:]]
    passes = sum(r["logs"]["completions/max_length"] for r in steps)
    reached = passes * weight_bytes / sum(r["generate"] for r in steps)
    copy = _mean(rates)["copy_bytes"]
    return {"reached_bytes": reached, "copy_bytes": copy, "share": reached / copy}


def _mean(rates: list[dict[str, Any]]) -> dict[str, Any]:
    """The same nested numbers, averaged."""
    first = rates[0]
    return {
        key: _mean([r[key] for r in rates]) if isinstance(value, dict) else fmean(r[key] for r in rates)
        for key, value in first.items()
    }


def same_work(shape: Shape, runs: dict[str, dict[str, Any]]) -> list[str]:
    """What shows that the sides did not have the same work; empty when they had.

    Prompt tokens of every step must agree, and where lengths are fixed, every completion must have the full one.
    """
    problems, prompts = [], {}
    for name, run in runs.items():
        for record in (record for records in run["rounds"] for record in records):
            logs = record["logs"]
            lengths = {logs["completions/min_length"], logs["completions/max_length"]}
            if shape.fixed and lengths != {shape.completion_tokens}:
                problems.append(f"{name}: completions of {lengths} tokens, not {shape.completion_tokens}")
        prompts[name] = [
            round(r["logs"]["num_tokens"] - r["logs"]["completions/mean_length"] * shape.rows) for r in run["rounds"][0]
        ]
    names = list(prompts)
    for name in names[1:]:
        both = min(len(prompts[name]), len(prompts[names[0]]))
        if prompts[name][:both] != prompts[names[0]][:both]:
            problems.append(f"prompt tokens per step differ: {names[0]} {prompts[names[0]]}, {name} {prompts[name]}")
    return problems


HEADINGS = (
    f"{'side':<28} {'step s':>7} {'(min':>6} {'max)':>6} {'rollout':>8} {'train':>7} {'update':>7} "
    f"{'sample tok/s':>13} {'train tok/s':>12} {'peak GiB':>9} {'state':>6} {'rest':>6} {'wall s':>7}"
)


def row(name: str, s: dict[str, float]) -> str:
    """A run under `HEADINGS`."""
    return (
        f"{name:<28} {s['step_s']:7.2f} {s['step_min_s']:6.1f} {s['step_max_s']:6.1f} {s['rollout_s']:8.2f} "
        f"{s['train_s']:7.2f} {s['update_s']:7.2f} {s['sample_tokens_per_s']:13,.0f} {s['train_tokens_per_s']:12,.0f} "
        f"{s['peak_bytes'] / GIB:9.2f} {s['state_bytes'] / GIB:6.2f} {s['rest_bytes'] / GIB:6.2f} {s['wall_s']:7.0f}"
    )


def curve_gap(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Mean reward of both over all steps, [seed][step], and their gap with its standard error over seeds.

    A seed is one sample, since the steps of a run depend on one another; the prompts of a step are the same on both
    sides, so gaps are paired. `agree`: the 95% interval of the mean gap (Student's t) contains 0.
    """
    gaps = [fmean(a) - fmean(b) for a, b in zip(ours, theirs, strict=True)]
    error = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
    half = _T[min(len(gaps) - 1, len(_T)) - 1] * error if len(gaps) > 1 else math.inf
    return {
        "grpofit": fmean(map(fmean, ours)),
        "trl": fmean(map(fmean, theirs)),
        "gap": fmean(gaps),
        "standard_error": error,
        "half_interval": half,
        "agree": abs(fmean(gaps)) <= half,
    }
