"""Rollouts for the tests of rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpofit.types import Completion, FinishReason, Prompt, Rollout


def make_rollout(text: str, *, row: int = 0, tokens: int = 3, truncated: bool = False, **columns: Any) -> Rollout:
    """A plain-text rollout whose prompt has the given columns."""
    question = str(columns.get("question", "What is 1 + 1?"))
    prompt = Prompt(row, question, question, (1, 2), columns)
    finish = FinishReason.LENGTH if truncated else FinishReason.STOP
    return Rollout(prompt, Completion(tuple(range(tokens)), (0.0,) * tokens, finish, text), row, 0)


def make_rollouts(texts: Sequence[str], **columns: Any) -> list[Rollout]:
    """One rollout per text, all with the same columns."""
    return [make_rollout(text, row=row, **columns) for row, text in enumerate(texts)]
