"""How a decode step is run: as it stands, or captured once as a CUDA graph and replayed.

Owns the captured graph. Must not know what a step computes.

A decode step of a small model is hundreds of kernels of a few microseconds each, and Python launches them slower than
the card runs them; a graph is launched at once. A graph repeats fixed kernels on fixed addresses: inputs must be
written into the same tensors, and no shape may change. So a step is captured anew for each `key`, which names its
shapes and buffers, and only one graph lives at a time. Nothing is kept between rollouts: the KV cache is freed for
training, and weights may be moved or replaced between them. (Updated in place, as an optimizer does, they need not be
captured again; a graph would read the old ones if a parameter got new storage while it lives.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor


class Runner(Protocol):
    """Runs a step.

    Attributes:
        static: steps of one key must use the same shapes and addresses.
    """

    static: bool

    def run(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """The output of `step`, valid until the next call. Keys of different decoders may be equal: `reset` between."""
        ...

    def reset(self) -> None:
        """Forget the last key and free what was captured for it."""
        ...


class PlainRunner:
    """Calls the step. `static` is for tests: steps are then written as a graph needs them, and run without one."""

    def __init__(self, *, static: bool = False) -> None:
        self.static = static

    def run(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """See `Runner.run`."""
        return step()

    def reset(self) -> None:
        """See `Runner.reset`."""


class GraphRunner:
    """Runs the first step of a key as it stands, captures the second, replays it from then on."""

    static = True

    def __init__(self) -> None:
        self._seen: Hashable | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output = torch.empty(0)

    def run(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """See `Runner.run`.

        Raises:
            RuntimeError: the step cannot be captured, because it reads from the device or synchronises with it.
        """
        if key != self._seen:
            self.reset()
            self._seen = key
            return step()  # also the warm-up that a capture needs: workspaces and lazily made buffers exist then
        if self._graph is None:
            self._graph, self._output = _capture(step)
        self._graph.replay()
        return self._output

    def reset(self) -> None:
        """See `Runner.reset`."""
        self._seen, self._graph, self._output = None, None, torch.empty(0)


def _capture(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph of `step`, which is not run by this, and the tensor each replay writes."""
    stream = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            output = step()
    except BaseException:
        torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
        raise
    return graph, output
