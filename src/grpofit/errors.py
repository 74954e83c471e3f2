"""The exception tree and the four-part error that every user mistake becomes.

Owns how a failure is worded. Must not know any other module, so that every module may raise.

GrpofitError                 four parts: what failed, the values, why it matters, the exact change to make
├── UserError (ValueError)   something the user wrote; exit code 2
│   ├── ConfigError          YAML, recipe, --set, cross-field rules
│   ├── DataError            task, file, column, prompt
│   ├── ModelError           model name, tokenizer, missing EOS
│   └── RunError             run directory, resume
└── StoppedError (RuntimeError)   the run stopped itself, its checkpoint kept; exit code 4
    ├── RewardError          a reward function raised or returned something unusable
    ├── CheckpointError      a checkpoint could not be written or none could be read
    └── NonFiniteError       loss or gradient not finite, too often
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_DOES_NOT_FIT = 3
EXIT_STOPPED = 4
EXIT_INTERRUPTED = 130


class GrpofitError(Exception):
    """Base of all expected failures.

    Args:
        what: one line, what failed, with names quoted.
        values: the values that led to it, as a reader would want to see them.
        why: why it matters, that is, what would have gone wrong.
        fix: the exact change to make: a key, a command, a line to paste.
    """

    exit_code = EXIT_BUG

    def __init__(self, what: str, *, values: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.values, self.why, self.fix = what, values, why, fix

    def parts(self) -> list[tuple[str, str]]:
        """The non-empty parts after `what`, as (label, text)."""
        labelled = [("got", self.values), ("why", self.why), ("fix", self.fix)]
        return [(label, text) for label, text in labelled if text]

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in self.parts():
            first, *rest = text.splitlines()
            lines.append(f"  {label:<4} {first}")
            lines += [f"       {line}" for line in rest]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not survive pickling between processes otherwise.
        return (_rebuild, (type(self), self.what, self.values, self.why, self.fix))


def _rebuild(kind: type[GrpofitError], what: str, values: str, why: str, fix: str) -> GrpofitError:
    return kind(what, values=values, why=why, fix=fix)


class UserError(GrpofitError, ValueError):
    """Something the user wrote cannot be done as written."""

    exit_code = EXIT_USER


class ConfigError(UserError):
    """The configuration: an unknown key, a value out of range, two keys that contradict."""


class DataError(UserError):
    """The task: an unreadable file, a missing column, no usable prompt."""


class ModelError(UserError):
    """The model or its tokenizer."""


class RunError(UserError):
    """A run directory that exists, or a resume that would not continue the same run."""


class StoppedError(GrpofitError, RuntimeError):
    """The run stopped itself; what it had is kept."""

    exit_code = EXIT_STOPPED


class RewardError(StoppedError):
    """A reward function raised, or returned something that is not one number or None per completion."""


class CheckpointError(StoppedError):
    """No checkpoint could be written, or none of those on disk can be read."""


class NonFiniteError(StoppedError):
    """Loss or gradient norm was not finite in several steps in a row."""
