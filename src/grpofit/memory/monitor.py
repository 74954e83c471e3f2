"""What memory this process really takes, in bytes.

Owns the reading of the operating system's and the allocator's counters. Must not decide anything.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from grpofit.units import GIB


def rss_bytes() -> int:
    """Resident memory of this process now; 0 where /proc does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return 0
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would also count what the process that started this one held
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
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
