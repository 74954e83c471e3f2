"""The verbs as functions: what the command line does, from Python.

Owns the order of a verb's work. Must not print (displays do), nor know how a step or an evaluation is computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpofit import config as config_layer
from grpofit.config import Config, RecipeInfo, Resolved
from grpofit.errors import RunError, UserError

if TYPE_CHECKING:
    from grpofit.types import Rollout

Overrides = Sequence[str] | Mapping[str, Any]
Source = str | Path | Mapping[str, Any] | Config | Resolved


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run: where it is, and its `summary.json`."""

    run_dir: Path
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """An evaluation: `metrics` as in the run's records, and some of the completions."""

    metrics: Mapping[str, float]
    samples: Sequence[Rollout] = field(default=())


def load(source: Source, overrides: Overrides = ()) -> Resolved:
    """Load a recipe, file or mapping, apply overrides, check.

    Raises:
        ConfigError: with everything that is wrong.
    """
    if isinstance(source, Resolved):
        return config_layer.load(source.config, overrides) if overrides else source
    return config_layer.load(source, overrides)


def recipes() -> list[RecipeInfo]:
    """The packaged recipes."""
    return config_layer.recipes()


def train(
    source: Source | None = None,
    overrides: Overrides = (),
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    plain: bool | None = None,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
) -> RunResult:
    """Train, or continue a run.

    Args:
        source: recipe name, YAML path, mapping or configuration; None with `resume`.
        overrides: `a.b=value` texts or dotted keys with values.
        out: run directory, must not exist; default `runs/NAME-MMDD-HHMM`.
        resume: run directory to continue from its last checkpoint. Only keys that change no maths may be overridden;
            the run keeps the changes.
        plain: one line a step instead of the live screen; None: live where there is a terminal.
        rewards: functions by the name under which `rewards[].function` refers to them; they run in this process.

    Raises:
        UserError: something in the configuration, the data, the model or the directory; nothing was lost.
        StoppedError: the run stopped itself; its checkpoint is kept.
        KeyboardInterrupt: stopped on request; its checkpoint is kept.
    """
    _refuse_contradictions(source, out, resume)
    from grpofit.training import rundir
    from grpofit.training.display import open_display
    from grpofit.training.loop import Trainer

    run_dir, resolved, threads, notes = (
        _created(source, overrides, out) if resume is None else _reopened(resume, overrides)
    )
    with rundir.locked(run_dir), open_display(run_dir / rundir.LOG, plain=plain) as display:
        try:
            trainer = Trainer(resolved, run_dir, display, threads=threads, functions=rewards)
        except (UserError, KeyboardInterrupt):
            if resume is None:
                rundir.discard(run_dir)
            raise
        if resume is not None and overrides:
            rundir.keep_config(run_dir, resolved)
        rundir.point_latest(run_dir)
        for note in notes:
            display.event(note, warning=True)
        return RunResult(run_dir, trainer.run())


def _refuse_contradictions(source: Source | None, out: str | Path | None, resume: str | Path | None) -> None:
    if (source is None) == (resume is None):
        raise UserError(
            "train needs either a configuration or a run directory to resume",
            values=f"source: {source!r}, resume: {resume!r}",
            why="a resumed run has its configuration in its directory",
            fix="train('smollm2-arithmetic') or train(resume='runs/latest')",
        )
    if resume is not None and out is not None:
        raise UserError(
            "a resumed run stays in its directory",
            values=f"resume: {str(resume)!r}, out: {str(out)!r}",
            why="its records and checkpoints are there",
            fix=f"leave out --out, or start a new run: train('{resume}/config.yaml', out='{out}')",
        )


def _created(
    source: Source | None, overrides: Overrides, out: str | Path | None
) -> tuple[Path, Resolved, int, list[str]]:
    """A new run directory, its configuration and thread count; nothing to note."""
    from grpofit.training import rundir
    from grpofit.training.setup import set_threads

    assert source is not None
    resolved = load(source, overrides)
    threads = set_threads(resolved.config.run.threads)
    run_dir = Path(out) if out is not None else rundir.default_run_dir(resolved.name)
    rundir.create_run_dir(run_dir, resolved, threads)
    return run_dir, resolved, threads, []


def _reopened(resume: str | Path, overrides: Overrides) -> tuple[Path, Resolved, int, list[str]]:
    """The run directory to go on in, its configuration, the thread count it began with, and what has changed since."""
    from grpofit.training import rundir
    from grpofit.training.setup import set_threads

    run_dir, resolved, recorded = rundir.open_run_dir(Path(resume), overrides)
    asked = resolved.config.run.threads
    threads = set_threads(recorded["threads"] if asked == "auto" else asked)
    changed = rundir.changed_packages(recorded, threads)
    note = f"not the environment the run began in, results may round differently: {', '.join(changed)}"
    return run_dir, resolved, threads, [note] if changed else []


