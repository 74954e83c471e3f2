"""The run directory: how it is made, what is in it, and how a resumed run finds its way back.

Owns names of files in a run directory and the rules of resuming. Must not know how to train.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpofit import __version__
from grpofit.config import Config, Resolved, load, resume_conflicts
from grpofit.errors import RunError
from grpofit.training.records import drop_rollouts_after, truncate_jsonl

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
LOG = "train.log"
ROLLOUTS = "rollouts"
CHECKPOINTS = "checkpoints"
FINAL = "final"
BEST = "best"
CURVE = "curve.png"

_PACKAGES = ("torch", "transformers", "numpy", "safetensors")


def default_run_dir(name: str, now: datetime | None = None) -> Path:
    """`runs/NAME-MMDD-HHMM`, numbered when that is taken."""
    stem = f"{name}-{now or datetime.now():%m%d-%H%M}"
    taken = (Path("runs") / (stem if i == 1 else f"{stem}-{i}") for i in range(1, 1000))
    return next(path for path in taken if not path.exists())


def create_run_dir(run_dir: Path, resolved: Resolved, threads: int) -> None:
    """Make the directory with its configuration inside, all or nothing.

    Raises:
        RunError: the directory exists, or cannot be made.
    """
    if run_dir.exists() or run_dir.is_symlink():
        resumable = (run_dir / CONFIG).is_file()
        raise RunError(
            f"run directory '{run_dir}' exists",
            values="it holds a run" if resumable else "it holds something else",
            why="starting in it would overwrite or mix records",
            fix=f"{_resume_line(run_dir)}   or choose another --out" if resumable else "choose another --out",
        )
    beside = run_dir.with_name(f".{run_dir.name}.{os.getpid()}.partial")
    try:
        beside.mkdir(parents=True)
        (beside / CONFIG).write_text(resolved.to_yaml(comment_origins=True), encoding="utf-8")
        (beside / ENVIRONMENT).write_text(json.dumps(environment(threads) | {"name": resolved.name}, indent=1))
        for folder in (ROLLOUTS, CHECKPOINTS):
            (beside / folder).mkdir()
        os.rename(beside, run_dir)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunError(
            f"run directory '{run_dir}' cannot be made",
            values=str(error),
            why="a run keeps its configuration, records and checkpoints there",
            fix="choose a folder you may write to: --out DIR",
        ) from error


def discard(run_dir: Path) -> None:
    """Take back a directory in which nothing ran, so that the corrected command can use its name."""
    shutil.rmtree(run_dir, ignore_errors=True)


def environment(threads: int) -> dict[str, Any]:
    """What besides the configuration decides how sums round."""
    packages = {package: version(package) for package in _PACKAGES}
    return {"threads": threads, "python": platform.python_version(), "grpofit": __version__, **packages}


def point_latest(run_dir: Path) -> None:
    """Let `latest`, beside the run directory, point to it."""
    link = run_dir.parent / "latest"
    if link.exists() and not link.is_symlink():
        return  # somebody's own folder of that name
    beside = run_dir.parent / f".latest.{os.getpid()}"
    try:
        beside.symlink_to(run_dir.name)
        os.replace(beside, link)
    except OSError:
        beside.unlink(missing_ok=True)  # a file system without links: `latest` is only a convenience


def open_run_dir(run_dir: Path, overrides: Any) -> tuple[Path, Resolved, dict[str, Any]]:
    """The real path, configuration and environment of an existing run, with allowed changes applied.

    Raises:
        RunError: no run there, or an override changes what is trained.
    """
    path = run_dir.resolve()
    missing = [name for name in (CONFIG, ENVIRONMENT) if not (path / name).is_file()]
    if missing:
        raise RunError(
            f"'{run_dir}' is not a run directory",
            values=f"no {missing[0]} in {path}" if path.is_dir() else "no such folder",
            why="a resumed run continues with its own configuration",
            fix="give the directory that `grpofit train` printed, e.g. grpofit train --resume runs/latest",
        )
    recorded = json.loads((path / ENVIRONMENT).read_text())
    old = load(path / CONFIG)
    new = load(path / CONFIG, overrides) if overrides else old
    _refuse_other_maths(run_dir, old.config, new.config)
    return path, Resolved(new.config, new.origins, new.base_dir, recorded.get("name", new.name)), recorded


def keep_config(run_dir: Path, resolved: Resolved) -> None:
    """Let the run's own configuration be the one with the changes, for the next time it is resumed."""
    beside = run_dir / f".{CONFIG}.partial"
    beside.write_text(resolved.to_yaml(comment_origins=True), encoding="utf-8")
    os.replace(beside, run_dir / CONFIG)


def _resume_line(run_dir: Path) -> str:
    return f"grpofit train --resume {shlex.quote(str(run_dir))}"


def _refuse_other_maths(run_dir: Path, old: Config, new: Config) -> None:
    conflicts = resume_conflicts(old, new)
    if conflicts:
        raise RunError(
            f"resuming '{run_dir}' with other values would not continue the same run",
            values="\n".join(f"{key}: {was} -> {now}" for key, was, now in conflicts),
            why="half of the run would be trained one way and half another, under one name",
            fix=f"{_resume_line(run_dir)}   without these, or start a new run with --out",
        )


def changed_packages(recorded: Mapping[str, Any], threads: int) -> list[str]:
    """`name old -> new` of what differs from the environment in which the run began."""
    now = environment(threads)
    return [f"{key} {recorded[key]} -> {now[key]}" for key in now if key in recorded and recorded[key] != now[key]]


def forget_after(run_dir: Path, step: int) -> None:
    """Drop records of steps after `step`: they will be made again."""
    truncate_jsonl(run_dir / METRICS, step)
    drop_rollouts_after(run_dir / ROLLOUTS, step)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for this process; the lock ends with the process, however it ends.

    Raises:
        RunError: another process trains in it.
    """
    with (run_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"run directory '{run_dir}' is in use",
                values="another process holds its lock",
                why="two processes would overwrite each other's records and checkpoints",
                fix="wait for it, stop it, or choose another --out",
            ) from None
        yield
