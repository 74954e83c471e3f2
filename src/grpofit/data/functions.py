"""A user's reward function: finding it, calling it the way TRL does, reading what it returns.

Owns TRL's calling convention. Runs in a reward worker, or in the main process for a function that was handed over
in Python. Must not import torch, nor know processes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# What every function may ask for, besides the columns of the rows.
BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# TRL keeps these columns from reward functions as well.
_HIDDEN_COLUMNS = frozenset({"prompt", "completion", *BATCH_ARGUMENTS})
_TRACEBACK_LINES = 12


class FunctionMissing(Exception):
    """The function's file, module or name does not exist; the message says which."""


def load_function(target: str, base_dir: str) -> Callable[..., Any]:
    """The function of `file.py:function` (relative to `base_dir`) or `package.module:function`.

    Its folder is put on the import path, so that it may import its neighbours.

    Raises:
        FunctionMissing: no such file or name.
        Exception: whatever importing the user's module raises.
    """
    source, _, name = target.rpartition(":")
    if source.endswith(".py"):
        path = Path(base_dir, Path(source).expanduser()).absolute()
        if not path.is_file():
            raise FunctionMissing(f"there is no file {path}")
        sys.path.insert(0, str(path.parent))
        # Not under its own name: a file called random.py must not take the place of that module.
        spec = importlib.util.spec_from_file_location(f"grpofit_reward_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path[:0] = [base_dir, str(Path.cwd())]
        module = importlib.import_module(source)
    found = getattr(module, name, None)
    if not callable(found):
        callables = sorted(n for n, value in vars(module).items() if inspect.isfunction(value))
        raise FunctionMissing(f'"{source}" has no function "{name}"; it has: {", ".join(callables) or "none"}')
    return found  # type: ignore[no-any-return]


class UserFunction:
    """A reward function with TRL's signature, sync or async.

    It is called with keywords: `prompts`, `completions`, `completion_ids`, every column as a list, `trainer_state`,
    `log_extra(column, values)` and `log_metric(name, value)`; without `**kwargs` only with those it names.
    """

    def __init__(self, function: Callable[..., Any], run_async: Callable[[Any], Any]) -> None:
        """`run_async` waits for an awaitable; it keeps one event loop, so that clients survive between calls."""
        self._function, self._run_async, self._file = function, run_async, _file_of(function)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some callables written in C have none
            self.takes_all, self.names, self.required = True, [], []
            return
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.names = [p.name for p in named]
        self.required = [p.name for p in named if p.default is p.empty]

    def describe(self) -> dict[str, Any]:
        """What a caller needs to know, as plain values."""
        return {"takes_all": self.takes_all, "names": self.names, "required": self.required}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Call it once; every outcome is a dictionary of plain values that JSON can hold.

        Args:
            batch: `prompts`, `completions`, `completion_ids`, `columns` (lists of the same length), `global_step`
                and `max_steps`.

        Returns:
            `{"values": [float or None], "errors": {row: text}, "metrics": {name: [value]}, "extra": {name: list}}`;
            `{"raised": text, "traceback": text}`; or `{"unusable": text}` if no call could make it right.
        """
        metrics: dict[str, list[float]] = {}
        extra: dict[str, list[Any]] = {}
        arguments = {
            **batch["columns"],
            "prompts": batch["prompts"],
            "completions": batch["completions"],
            "completion_ids": batch["completion_ids"],
            "trainer_state": SimpleNamespace(global_step=batch["global_step"], max_steps=batch["max_steps"]),
            "log_extra": lambda column, values: extra.setdefault(str(column), []).extend(map(_plain, values)),
            "log_metric": lambda name, value: metrics.setdefault(str(name), []).append(float(value)),
        }
        if not self.takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self.names}
        try:
            result = self._function(**arguments)
            if inspect.isawaitable(result):
                result = self._run_async(result)
            values = result.tolist() if hasattr(result, "tolist") else result
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a function must not end the run
            return {"raised": _one_line(error, self._file), "traceback": _last_lines(error)}
        return {**_read_values(values, len(batch["prompts"])), "metrics": metrics, "extra": extra}


def visible_columns(columns: Sequence[str]) -> list[str]:
    """The columns that reward functions get by name."""
    return [column for column in columns if column not in _HIDDEN_COLUMNS]


def _read_values(values: object, count: int) -> dict[str, Any]:
    if not isinstance(values, (list, tuple)):
        return {"unusable": f"returned a {type(values).__name__} ({values!r:.80}), not a list"}
    if len(values) != count:
        return {"unusable": f"returned {len(values)} values for {count} completions"}
    read: list[float | None] = []
    errors: dict[int, str] = {}
    for row, value in enumerate(values):
        number = _scalar(value)
        if number is not None and not isinstance(number, (bool, int, float)):
            return {"unusable": f"returned {value!r:.80} (a {type(value).__name__}) for completion {row + 1}"}
        try:
            number = None if number is None else float(number)
        except OverflowError:
            number = math.inf
        if number is not None and not math.isfinite(number):
            errors[row] = f"returned {number}"
            number = None
        read.append(number)
    return {"values": read, "errors": {str(row): text for row, text in errors.items()}}


def _scalar(value: Any) -> Any:
    """Scalars of numpy and torch as Python's own; anything else as it is."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # an array of several
        return value


def _plain(value: object) -> Any:
    value = _scalar(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _file_of(function: Callable[..., Any]) -> str:
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    try:
        return inspect.getfile(inner if inspect.isroutine(inner) else type(inner))
    except TypeError:  # built into Python
        return ""


def _one_line(error: BaseException, file: str) -> str:
    """`ValueError: too short (my_rewards.py:12)`: the deepest line of the user's own file, if any."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{text} ({Path(file).name}:{lines[-1]})" if lines else text


def _last_lines(error: BaseException) -> str:
    """The end of the traceback, from the user's function on."""
    own = error.__traceback__
    lines = "".join(traceback.format_exception(type(error), error, own.tb_next if own else None)).splitlines()
    return "\n".join(lines[-_TRACEBACK_LINES:])
