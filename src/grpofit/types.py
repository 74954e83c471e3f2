"""The shape legend and the records that pass between the layers.

Owns the plain data of a step. Must not import torch (the command line and the reward workers read it), nor know
who produces or consumes a record.

Shape legend, used in every docstring:
    B  rows: completions in a micro batch (or in the whole step)      P  prompts in a step (= groups)
    T  completion tokens, padded to the longest in the batch          G  group_size, completions of one prompt
    S  prompt and completion tokens of a row, padded                  V  vocabulary size
    H  hidden size                                                    N  completion tokens, flat, no padding

Masks are 1 where a token counts. A `completion_mask` [B, T] is 1 on completion tokens that enter the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Reason(StrEnum):
    """Why a completion has its score."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"
    SCORED = "scored"  # a value without a notion of correct: format, length, a user's function
    NOT_APPLICABLE = "not_applicable"  # the function returned None: left out of this row's reward
    TIMEOUT = "timeout"
    ERROR = "error"


class FinishReason(StrEnum):
    """Why a completion ended: an EOS id or stop string, or the length limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Score:
    """What one reward function says of one completion. `value` is None when it does not apply or failed."""

    value: float | None
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a task, ready for the model.

    Attributes:
        row_id: index of the row in its split, stable across runs; part of the random key.
        text: the prompt as the model reads it, chat template applied.
        messages: the message list that the chat template was applied to, or the plain string.
        token_ids: `text` as token ids, without padding.
        columns: the other columns of the row, handed to reward functions by name.
        conversational: the row's own prompt was a message list; reward functions then receive message lists.
    """

    row_id: int
    text: str
    messages: str | Sequence[Mapping[str, str]]
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    conversational: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one prompt.

    Attributes:
        token_ids: sampled ids, the EOS id included when one was sampled; never re-tokenised.
        sampler_logprobs: log-probability of each id under the distribution it was drawn from.
        finish: stop or length.
        text: decoded, special tokens removed, cut before a stop string.
    """

    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    finish: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A prompt and some of its completions in a packed row: [prompt, completion, completion, ...].

    Attributes:
        start: place of the prompt's first token in the row.
        prompt_tokens: length of the prompt, at least 1.
        completion_tokens: length of each completion as it stands in the row, at least 1.
    """

    start: int
    prompt_tokens: int
    completion_tokens: tuple[int, ...]


@dataclass(slots=True)
class Rollout:
    """One prompt with one completion, and what became of it.

    Attributes:
        group: index of the prompt in this step, 0 .. P-1; rows of a group are contiguous.
        sample: index within the group, 0 .. G-1; part of the random key.
        scores: by reward name.
        reward: weighted sum of the scores' values; None when no score has a value.
        advantage: centred (and scaled) reward; 0 when `reward` is None.
    """

    prompt: Prompt
    completion: Completion
    group: int
    sample: int
    scores: dict[str, Score] = field(default_factory=dict)
    reward: float | None = None
    advantage: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether the length limit ended the completion."""
        return self.completion.finish is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 means greedy."""

    max_completion_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """Names every random draw of one completion, so that batch shape and order cannot change it."""

    seed: int
    step: int
    row_id: int
    sample: int
