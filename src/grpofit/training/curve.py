"""The learning curve of a run as a picture.

Owns how reward, held-out accuracy and length are drawn. Must not know how they were computed, nor import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_WINDOW = 10  # steps of the moving average
_BLUE, _ORANGE, _GREY = "#2563a8", "#c2571a", "#555555"


def plot_learning(metrics: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> None:
    """Draw reward and held-out accuracy over completion length, against the step, to `path` (.png, .svg, .pdf).

    Args:
        metrics: records of `metrics.jsonl`: `reward` and `completions/mean_length` of steps, `eval/accuracy` with
            `eval/accuracy_low` and `eval/accuracy_high` (Wilson interval) and `eval/n` of evaluations, or their
            `eval/reward` where there is no accuracy. Missing keys and null leave a gap.
    """
    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _reward(upper, metrics)
    _held_out(upper, metrics)
    _length(lower, metrics)
    if title:
        upper.set_title(title, loc="left", fontsize=11)
    upper.set_ylabel("reward; accuracy (fraction)")
    if upper.get_legend_handles_labels()[0]:
        upper.legend(loc="best", frameon=False, fontsize=10)
    upper.margins(x=0.06)
    lower.set_ylabel("length (tokens)")
    lower.set_xlabel("step (optimizer updates on one batch of rollouts)")
    lower.xaxis.get_major_locator().set_params(integer=True)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#dddddd", linewidth=0.6)
    figure.savefig(path)


def moving_average(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    found = [(record["step"], record[key]) for record in metrics if record.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _reward(axes: Axes, metrics: Sequence[Mapping[str, Any]]) -> None:
    steps, rewards = _series(metrics, "reward")
    if not steps:
        return
    axes.plot(steps, rewards, ".", color=_BLUE, alpha=0.35, markersize=5, label="training reward, each step")
    label = f"training reward, mean of the last {_WINDOW} steps"
    axes.plot(steps, moving_average(rewards), color=_BLUE, linewidth=2, label=label)


def _held_out(axes: Axes, metrics: Sequence[Mapping[str, Any]]) -> None:
    steps, values = _series(metrics, "eval/accuracy")
    label = "held-out accuracy, greedy"
    if not steps:  # no reward knows what is correct
        steps, values = _series(metrics, "eval/reward")
        label = "held-out reward, greedy"
    if not steps:
        return
    lows, highs = _series(metrics, "eval/accuracy_low")[1], _series(metrics, "eval/accuracy_high")[1]
    bars = None
    if len(lows) == len(highs) == len(values):
        # Not below 0: at accuracy 0 or 1 the bound may lie past the value by a rounding error.
        below = [max(0.0, value - low) for value, low in zip(values, lows, strict=True)]
        bars = [below, [max(0.0, high - value) for value, high in zip(values, highs, strict=True)]]
        label += f", 95% interval (n = {_series(metrics, 'eval/n')[1][-1]})"
    axes.errorbar(steps, values, yerr=bars, fmt="o-", color=_ORANGE, capsize=3, linewidth=1.2, label=label)
    for step, value in {steps[0]: values[0], steps[-1]: values[-1]}.items():
        axes.annotate(f"{value:.2f}", (step, value), (6, -12), textcoords="offset points", color=_ORANGE, fontsize=10)


def _length(axes: Axes, metrics: Sequence[Mapping[str, Any]]) -> None:
    steps, lengths = _series(metrics, "completions/mean_length")
    if steps:
        axes.plot(steps, lengths, color=_GREY, linewidth=1.5, marker="." if len(steps) == 1 else "")
        axes.set_ylim(bottom=0)
