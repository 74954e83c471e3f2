"""Runs for the tests of the training loop: a tiny model, a configuration of a few quick steps, a process to train in.

In-process runs hand the reward over as a function (`HERE`), which starts no worker; runs through the command line
name it in a file (`write_yaml`).
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from safetensors.torch import load_file
from tiny import save_tiny_model
from torch import Tensor

from grpofit import api
from grpofit.training import loop
from grpofit.training.records import read_metrics

HERE = "here:small_letters"
REWARD_FILE = '''"""A reward that a tiny random model can learn."""


def small_letters(completions, **kwargs):
    return [sum(c in "abcdefghijklm" for c in text) / 8 for text in completions]
'''


def small_letters(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """The reward of `REWARD_FILE`: how many of (at most) 8 characters are among the first 13 letters."""
    return [sum(c in "abcdefghijklm" for c in text) / 8 for text in completions]


def tiny_config(folder: Path, **model: Any) -> dict[str, Any]:
    """A run of 4 steps on a model made in `folder/model`; evaluates at 0, 2 and 4, saves at 2 and 4."""
    if not (folder / "model").exists():
        save_tiny_model(folder / "model", **model)
    return {
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "task": {"name": "arithmetic", "eval_size": 6, "train_size": 20, "template": "none", "prompt": "{{question}}="},
        "rewards": [{"function": HERE}],
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_prompt_tokens": 16, "max_completion_tokens": 8},
        "algo": {"loss": "grpo"},
        "optim": {"lr": 1e-2},
        "run": {"steps": 4, "eval_every": 2, "checkpoint_every": 2, "threads": 1},
    }


def train(
    source: Any, overrides: Mapping[str, Any] | None = None, *, curve: bool = False, **options: Any
) -> api.RunResult:
    """`api.train` in this process, one line a step, with the reward of `HERE`.

    `curve`: draw `curve.png`, which takes longer than such a run.
    """
    options.setdefault("rewards", {HERE: small_letters})
    with contextlib.nullcontext() if curve else mock.patch.object(loop, "plot_learning"):
        return api.train(source, overrides or {}, plain=True, **options)


def resume(run_dir: Path, overrides: Mapping[str, Any] | None = None, **options: Any) -> api.RunResult:
    """Continue a run in this process."""
    return train(None, overrides, resume=run_dir, **options)


def write_yaml(folder: Path, document: Mapping[str, Any], name: str = "tiny.yaml") -> Path:
    """The configuration as a file for the command line, its reward in `rewards.py` beside it."""
    (folder / "rewards.py").write_text(REWARD_FILE)
    text = yaml.safe_dump(dict(document)).replace(HERE, "rewards.py:small_letters")
    path = folder / name
    path.write_text(text)
    return path


def steps_of(run_dir: Path) -> list[int]:
    """The steps of the training records, in their order."""
    return [record["step"] for record in read_metrics(run_dir / "metrics.jsonl") if "step_time" in record]


def evaluations_of(run_dir: Path) -> list[int]:
    """After which steps the run was evaluated, in the order of the records."""
    return [record["step"] for record in read_metrics(run_dir / "metrics.jsonl") if "eval/n" in record]


def records_of(run_dir: Path) -> list[dict[str, Any]]:
    """The records of `metrics.jsonl` without what no two runs share: times and memory."""
    return [
        {key: value for key, value in record.items() if not key.startswith(("time/", "memory/", "step_time"))}
        for record in read_metrics(run_dir / "metrics.jsonl")
    ]


def weights_of(run_dir: Path, checkpoint: str | None = None) -> dict[str, Tensor]:
    """The exported weights, or the masters of a checkpoint."""
    if checkpoint is None:
        return load_file(run_dir / "final" / "model.safetensors")
    tensors = load_file(run_dir / "checkpoints" / checkpoint / "state.safetensors")
    return {name.removeprefix("master/"): t for name, t in tensors.items() if name.startswith("master/")}


def final_digest(run_dir: Path) -> str:
    """Of the exported weights; equal digests are equal bits."""
    return hashlib.sha256((run_dir / "final" / "model.safetensors").read_bytes()).hexdigest()


def assert_same_run(run_dir: Path, undisturbed: Path) -> None:
    """The same bits, the same records, and nothing twice."""
    assert final_digest(run_dir) == final_digest(undisturbed)
    assert records_of(run_dir) == records_of(undisturbed)
    summaries = [api.read_summary(path) for path in (run_dir, undisturbed)]
    for key in ("steps", "seed", "eval_n", "eval_reward_start", "eval_reward_end"):
        assert summaries[0][key] == summaries[1][key]
    names = [sorted(p.name for p in (path / "rollouts").iterdir()) for path in (run_dir, undisturbed)]
    assert names[0] == names[1]


def start(arguments: Sequence[str], cwd: Path, output: Path) -> multiprocessing.process.BaseProcess:
    """The command line in a process of its own, its output in a file.

    Forked from a server that has torch imported already and has run nothing: a start costs milliseconds, and the
    process is its own, so that it can be killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "run_factory", "grpofit.cli", "grpofit.training.loop"])
    process = context.Process(target=_main, args=(list(arguments), str(cwd), str(output)))
    process.start()
    return process


def _main(arguments: list[str], cwd: str, output: str) -> None:
    os.chdir(cwd)
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
    from grpofit.cli import main

    main(arguments)


def wait_for(happened: Callable[[], bool], process: multiprocessing.process.BaseProcess) -> None:
    """Return as soon as it has happened; fails if the process ends before, or in 5 minutes nothing happens."""
    until = time.monotonic() + 300
    while not happened():
        assert process.is_alive(), f"the process ended before, with exit code {process.exitcode}"
        assert time.monotonic() < until
        time.sleep(0.0005)


def end(process: multiprocessing.process.BaseProcess) -> None:
    """Kill it if it still runs, and wait."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.join()
