"""Scoring rollouts: built-ins in killable workers, users' functions called TRL's way, one report.

Owns which process a reward runs in, what happens when it fails, and how scores become the reward of a rollout. Must
not know how rollouts were made, nor what advantages are.

A completion over its deadline, or over the worker's memory, costs itself alone: the worker is killed, another one
goes on. A function that fails on a batch is called again row by row, so that only the guilty rows lose their score.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpofit.config.tree import RewardConfig, TaskConfig
from grpofit.data.calls import Failure, FunctionCall, FunctionSpec, missing_column
from grpofit.data.functions import UserFunction, visible_columns
from grpofit.data.process import Job, Outcome, Pool, Unsendable, WorkerProcess, run_jobs, start_all
from grpofit.data.rewards import NEEDED_COLUMNS
from grpofit.data.tasks import reasoning_gym_setup
from grpofit.errors import ConfigError, DataError, RewardError
from grpofit.types import Reason, Rollout, Score
from grpofit.units import GIB, gib, percent

BUILTIN_MEMORY_BYTES = 4 * GIB
# Numeric libraries would start a thread per core in a worker, each with address space of its own.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_SHOWN_CHARACTERS = 600


@dataclass(frozen=True)
class RewardReport:
    """What became of the rewards of one batch.

    Attributes:
        reasons: per reward, how many completions got which reason.
        failing_rows: completions on which a function failed, or whose reference could not be used.
        unrewarded_rows: completions that no reward gave a value.
        warnings: one sentence each.
        metrics: means of what functions logged with `log_metric`.
        extra: columns that functions logged with `log_extra`, one value a rollout.
    """

    reasons: Mapping[str, Mapping[Reason, int]]
    failing_rows: int
    unrewarded_rows: int
    warnings: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def check_columns(rewards: Sequence[RewardConfig], columns: Sequence[str]) -> None:
    """Raises DataError if a built-in reads a column that the rows do not have; starts nothing."""
    for reward in rewards:
        for column in NEEDED_COLUMNS[reward.name] if reward.name else ():
            if column not in columns:
                raise missing_column(reward.label, column, columns)


class RewardRunner:
    """Scores rollouts; keeps its workers between calls. Close it, or use it in a `with`.

    Built-ins share `workers` processes, each completion with its own deadline. Every function named in the
    configuration has a process of its own and is called once with the whole batch (deadline: `timeout_s` a
    completion). Functions handed over in Python run in this process, without deadline.

    Workers are tied to the thread that started them: Linux kills them when that thread ends.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        *,
        base_dir: Path,
        max_completion_tokens: int,
        columns: Sequence[str],
        max_error_frac: float,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        workers: int = 1,
        task: TaskConfig | None = None,
        function_memory_bytes: int | None = None,
        log: Path | None = None,
    ) -> None:
        """Start the workers and check all that can be checked before a run.

        Args:
            rewards: in the order in which scores and `weights` stand.
            base_dir: where relative paths of functions start.
            columns: names of the rows' columns.
            max_error_frac: `score` raises when a larger share of the completions has a failing reward.
            functions: by the `function` of the reward that uses it.
            task: needed by the reward `task`.
            function_memory_bytes: writable memory of each function's process (default: half of the machine's).
            log: file for what rewards print; by default it goes to this process's stderr.

        Raises:
            DataError: a column that a reward needs is missing.
            ConfigError: a function that cannot be found or imported, or a built-in that cannot start.
        """
        self.labels = [reward.label for reward in rewards]
        self.weights = [reward.weight for reward in rewards]
        self._rewards, self._max_error_frac = list(rewards), max_error_frac
        check_columns(rewards, columns)
        self._visible = visible_columns(columns)
        self._log = log.open("ab") if log is not None else None
        self._event_loop: ThreadPoolExecutor | None = None
        self._here: dict[int, UserFunction] = {}
        self._specs: dict[int, FunctionSpec] = {}
        self._builtins = [index for index, reward in enumerate(rewards) if reward.name]
        specs = [self._builtin_spec(rewards[index], max_completion_tokens, task) for index in self._builtins]
        setup = {"kind": "builtins", "rewards": specs, "memory_bytes": BUILTIN_MEMORY_BYTES}
        self._pool = Pool([self._worker(setup, _ONE_THREAD) for _ in range(workers if specs else 0)])
        self._function_pools: dict[int, Pool] = {}
        memory = function_memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        try:
            self._add_functions(base_dir, dict(functions or {}), memory)
            self._start()
        except BaseException:
            self.close()
            raise

    def _worker(self, setup: Mapping[str, Any], environment: Mapping[str, str]) -> WorkerProcess:
        return WorkerProcess(setup, output_fd=self._log.fileno() if self._log else 2, environment=environment)

    @staticmethod
    def _builtin_spec(reward: RewardConfig, limit: int, task: TaskConfig | None) -> dict[str, Any]:
        spec: dict[str, Any] = {"name": reward.name}
        if reward.name == "regex":
            spec["pattern"] = reward.pattern
        if reward.name == "soft_overlong":
            spec |= {"max_completion_tokens": limit, "buffer_tokens": reward.buffer_tokens or max(1, limit // 5)}
        if reward.name == "task":
            assert task is not None, "the reward `task` needs the task's configuration"
            spec |= reasoning_gym_setup(task)
        return spec

    def _add_functions(self, base_dir: Path, functions: dict[str, Callable[..., Any]], memory: int) -> None:
        for index, reward in enumerate(self._rewards):
            if reward.function is None:
                continue
            if (function := functions.pop(reward.function, None)) is not None:
                self._here[index] = UserFunction(function, self._run_async)
                self._specs[index] = self._spec(index, self._here[index].describe())
                continue
            setup = {"kind": "function", "target": reward.function, "base_dir": str(base_dir), "memory_bytes": memory}
            self._function_pools[index] = Pool([self._worker(setup, {})])
        if functions:
            raise ConfigError(
                f'no reward uses the function "{", ".join(functions)}"',
                values=f"rewards: {', '.join(reward.name or str(reward.function) for reward in self._rewards)}",
                why="it would be ignored, though it was handed over",
                fix=f'add to rewards: {{function: "{next(iter(functions))}"}}',
            )

    def _spec(self, index: int, description: Mapping[str, Any]) -> FunctionSpec:
        known = {name: description[name] for name in ("takes_all", "names", "required")}
        spec = FunctionSpec(self.labels[index], self._rewards[index].timeout_s, columns=self._visible, **known)
        spec.check()
        return spec

    def _start(self) -> None:
        function_workers = [pool.workers[0] for pool in self._function_pools.values()]
        outcomes = start_all([*self._pool.workers, *function_workers])
        builtin_outcomes = outcomes[: len(self._pool.workers)]
        for outcome in builtin_outcomes:
            if not outcome.reply.get("ready"):
                raise self._not_started("rewards", ", ".join(self.labels[i] for i in self._builtins), outcome)
        for index, outcome in zip(self._function_pools, outcomes[len(builtin_outcomes) :], strict=True):
            if not outcome.reply.get("ready"):
                name = str(self._rewards[index].function)
                raise self._not_started(f"rewards.{index}.function", name, outcome)
            self._specs[index] = self._spec(index, outcome.reply)

    @staticmethod
    def _not_started(key: str, name: str, outcome: Outcome) -> ConfigError:
        text = str(outcome.reply.get("raised", "")) or f"its process ended: {outcome.text}"
        missing = outcome.reply.get("missing")
        return ConfigError(
            f'the reward function "{name}" was not found' if missing else f'the reward "{name}" cannot be loaded',
            values=text.removeprefix("FunctionMissing: ") if missing else str(outcome.reply.get("traceback") or text),
            why="it is needed for every completion, so the run would stop at its first step",
            fix=f"set {key} to file.py:function (relative to the YAML file) or package.module:function"
            if missing
            else "make the import work; what it needs must be installed in this environment",
        )

    def score(self, rollouts: Sequence[Rollout], *, step: int = 0, max_steps: int = 0) -> RewardReport:
        """Fill `scores` and `reward` of every rollout.

        `reward` is the sum of weight times value over the scores that have one, in the order of the configuration;
        None if none has. Built-ins over a limit of time or memory get TIMEOUT; failing functions and unusable
        references get ERROR (a function over its deadline: TIMEOUT), and both have no value.

        Args:
            step, max_steps: what functions read as `trainer_state.global_step` and `.max_steps`.

        Raises:
            RewardError: more than `max_error_frac` of the rollouts have a failing reward, or a function returned
                something that is not one number or None per completion. No rollout is changed then.
        """
        if not rollouts:
            return RewardReport({label: {} for label in self.labels}, 0, 0)
        failures: dict[int, Failure] = {}

        def fail(failure: Failure) -> None:
            failures.setdefault(failure.row, failure)
            if len(failures) > self._max_error_frac * len(rollouts):
                raise self._too_many(failures, rollouts)

        table: dict[int, dict[int, Score]] = {index: {} for index in range(len(self._rewards))}
        for row, rollout in enumerate(rollouts):
            for index in self._builtins:
                self._pool.queue.append(self._builtin_job(index, row, rollout, table[index], fail))
        calls = {i: FunctionCall(spec, rollouts, step, max_steps, fail) for i, spec in self._specs.items()}
        for index, pool in self._function_pools.items():
            pool.queue.extend(calls[index].jobs())
        try:
            run_jobs([self._pool, *self._function_pools.values()])
        except Unsendable as error:
            raise DataError(
                "a column of the rows cannot be sent to the process of a reward",
                values=f"{error}; columns: {', '.join(self._visible)}",
                why="rewards run in processes of their own, so that they can be stopped",
                fix="let the function name only the columns it reads, instead of taking **kwargs",
            ) from error
        for index, function in self._here.items():
            calls[index].run_here(function)
        table.update({index: call.scores for index, call in calls.items()})
        for row, rollout in enumerate(rollouts):
            scores = [table[index][row] for index in range(len(self._rewards))]
            rollout.scores = dict(zip(self.labels, scores, strict=True))
            parts = [w * s.value for w, s in zip(self.weights, scores, strict=True) if s.value is not None]
            rollout.reward = sum(parts) if parts else None
        return self._report(rollouts, failures, list(calls.values()))

    def _builtin_job(
        self, index: int, row: int, rollout: Rollout, scores: dict[int, Score], fail: Callable[[Failure], None]
    ) -> Job:
        reward = self._rewards[index]

        def done(outcome: Outcome) -> list[Job]:
            reply = outcome.reply
            if "reason" in reply:
                scores[row] = Score(reply["value"], Reason(reply["reason"]), reply["detail"])
            elif "raised" in reply:
                scores[row] = Score(None, Reason.ERROR, reply["raised"])
                fail(Failure(reward.label, row, reply["raised"], reply.get("traceback", "")))
            else:
                limits = {"memory": f"over {gib(BUILTIN_MEMORY_BYTES)} of memory", "recursion": "nested too deeply"}
                why = {"timeout": outcome.text, "died": f"its process ended: {outcome.text}"}.get(outcome.kind)
                scores[row] = Score(None, Reason.TIMEOUT, why or limits[reply["limit"]])
            return []

        assert reward.name is not None
        columns = {name: rollout.prompt.columns.get(name) for name in NEEDED_COLUMNS[reward.name]}
        completion = rollout.completion
        request = (self._builtins.index(index), completion.text, len(completion.token_ids), rollout.truncated, columns)
        return Job(request, reward.timeout_s, done)

    def _too_many(self, failures: Mapping[int, Failure], rollouts: Sequence[Rollout]) -> RewardError:
        first = failures[min(failures)]
        rollout = rollouts[first.row]
        frac = (len(failures) + 1) / len(rollouts)
        return RewardError(
            f'the reward "{first.label}" failed on at least {len(failures)} of {len(rollouts)} completions; '
            f"run.max_reward_error_frac allows {percent(self._max_error_frac)}",
            values=f"first failing rollout (group {rollout.group}, sample {rollout.sample}):\n"
            f"prompt      {_shown(rollout.prompt.text)}\n"
            f"completion  {_shown(rollout.completion.text)}\n"
            f"{first.traceback or first.text}",
            why="a failing reward is not a zero: what the model did there is unknown",
            fix="correct the reward; return None where it does not apply; check the row's reference;\n"
            f"to go on without these completions: --set run.max_reward_error_frac={min(1.0, max(0.5, frac)):.2g}",
        )

    def _report(
        self, rollouts: Sequence[Rollout], failures: Mapping[int, Failure], calls: Sequence[FunctionCall]
    ) -> RewardReport:
        reasons = {label: Counter(rollout.scores[label].reason for rollout in rollouts) for label in self.labels}
        warnings = []
        for call in calls:
            if call.retried:
                warnings.append(
                    f'the reward "{call.spec.label}" failed on the whole batch ({call.retried}) and was called again '
                    "for each completion alone"
                )
        for index in self._builtins:
            if over := reasons[self.labels[index]][Reason.TIMEOUT]:
                warnings.append(f'{over} of {len(rollouts)} completions were too much for "{self.labels[index]}"')
        if failures:
            first = failures[min(failures)]
            warnings.append(f'{len(failures)} completions have a failing reward, first "{first.label}": {first.text}')
        unrewarded = sum(rollout.reward is None for rollout in rollouts)
        if unrewarded:
            warnings.append(f"{unrewarded} of {len(rollouts)} completions got no value from any reward")
        logged = [(name, values) for call in calls for name, values in call.metrics.items() if values]
        metrics = {name: sum(values) / len(values) for name, values in logged}
        extra = {column: values for call in calls for column, values in call.extra.items()}
        return RewardReport(reasons, len(failures), unrewarded, warnings, metrics, extra)

    def _run_async(self, awaitable: Any) -> Any:
        """Wait for an awaitable of a function handed over in Python, in a thread with an event loop that stays: a
        notebook's own loop is running already, and clients of an async library belong to one loop."""
        import asyncio

        if self._event_loop is None:
            self._event_loop = ThreadPoolExecutor(1, "reward-event-loop")
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await awaitable

        return self._event_loop.submit(lambda: self._runner.run(wait())).result()

    def close(self) -> None:
        """End all workers; what they were doing is lost."""
        for pool in (self._pool, *self._function_pools.values()):
            for worker in pool.workers:
                worker.kill()
        if self._event_loop is not None:
            self._event_loop.submit(self._runner.close).result()
            self._event_loop.shutdown()
            self._event_loop = None
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shown(text: str) -> str:
    """One line, the middle left out if long."""
    line = text.replace("\n", "\\n")
    half = _SHOWN_CHARACTERS // 2
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:half]} ... {line[-half:]}"
