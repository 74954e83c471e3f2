"""The counters of the operating system, read in a real process."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CHILD = "from grpofit.memory.monitor import peak_rss_bytes, rss_bytes; print(peak_rss_bytes(), rss_bytes())"
_MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="what getrusage keeps across exec is Linux's")
def test_the_peak_is_this_process_not_the_one_that_started_it() -> None:
    # A parent that holds 1.5 GiB replaces itself: getrusage would still tell its peak.
    hold = f"held = bytearray(b'x') * {1536 * _MIB}"
    parent = f"import os, sys; {hold}; os.execv(sys.executable, [sys.executable, '-c', {_CHILD!r}])"
    ran = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    peak, now = map(int, ran.stdout.split())
    assert 50 * _MIB < now <= peak < 1400 * _MIB
