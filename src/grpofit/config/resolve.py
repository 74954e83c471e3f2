"""From a recipe, a file or a mapping, plus overrides, to a checked configuration that knows where each value is from.

Owns loading, `--set`, origins, and the paths of the user's files. Must not know what the keys mean: types are the
tree's (`tree.py`), contradictions the rules' (`rules.py`), wording `problems.py`'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpofit.config import rules
from grpofit.config.catalog import recipe
from grpofit.config.problems import (
    Problem,
    default_of,
    from_pydantic,
    placeholders,
    set_flag,
    to_error,
    unset_flag,
    value_at,
)
from grpofit.config.tree import Config, MemoryConfig
from grpofit.config.yaml import KeyPath, dotted, dump, leaves, parse
from grpofit.errors import ConfigError

Overrides = Sequence[str] | Mapping[str, Any]

DEFAULT = "default"
OVERRIDE = "--set"
_PYTHON = "python"
_BASE_DIR = re.compile(r"(?:#.*\n)*?# base_dir: (?P<folder>.+)\n")
# What else stands in model.name and task.dataset is an id of the hub, or an alias, unless a folder is called so.
_LOOKS_LIKE_A_PATH = re.compile(r"(\.\.?|~)?[/\\]|~$|\.\.?$|.*\.gguf$")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked configuration and where it is from.

    Attributes:
        config: every key has a value; the paths of the user's files are absolute, so that it holds anywhere.
        origins: for every leaf key, `default`, `recipe NAME`, `file PATH`, `--set` or `python`.
        base_dir: the folder of the YAML; the working directory where there is none.
        name: of the recipe, or the file's stem; for run directories.
    """

    config: Config
    origins: dict[str, str]
    base_dir: Path
    name: str

    def to_yaml(self, comment_origins: bool = True) -> str:
        """All keys as YAML that loads again to an equal configuration, each with its origin behind it if asked.

        The text may be kept in any folder: paths are absolute, and a comment names `base_dir`, which `load` obeys.
        """
        data = _plain(self.config.model_dump())
        comments = {path: self.origins[dotted(path)] for path, _ in leaves(data)} if comment_origins else {}
        head = f"# {self.name}, every key written out; relative paths start at base_dir\n# base_dir: {self.base_dir}\n"
        return head + dump(data, comments)


@dataclass(slots=True)
class _Draft:
    """Plain data on its way to a configuration, with the origin of every value."""

    source: str
    origin: str
    name: str
    base_dir: Path
    data: Any
    lines: dict[KeyPath, int]
    origins: dict[KeyPath, str]

    def record(self, path: KeyPath, value: Any, origin: str) -> None:
        """Note that `value` was written at `path`, in place of all that was below it."""
        self.origins = {old: was for old, was in self.origins.items() if old[: len(path)] != path}
        self.origins |= {leaf: origin for leaf, _ in leaves(value, path)}

    def origin_of(self, path: KeyPath) -> str:
        """The origin of the value at `path`, of the list it is an entry of, or of the first value below it."""
        if path not in self.origins and path and isinstance(path[-1], int) and path[:-1] in self.origins:
            path = path[:-1]
        return next((origin for at, origin in self.origins.items() if at[: len(path)] == path), DEFAULT)

    def place_of(self, path: KeyPath) -> str:
        """The origin with the line, where it is a text with lines."""
        origin = self.origin_of(path)
        line = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)
        return f"{origin}, line {line}" if line is not None and origin == self.origin else origin


