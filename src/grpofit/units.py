"""How numbers are printed: bytes as GiB, seconds as h and min, fractions as percent.

Owns the unit conventions (GiB = 1024**3 bytes). Must not know anything else of the product.
"""

from __future__ import annotations

GIB = 1024**3
MIB = 1024**2


def gib(n_bytes: float) -> str:
    """`'2.88 GiB'`; MiB below a tenth of a GiB, so that small figures do not print as 0.00."""
    return f"{n_bytes / GIB:.2f} GiB" if abs(n_bytes) >= GIB / 10 else f"{n_bytes / MIB:.1f} MiB"


def duration(seconds: float) -> str:
    """`'4.2 s'`, `'7 min 05 s'`, `'1 h 06 min'`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(fraction: float) -> str:
    """`'58%'`."""
    return f"{100 * fraction:.0f}%"
