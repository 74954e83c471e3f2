"""What is wrong with a configuration, and how it is told: all problems in one four-part error.

Owns the record `Problem`, the wording of pydantic's findings (its own texts never reach a user), the nearest match
of an unknown key, and the layout of the error. Must not know the rules that join several keys (`rules.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from grpofit.config.describe import choices, expected, keys, locate, section_of
from grpofit.config.tree import Config
from grpofit.config.yaml import KeyPath, dotted, inline, parse
from grpofit.errors import ConfigError

_REQUIRED: dict[str, Any] = {
    "model": {"name": "smollm2-135m"},
    "model.name": "smollm2-135m",
    "task": {"name": "arithmetic"},
    "rewards": [{"name": "last_number"}],
}
"""The keys without a default, with a value that works."""

_REASONS = {
    "rollout.group_size": "an advantage compares a completion with the others of its group: one alone has none",
    "rollout.temperature": "at 0 all completions of a group are the same, so no group has a signal",
    "optim.lr": "without a positive learning rate no weight moves",
    "rewards": "without a reward there is nothing to learn from",
    "model": "there is no policy to train",
    "model.name": "there is no policy to train",
    "task": "there is nothing to prompt the policy with",
}
_REASON_VALUE = "a value that is guessed at would train something else than you wrote"
_REASON_KEY = "a key that is passed over would leave its default in force"

_OLD_BOOLEANS = {"on": True, "yes": True, "off": False, "no": False}
"""Booleans of YAML 1.1, text in YAML 1.2."""

# What people coming from TRL type; only ever named in an error, never accepted.
_TRL_NAMES = {
    "model_name_or_path": "model.name",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "attn_implementation": "model.attention",
    "dataset_name": "task.dataset",
    "reward_funcs": "rewards",
    "reward_weights": "rewards.0.weight",
    "num_generations": "rollout.group_size",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_completion_length": "rollout.max_completion_tokens",
    "generation_batch_size": "memory.generation_chunk",
    "loss_type": "algo.loss",
    "scale_rewards": "algo.advantage",
    "multi_objective_aggregation": "algo.combine",
    "importance_sampling_level": "algo.ratio",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "delta": "algo.clip_delta",
    "num_iterations": "algo.iterations_per_batch",
    "mask_truncated_completions": "algo.mask_truncated",
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "per_device_train_batch_size": "memory.micro_batch_tokens",
    "gradient_accumulation_steps": "memory.micro_batch_tokens",
    "gradient_checkpointing": "memory.checkpointing",
    "max_steps": "run.steps",
    "eval_steps": "run.eval_every",
    "save_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep_last",
    "report_to": "run.trackers",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        keys: the dotted keys that show it, each printed with value and origin.
        what: one sentence.
        why: what would have gone wrong.
        fix: the change to make.
        meant: keys that were probably meant; rules about them are not judged meanwhile.
    """

    keys: tuple[str, ...]
    what: str
    why: str
    fix: str
    meant: tuple[str, ...] = ()


def set_flag(key: str, value: Any) -> str:
    """`--set algo.loss=grpo`, quoted for the shell where it must be."""
    text = f"{key}={inline(value)}"
    plain_in_double_quotes = "'" in text and not set(text) & set('"$`\\!')
    return f'--set "{text}"' if plain_in_double_quotes else f"--set {shlex.quote(text)}"


def default_of(key: str) -> Any:
    """The default of a dotted key (list indices allowed); None for keys without one and unknown keys."""
    path = split(key)
    known, field, _ = locate(path)
    if field is None or known != path or field.is_required():
        return None
    default = field.get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default


def unset_flag(key: str) -> str:
    """The `--set` that brings a key back to its default."""
    return set_flag(key, default_of(key))


def split(key: str) -> KeyPath:
    """`rewards.0.weight` as a path; digits are list indices."""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def from_pydantic(error: ValidationError, data: Mapping[str, Any]) -> list[Problem]:
    """Pydantic's findings in our words, at most one a key."""
    problems: dict[str, Problem] = {}
    for finding in error.errors(include_url=False, include_context=False):
        path: KeyPath = finding["loc"]
        if finding["type"] == "extra_forbidden":
            problem = unknown_key(path, value_at(data, path))
        else:
            problem = _bad_value(path, finding["type"], data)
        problems.setdefault(problem.keys[0], problem)
    return list(problems.values())


def _bad_value(path: KeyPath, kind: str, data: Mapping[str, Any]) -> Problem:
    known, field, _ = locate(path)
    assert field is not None, path
    inner, _ = section_of(field)
    if inner is not None and len(path) > len(known):
        known, needs = path[: len(known) + 1], "a mapping of keys"  # one entry of `rewards`
    elif kind == "finite_number":
        needs = "a finite number"
    else:
        needs = expected(field)
    key = dotted(known)
    why = _REASONS.get(key, _REASON_VALUE)
    if kind == "missing" and path == known:
        return Problem((key,), f"'{key}' is missing", why, set_flag(key, _REQUIRED[key]))
    return Problem((key,), f"'{key}' needs {needs}", why, _better_value(key, field, value_at(data, known), needs))


