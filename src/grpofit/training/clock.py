"""Seconds per phase of a step, and the one place where a run may be interrupted.

Owns phase names and timing. Must not know what happens in a phase.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

PhaseListener = Callable[[str, int, int], None]
"""Called with (phase, done, total) as a phase goes on."""


class Interrupted(Exception):
    """The user or the system asked the run to stop; the step in progress is abandoned, the last one stands."""


class Clock:
    """Times phases and passes their progress on."""

    def __init__(self, listener: PhaseListener | None = None, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._listener = listener
        self._should_stop = should_stop
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str, *, interruptible: bool = True) -> Iterator[Callable[[int, int], None]]:
        """Time a phase; yields `progress(done, total)`, which raises `Interrupted` when a stop was asked for.

        `interruptible`: whether abandoning the step here leaves weights and optimizer as they were before it.
        """

        def progress(done: int, total: int) -> None:
            if interruptible and self._should_stop():
                raise Interrupted
            if self._listener is not None:
                self._listener(name, done, total)

        started = time.perf_counter()
        try:
            progress(0, 1)
            yield progress
        finally:
            self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call, as `time/PHASE_s`."""
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


class StopSignals:
    """Within this context the first Ctrl-C or SIGTERM asks for a stop at the next safe point, the second ends at once.

    Signals can only be caught in the main thread; elsewhere (a notebook's worker) nothing is caught.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.asked = False
        self._on_first = on_first
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        except ValueError:
            self._previous.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._on_first()
