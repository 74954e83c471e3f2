"""Shows a run while it trains: a live screen on a terminal, one plain line a step elsewhere; `train.log` always.

Owns when and where something is printed. Must not know what is printed for a given state (`screen.py`), nor import
torch. A terminal that goes away never ends a run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from grpofit.training.screen import (
    Checkpoint,
    Phase,
    Record,
    RunHeader,
    State,
    evaluation_line,
    phase_line,
    printable,
    rows,
    step_line,
)
from grpofit.units import duration, gib

_REDRAWS_PER_SECOND = 4
_LIFE_S = 30.0  # a plain run says that it lives when nothing was printed for this long


class Display(Protocol):
    """What the loop tells. Record keys are those of `metrics.jsonl`; a missing key is simply not shown.

    `sample` of a step's record is `{completion, reward, reason, group_correct, group_size}`.
    """

    def start(self, header: RunHeader) -> None:
        """Before anything slow: the header, then phases such as loading."""

    def phase(self, name: str, done: int | None = None, total: int | None = None, unit: str = "") -> None:
        """Sign of life within a step: `phase("rollout", 640, 1536, "tokens")`. Cheap; call it as often as wanted."""

    def step(self, record: Record) -> None:
        """A step is done."""

    def evaluation(self, record: Record) -> None:
        """An evaluation is done."""

    def checkpoint(self, step: int, seconds: float, n_bytes: int) -> None:
        """A checkpoint after `step` was written."""

    def event(self, text: str, *, warning: bool = False) -> None:
        """Something worth a line of its own; a warning also stays in the health row."""

    def finish(self, summary: Mapping[str, Any], *, examples: Sequence[Mapping[str, str]] = ()) -> None:
        """The run is over: what was learned. Keys as in `summary.json`.

        `examples`: held-out prompts `{prompt, answer, before, after}` with what the model wrote at start and end.
        """

    def close(self) -> None:
        """Give the terminal back; safe to call twice, and after an exception."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display(log: Path, *, plain: bool | None = None, clock: Callable[[], float] = time.monotonic) -> Display:
    """The display for this process's standard output, writing `log` (`train.log`) besides.

    Args:
        plain: True for plain lines, False for the live screen; None: live where there is a terminal that can.
    """
    console = Console()
    if plain is None:
        plain = not console.is_terminal or console.is_dumb_terminal or console.is_jupyter
    return PlainDisplay(log, sys.stdout, clock) if plain else LiveDisplay(log, console, clock)


