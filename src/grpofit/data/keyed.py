"""Random choices that depend on a key and on nothing else.

Owns keyed generators and the stable hash of a row. Must not know tasks, prompts or training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def keyed_rng(*key: int) -> np.random.Generator:
    """A generator that depends on the key alone. Negative numbers are fine (taken modulo 2**64)."""
    return np.random.default_rng([part % 2**64 for part in key])


def stable_hash(*parts: object) -> int:
    """A 64-bit number that is the same in every process, version and platform; parts must be JSON-like."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=_plain)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def hash_order(rows: Iterable[Mapping[str, Any]], seed: int) -> list[tuple[int, int]]:
    """`(hash, index)` of every row, sorted: an order that follows a row's content, not its position."""
    return sorted((stable_hash(seed, row), index) for index, row in enumerate(rows))


def _plain(value: object) -> str:
    """What JSON lacks. A type's name stands for objects whose text may hold a memory address."""
    if isinstance(value, bytes):
        return value.hex()
    if type(value).__module__ in ("datetime", "decimal", "uuid", "fractions"):
        return str(value)
    return type(value).__qualname__