def load(source: str | Path | Mapping[str, Any] | Config, overrides: Overrides = ()) -> Resolved:
    """Load, override, check.

    Args:
        source: a YAML path, the name of a packaged recipe, a mapping in the YAML's shape, or a `Config`.
        overrides: `a.b=value` texts, the value read as YAML; or dotted keys with values. Entries of lists by index:
            `rewards.0.weight=0.5`. The last one of a key wins. Relative paths in them start at the working directory,
            those of a YAML at its folder.

    Raises:
        ConfigError: with everything that is wrong, each with key, value and origin.
    """
    draft = _read(source)
    if not isinstance(draft.data, dict):
        raise ConfigError(
            f"{draft.source} is not a mapping of keys",
            values=f"it holds {_kind(draft.data)}",
            why="a configuration is a mapping: model, task, rewards, ...",
            fix="see a whole one: grpofit recipes smollm2-arithmetic",
        )
    _write_out(draft.data)
    draft.record((), draft.data, draft.origin)
    problems = _override(draft, overrides)
    config, found = _validate(_with_absolute_paths(draft))
    problems += found
    if problems or config is None:
        raise to_error(problems, draft.source, draft.data, draft.place_of)
    origins = {dotted(path): draft.origin_of(path) for path, _ in leaves(_plain(config.model_dump()))}
    return Resolved(config, origins, draft.base_dir, draft.name)


def _read(source: str | Path | Mapping[str, Any] | Config) -> _Draft:
    if isinstance(source, Config):
        source = source.model_dump(exclude_unset=True)
    if isinstance(source, Mapping):
        return _Draft("the configuration", _PYTHON, "config", Path.cwd(), _plain(source), {}, {})
    path = Path(source)
    named = isinstance(source, str) and not re.search(r"[/\\]|\.ya?ml$", source) and not path.is_file()
    if named:
        entry = recipe(str(source))
        path, label, name = entry.path, f"recipe {entry.name}", entry.name
    else:
        path = path.expanduser()
        label, name = f"file {source}", path.stem
    shown = label if named else str(source)
    text = _read_text(path, shown)
    document = parse(text, shown)
    if document.data is None:
        raise ConfigError(
            f"{shown} is empty",
            why="model, task and rewards have no defaults",
            fix=f"start from a recipe: grpofit recipes smollm2-arithmetic > {shown}",
        )
    kept = _BASE_DIR.match(text)
    base_dir = Path(kept["folder"]) if kept else Path(os.path.abspath(path.parent))
    return _Draft(shown, label, name, base_dir, document.data, document.lines, {})


