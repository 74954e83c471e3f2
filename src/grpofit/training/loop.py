"""The training loop: steps, evaluations, checkpoints, records, and an orderly end.

Owns what happens when. Must not know how a step computes (`step.py`) nor how anything is shown (`display.py`).
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import SafetensorError

from grpofit.config import Resolved
from grpofit.errors import CheckpointError, NonFiniteError, RunError, StoppedError
from grpofit.memory.monitor import memory_record, peak_rss_bytes
from grpofit.models.save import save_policy
from grpofit.training import rundir
from grpofit.training.checkpoint import Checkpoint, load_newest, prune_checkpoints, save_checkpoint
from grpofit.training.clock import Clock, Interrupted, StopSignals
from grpofit.training.curve import plot_learning
from grpofit.training.display import Display
from grpofit.training.evaluate import Evaluation, evaluate_policy
from grpofit.training.metrics import rollout_record, update_record
from grpofit.training.optim import learning_rate
from grpofit.training.records import append_jsonl, read_metrics, write_rollouts
from grpofit.training.screen import RunHeader
from grpofit.training.setup import (
    ask_for_determinism,
    build_evaluator,
    build_parts,
    choose_device,
    device_line,
    device_warning,
)
from grpofit.training.step import UpdateResult, collect, update
from grpofit.training.trackers import Trackers
from grpofit.types import Rollout
from grpofit.units import gib

_EXAMPLES = 3


class Trainer:
    """A run in its directory, from its last checkpoint (or the start) to its end."""

    def __init__(
        self,
        resolved: Resolved,
        run_dir: Path,
        display: Display,
        *,
        threads: int,
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._config = resolved.config
        self._run_dir = run_dir
        self._display = display
        self._began = time.perf_counter()
        self._finished = 0
        self._saved_at = -1
        self._elapsed_before_s = 0.0
        self._nonfinite_in_a_row = 0
        self._stop = StopSignals(self._say_stopping)
        self._clock = Clock(display.phase, lambda: self._stop.asked)
        self._first: Evaluation | None = None
        self._last: Evaluation | None = None

        checkpoint = load_newest(run_dir / rundir.CHECKPOINTS, lambda text: self._event(text, warning=True))
        self._finished = checkpoint.step if checkpoint else 0
        if self._finished > self._config.run.steps:
            raise RunError(
                f"'{run_dir}' has finished more steps than run.steps",
                values=f"finished: {self._finished}, run.steps: {self._config.run.steps}",
                why="a run cannot be shortened afterwards",
                fix=f"--set run.steps={self._finished} or more; grpofit eval {run_dir} for what it has learned",
            )
        rundir.forget_after(run_dir, self._finished if checkpoint else -1)
        device = choose_device(self._config.run.device)
        if self._config.run.deterministic:
            ask_for_determinism(device)
        self._start_display(resolved, device, threads)
        display.phase("loading model")
        self._evaluator, prompts = build_evaluator(resolved, device, functions=functions, log=run_dir / rundir.LOG)
        self._rewards = self._evaluator.rewards
        try:
            for note in self._evaluator.notes:
                display.event(note)
            self._parts = build_parts(resolved, self._evaluator, prompts, self._clock)
            for note in self._parts.notes:
                display.event(note)
            self._trackers = Trackers(
                self._config.run.trackers, run_dir, self._config.model_dump(), checkpoint is not None,
                report=lambda text: self._event(text, warning=True),
            )  # fmt: skip
            if checkpoint is not None:
                self._restore(checkpoint)
        except BaseException:
            self._rewards.close()
            raise

    def run(self) -> dict[str, Any]:
        """Train to the last step; returns the summary.

        Raises:
            KeyboardInterrupt: stopped on request; what was finished is saved.
            StoppedError: the run stopped itself; what was finished is saved.
        """
        try:
            with self._stop:
                return self._train()
        except Interrupted:
            self._save_checkpoint()
            self._event(f"stopped after step {self._finished}; go on with: {self._resume_line()}")
            raise KeyboardInterrupt from None
        except StoppedError as error:
            self._event(f"stopped after step {self._finished}: {error.what}", warning=True)
            error.fix = f"{error.fix}\nthen go on with: {self._resume_line()}" if error.fix else self._resume_line()
            raise
        finally:
            self._rewards.close()
            self._trackers.close()

    def _train(self) -> dict[str, Any]:
        try:
            self._evaluate_if_due()
            self._first = self._last if self._finished == 0 else None
            while self._finished < self._config.run.steps:
                self._step()
                self._evaluate_if_due()
                if _due(self._finished, self._config.run.checkpoint_every):
                    self._save_checkpoint()
            self._save_checkpoint()
            return self._finish()
        except CheckpointError:
            raise
        except StoppedError:
            # What the optimizer holds is the state after the last finished step: the failed step never reached it.
            self._save_checkpoint()
            raise
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self._run_dir).free
            raise StoppedError(
                f"the run directory '{self._run_dir}' cannot be written",
                values=f"{error}\nfree on that disk {gib(free)}",
                why="records and weights would be lost; what was saved up to the last checkpoint is untouched",
                fix="free space, or make it writable",
            ) from error

    def _step(self) -> None:
        step, parts = self._finished, self._parts
        started = time.perf_counter()
        rollouts, report = collect(parts, step, self._config.run.steps)
        for warning in report.warnings:
            self._event(warning, warning=True)
        _check_sampled(rollouts, self._finished)
        lr = learning_rate(self._config.optim, step, self._config.run.steps)
        results = update(parts, rollouts, lr)
        self._finished += 1
        record = {
            "step": self._finished,
            **rollout_record(rollouts, parts.settings.group_size),
            **update_record(results, len(rollouts), lr),
            **report.metrics,
            "step_time": time.perf_counter() - started,
            **self._clock.take(),
            **memory_record(parts.policy.device),
        }
        self._record(record)
        self._display.step(record)
        write_rollouts(self._run_dir / rundir.ROLLOUTS, self._finished, rollouts)
        self._check_finite(results, rollouts)

    def _check_finite(self, results: list[UpdateResult], rollouts: list[Rollout]) -> None:
        if all(result.finite for result in results):
            self._nonfinite_in_a_row = 0
            return
        self._nonfinite_in_a_row += 1
        bad = results[-1]
        longest = max(rollouts, key=lambda r: abs(r.advantage))
        self._event(
            f"step {self._finished}: loss {bad.loss}, gradient norm {bad.grad_norm}; the update was skipped. "
            f"Largest advantage {longest.advantage:.3g}: {longest.completion.text!r:.120}",
            warning=True,
        )
        if self._nonfinite_in_a_row >= self._config.run.max_nonfinite_steps:
            raise NonFiniteError(
                f"loss or gradient was not finite in {self._nonfinite_in_a_row} steps in a row",
                values=f"step {self._finished}: loss {bad.loss}, gradient norm {bad.grad_norm}",
                why="every such step is skipped, so nothing is learned any more",
                fix="lower optim.lr, or --set model.dtype=float32, in a new run",
            )

    def _evaluate_if_due(self) -> None:
        """At start, every `eval_every` steps and at the end; one that was interrupted is made up for after a resume."""
        run = self._config.run
        if _due(self._finished, run.eval_every) or self._finished in (0, run.steps):
            past = read_metrics(self._run_dir / rundir.METRICS)
            if not any("eval/n" in record and record["step"] == self._finished for record in past):
                self._evaluate()

    def _evaluate(self) -> None:
        evaluator, run = self._evaluator, self._config.run
        with self._clock.phase("evaluating") as progress:
            result = evaluate_policy(
                evaluator.engine,
                evaluator.rewards,
                evaluator.heldout,
                evaluator.sampling,
                seed=run.seed,
                k=run.eval_pass_k,
                progress=progress,
            )
        record = {"step": self._finished, **result.record(), **self._clock.take()}
        best = max((_score(r) for r in read_metrics(self._run_dir / rundir.METRICS) if "eval/n" in r), default=-1.0)
        self._record(record)
        self._display.evaluation(record)
        self._last = result
        if run.keep_best and result.score > best:
            save_policy(self._parts.policy, self._run_dir / rundir.BEST)
            self._event(f"best so far, kept in {rundir.BEST}/: step {self._finished}")

    def _record(self, record: dict[str, Any]) -> None:
        append_jsonl(self._run_dir / rundir.METRICS, record)
        self._trackers.log(record["step"], record)

    def _event(self, text: str, *, warning: bool = False) -> None:
        event = {"time": time.time(), "step": self._finished, "warning": warning, "text": text}
        with suppress(OSError):  # a full disk must not hide what is said here
            append_jsonl(self._run_dir / rundir.EVENTS, event)
        self._display.event(text, warning=warning)

    def _save_checkpoint(self) -> None:
        if self._saved_at == self._finished:
            return
        started = time.perf_counter()
        self._display.phase("saving checkpoint")
        tensors = self._parts.optimizer.state_tensors()
        record = {"elapsed_s": self._elapsed_s(), "nonfinite_in_a_row": self._nonfinite_in_a_row}
        folder = self._run_dir / rundir.CHECKPOINTS
        save_checkpoint(folder, self._finished, tensors, record)
        self._saved_at = self._finished
        prune_checkpoints(folder, self._config.run.keep_last, newest=self._finished)
        n_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._display.checkpoint(self._finished, time.perf_counter() - started, n_bytes)

    def _restore(self, checkpoint: Checkpoint) -> None:
        self._parts.optimizer.load_state_tensors(checkpoint.tensors)
        self._elapsed_before_s = float(checkpoint.record["elapsed_s"])
        self._nonfinite_in_a_row = int(checkpoint.record["nonfinite_in_a_row"])
        self._saved_at = checkpoint.step

    def _start_display(self, resolved: Resolved, device: torch.device, threads: int) -> None:
        header = RunHeader(
            name=resolved.name,
            run_dir=self._run_dir,
            device=device_line(device, threads),
            total_steps=self._config.run.steps,
            first_step=self._finished + 1,
            past=read_metrics(self._run_dir / rundir.METRICS),
        )
        self._display.start(header)
        warning = device_warning(device)
        if warning:
            self._event(warning, warning=True)

    def _say_stopping(self) -> None:
        self._display.event("stopping: finishing what cannot be abandoned, then saving (Ctrl-C again: stop without)")

    def _resume_line(self) -> str:
        return f"grpofit train --resume {shlex.quote(str(self._run_dir))}"

    def _elapsed_s(self) -> float:
        return self._elapsed_before_s + time.perf_counter() - self._began

    def _finish(self) -> dict[str, Any]:
        with self._clock.phase("exporting", interruptible=False):
            save_policy(self._parts.policy, self._run_dir / rundir.FINAL)
        metrics = read_metrics(self._run_dir / rundir.METRICS)
        summary = {**summarize(metrics), "wall_s": self._elapsed_s(), "peak_rss_bytes": peak_rss_bytes(),
                   "seed": self._config.run.seed}  # fmt: skip
        (self._run_dir / rundir.SUMMARY).write_text(json.dumps(summary, indent=1))
        try:
            plot_learning(metrics, self._run_dir / rundir.CURVE)
        except Exception as error:  # a picture must not cost the run its end
            self._event(f"{rundir.CURVE} could not be drawn: {error}", warning=True)
        self._display.finish(summary, examples=self._examples())
        return summary

    def _examples(self) -> list[dict[str, str]]:
        """Held-out prompts whose answer changed, with what the model wrote at start and end."""
        if self._first is None or self._last is None:
            return []
        pairs = list(zip(self._first.rollouts, self._last.rollouts, strict=True))
        pairs.sort(key=lambda pair: (pair[0].reward or 0.0) - (pair[1].reward or 0.0))
        return [
            {
                "prompt": str(before.prompt.columns.get("question", before.prompt.text)),
                "answer": str(before.prompt.columns.get("answer", "")),
                "before": before.completion.text,
                "after": after.completion.text,
            }
            for before, after in pairs[:_EXAMPLES]
        ]


def summarize(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What was learned, from the records of a finished run."""
    evaluations = [r for r in metrics if "eval/n" in r]
    steps = [r for r in metrics if "step_time" in r]
    summary: dict[str, Any] = {
        "steps": max((r["step"] for r in steps), default=0),
        "step_s_median": median(r["step_time"] for r in steps) if steps else None,
        "eval_n": evaluations[-1]["eval/n"] if evaluations else 0,
    }
    for place, record in zip(("start", "end"), (evaluations[:1] + evaluations[-1:]), strict=False):
        summary[f"accuracy_{place}"] = record.get("eval/accuracy")
        summary[f"accuracy_{place}_low"] = record.get("eval/accuracy_low")
        summary[f"accuracy_{place}_high"] = record.get("eval/accuracy_high")
        summary[f"eval_reward_{place}"] = record.get("eval/reward")
    return summary


def _check_sampled(rollouts: list[Rollout], finished: int) -> None:
    """A policy whose logits are NaN would write one token for ever: no group has a signal, so no loss would show it."""
    broken = [r for r in rollouts if not math.isfinite(sum(r.completion.sampler_logprobs))]
    if broken:
        raise NonFiniteError(
            "the policy's own logprobs are not finite",
            values=f"{len(broken)} of {len(rollouts)} completions, sampled after step {finished}",
            why="its weights or activations have overflowed, so it neither writes nor learns anything any more",
            fix="lower optim.lr, or --set model.dtype=float32, in a new run",
        )


def _score(record: Mapping[str, Any]) -> float:
    return float(record.get("eval/accuracy", record["eval/reward"]))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