def evaluate(
    target: str | Path,
    overrides: Overrides = (),
    *,
    samples: int = 0,
    show: int = 0,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    say: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EvalResult:
    """Accuracy on held-out prompts.

    Args:
        target: a run directory (its final weights, else its last checkpoint), a recipe or YAML (its starting model),
            or a model: hub id, folder, GGUF file, `smollm2-135m`; a model is asked the task of `smollm2-arithmetic`
            unless `task` is overridden.
        samples: also pass@k from k samples of each prompt; 0: off.
        show: return this many scored completions.
        rewards: as for `train`.
        say: called with lines worth showing: the device, the model, the task.
        progress: called with (completions finished, all).
    """
    from grpofit.training.evaluate import evaluate_policy
    from grpofit.training.setup import build_evaluator, choose_device, device_line, device_warning, set_threads

    say = say or (lambda line: None)
    resolved, restore = _evaluation_target(str(target), overrides)
    config = resolved.config
    device = choose_device(config.run.device)
    say(device_line(device, set_threads(config.run.threads)))
    if warning := device_warning(device):
        say(warning)
    evaluator, _ = build_evaluator(resolved, device, functions=rewards)
    try:
        for note in evaluator.notes:
            say(note)
        if restore is not None:
            restore(evaluator.policy, say)
        evaluator.policy.model.eval()
        result = evaluate_policy(
            evaluator.engine,
            evaluator.rewards,
            evaluator.heldout,
            evaluator.sampling,
            seed=config.run.seed,
            k=samples,
            progress=progress,
        )
    finally:
        evaluator.rewards.close()
    return EvalResult(result.record(), result.rollouts[:show])


_Restore = Callable[[Any, Callable[[str], None]], None]
"""Called with a policy, to give it the weights of a checkpoint, and with where to say what is wrong with one."""


def _evaluation_target(target: str, overrides: Overrides) -> tuple[Resolved, _Restore | None]:
    from grpofit.training import rundir

    path = Path(target)
    if (path / rundir.CONFIG).is_file():
        if _is_over(path):
            changes = {"model.name": str((path / rundir.FINAL).resolve()), **_as_mapping(overrides)}
            return config_layer.load(path / rundir.CONFIG, changes), None
        return config_layer.load(path / rundir.CONFIG, overrides), partial(_load_checkpoint, path)
    if path.suffix in (".yaml", ".yml") or target in {recipe.name for recipe in recipes()}:
        return load(target, overrides), None
    changes = {"model.name": target, **_as_mapping(overrides)}
    if isinstance(changes.get("task"), Mapping) and "rewards" not in changes:
        changes["rewards"] = [{"name": _usual_reward(changes["task"])}]
    return load("smollm2-arithmetic", changes), None


def _is_over(run_dir: Path) -> bool:
    """Whether `final/` holds the run's last step: a run that was given more steps may be past it."""
    from grpofit.training import rundir

    steps = config_layer.load(run_dir / rundir.CONFIG).config.run.steps
    exported = (run_dir / rundir.FINAL).is_dir() and (run_dir / rundir.SUMMARY).is_file()
    return exported and bool(read_summary(run_dir)["steps"] == steps)


def _as_mapping(overrides: Overrides) -> dict[str, Any]:
    if isinstance(overrides, Mapping):
        return dict(overrides)
    from grpofit.config.yaml import parse

    pairs = (text.partition("=") for text in overrides)
    return {key.strip(): parse(value, f"--set {key}").data for key, _, value in pairs}


def _usual_reward(task: Mapping[str, Any]) -> str:
    name = str(task.get("name", ""))
    if name.startswith("reasoning_gym:"):
        return "task"
    return "last_number" if name == "arithmetic" else "math_answer"


def _load_checkpoint(run_dir: Path, policy: Any, say: Callable[[str], None]) -> None:
    """Put the weights of the newest checkpoint into `policy`."""
    from grpofit.training import rundir
    from grpofit.training.checkpoint import load_newest

    checkpoint = load_newest(run_dir / rundir.CHECKPOINTS, say)
    if checkpoint is None:
        raise RunError(
            f"run '{run_dir}' has no weights yet",
            values="no final/ and no checkpoint",
            why="there is nothing to evaluate",
            fix=f"grpofit train --resume {run_dir}",
        )
    parameters = dict(policy.model.named_parameters())
    for name, tensor in checkpoint.tensors.items():
        kind, _, parameter = name.partition("/")
        if kind == "master":
            parameters[parameter].data.copy_(tensor)


def read_summary(run_dir: str | Path) -> dict[str, Any]:
    """`summary.json` of a finished run."""
    from grpofit.training import rundir

    return dict(json.loads((Path(run_dir) / rundir.SUMMARY).read_text()))
