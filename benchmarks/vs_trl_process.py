"""One side in a process of its own, with its wall time and its memory.

Owns the watching of a process tree. Must not know what the process does.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpofit.memory.monitor import high_water_bytes

_LOOK_EVERY_S = 0.1
_ERROR_LINES = 15


@dataclass(frozen=True)
class Ran:
    """What a process took.

    Attributes:
        wall_s: from start to exit, imports and loading included.
        peak_bytes: peak resident memory of the process as the kernel counts it (VmHWM); where it has helper processes
            (reward workers, compilers), at least the largest sum over all of them at one moment.
        helpers_bytes: largest sum over its helper processes at one moment.
    """

    wall_s: float
    peak_bytes: int
    helpers_bytes: int


class ChildFailedError(RuntimeError):
    """The process exited with an error; the message holds the end of its output."""


def run_watched(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Ran:
    """Run `command` to its end, its output in `log`.

    Raises:
        ChildFailedError: it failed.
    """
    started = time.perf_counter()
    with log.open("w") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
        )
        watcher = _TreeWatcher(child.pid)
        watcher.start()
        try:
            code = child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            watcher.done.set()
            watcher.join()
    wall_s = time.perf_counter() - started
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_ERROR_LINES:])
        raise ChildFailedError(f"exit code {code}: {' '.join(command)}\n{tail}\n(all of it: {log})")
    return Ran(wall_s, watcher.peak_bytes, watcher.helpers_bytes)


class _TreeWatcher(threading.Thread):
    """Peak resident memory of a process and its descendants.

    Read while they run: what `getrusage` says of a child afterwards includes the memory of the parent that it was
    forked from.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.peak_bytes = 0
        self.helpers_bytes = 0
        self._root = psutil.Process(pid)

    def run(self) -> None:
        while not self.done.wait(_LOOK_EVERY_S):
            helpers = 0
            with suppress(psutil.Error):
                for process in self._root.children(recursive=True):
                    with suppress(psutil.Error):
                        helpers += process.memory_info().rss
                alone = high_water_bytes(self._root.pid)
                self.peak_bytes = max(self.peak_bytes, self._root.memory_info().rss + helpers, alone)
            self.helpers_bytes = max(self.helpers_bytes, helpers)
