"""A worker process seen from the parent: start, ask, wait, kill.

Owns pipes, deadlines and the loop that keeps several workers busy. Must not know rewards or rollouts: a job is a
request with a deadline, an outcome is a reply or why there is none. Nothing that a worker says is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpofit.data.worker import HEADER

# Importing a user's module may load a model of its own.
STARTUP_S = 300.0
_MAX_REPLY_BYTES = 256 * 1024**2
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
# -P: neither the current folder nor the script's may take the place of a library before the worker runs. The root is
# appended, for the case that grpofit is not installed but on the parent's path.
_COMMAND = f"import sys; sys.path.append({_PACKAGE_ROOT!r}); from grpofit.data.worker import main; main()"


class Unsendable(Exception):
    """A request holds an object that cannot be sent to another process."""


@dataclass(frozen=True)
class Outcome:
    """What became of a request: the reply, or that time ran out, or that the process died (`text` says how)."""

    kind: Literal["reply", "timeout", "died"]
    reply: dict[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Job:
    """One request; `done` gets its outcome and returns the jobs that follow from it, to be done next."""

    request: Any
    timeout_s: float
    done: Callable[[Outcome], Sequence[Job]]


class WorkerProcess:
    """One worker, started again after it was killed or died. Not thread-safe."""

    def __init__(self, setup: Mapping[str, Any], *, output_fd: int, environment: Mapping[str, str]) -> None:
        """`setup` goes to the worker at every start; what it prints goes to `output_fd`."""
        self._setup, self._output_fd, self._environment = setup, output_fd, {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._request_fd = self._reply_fd = -1
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._ready, self._deadline = False, 0.0
        self.job: Job | None = None
        self.hello: dict[str, Any] = {}

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it if it does not run; returns at once, `ready` answers when it has imported what it needs."""
        if self._process is not None and not _has_ended(self._process):
            return
        self.kill()
        request_read, self._request_fd = os.pipe()
        self._reply_fd, reply_write = os.pipe()
        arguments = [sys.executable, "-u", "-P", "-c", _COMMAND, str(request_read), str(reply_write), str(os.getpid())]
        # Its own session: the terminal's Ctrl-C does not reach it, and its children die with it.
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=self._output_fd,
            stderr=self._output_fd,
            pass_fds=(request_read, reply_write),
            start_new_session=True,
            env=self._environment,
        )
        os.close(request_read)
        os.close(reply_write)
        os.set_blocking(self._request_fd, False)
        os.set_blocking(self._reply_fd, False)
        self._ready, self._deadline = False, time.monotonic() + STARTUP_S
        self._outgoing, self._incoming = bytearray(_framed(self._setup)), bytearray()

    def submit(self, job: Job) -> None:
        """Give it a job; only while it has none. Its time counts from when the worker is ready."""
        assert self.job is None, "a worker takes one job at a time"
        request = _framed(job.request)
        self.start()
        self.job = job
        self._outgoing += request
        if self._ready:
            self._deadline = time.monotonic() + job.timeout_s

    def advance(self) -> Outcome | None:
        """Move bytes, watch the clock; the outcome of the job (or of the start) once it is known."""
        try:
            ended = self._transfer()
            message = self._message()
        except (OSError, ValueError):  # a closed pipe, or a reply that is not JSON
            ended, message = True, None
        if message is not None and not self._ready and message.get("ready"):
            self._ready, self.hello = True, message
            self._deadline = time.monotonic() + (self.job.timeout_s if self.job else 0)
            return None if self.job else Outcome("reply", message)
        if message is not None:
            self.job = None
            if not self._ready:
                self.kill(grace_s=1.0)
            return Outcome("reply", message)
        if ended:
            return Outcome("died", text=self.kill(grace_s=1.0))
        if time.monotonic() > self._deadline:
            limit_s = self.job.timeout_s if self.job and self._ready else STARTUP_S
            during = "" if self._ready else "while starting "
            self.kill()
            return Outcome("timeout", text=f"no answer {during}in {limit_s:g} s")
        return None

    def _transfer(self) -> bool:
        """Write and read what the pipes take; True at the end of the worker's output."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._request_fd, self._outgoing[: 1 << 16])]
        except BlockingIOError:
            pass
        try:
            while chunk := os.read(self._reply_fd, 1 << 16):
                self._incoming += chunk
                if len(self._incoming) > _MAX_REPLY_BYTES:
                    raise ValueError("reply too long")
        except BlockingIOError:
            return False
        return True

    def _message(self) -> dict[str, Any] | None:
        if len(self._incoming) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        body = bytes(self._incoming[HEADER.size : end])
        del self._incoming[:end]
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ValueError("a reply is a dictionary")
        return message

    def watch(self, poll: select.poll) -> float:
        """Register its pipes; returns the moment of its deadline (`time.monotonic`)."""
        poll.register(self._reply_fd, select.POLLIN)
        if self._outgoing:
            poll.register(self._request_fd, select.POLLOUT)
        return self._deadline

    def kill(self, grace_s: float = 0.0) -> str:
        """Kill it with its children; how it ended, in words. One that ends by itself has `grace_s` to do so."""
        process, self._process = self._process, None
        self.job, self._ready = None, False
        if process is None:
            return "not running"
        os.close(self._request_fd)
        os.close(self._reply_fd)
        until = time.monotonic() + grace_s
        while not _has_ended(process) and time.monotonic() < until:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Pool:
    """Workers that share a queue of jobs."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self.workers = list(workers)
        self.queue: deque[Job] = deque()

    def feed(self) -> list[WorkerProcess]:
        """Give waiting jobs to idle workers; the workers that are at work."""
        for worker in self.workers:
            if worker.job is None and self.queue:
                worker.submit(self.queue.popleft())
        return [worker for worker in self.workers if worker.job is not None]


def run_jobs(pools: Sequence[Pool]) -> None:
    """Work until all queues are empty. If anything raises, queues are cleared and busy workers killed."""
    try:
        while busy := [(pool, worker) for pool in pools for worker in pool.feed()]:
            _wait([worker for _, worker in busy])
            for pool, worker in busy:
                job = worker.job
                outcome = worker.advance()
                if outcome is not None and job is not None:
                    pool.queue.extendleft(reversed(job.done(outcome)))
    except BaseException:
        for pool in pools:
            pool.queue.clear()
            for worker in pool.workers:
                if worker.job is not None:
                    worker.kill()
        raise


def start_all(workers: Sequence[WorkerProcess]) -> list[Outcome]:
    """Start workers side by side and wait until each is ready or has failed; outcomes in their order."""
    for worker in workers:
        worker.start()
    outcomes: dict[int, Outcome] = {}
    while waiting := [index for index in range(len(workers)) if index not in outcomes]:
        _wait([workers[index] for index in waiting])
        for index in waiting:
            outcome = workers[index].advance()
            if outcome is not None:
                outcomes[index] = outcome
    return [outcomes[index] for index in range(len(workers))]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Asks without reaping it, so that its number, and that of its group, cannot go to another process yet."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait(workers: Sequence[WorkerProcess]) -> None:
    poll = select.poll()
    until = min(worker.watch(poll) for worker in workers)
    poll.poll(max(0, math.ceil(1000 * (until - time.monotonic()))))


def _framed(message: Any) -> bytes:
    try:
        body = pickle.dumps(message)
    except Exception as error:  # objects may refuse with any exception
        raise Unsendable(f"{type(error).__name__}: {error}") from error
    return HEADER.pack(len(body)) + body
