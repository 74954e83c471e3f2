"""The rules that join several keys of `algo`, and what its `auto` stands for.

Owns which clip, ratio and denominator a loss has. Must not know where a value came from, nor torch. A key counts as
set when its value differs from its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from grpofit.config.problems import Problem, default_of, set_flag, unset_flag
from grpofit.config.tree import AlgoConfig, Config

_UNCLIPPED = ("sapo", "reinforce")
_SEQUENCE_LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "gspo")
_LARGEST_SEQUENCE_CLIP = 0.01
"""The sequence ratio is a mean over the completion's tokens; GSPO's own clips are 3e-4 and 4e-4."""


def resolved_ratio(algo: AlgoConfig) -> str:
    """`token` or `sequence`; `auto` is sequence for gspo, else token."""
    if algo.ratio != "auto":
        return algo.ratio
    return "sequence" if algo.loss == "gspo" else "token"


def resolved_clips(algo: AlgoConfig) -> tuple[float, float]:
    """`(clip_low, clip_high)`: the ratio is kept within [1 - clip_low, 1 + clip_high].

    `auto` is (0.2, 0.2); (3e-4, 4e-4) for the sequence ratio (GSPO, arXiv 2507.18071, section 5.1). For cispo
    `clip_high` is the cap of the ratio itself, 5 where `auto`. A bound that the loss does not have is returned as one
    that never acts: 1 below (the ratio is positive), inf above.
    """
    if algo.loss in _UNCLIPPED:
        return 1.0, math.inf
    if algo.loss == "cispo":
        return 1.0, 5.0 if algo.clip_high == "auto" else algo.clip_high
    low, high = (3e-4, 4e-4) if resolved_ratio(algo) == "sequence" else (0.2, 0.2)
    return (
        low if algo.clip_low == "auto" else algo.clip_low,
        high if algo.clip_high == "auto" else algo.clip_high,
    )


def gspo_is_sequence_level(config: Config) -> list[Problem]:
    """`algo`: gspo has the sequence ratio."""
    if config.algo.loss != "gspo" or config.algo.ratio != "token":
        return []
    what = "gspo contradicts a ratio per token"
    why = "gspo is defined by its ratio per sequence; with a ratio per token it is grpo"
    fix = f"{set_flag('algo.ratio', 'auto')}, or {set_flag('algo.loss', 'grpo')}"
    return [Problem(("algo.loss", "algo.ratio"), what, why, fix)]


def sequence_ratio_has_a_meaning(config: Config) -> list[Problem]:
    """`algo.ratio: sequence` goes with the clipped losses: grpo, dapo, dr_grpo, bnpo, gspo."""
    if config.algo.ratio != "sequence" or config.algo.loss in _SEQUENCE_LOSSES:
        return []
    what = f"{config.algo.loss} has no ratio per sequence"
    why = (
        "its paper weighs each token by itself" if config.algo.loss != "reinforce" else "reinforce has no ratio at all"
    )
    fix = f"{set_flag('algo.ratio', 'auto')}, or {set_flag('algo.loss', 'gspo')}"
    return [Problem(("algo.ratio", "algo.loss"), what, why, fix)]


def clips_are_used(config: Config) -> list[Problem]:
    """`algo`: no clip that the loss does not have (sapo, reinforce: none; cispo: `clip_high` only)."""
    algo = config.algo
    unused: tuple[str, ...] = ("clip_low", "clip_delta") if algo.loss == "cispo" else ()
    if algo.loss in _UNCLIPPED:
        unused = ("clip_low", "clip_high", "clip_delta")
    return [
        Problem(
            (f"algo.{name}", "algo.loss"),
            f"{algo.loss} has no '{name}'",
            "it would change nothing, though it is set",
            unset_flag(f"algo.{name}"),
        )
        for name in unused
        if getattr(algo, name) not in ("auto", None)
    ]


def clips_are_in_range(config: Config) -> list[Problem]:
    """`algo`: clip_low in [0, 1), clip_high >= 0 (cispo: a cap >= 1), clip_delta > 1 + clip_high."""
    algo = config.algo
    problems = []
    if algo.loss in _UNCLIPPED:
        return []
    if algo.loss == "cispo":
        if algo.clip_high != "auto" and algo.clip_high < 1:
            why = "for cispo it is the cap of the ratio itself: below 1 it would cut every token, on-policy ones too"
            what = "'algo.clip_high' needs a number >= 1 for cispo"
            problems.append(Problem(("algo.clip_high", "algo.loss"), what, why, set_flag("algo.clip_high", 5.0)))
        return problems
    if algo.clip_low != "auto" and not 0 <= algo.clip_low < 1:
        why = "the ratio is kept above 1 - clip_low, and a ratio is never negative"
        what = "'algo.clip_low' needs a number >= 0 and < 1"
        problems.append(Problem(("algo.clip_low",), what, why, unset_flag("algo.clip_low")))
    if algo.clip_high != "auto" and algo.clip_high < 0:
        why = "the ratio is kept below 1 + clip_high, and on-policy it is 1"
        what = "'algo.clip_high' needs a number >= 0"
        problems.append(Problem(("algo.clip_high",), what, why, unset_flag("algo.clip_high")))
    elif algo.clip_delta is not None and algo.clip_delta <= (bound := 1 + resolved_clips(algo)[1]):
        why = "it bounds the ratio where the clip does not act, so it must lie above the clip"
        what = f"'algo.clip_delta' needs a number > 1 + clip_high = {bound:g}"
        fix = set_flag("algo.clip_delta", max(2.0, math.ceil(bound + 1)))
        problems.append(Problem(("algo.clip_delta", "algo.clip_high"), what, why, fix))
    return problems


def clips_suit_the_sequence_ratio(config: Config) -> list[Problem]:
    """`algo`: with a ratio per sequence (gspo), clips are at most 0.01."""
    algo = config.algo
    if resolved_ratio(algo) != "sequence" or algo.loss not in _SEQUENCE_LOSSES:
        return []
    return [
        Problem(
            (key, "algo.loss", "algo.ratio"),
            f"'{key}' is too large for a ratio per sequence",
            f"that ratio is a mean over the completion's tokens and stays within about 1 +- 1e-3: {value:g} never acts",
            f"{unset_flag(key)}   (auto: {auto:g})",
        )
        for key, value, auto in (("algo.clip_low", algo.clip_low, 3e-4), ("algo.clip_high", algo.clip_high, 4e-4))
        if value != "auto" and value > _LARGEST_SEQUENCE_CLIP
    ]


def sapo_gates_are_used(config: Config) -> list[Problem]:
    """`algo`: `sapo_tau_pos` and `sapo_tau_neg` go with sapo."""
    return [
        Problem(
            (key, "algo.loss"),
            f"'{key}' is read by sapo only",
            "it would change nothing, though it is set",
            f"{unset_flag(key)}, or {set_flag('algo.loss', 'sapo')}",
        )
        for key in ("algo.sapo_tau_pos", "algo.sapo_tau_neg")
        if config.algo.loss != "sapo" and getattr(config.algo, key.removeprefix("algo.")) != default_of(key)
    ]


def denominator_is_defined(config: Config) -> list[Problem]:
    """`algo.denominator: with_signal` needs one denominator a step (not bnpo), and no KL or entropy term."""
    algo = config.algo
    if algo.denominator != "with_signal":
        return []
    problems = []
    fix = unset_flag("algo.denominator")
    if algo.loss == "bnpo":
        what = "bnpo has no denominator that could leave out rows without signal"
        why = "it divides each micro batch by its own tokens, so the memory settings would decide what counts"
        problems.append(Problem(("algo.denominator", "algo.loss"), what, why, f"{fix}, or --set algo.loss=dapo"))
    for key, value in (("algo.beta", algo.beta), ("algo.entropy_bonus", algo.entropy_bonus)):
        if value:
            what = f"with '{key}' above 0 every row has a gradient, so 'algo.denominator' cannot leave rows out"
            why = "rows that add to the sum but not to its denominator would be weighed too heavily"
            problems.append(Problem(("algo.denominator", key), what, why, f"{fix}, or {unset_flag(key)}"))
    return problems


def normalize_each_scales_alone(config: Config) -> list[Problem]:
    """`algo.combine: normalize_each` brings its own scaling, so `algo.advantage` stays at its default."""
    if config.algo.combine != "normalize_each" or config.algo.advantage == "group":
        return []
    what = "'algo.advantage' is not read with normalize_each"
    why = "GDPO normalises each reward in its group and the sum over the batch; a second choice would never act"
    fix = f"{unset_flag('algo.advantage')}, or {unset_flag('algo.combine')}"
    return [Problem(("algo.advantage", "algo.combine"), what, why, fix)]


ALGO_RULES: tuple[Callable[[Config], list[Problem]], ...] = (
    gspo_is_sequence_level,
    sequence_ratio_has_a_meaning,
    clips_are_used,
    clips_are_in_range,
    clips_suit_the_sequence_ratio,
    sapo_gates_are_used,
    denominator_is_defined,
    normalize_each_scales_alone,
)
