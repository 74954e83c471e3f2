"""The rules that join several keys of `task` and `rewards`.

Owns which keys a kind of task or reward reads. Must not know where a value came from. A key counts as set when its
value differs from its default.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches

from grpofit.config.problems import Problem, default_of, set_flag, unset_flag
from grpofit.config.tree import Config, RewardConfig, TaskConfig

TASK_NAMES = ("arithmetic", "gsm8k")
REASONING_GYM = "reasoning_gym:"

_TASK_KINDS = {
    "operations": ("arithmetic",),
    "terms": ("arithmetic",),
    "options": ("reasoning_gym",),
    "eval_file": ("file",),
    "dataset_config": ("dataset",),
    "split": ("dataset",),
    "eval_split": ("dataset",),
}
"""Keys that only some tasks read."""


def task_kind(task: TaskConfig) -> str:
    """`arithmetic`, `gsm8k`, `reasoning_gym`, `file`, `dataset`; empty while that is not settled."""
    given = [kind for kind in ("name", "file", "dataset") if getattr(task, kind) is not None]
    if len(given) != 1:
        return ""
    if task.name is None:
        return given[0]
    if task.name.startswith(REASONING_GYM) and task.name != REASONING_GYM:
        return "reasoning_gym"
    return task.name if task.name in TASK_NAMES else ""


def task_has_one_source(config: Config) -> list[Problem]:
    """`task`: exactly one of `name`, `file`, `dataset`."""
    keys = ("task.name", "task.file", "task.dataset")
    given = [key for key in keys if getattr(config.task, key.removeprefix("task.")) is not None]
    if len(given) == 1:
        return []
    what = "'task' needs exactly one of name, file, dataset"
    if not given:
        return [Problem(keys, f"{what}; none is set", "there are no prompts to train on", "--set task.name=arithmetic")]
    fix = "keep one: " + " ".join(unset_flag(key) for key in given[1:])
    return [Problem(tuple(given), f"{what}; {len(given)} are set", "only one of them could be used", fix)]


def task_name_is_known(config: Config) -> list[Problem]:
    """`task.name`: a built-in task, or `reasoning_gym:` and one of its data sets."""
    name = config.task.name
    if name is None or name in TASK_NAMES or task_kind(config.task) == "reasoning_gym":
        return []
    if name.startswith(REASONING_GYM.rstrip(":")):
        meant = "reasoning_gym:basic_arithmetic"
    else:
        meant = (get_close_matches(name, TASK_NAMES, n=1) or ["arithmetic"])[0]
    return [
        Problem(
            ("task.name",),
            f"unknown task '{name}'; there are {', '.join(TASK_NAMES)} and {REASONING_GYM}<dataset>",
            "your own rows go into task.file, a data set of the hub into task.dataset",
            set_flag("task.name", meant),
        )
    ]


def task_keys_apply(config: Config) -> list[Problem]:
    """`task`: no key that the chosen task does not read."""
    kind = task_kind(config.task)
    problems = []
    for name, kinds in _TASK_KINDS.items():
        key = f"task.{name}"
        if not kind or kind in kinds or getattr(config.task, name) == default_of(key):
            continue
        chosen = "task.name" if config.task.name else f"task.{kind}"
        problems.append(
            Problem(
                (key, chosen),
                f"'{key}' is read by {' and '.join(kinds)} tasks only, not by {kind}",
                "it would change nothing, though it is set",
                unset_flag(key),
            )
        )
    return problems


def terms_are_ordered(config: Config) -> list[Problem]:
    """`task.terms`: the smallest term first."""
    terms = config.task.terms
    if terms is None or terms[0] <= terms[1]:
        return []
    fix = set_flag("task.terms", sorted(terms))
    return [Problem(("task.terms",), "'task.terms' needs the smallest term first", "the range is empty", fix)]


def options_leave_rows_alone(config: Config) -> list[Problem]:
    """`task.options`: `size` and `seed` are set by `train_size`, `eval_size` and `split_seed`."""
    instead = {"size": "task.train_size", "seed": "task.split_seed"}
    return [
        Problem(
            (f"task.options.{name}", key),
            f"'task.options.{name}' is not an option: '{key}' decides it",
            "training and held-out rows must be drawn apart from each other",
            f"remove task.options.{name}; {set_flag(key, config.task.options[name])}",
        )
        for name, key in instead.items()
        if name in config.task.options and task_kind(config.task) == "reasoning_gym"
    ]


def chat_template_is_used(config: Config) -> list[Problem]:
    """`task.template: none` has no place for `system` and `chat_template_kwargs`."""
    if config.task.template != "none":
        return []
    return [
        Problem(
            (key, "task.template"),
            f"'{key}' needs a chat template, and 'task.template' is none",
            "the bare prompt has no place for it",
            f"{unset_flag(key)} (put the words into task.prompt), or {set_flag('task.template', 'chat')}",
        )
        for key, value in (
            ("task.system", config.task.system),
            ("task.chat_template_kwargs", config.task.chat_template_kwargs),
        )
        if value
    ]


def rewards_have_one_source(config: Config) -> list[Problem]:
    """`rewards`: each has exactly one of `name`, `function`; a function is `file.py:function` or `module:function`."""
    problems = []
    for index, reward in enumerate(config.rewards):
        name, function = f"rewards.{index}.name", f"rewards.{index}.function"
        if (reward.name is None) == (reward.function is None):
            which = "none is set" if reward.name is None else "both are set"
            fix = set_flag(name, "last_number") if reward.name is None else f"keep one: {unset_flag(name)}"
            problems.append(
                Problem(
                    (name, function),
                    f"'rewards.{index}' needs exactly one of name, function; {which}",
                    "one entry is one score",
                    fix,
                )
            )
        if reward.function is not None and not re.fullmatch(r"(.+\.py|[^\W\d][\w.]*):[^\W\d]\w*", reward.function):
            stem = reward.function.rpartition(":")[0] or reward.function or "my_rewards.py"
            problems.append(
                Problem(
                    (function,),
                    f"'{function}' needs file.py:function or package.module:function",
                    "the function cannot be found without both parts",
                    set_flag(function, f"{stem}:score"),
                )
            )
    return problems


def regex_has_a_pattern(config: Config) -> list[Problem]:
    """`rewards`: `regex` has a `pattern`, and it compiles."""
    problems = []
    for index, reward in enumerate(config.rewards):
        if reward.name != "regex":
            continue
        key = f"rewards.{index}.pattern"
        example = set_flag(key, r"\d+$")
        if reward.pattern is None:
            why = "without it every completion would match"
            problems.append(Problem((key,), f"the reward regex needs '{key}'", why, example))
            continue
        try:
            re.compile(reward.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            what = f"'{key}' is not a regular expression: {error}"
            why = "it would fail on every completion"
            problems.append(Problem((key,), what, why, f"correct it, e.g. {example}"))
    return problems


def reward_keys_apply(config: Config) -> list[Problem]:
    """`rewards`: `pattern` goes with `regex`, `buffer_tokens` with `soft_overlong`."""
    problems = []
    for index, reward in enumerate(config.rewards):
        for name, owner in (("pattern", "regex"), ("buffer_tokens", "soft_overlong")):
            if getattr(reward, name) is None or reward.name == owner:
                continue
            key = f"rewards.{index}.{name}"
            shown = f"rewards.{index}.{'function' if reward.function else 'name'}"
            what = f"'{key}' is read by the reward {owner} only"
            problems.append(Problem((key, shown), what, "it would change nothing, though it is set", unset_flag(key)))
    return problems


def overlong_buffer_fits(config: Config) -> list[Problem]:
    """`rewards`: `buffer_tokens` is at most `rollout.max_completion_tokens`."""
    limit = config.rollout.max_completion_tokens
    return [
        Problem(
            (f"rewards.{index}.buffer_tokens", "rollout.max_completion_tokens"),
            f"'rewards.{index}.buffer_tokens' is longer than a whole completion",
            "the penalty would begin before the first token",
            set_flag(f"rewards.{index}.buffer_tokens", max(1, limit // 5)),
        )
        for index, reward in enumerate(config.rewards)
        if reward.buffer_tokens is not None and reward.buffer_tokens > limit
    ]


def reward_labels_differ(config: Config) -> list[Problem]:
    """`rewards`: no two with the same name; a function counts by its own name, without its file."""
    first: dict[str, int] = {}
    problems = []
    for index, reward in enumerate(config.rewards):
        before = first.setdefault(reward.label, index)
        if before != index and reward.label:
            keys = (_source_key(config.rewards[before], before), _source_key(reward, index))
            fix = (
                "rename one of the functions" if reward.function else "remove one, or join both in a function of yours"
            )
            why = "scores and metrics are told apart by this name"
            problems.append(Problem(keys, f"two rewards are called '{reward.label}'", why, fix))
    return problems


def _source_key(reward: RewardConfig, index: int) -> str:
    return f"rewards.{index}.{'name' if reward.name else 'function'}"


def task_reward_has_a_scorer(config: Config) -> list[Problem]:
    """`rewards`: `task` goes with a task that scores, `reasoning_gym:<dataset>`."""
    kind = task_kind(config.task)
    source = "task.name" if config.task.name else f"task.{kind}"
    return [
        Problem(
            (f"rewards.{index}.name", source),
            f"the reward 'task' is a scorer of the task, and {kind} tasks have none",
            "no completion would get a score",
            set_flag(f"rewards.{index}.name", "math_answer" if kind == "gsm8k" else "last_number"),
        )
        for index, reward in enumerate(config.rewards)
        if reward.name == "task" and kind not in ("", "reasoning_gym")
    ]


def some_reward_counts(config: Config) -> list[Problem]:
    """`rewards`: at least one weight is not 0."""
    if any(reward.weight for reward in config.rewards):
        return []
    keys = tuple(f"rewards.{index}.weight" for index in range(len(config.rewards)))
    what, why = "every reward has the weight 0", "all completions would score 0, so no group has a signal"
    return [Problem(keys, what, why, set_flag(keys[0], 1.0))]


TASK_RULES: tuple[Callable[[Config], list[Problem]], ...] = (
    task_has_one_source,
    task_name_is_known,
    task_keys_apply,
    terms_are_ordered,
    options_leave_rows_alone,
    chat_template_is_used,
    rewards_have_one_source,
    regex_has_a_pattern,
    reward_keys_apply,
    overlong_buffer_fits,
    reward_labels_differ,
    task_reward_has_a_scorer,
    some_reward_counts,
)
