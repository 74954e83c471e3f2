"""The built-in rewards: a score and a reason for one completion.

Owns what each built-in rewards. Pure functions of the completion (never of prompt and completion together). Must not
import torch, nor the configuration: a reward worker starts fast and stays small. They may be slow or fail on a
hostile completion, so they run in a worker process (`verify.py`), which is killed at the deadline.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Any

from grpofit.types import Reason, Score

# A sign counts only where it cannot be a minus between two terms ("10-15" holds 10 and 15). Thousands are commas
# between groups of three digits. A point alone begins a number only after a space or a sign ("No.5" holds 5).
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.])[-−])?(?:\$(?P<inner>[-−])?)?"
    r"(?P<value>(?:(?<![0-9,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PLAIN_NUMBER = re.compile(r"[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?\s?\\?%?|[-+]?[0-9]+\s?/\s?[0-9]+")
_MATH_MARKUP = re.compile(r"\\boxed|\\\(|\\\[|\$.*\$", re.DOTALL)


@dataclass(frozen=True)
class Case:
    """One completion with what the built-ins may read.

    Attributes:
        tokens: completion tokens, the EOS included.
        truncated: the length limit ended it.
        columns: the row's columns that the reward needs.
    """

    completion: str
    tokens: int
    truncated: bool
    columns: Mapping[str, Any] = field(default_factory=dict)


class ReferenceUnusable(ValueError):
    """The row's reference is missing or is not what the reward can compare with: the row's fault, not the model's."""


def last_number(completion: str, answer: object, truncated: bool = False) -> Score:
    """1 if the last number of the completion equals the last number of `answer`, else 0.

    Read are signs, decimals, commas between thousands, a leading `$` (also `-$5`, `$-5`) and a trailing full stop;
    values are compared exactly (12 equals 12.0). Not read: fractions, exponents, words.

    Returns:
        reason CORRECT; else TRUNCATED if the length limit ended the completion, else WRONG, or NO_ANSWER without
        a number. `detail` is the number found.
    """
    reference = _last_decimal(str(answer))
    if answer is None or reference is None:
        raise ReferenceUnusable(f"the answer {answer!r:.80} holds no number")
    found = _last_decimal(completion)
    return _verdict(None if found is None else found == reference, truncated, "" if found is None else str(found)[:80])