def _better_value(key: str, field: FieldInfo, value: Any, needs: str) -> str:
    """The change to propose: what was probably meant, else the default."""
    words = choices(field)
    if isinstance(value, str) and (meant := _meant(key, value, words, needs)):
        return meant
    if isinstance(value, list) and words:
        return set_flag(key, [word for word in value if word in words] or words)
    if field.examples:
        return set_flag(key, field.examples[0])
    if isinstance(value, Mapping) and needs.startswith("a list"):
        return f"put the mapping in a list: {set_flag(key, [value])}"
    if isinstance(value, bool | int | float) and needs.startswith("text"):
        return set_flag(key, inline(value))
    if section_of(field)[0] is not None:
        name = key.partition(".")[0]
        return set_flag(name, _REQUIRED.get(name, {}))
    if key in _REQUIRED:
        return set_flag(key, _REQUIRED[key])
    return f"{unset_flag(key)}   (the default)"


def _meant(key: str, value: str, words: Sequence[str], needs: str) -> str | None:
    if value.lower() in ("none", "null") and "null" in needs:
        return set_flag(key, None)
    if needs == "true or false" and value.lower() in _OLD_BOOLEANS:
        return set_flag(key, _OLD_BOOLEANS[value.lower()])
    near = get_close_matches(value, words, n=1)
    if needs.startswith("a list of"):
        return set_flag(key, near) if near else set_flag(key, [value]) if "text" in needs else None
    if near:
        return set_flag(key, near[0])
    number = _as_number(value)
    if number is not None and "number" in needs:
        return f"{set_flag(key, number)}   (a number, without quotes or separators)"
    return None


def _as_number(text: str) -> int | float | None:
    try:
        value = parse(text.replace("_", "").replace(",", ""), "").data
    except ConfigError:
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def unknown_key(path: KeyPath, value: Any) -> Problem:
    """The problem of a key that the tree does not have, with the nearest one that it has."""
    key, name = dotted(path), str(path[-1])
    _, _, section = locate(path)
    everywhere: dict[str, list[str]] = {}
    for entry in keys():
        everywhere.setdefault(str(entry.path[-1]), []).append(dotted(entry.path))
    same, trl = everywhere.get(name, []), _TRL_NAMES.get(name)
    if 1 <= len(same) <= 2:
        meant = same
        hint = "here it is " + " or ".join(f"'{one}'" for one in same)
    elif trl:
        why, fix = _REASON_KEY, f"replace it by '{trl}': {unset_flag(trl)} is the default"
        return Problem((key,), f"unknown key '{key}' (TRL's name; here it is '{trl}')", why, fix, meant=(trl,))
    else:
        near = [dotted((*path[:-1], one)) for one in get_close_matches(name, section.model_fields, n=1)]
        far = [everywhere[one][0] for one in get_close_matches(name, everywhere, n=1, cutoff=0.75)]
        meant = near or far
        hint = f"nearest: '{meant[0]}'" if meant else f"there are {', '.join(section.model_fields)}"
    fix = f"rename it: {set_flag(meant[0], value)}" if meant else f"remove '{key}'"
    return Problem((key,), f"unknown key '{key}' ({hint})", _REASON_KEY, fix, meant=tuple(meant))


def value_at(data: Any, path: KeyPath, otherwise: Any = None) -> Any:
    """The value at `path` in plain data."""
    for part in path:
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, Mapping) and str(part) in data:
            data = data[str(part)]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return otherwise
    return data


def to_error(
    problems: Sequence[Problem], source: str, data: Mapping[str, Any], origin_of: Callable[[KeyPath], str]
) -> ConfigError:
    """All problems as one error; the values part has each key with its value and origin."""
    shown = [_shown(problem.keys, data, origin_of) for problem in problems]
    if len(problems) == 1:
        only = problems[0]
        return ConfigError(f"{source}: {only.what}", values="\n".join(shown[0]), why=only.why, fix=only.fix)
    return ConfigError(
        f"{source}: {len(problems)} problems",
        values=_numbered(
            ": ".join(filter(None, [problem.what, ", ".join(rows)]))
            for problem, rows in zip(problems, shown, strict=True)
        ),
        why=_numbered(problem.why for problem in problems),
        fix=_numbered(problem.fix for problem in problems),
    )


def _numbered(texts: Iterable[str]) -> str:
    """One line a text, with the numbers of the problems it belongs to."""
    numbers: dict[str, list[str]] = {}
    for number, text in enumerate(texts, 1):
        numbers.setdefault(text, []).append(str(number))
    return "\n".join(f"{', '.join(of)}: {text}" for text, of in numbers.items())


def _shown(
    names: Sequence[str], data: Mapping[str, Any], origin_of: Callable[[KeyPath], str], limit: int = 80
) -> list[str]:
    rows = []
    missing = object()
    for key in names:
        value = value_at(data, split(key), missing)
        if value is missing:
            if key in _REQUIRED:
                rows.append(f"no {key}")
                continue
            value = default_of(key)
        text = inline(value)
        text = text if len(text) <= limit else text[: limit - 3] + "..."
        rows.append(f"{key} = {text} ({origin_of(split(key))})")
    return rows


def placeholders(data: dict[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """`data` without what is wrong, so that the rules about everything else can be judged in the same go."""
    rest = {key: value for key, value in data.items() if key in Config.model_fields}
    for problem in problems:
        path = split(problem.keys[0])
        parent = value_at(rest, path[:-1])
        if isinstance(parent, dict):
            parent.pop(path[-1], None)
        elif isinstance(parent, list) and isinstance(path[-1], int):
            parent[path[-1]] = {}
    rest.setdefault("model", {}).setdefault("name", "unknown")
    rest.setdefault("task", {})
    rest.setdefault("rewards", [{}])
    return rest