class _Logged:
    """What both displays share: the state and the log. Subclasses say how a line is shown, in `_show`."""

    def __init__(self, log: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._log = log.open("ab", buffering=0)  # unbuffered: a signal handler may write in the middle of a write
        self._state: State | None = None

    def _show(self, line: str) -> None:
        raise NotImplementedError

    @property
    def _running(self) -> State:
        assert self._state is not None, "start() comes first"
        return self._state

    def start(self, header: RunHeader) -> None:
        self._state = State(header, self._clock)
        self._say(header.device)
        self._say(f"{header.name} → {header.run_dir}   {header.total_steps} steps")
        for note in header.notes:
            self._say(note)
        if header.first_step > 1:
            self._say(f"resumed after step {header.first_step - 1}")

    def phase(self, name: str, done: int | None = None, total: int | None = None, unit: str = "") -> None:
        before = self._running.phase
        started = before.started if before and before.name == name else self._clock()
        self._running.phase = Phase(name, done, total, unit, started)

    def step(self, record: Record) -> None:
        self._running.phase = None
        self._running.add(record)
        self._step_done(step_line(self._running))

    def _step_done(self, line: str) -> None:
        self._say(line)

    def evaluation(self, record: Record) -> None:
        self._running.phase = None
        self._running.add(record)
        self._say(evaluation_line(record))

    def checkpoint(self, step: int, seconds: float, n_bytes: int) -> None:
        self._running.phase = None
        self._running.saved = Checkpoint(step, self._clock(), seconds, n_bytes)
        self._write_log(f"checkpoint after step {step}: {gib(n_bytes)} in {seconds:.1f} s")

    def event(self, text: str, *, warning: bool = False) -> None:
        lines = [printable(line) for line in text.splitlines()] or [""]
        if warning and self._state is not None:
            self._state.warnings.append(lines[0])
        for line in lines:
            self._say(line)

    def finish(self, summary: Mapping[str, Any], *, examples: Sequence[Mapping[str, str]] = ()) -> None:
        self._running.phase = None
        self.close_screen()
        for line in report(summary, self._running.header, examples):
            self._say(line)

    def close_screen(self) -> None:
        """Stop drawing; lines may still follow."""

    def close(self) -> None:
        self.close_screen()
        self._log.close()

    def _say(self, line: str) -> None:
        self._write_log(line)
        self._show(line)

    def _write_log(self, line: str) -> None:
        with suppress(OSError):  # a full disk is reported by what has to be kept, not by the log
            self._log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n".encode("utf-8", "backslashreplace"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PlainDisplay(_Logged):
    """One line a step; for pipes, `nohup`, CI and notebooks."""

    def __init__(self, log: Path, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(log, clock)
        self._stream: TextIO | None = stream
        self._spoke = clock()

    def _show(self, line: str) -> None:
        self._spoke = self._clock()
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        with suppress(RuntimeError):  # a signal handler, in the middle of a write: the log has the line
            self._print(line.encode(encoding, "backslashreplace").decode(encoding))

    def _print(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except (OSError, ValueError):  # the reader of the pipe is gone, or the stream was closed
            self._stream = None

    def phase(self, name: str, done: int | None = None, total: int | None = None, unit: str = "") -> None:
        super().phase(name, done, total, unit)
        state, now = self._running, self._clock()
        if state.phase is not None and now - self._spoke >= _LIFE_S:
            self._show(f"step {state.step + 1}/{state.header.total_steps} {phase_line(state.phase, now)}")


class _LibraryBars:
    """Stands in for standard error while the screen is live: progress bars of libraries (tqdm's, of downloads and
    conversions) go to `show`, one text at a time, since drawn by themselves they would tear the screen. Else `stream`.
    """

    def __init__(self, stream: TextIO, show: Callable[[str], None]) -> None:
        self._stream, self._show, self._in_bar = stream, show, False

    def write(self, text: str) -> int:
        if "\r" in text:
            self._in_bar = True
            self._show(printable(text.rpartition("\r")[2].strip()))
        elif self._in_bar and not text.replace("\x1b[A", "").strip("\n"):  # the cursor's moves around a bar
            self._in_bar = "\n" not in text
            self._show("")
        else:
            self._in_bar = False
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if not self._in_bar:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LiveDisplay(_Logged):
    """The rows of `screen.py`, redrawn a few times a second; evaluations and events scroll by above them."""

    def __init__(self, log: Path, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(log, clock)
        self._console = console
        self._live: Live | None = None
        self._over = False

    def start(self, header: RunHeader) -> None:
        super().start(header)
        # A drawing thread: torch releases the GIL in long operations, so the screen lives through them.
        self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=_REDRAWS_PER_SECOND)
        self._live.start(refresh=True)
        self._stderr = sys.stderr
        sys.stderr = cast(TextIO, _LibraryBars(sys.stderr, self._show_bar))

    def _show_bar(self, text: str) -> None:
        self._running.library_bar = text

    def _draw(self) -> Group:
        return Group(*rows(self._running, self._console.width, over=self._over))

    def _show(self, line: str) -> None:
        with suppress(OSError):  # the terminal is gone; the log has the line
            self._console.print(Text(line), soft_wrap=True)

    def _step_done(self, line: str) -> None:
        self._write_log(line)

    def close_screen(self) -> None:
        self._over = True
        if self._live is not None:
            sys.stderr = self._stderr
            with suppress(OSError):
                self._live.stop()
            self._live = None


def report(summary: Mapping[str, Any], header: RunHeader, examples: Sequence[Mapping[str, str]] = ()) -> list[str]:
    """What was learned, as lines. A missing key, or None, leaves its part out."""
    known = {key: value for key, value in summary.items() if value is not None}
    lines = ["", f"trained   {known.get('steps', header.total_steps)} of {header.total_steps} steps"]
    if "wall_s" in known:
        lines[-1] += f" in {duration(known['wall_s'])}"
    if "step_s_median" in known:
        lines[-1] += f", median {known['step_s_median']:.1f} s a step"
    lines += [f"learned   {line}" for line in [_learned(known)] if line]
    if "peak_rss_bytes" in known:
        lines.append(f"memory    peak of the process {gib(known['peak_rss_bytes'])}")
    for example in examples:
        prompt, answer, before, after = (
            printable(example[key].strip()) for key in ("prompt", "answer", "before", "after")
        )
        lines += [f"example   {prompt}   (answer {answer})", f'  before  "{before}"', f'  after   "{after}"']
    lines.append(f"files     {header.run_dir}")
    return lines


def _learned(known: Mapping[str, Any]) -> str:
    details = []
    if "accuracy_start" in known and "accuracy_end" in known:
        text = f"held-out accuracy {known['accuracy_start']:.2f} → {known['accuracy_end']:.2f}"
        if "accuracy_end_low" in known:
            details.append(f"95%: {known['accuracy_end_low']:.2f} to {known['accuracy_end_high']:.2f}")
    elif "eval_reward_start" in known and "eval_reward_end" in known:
        text = f"held-out reward {known['eval_reward_start']:.2f} → {known['eval_reward_end']:.2f}"
    else:
        return ""
    if "eval_n" in known:
        details.append(f"n = {known['eval_n']}")
    return f"{text} ({', '.join(details)})" if details else text
