"""TensorBoard and Weights & Biases, beside the run's own records.

Owns starting them, continuing the same tracked run after a resume, and that a tracker that breaks never ends a run.
Must not know what the numbers mean. Both packages come with the extra `track` and are imported only when asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from grpofit.errors import ConfigError

PROJECT = "grpofit"  # W&B's project, unless WANDB_PROJECT says another


class Tracker(Protocol):
    """One place where metrics go. `where` says in a line how to look at them."""

    where: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Trackers:
    """The trackers of a run, as one.

    Args:
        names: `tensorboard`, `wandb`; empty does nothing.
        run_dir: where they keep their files; exists.
        config: the resolved configuration, shown beside the curves.
        resume: continue the tracked run that `run_dir` holds instead of a new one.
        report: receives one line when a tracker fails; that tracker is then left out for the rest of the run.

    Raises:
        ConfigError: a package is missing, or W&B refuses to start. Raised here, before any step.
    """

    def __init__(
        self,
        names: Iterable[str],
        run_dir: Path,
        config: Mapping[str, Any],
        resume: bool = False,
        *,
        report: Callable[[str], None] = print,
    ) -> None:
        self._report = report
        self._active: dict[str, Tracker] = {}
        for name in names:
            self._active[name] = _KINDS[name](run_dir, config, resume)

    @property
    def where(self) -> list[str]:
        """One line for each tracker: how to look at it."""
        return [tracker.where for tracker in self._active.values()]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the numbers of `metrics`; texts, lists and None are left out."""
        numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
        self._each(lambda tracker: tracker.log(step, numbers))

    def close(self) -> None:
        """Flush and end the tracked runs."""
        self._each(lambda tracker: tracker.close())
        self._active.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._active.items()):
            try:
                act(tracker)
            except Exception as error:  # a full disk or a lost network must not cost the run
                del self._active[name]
                self._report(f"tracker {name} failed and is off for the rest of this run: {error!r}")


class _TensorBoard:
    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume: bool) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from None
        self._open: Callable[..., Any] = SummaryWriter
        self._folder, self._config, self._resume = run_dir / "tensorboard", config, resume
        self._writer: Any = None
        self.where = f"tensorboard --logdir {self._folder}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            # Opened at the first step, since only then is it known from which step on to hide what a killed process
            # had written past its checkpoint.
            self._writer = self._open(str(self._folder), purge_step=step if self._resume else None)
            self._writer.add_text("config", _as_markdown(self._config), step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed process would lose what is still queued

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Wandb:
    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume: bool) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", error) from None
        id_file = run_dir / "wandb_id"
        known = id_file.read_text().strip() if resume and id_file.exists() else None
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run_dir.name,
                dir=str(run_dir),
                id=known,
                resume="allow" if known else None,
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True),  # its output would break the live display
            )
        except Exception as error:
            raise ConfigError(
                "Weights & Biases did not start",
                values=f"run.trackers has wandb; {type(error).__name__}: {error}",
                why="without it the run would train and be tracked nowhere",
                fix="wandb login    or, to track on this machine only:  export WANDB_MODE=offline",
            ) from error
        id_file.write_text(self._run.id)
        # Our own step as the axis: W&B drops rows whose built-in step goes back, which a resumed run's does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        offline = f"wandb sync {run_dir}/wandb/offline-run-*"
        self.where = offline if self._run.offline else f"wandb: {self._run.url}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


_KINDS: Mapping[str, Callable[[Path, Mapping[str, Any], bool], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
}


def _missing(package: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"run.trackers has {package}, which is not installed",
        values=str(error),
        why="the run would train and not be tracked",
        fix="pip install 'grpofit[track]'",
    )


def _as_markdown(config: Mapping[str, Any]) -> str:
    import yaml

    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return "".join(f"    {line}\n" for line in text.splitlines())
