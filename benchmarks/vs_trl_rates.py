"""What this machine can do at a model's matrix shapes, and what a training step needs.

    python vs_trl_rates.py SPEC.json RESULT.json        measures; run in a process of its own

Owns FLOP counts and rates. Must not know either side. A FLOP is one multiplication or one addition.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

_REPEATS = 5
_COPY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ModelSize:
    """A decoder with gated MLP and a head; counts, not bytes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def linears(self) -> dict[tuple[int, int], int]:
        """(inputs, outputs) of the linear layers, and how often each stands in the network; the head apart."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        counts: dict[tuple[int, int], int] = {}
        for shape, count in (
            ((self.hidden, queries), 1),
            ((self.hidden, keys), 2),
            ((queries, self.hidden), 1),
            ((self.hidden, self.intermediate), 2),
            ((self.intermediate, self.hidden), 1),
        ):
            counts[shape] = counts.get(shape, 0) + count * self.layers
        return counts

    @property
    def head(self) -> tuple[int, int]:
        """(inputs, outputs) of the head."""
        return self.hidden, self.vocabulary


@dataclass(frozen=True)
class Trained:
    """What passed through the network in a step's training.

    Attributes:
        tokens: positions of all rows, padding included.
        head_tokens: positions that need logits.
        attention_pairs: (query, key) pairs of causal attention, per head and layer.
        micro_batches: forward and backward passes.
    """

    tokens: int
    head_tokens: int
    attention_pairs: int
    micro_batches: int

    def as_dict(self) -> dict[str, int]:
        """Plain values."""
        return asdict(self)


def forward_flops(size: ModelSize, trained: Trained) -> dict[str, float]:
    """FLOPs of one forward pass: `linears`, `head`, `attention` (scores and weighted values).

    Backward needs twice as many. What checkpointing computes again is not counted: it is not needed.
    """
    weights = sum(inputs * outputs * count for (inputs, outputs), count in size.linears().items())
    inputs, outputs = size.head
    return {
        "linears": 2.0 * weights * trained.tokens,
        "head": 2.0 * inputs * outputs * trained.head_tokens,
        "attention": 4.0 * size.head_dim * size.heads * size.layers * trained.attention_pairs,
    }


def matmul_share(size: ModelSize, trained: Trained, seconds: float, rates: dict[str, Any]) -> dict[str, float]:
    """FLOP/s of forward and backward, the matmul rate, and their ratio.

    The matmul rate is the mean over forward, input gradient and weight gradient, each the rate at which the step's
    linears and head would run at the measured rates of their shapes.
    """
    flops = forward_flops(size, trained)
    reached = 3 * sum(flops.values()) / seconds
    kinds = []
    for kind in ("forward", "input_gradient", "weight_gradient"):
        needed_s = flops["linears"] / rates["linears"][kind] + flops["head"] / rates["head"][kind]
        kinds.append((flops["linears"] + flops["head"]) / needed_s)
    rate = sum(kinds) / len(kinds)
    return {"reached_flops": reached, "matmul_flops": rate, "share": reached / rate}


def seconds_of(function: Callable[[], object], at_least_s: float = 0.05) -> float:
    """Median seconds of one call, over repeats that each take at least `at_least_s`."""
    function()
    started = time.perf_counter()
    function()
    calls = max(1, round(at_least_s / max(time.perf_counter() - started, 1e-7)))
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - started) / calls)
    return median(times)


def matmul_probe() -> float:
    """FLOP/s of one large bfloat16 product: how fast the machine is just now."""
    a, b = torch.randn(2, 1024, 1024, dtype=torch.bfloat16)
    return 2 * 1024**3 / seconds_of(lambda: a @ b, at_least_s=0.1)


def measure(size: ModelSize, tokens: int, head_tokens: int) -> dict[str, Any]:
    """Rates in bfloat16 at the model's shapes (FLOP/s); rate of a large copy (bytes read plus written per s)."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return {
        "tokens": tokens,
        "linears": _mean_rates(size.linears(), tokens),
        "head": _mean_rates({size.head: 1}, head_tokens),
        "copy_bytes": 2 * _COPY_BYTES / seconds_of(lambda: target.copy_(source)),
    }


def _mean_rates(shapes: dict[tuple[int, int], int], tokens: int) -> dict[str, float]:
    seconds = {"forward": 0.0, "input_gradient": 0.0, "weight_gradient": 0.0}
    flops = 0.0
    for (inputs, outputs), count in shapes.items():
        x = torch.randn(tokens, inputs, dtype=torch.bfloat16)
        w = torch.randn(outputs, inputs, dtype=torch.bfloat16)
        g = torch.randn(tokens, outputs, dtype=torch.bfloat16)
        calls: dict[str, Callable[[], object]] = {
            "forward": partial(torch.nn.functional.linear, x, w),
            "input_gradient": partial(torch.matmul, g, w),
            "weight_gradient": partial(torch.matmul, g.T, x),
        }
        for kind, call in calls.items():
            seconds[kind] += count * seconds_of(call)
        flops += 2.0 * tokens * inputs * outputs * count
    return {kind: flops / value for kind, value in seconds.items()}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    with torch.no_grad():
        rates = measure(ModelSize(**spec["size"]), spec["tokens"], spec["head_tokens"])
    Path(sys.argv[2]).write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
