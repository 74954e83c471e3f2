"""What memory this process really takes, in bytes.

Owns the reading of the operating system's and the allocator's counters. Must not decide anything.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from grpofit.units import GIB


def rss_bytes() -> int:
    """Resident memory of this process now; 0 where /proc does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return 0
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def high_water_bytes(pid: int | Literal["self"]) -> int:
    """Largest resident memory of a process so far; 0 where /proc does not tell, or the process is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    if peak := high_water_bytes("self"):
        return peak
    # This also counts what the process that started this one held.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_record(device: torch.device) -> dict[str, float]:
    """The memory keys of a step's record: host always, allocator peaks since the last call on CUDA."""
    record: dict[str, float] = {"memory/rss_bytes": rss_bytes(), "memory/peak_rss_bytes": peak_rss_bytes()}
    if device.type == "cuda":
        record["memory/allocated_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        record["memory/reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return record
