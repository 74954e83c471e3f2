"""One call of a user's reward function on a step's rollouts, and what is done when it fails.

Owns the batch that a function receives and the reading of its reply: a batch that fails is called again row by row.
Must not know where the function runs, nor other rewards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpofit.data.functions import BATCH_ARGUMENTS, UserFunction
from grpofit.data.process import Job, Outcome
from grpofit.errors import DataError, RewardError
from grpofit.types import Reason, Rollout, Score


@dataclass(frozen=True)
class Failure:
    """A reward failed on one rollout."""

    label: str
    row: int
    text: str
    traceback: str = ""


@dataclass(frozen=True)
class FunctionSpec:
    """A function as its caller knows it.

    Attributes:
        takes_all: it has `**kwargs`.
        names: the keywords it accepts by name.
        required: those without a default.
        columns: the rows' columns that may be handed over.
    """

    label: str
    timeout_s: float
    takes_all: bool
    names: Sequence[str]
    required: Sequence[str]
    columns: Sequence[str]

    def check(self) -> None:
        """Raises DataError if the function requires a column that the rows do not have."""
        missing = [name for name in self.required if name not in BATCH_ARGUMENTS and name not in self.columns]
        if missing:
            raise missing_column(self.label, missing[0], self.columns)

    def batch(self, rollouts: Sequence[Rollout], step: int, max_steps: int) -> dict[str, Any]:
        """The arguments as TRL builds them: messages where the data set has messages, else plain text."""
        wanted = [column for column in self.columns if self.takes_all or column in self.names]
        return {
            "prompts": [_prompt(rollout) for rollout in rollouts],
            "completions": [_completion(rollout) for rollout in rollouts],
            "completion_ids": [list(rollout.completion.token_ids) for rollout in rollouts],
            "columns": {column: [rollout.prompt.columns.get(column) for rollout in rollouts] for column in wanted},
            "global_step": step,
            "max_steps": max_steps,
        }


def missing_column(label: str, column: str, columns: Sequence[str]) -> DataError:
    """The error for a reward whose column the rows do not have."""
    reference = next((name for name in columns if name not in ("prompt", "question")), "COLUMN")
    return DataError(
        f'the reward "{label}" needs the column "{column}", and the rows do not have it',
        values=f"columns: {', '.join(columns) or '(none)'}",
        why="without it no completion can be scored",
        fix=f"name the column that holds the reference: --set 'task.answer=\"{{{{ {reference} }}}}\"'"
        if column == "answer"
        else f'add the column "{column}", or give the parameter a default',
    )


def _prompt(rollout: Rollout) -> str | list[dict[str, str]]:
    messages = rollout.prompt.messages
    if isinstance(messages, str):
        return messages
    return [dict(message) for message in messages] if rollout.prompt.conversational else messages[-1]["content"]


def _completion(rollout: Rollout) -> str | list[dict[str, str]]:
    text = rollout.completion.text
    return [{"role": "assistant", "content": text}] if rollout.prompt.conversational else text


@dataclass
class FunctionCall:
    """Scores of one function for all rollouts of a step, filled in as outcomes arrive.

    Attributes:
        fail: told of every failing row; may raise to stop the step.
        metrics, extra: what the function logged.
        retried: why the whole batch failed, if it did.
    """

    spec: FunctionSpec
    rollouts: Sequence[Rollout]
    step: int
    max_steps: int
    fail: Callable[[Failure], None]
    scores: dict[int, Score] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    retried: str = ""

    def jobs(self) -> list[Job]:
        """The call on the whole batch. Its deadline is `timeout_s` for each completion in it."""
        request = self.spec.batch(self.rollouts, self.step, self.max_steps)
        return [Job(request, self.spec.timeout_s * len(self.rollouts), self._batch_done)]

    def run_here(self, function: UserFunction) -> None:
        """Call it in this process, where nothing can stop it."""
        queue = deque(self.jobs())
        while queue:
            job = queue.popleft()
            queue.extendleft(reversed(job.done(Outcome("reply", function(job.request)))))

    def _batch_done(self, outcome: Outcome) -> list[Job]:
        reason, text = self._problem(outcome)
        rows = range(len(self.rollouts))
        if reason is None:
            self._accept(outcome.reply, rows)
            return []
        if len(rows) == 1:
            self._failed(0, reason, text, outcome)
            return []
        self.retried = text
        return [self._row_job(row) for row in rows]

    def _row_job(self, row: int) -> Job:
        def done(outcome: Outcome) -> list[Job]:
            reason, text = self._problem(outcome)
            if reason is None:
                self._accept(outcome.reply, [row])
            else:
                self._failed(row, reason, text, outcome)
            return []

        request = self.spec.batch([self.rollouts[row]], self.step, self.max_steps)
        return Job(request, self.spec.timeout_s, done)

    def _problem(self, outcome: Outcome) -> tuple[Reason | None, str]:
        if unusable := outcome.reply.get("unusable"):
            raise RewardError(
                f'the reward "{self.spec.label}" returned something unusable',
                values=str(unusable),
                why="which number belongs to which completion cannot be guessed",
                fix="return a list with one number, or None, for each completion",
            )
        if outcome.kind == "timeout":
            return Reason.TIMEOUT, outcome.text
        if outcome.kind == "died":
            return Reason.ERROR, f"its process ended: {outcome.text}"
        raised = outcome.reply.get("raised")
        return (None, "") if raised is None else (Reason.ERROR, str(raised))

    def _accept(self, reply: Mapping[str, Any], rows: Sequence[int]) -> None:
        for place, row in enumerate(rows):
            if text := reply["errors"].get(str(place)):
                self._failed(row, Reason.ERROR, str(text))
                continue
            value = reply["values"][place]
            self.scores[row] = Score(value, Reason.NOT_APPLICABLE if value is None else Reason.SCORED)
        for name, values in reply["metrics"].items():
            self.metrics.setdefault(name, []).extend(values)
        for column, values in reply["extra"].items():
            if len(values) == len(rows):
                place_of = self.extra.setdefault(column, [None] * len(self.rollouts))
                for row, value in zip(rows, values, strict=True):
                    place_of[row] = value

    def _failed(self, row: int, reason: Reason, text: str, outcome: Outcome | None = None) -> None:
        self.scores[row] = Score(None, reason, text)
        traceback = str(outcome.reply.get("traceback", "")) if outcome is not None else ""
        self.fail(Failure(self.spec.label, row, text, traceback))
