"""Rewards that both sides of `vs_trl.py` use, with TRL's signature. Must not import torch: reward workers load this."""

from __future__ import annotations

import re
import zlib
from typing import Any

_NUMBER = re.compile(r"-?\d+")


def last_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of the completion is the answer, else 0."""
    texts = [_text(completion) for completion in completions]
    return [float((_NUMBER.findall(text) or [""])[-1] == right) for text, right in zip(texts, answer, strict=True)]


def every_group(completions: list[Any], **_: Any) -> list[float]:
    """A number in [0, 1) from the completion's text: no two texts are alike, so every group has a signal."""
    return [zlib.crc32(_text(completion).encode()) / 2**32 for completion in completions]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
