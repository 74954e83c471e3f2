"""A slow second implementation of every loss: plain Python floats, one token at a time.

Used to check values, and, by central differences, gradients. It shares no code with `grpofit.algo.losses` and is
written from the papers' formulas: sums over rows and tokens, `if` where they say clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Rows = list[list[float]]


def surrogate(ratio: float, advantage: float, low: float, high: float, delta: float | None) -> float:
    clipped = min(max(ratio, 1 - low), 1 + high)
    free = ratio if delta is None or ratio < delta else delta
    return -min(free * advantage, clipped * advantage)


def kl_estimate(kind: str, logprob: float, ref: float) -> float:
    if kind == "k1":
        return logprob - ref
    if kind == "k2":
        return 0.5 * (logprob - ref) ** 2
    return math.exp(ref - logprob) - (ref - logprob) - 1


def token_loss(spec: dict[str, object], ratio: float, held_ratio: float, logprob: float, advantage: float) -> float:
    """`held_ratio` is the ratio where the formula has a stop-gradient around it."""
    low, high, delta = spec["clip_low"], spec["clip_high"], spec["clip_delta"]
    name = spec["loss"]
    if name == "reinforce":
        return -advantage * logprob
    if name == "cispo":
        return -min(held_ratio, high) * advantage * logprob
    if name == "sapo":
        tau = spec["sapo_tau_pos"] if advantage > 0 else spec["sapo_tau_neg"]
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    return surrogate(ratio, advantage, low, high, delta)


def reference_loss(
    spec: dict[str, object],
    logprobs: Rows,
    held: Rows,
    old: Rows | None,
    advantages: list[float],
    mask: list[list[int]],
    ref: Rows,
    entropy: Rows,
) -> float:
    """Loss of a whole step in one micro batch. `held` are the logprobs as constants (under a stop-gradient)."""
    behaviour = held if old is None else old
    n_tokens = sum(map(sum, mask))
    total = 0.0
    for i, row_mask in enumerate(mask):
        kept = [t for t, bit in enumerate(row_mask) if bit]
        if not kept:
            continue
        mean_gap = sum(logprobs[i][t] - behaviour[i][t] for t in kept) / len(kept)
        mean_held_gap = sum(held[i][t] - behaviour[i][t] for t in kept) / len(kept)
        of_row = 0.0
        for t in kept:
            gap, held_gap = logprobs[i][t] - behaviour[i][t], held[i][t] - behaviour[i][t]
            if spec["ratio"] == "sequence":
                gap, held_gap = mean_gap, mean_held_gap
            of_row += token_loss(spec, math.exp(gap), math.exp(held_gap), logprobs[i][t], advantages[i])
            of_row += spec["beta"] * kl_estimate(spec["kl"], logprobs[i][t], ref[i][t])
            of_row -= spec["entropy_bonus"] * entropy[i][t]
        if spec["loss"] in ("dapo", "cispo", "reinforce", "bnpo"):
            total += of_row / n_tokens
        elif spec["loss"] == "dr_grpo":
            total += of_row / (len(mask) * spec["max_completion_tokens"])
        else:
            total += of_row / len(kept) / len(mask)
    return total


def slope(function: Callable[[Rows], float], at: Rows, step: float = 1e-6) -> Rows:
    """Gradient of `function` by central differences, one number at a time."""

    def moved(i: int, t: int, by: float) -> float:
        rows = [list(row) for row in at]
        rows[i][t] += by
        return function(rows)

    return [
        [(moved(i, t, step) - moved(i, t, -step)) / (2 * step) for t in range(len(row))] for i, row in enumerate(at)
    ]
