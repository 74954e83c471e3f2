"""The process that a reward runs in: `python -c "...; main()" REQUEST_FD REPLY_FD PARENT_PID`.

Owns the child's side: reads requests, writes replies, dies with its parent. Requests are pickled (the parent is
trusted), replies are JSON: whatever a completion makes of this process, the parent parses plain values only. Must not
import torch or the configuration, so that it starts in a moment and a killed one is soon replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

HEADER = struct.Struct(">Q")
Handler = Callable[[Any], dict[str, Any]]
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the parent closes the pipe or dies."""
    request_fd, reply_fd, parent_pid = map(int, sys.argv[1:4])
    _belong_to(parent_pid)
    for fd in (request_fd, reply_fd):
        os.set_inheritable(fd, False)
    with os.fdopen(request_fd, "rb") as requests, os.fdopen(reply_fd, "wb") as replies:
        setup = pickle.loads(_receive(requests))
        try:
            _limit_memory(setup)
            handler, hello = _function(setup) if setup["kind"] == "function" else _builtins(setup)
        except BaseException as error:  # SystemExit too: the parent must hear why there is no worker
            _send(replies, _failure(error))
            return
        _send(replies, {"ready": True, **hello})
        while request := _receive(requests):
            _send(replies, _handled(handler, request))


def _belong_to(parent_pid: int) -> None:
    """Leave Ctrl-C to the parent; be killed by the kernel when the parent is gone, even in the middle of a loop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel's out-of-memory killer shall take this process, not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(0)


def _limit_memory(setup: Mapping[str, Any]) -> None:
    """Built-ins: the address space. Functions: writable memory only, since CUDA reserves addresses without end."""
    kind = resource.RLIMIT_DATA if setup["kind"] == "function" else resource.RLIMIT_AS
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force already, or the system has none
        resource.setrlimit(kind, (setup["memory_bytes"], setup["memory_bytes"]))


def _builtins(setup: Mapping[str, Any]) -> tuple[Handler, dict[str, Any]]:
    from grpofit.data.rewards import Case, ReferenceUnusable, make_builtin

    rewards = [make_builtin(spec) for spec in setup["rewards"]]

    def handle(request: tuple[int, str, int, bool, dict[str, Any]]) -> dict[str, Any]:
        index, completion, tokens, truncated, columns = request
        try:
            score = rewards[index](Case(completion, tokens, truncated, columns))
        except (MemoryError, RecursionError) as error:
            return {"limit": "memory" if isinstance(error, MemoryError) else "recursion"}
        except ReferenceUnusable as error:
            return {"raised": str(error)}
        return {"value": score.value, "reason": score.reason.value, "detail": score.detail}

    return handle, {}


def _function(setup: Mapping[str, Any]) -> tuple[Handler, dict[str, Any]]:
    from grpofit.data.functions import UserFunction, load_function

    loops: list[Any] = []

    def run_async(awaitable: Any) -> Any:
        import asyncio

        loops[:] = loops or [asyncio.Runner()]
        return loops[0].run(_wait(awaitable))

    function = UserFunction(load_function(setup["target"], setup["base_dir"]), run_async)
    return function, function.describe()


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _failure(error: BaseException) -> dict[str, Any]:
    import traceback

    lines = traceback.format_exc().splitlines()
    return {
        "raised": f"{type(error).__name__}: {error}",
        "traceback": "\n".join(lines[-12:]),
        "missing": type(error).__name__ == "FunctionMissing",
    }


def _handled(handler: Handler, request: bytes) -> dict[str, Any]:
    try:
        return handler(pickle.loads(request))
    except Exception as error:  # of a built-in, or a column whose class this process cannot import
        return _failure(error)


def _receive(requests: IO[bytes]) -> bytes:
    """One request; empty at the end."""
    header = requests.read(HEADER.size)
    return requests.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""


def _send(replies: IO[bytes], reply: Mapping[str, Any]) -> None:
    body = json.dumps(reply).encode()
    replies.write(HEADER.pack(len(body)) + body)
    replies.flush()