def _last_decimal(text: str) -> Decimal | None:
    last = deque(_NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    match = last[0]
    value = Decimal(match["value"].replace(",", ""))
    return -value if match["sign"] or match["inner"] else value


def _verdict(correct: bool | None, truncated: bool, detail: str) -> Score:
    """`correct` None: no answer was found."""
    if correct:
        return Score(1.0, Reason.CORRECT, detail)
    reason = Reason.NO_ANSWER if correct is None else Reason.WRONG
    return Score(0.0, Reason.TRUNCATED if truncated else reason, detail)


def math_answer(completion: str, answer: object, truncated: bool = False) -> Score:
    """1 if the completion's answer is mathematically equal to `answer` (library math-verify), else 0.

    The completion's last `\\boxed{}` counts; without one, what math-verify takes as the answer in the whole text
    (after words like "the answer is", else the last formula or number). `answer` may be a number, LaTeX with or
    without dollar signs, or a text with a `\\boxed{}`.

    The library's own time limits are off (they need signals): the worker is killed at the deadline instead.
    """
    gold = _parsed_reference(str(answer)) if answer is not None else ()
    if not gold:
        raise ReferenceUnusable(f"math-verify cannot read the answer {answer!r:.80}")
    boxed = last_boxed(completion)
    found = _parse_math(completion if boxed is None else f"\\boxed{{{boxed}}}")
    if not found:
        return _verdict(None, truncated, "")
    from math_verify import verify

    detail = str(found[-1])[:80]  # the text as written; str() of the expression could itself be expensive
    return _verdict(bool(verify(list(gold), found, timeout_seconds=None)), truncated, detail)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last complete `\boxed{...}` (or `\fbox{...}`), braces matched; None without one."""
    for match in reversed(list(re.finditer(r"\\f?box(?:ed)?\s*\{", text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position]
    return None


@lru_cache(maxsize=1024)
def _parsed_reference(answer: str) -> tuple[Any, ...]:
    plain = _PLAIN_NUMBER.fullmatch(answer.strip()) is not None
    # Bare LaTeX must be marked as such: of "3\sqrt{2}" the library would else read the 3.
    text = answer if plain or _MATH_MARKUP.search(answer) else f"${answer}$"
    if (boxed := last_boxed(answer)) is not None:
        text = f"\\boxed{{{boxed}}}"
    return tuple(_parse_math(text)) or tuple(_parse_math(answer))


def _parse_math(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return list(parse(text, configs, parsing_timeout=None))


def answer_format(completion: str) -> Score:
    """Rewards the form alone: 0.7 if the completion has `answer:` (any case), 1.0 if it also has a digit, else 0.2."""
    if "answer:" not in completion.lower():
        return Score(0.2, Reason.SCORED)
    return Score(1.0 if re.search(r"[0-9]", completion) else 0.7, Reason.SCORED)


def soft_overlong(tokens: int, max_completion_tokens: int, buffer_tokens: int) -> Score:
    """0 up to `max_completion_tokens - buffer_tokens`, then falling linearly to -1 at the limit, -1 beyond.

    DAPO (Yu et al., 2025, arXiv:2503.14476), equation 13. `tokens` counts completion tokens, the EOS included.
    """
    over = tokens - (max_completion_tokens - buffer_tokens)
    return Score(-min(max(over, 0) / buffer_tokens, 1.0) + 0.0, Reason.SCORED)


def regex(completion: str, pattern: str) -> Score:
    """1 if `pattern` is found anywhere in the completion (`re.search`), else 0."""
    return Score(float(re.search(pattern, completion) is not None), Reason.SCORED)


def tagged_answer(completion: str) -> str:
    """What stands in the last `<answer>` tags, else the whole completion; without surrounding space."""
    tagged = _ANSWER_TAG.findall(completion)
    return str(tagged[-1] if tagged else completion).strip()


def task(completion: str, score_answer: Callable[[str], float], truncated: bool = False) -> Score:
    """The task's own scorer on the completion's answer (see `tagged_answer`); CORRECT from 1 on, partial below.

    Several scorers of reasoning_gym raise on an answer that is not of the form they expect: that is a wrong answer,
    with the exception as `detail`.
    """
    answer = tagged_answer(completion)
    if not answer:
        return _verdict(None, truncated, "")
    try:
        value = float(score_answer(answer))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        return _verdict(False, truncated, f"the scorer raised {type(error).__name__}: {error}"[:200])
    judged = _verdict(value >= 1.0, truncated, answer[:80])
    return Score(value, judged.reason, judged.detail)


# The columns that each built-in reads.
NEEDED_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "last_number": ("answer",),
    "math_answer": ("answer",),
    "answer_format": (),
    "soft_overlong": (),
    "regex": (),
    "task": ("question", "answer", "metadata"),
}


def make_builtin(spec: Mapping[str, Any]) -> Callable[[Case], Score]:
    """The built-in of `spec`: its `name` and settings, plain values that can be sent to a worker.

    Imports what the reward needs, so that a first completion does not pay for it.
    """
    name = spec["name"]
    if name == "last_number":
        return lambda case: last_number(case.completion, case.columns.get("answer"), case.truncated)
    if name == "math_answer":
        import logging

        import math_verify  # noqa: F401

        logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its time limits are off
        return lambda case: math_answer(case.completion, case.columns.get("answer"), case.truncated)
    if name == "answer_format":
        return lambda case: answer_format(case.completion)
    if name == "soft_overlong":
        limit, buffer = spec["max_completion_tokens"], spec["buffer_tokens"]
        return lambda case: soft_overlong(case.tokens, limit, buffer)
    if name == "regex":
        return lambda case: regex(case.completion, spec["pattern"])
    if name == "task":
        from grpofit.data.gym import make_scorer

        scorer = make_scorer(spec["dataset"], spec["options"])
        return lambda case: task(case.completion, lambda answer: scorer(answer, case.columns), case.truncated)
    raise ValueError(f"no built-in reward is called {name!r}")
