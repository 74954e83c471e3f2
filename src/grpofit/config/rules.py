"""The rules that join several keys: one named function each, all judged, none changes a value.

Owns the list of all rules, those that cross sections, what a model's positions allow, and which keys a resumed run
may change. Must not know where a value came from. A key counts as set when its value differs from its default, so
that a written-out configuration obeys the same rules as the short one it came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from grpofit.config.problems import Problem, set_flag, unset_flag
from grpofit.config.rules_algo import ALGO_RULES, resolved_clips, resolved_ratio
from grpofit.config.rules_task import TASK_RULES
from grpofit.config.tree import Config, MemoryConfig
from grpofit.config.yaml import dotted, leaves
from grpofit.errors import ConfigError

__all__ = [
    "RULES",
    "check",
    "check_model_limits",
    "keys_that_cut_layers",
    "resolved_clips",
    "resolved_ratio",
    "resume_conflicts",
]

_RESUME_MAY_CHANGE = re.compile(
    r"memory\..*|run\.(steps|eval_every|eval_pass_k|checkpoint_every|keep_last|keep_best|max_\w+|trackers)"
)


def schedule_fits(config: Config) -> list[Problem]:
    """`optim`: warm-up within the run; `min_lr_frac` with a falling schedule; betas >= 0 and < 1."""
    optim, problems = config.optim, []
    if optim.warmup_steps > config.run.steps:
        what, why = "the warm-up is longer than the run", "the learning rate would never reach its peak"
        fix = set_flag("optim.warmup_steps", config.run.steps // 10)
        problems.append(Problem(("optim.warmup_steps", "run.steps"), what, why, fix))
    if optim.min_lr_frac and optim.schedule == "constant":
        what, why = "a constant schedule has no end to fall to", "'optim.min_lr_frac' would change nothing"
        fix = f"{set_flag('optim.schedule', 'linear')}, or {unset_flag('optim.min_lr_frac')}"
        problems.append(Problem(("optim.min_lr_frac", "optim.schedule"), what, why, fix))
    if not all(0 <= beta < 1 for beta in optim.betas):
        what, why = "'optim.betas' needs two numbers >= 0 and < 1", "the moving averages would not decay"
        problems.append(Problem(("optim.betas",), what, why, unset_flag("optim.betas")))
    return problems


def precision_can_learn(config: Config) -> list[Problem]:
    """`model`: float16 needs float32 master weights; flash attention needs 16-bit floats and a GPU."""
    model, problems = config.model, []
    if model.dtype == "float16" and model.master_dtype != "float32":
        what, why = (
            "float16 needs float32 master weights",
            "float16 has too small a range for updates and their moments",
        )
        problems.append(
            Problem(("model.dtype", "model.master_dtype"), what, why, set_flag("model.master_dtype", "float32"))
        )
    if model.attention == "flash_attention_2":
        fix = set_flag("model.attention", "sdpa")
        for key, bad in (("model.dtype", model.dtype == "float32"), ("run.device", config.run.device == "cpu")):
            if bad:
                what, why = "flash_attention_2 needs a 16-bit dtype and a CUDA device", "its kernels have no other form"
                problems.append(Problem(("model.attention", key), what, why, fix))
    return problems


def chance_has_something_to_round(config: Config) -> list[Problem]:
    """`optim.rounding: stochastic` is for bfloat16 weights without a master: `model.master_dtype: none`."""
    model = config.model
    if config.optim.rounding == "nearest":
        return []
    fix, bfloat16 = unset_flag("optim.rounding"), model.dtype in ("auto", "bfloat16")
    without = set_flag("model.master_dtype", "none")
    if not bfloat16:
        what = f"stochastic rounding is for bfloat16 weights, and 'model.dtype' is {model.dtype}"
        why = "float32 weights need no rounding" if model.dtype == "float32" else "float16 needs a float32 master"
        fix = f"{fix}, or {set_flag('model.dtype', 'bfloat16')} {without}"
        return [Problem(("optim.rounding", "model.dtype"), what, why, fix)]
    if model.master_dtype == "float32":
        what = "stochastic rounding is for weights without a float32 master"
        why = "with a master no update is lost, and the weight is its nearest rounding: chance would only add noise"
        return [Problem(("optim.rounding", "model.master_dtype"), what, why, f"{fix}, or {without}")]
    return []


def keys_that_cut_layers(memory: MemoryConfig) -> list[str]:
    """The keys that make parts of a layer recompute on their own, so that it cannot be compiled whole."""
    cuts = {
        "memory.checkpointing": memory.checkpointing == "selective",
        "memory.mlp_tile_tokens": memory.mlp_tile_tokens not in ("auto", "none"),
    }
    return [key for key, cut in cuts.items() if cut]


def whole_layers_can_be_compiled(config: Config) -> list[Problem]:
    """`run.compile: layers` without parts of a layer that recompute on their own: `selective`, MLP tiles."""
    problems: list[Problem] = []
    if config.run.compile != "layers":
        return problems
    for key in keys_that_cut_layers(config.memory):
        what = f"'run.compile: layers' compiles a layer whole, and '{key}' recomputes a part of it"
        why = "the compiler would stop at every such part: slower than no compiling"
        fix = f"{set_flag('run.compile', 'none')}, or {unset_flag(key)}"
        problems.append(Problem(("run.compile", key), what, why, fix))
    return problems


def keep_best_has_evaluations(config: Config) -> list[Problem]:
    """`run.keep_best` needs evaluations on the way: `run.eval_every` above 0."""
    if not config.run.keep_best or config.run.eval_every:
        return []
    what, why = "'run.keep_best' needs evaluations during the run", "with those at start and end alone, best is last"
    return [Problem(("run.keep_best", "run.eval_every"), what, why, set_flag("run.eval_every", 25))]


RULES: tuple[Callable[[Config], list[Problem]], ...] = (
    *TASK_RULES,
    *ALGO_RULES,
    schedule_fits,
    precision_can_learn,
    chance_has_something_to_round,
    whole_layers_can_be_compiled,
    keep_best_has_evaluations,
)


def check(config: Config) -> list[Problem]:
    """What all rules find, in their order."""
    return [problem for rule in RULES for problem in rule(config)]


def check_model_limits(config: Config, max_positions: int | None) -> None:
    """Hold prompt and completion against the model's positions, once its own configuration is known.

    Args:
        max_positions: the longest sequence the model knows, in tokens; None when it has no such limit.

    Raises:
        ConfigError: `max_prompt_tokens + max_completion_tokens` is more.
    """
    prompt, completion = config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens
    if max_positions is None or prompt + completion <= max_positions:
        return
    fixes = [
        set_flag(f"rollout.{name}", max_positions - other)
        for name, other in (("max_completion_tokens", prompt), ("max_prompt_tokens", completion))
        if max_positions > other
    ]
    half = max_positions // 2
    both = f"{set_flag('rollout.max_prompt_tokens', half)} {set_flag('rollout.max_completion_tokens', half)}"
    raise ConfigError(
        f"prompt and completion do not fit the {max_positions} positions of {config.model.name}",
        values=f"rollout.max_prompt_tokens = {prompt}\nrollout.max_completion_tokens = {completion}\n"
        f"together {prompt + completion}, {prompt + completion - max_positions} too many",
        why="beyond its positions a model was never trained: it writes noise there, or fails",
        fix=", or ".join(fixes) or both,
    )


def resume_conflicts(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Keys that may not differ between a run and its continuation, as `(key, old, new)`; None for an absent one.

    Free are the length of the run (unless the learning rate depends on it), how often it is evaluated and saved, its
    limits of failure, its trackers, and all of `memory`.
    """
    before, after = _flat(old), _flat(new)
    scheduled = "constant" not in (old.optim.schedule, new.optim.schedule)
    return [
        (key, before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
        and (not _RESUME_MAY_CHANGE.fullmatch(key) or (key == "run.steps" and scheduled))
    ]


def _flat(config: Config) -> dict[str, Any]:
    return {dotted(path): value for path, value in leaves(config.model_dump())}