def _read_text(path: Path, shown: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        near = get_close_matches(path.name, [entry.name for entry in path.parent.glob("*.y*ml")], n=1)
        fix = f"did you mean {path.with_name(near[0])}? " if near else ""
        if path.is_dir() and (path / "config.yaml").is_file():
            fix = f"name the file: {path / 'config.yaml'}; "
        raise ConfigError(
            f"cannot read the configuration '{shown}'",
            values=f"{path.absolute()}: {reason}",
            why="without it there is nothing to run",
            fix=f"{fix}give a YAML file, or a recipe (grpofit recipes lists them)",
        ) from None


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"the text {value!r:.60}" if isinstance(value, str) else repr(value)


def _plain(value: Any, path: KeyPath = ()) -> Any:
    """Tuples as lists, paths as texts, subclasses as what they extend, in a fresh copy."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(entry, (*path, key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, (*path, index)) for index, entry in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Path):
        return str(value)
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    raise ConfigError(
        f"'{dotted(path)}' is not plain data",
        values=f"{value!r:.80} ({type(value).__name__})",
        why="a configuration can be written as YAML: text, numbers, true, false, null, lists, mappings with text keys",
        fix="convert it first, e.g. with int(...), float(...), str(...) or .tolist()",
    )


def _write_out(data: dict[str, Any]) -> None:
    """Write `memory: auto` out, and take a section whose keys are all commented out as empty."""
    for name in ("model", "task", "rollout", "algo", "optim", "run"):
        if name in data and data[name] is None:
            data[name] = {}
    if "memory" in data:
        data["memory"] = _memory(data["memory"])


def _memory(value: Any) -> Any:
    """`auto` and `none` stand for every field of the section."""
    return dict.fromkeys(MemoryConfig.model_fields, value) if value in ("auto", "none") else value


def _override(draft: _Draft, overrides: Overrides) -> list[Problem]:
    problems = []
    pairs: Iterable[tuple[str, Any] | Problem]
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, Mapping):
        pairs = [(key, _plain(value, (key,))) for key, value in overrides.items()]
    else:
        pairs = [_split_override(text) for text in overrides]
    for pair in pairs:
        problem = pair if isinstance(pair, Problem) else _set(draft, *pair)
        problems += [problem] if problem else []
    return problems


def _split_override(text: str) -> tuple[str, Any] | Problem:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        example = "--set rollout.group_size=8" if default_of(key) is None else unset_flag(key)
        return Problem((), f"'--set {text}' is not key=value", "there is nothing to set", example)
    try:
        return key, parse(value, f"--set {key}").data
    except ConfigError:
        what, why = f"the value of '--set {text}' is not YAML", "values are read as YAML, as in a file"
        return Problem((), what, why, f"{set_flag(key, value)}   (as text)")


def _set(draft: _Draft, key: str, value: Any) -> Problem | None:
    """Write one override into the draft; sections on the way are made."""
    value = _memory(value) if key == "memory" else value
    holder: Any = draft.data
    path: KeyPath = ()
    parts = key.split(".")
    for part in parts[:-1]:
        step = _step(holder, part)
        if step is None:
            break
        if isinstance(holder, dict) and holder.get(part) is None:
            holder[part] = {}
        holder, path = holder[step], (*path, step)
    step = _step(holder, parts[len(path)])
    if step is None:
        within = dotted(path)
        if isinstance(holder, list):
            has = f"'{within}' has {len(holder)} entries, counted from 0"
            fix = set_flag(".".join([within, "0", *parts[len(path) + 1 :]]), value)
        else:
            has, fix = f"'{within}' holds a value, not keys", f"correct '{within}' first, or leave this out"
        return Problem((within,), f"'--set {key}' has no place: {has}", "nothing would be changed", fix)
    holder[step] = value
    path = (*path, step)
    if isinstance(step, int) and not isinstance(value, Mapping):
        path, value = path[:-1], holder
    draft.record(path, value, OVERRIDE)
    return None


def _step(holder: Any, part: str) -> str | int | None:
    """`part` as a key or index of `holder`; None where there is no such place."""
    if isinstance(holder, dict):
        return part or None
    if isinstance(holder, list) and part.isdecimal() and int(part) < len(holder):
        return int(part)
    return None


def _validate(data: dict[str, Any]) -> tuple[Config | None, list[Problem]]:
    """All problems of types, ranges and rules; rules about a key that is wrong by itself wait until it is right."""
    try:
        config, problems = Config.model_validate(data), []
    except ValidationError as error:
        problems = from_pydantic(error, data)
        try:
            config = Config.model_validate(placeholders(deepcopy(data), problems))
        except ValidationError:
            return None, problems
    doubtful = [key for problem in problems for key in (*problem.keys, *problem.meant)]
    problems += [
        problem
        for problem in rules.check(config)
        if not any(_overlap(key, other) for key in problem.keys for other in doubtful)
    ]
    return (None if problems else config), problems


def _overlap(one: str, other: str) -> bool:
    """Whether a key is the other, or holds it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _with_absolute_paths(draft: _Draft) -> dict[str, Any]:
    """A copy whose paths start at the root: a YAML's at its folder, an override's at the working directory."""
    data: dict[str, Any] = deepcopy(draft.data)
    rewards = data.get("rewards")
    count = len(rewards) if isinstance(rewards, list) else 0
    keys: list[KeyPath] = [("model", "name"), ("task", "file"), ("task", "eval_file"), ("task", "dataset")]
    for path in [*keys, *(("rewards", index, "function") for index in range(count))]:
        value = value_at(data, path)
        if isinstance(value, str):
            base = draft.base_dir if draft.origin_of(path) == draft.origin else Path.cwd()
            value_at(data, path[:-1])[path[-1]] = _absolute(value, str(path[-1]), base)
    return data


def _absolute(value: str, name: str, base: Path) -> str:
    if name == "function":
        file, colon, function = value.rpartition(":")
        return f"{_join(base, file)}{colon}{function}" if file.endswith(".py") else value
    if name in ("file", "eval_file"):
        return _join(base, value) if value else value
    is_path = _LOOKS_LIKE_A_PATH.match(value) or ("/" in value and (base / value).exists())
    return _join(base, value) if is_path else value


def _join(base: Path, value: str) -> str:
    return os.path.abspath(base / Path(value).expanduser())
