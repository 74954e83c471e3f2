"""grpofit's side of `vs_trl.py`: `grpofit train` in a process of its own, read back from the records of its run.

Owns the configuration of the run and what its records mean. Must not know TRL.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from safetensors import safe_open
from vs_trl_process import run_watched
from vs_trl_rates import ModelSize, Trained
from vs_trl_shapes import Work

from grpofit.config import ModelConfig, load
from grpofit.models.load import load_tokenizer

_PHASES = {
    "rollout": "rollout",
    "reward": "rollout",
    "logprobs": "backward",
    "backward": "backward",
    "update": "update",
}


def configuration(work: Work, threads: int) -> dict[str, Any]:
    """What a user would write for this work."""
    shape = work.shape
    return {
        "model": {"name": str(work.model)},
        "task": {
            "file": str(work.pool),
            "eval_file": str(work.heldout),
            "eval_size": 1,
            "template": "none" if shape.fixed else "chat",
        },
        "rewards": [{"function": f"{Path(__file__).with_name('vs_trl_rewards.py')}:{shape.reward}"}],
        "rollout": {
            "prompts_per_step": shape.prompts,
            "group_size": shape.group_size,
            "max_prompt_tokens": shape.prompt_tokens,
            "max_completion_tokens": shape.completion_tokens,
            "temperature": work.temperature,
        },
        "algo": {"loss": work.loss, "beta": 0.0},
        "optim": {"lr": work.lr, "max_grad_norm": 1.0},
        "run": {
            "steps": work.steps,
            "seed": work.seed,
            "eval_every": 0,
            "checkpoint_every": 0,
            "device": "cpu",
            "threads": threads,
        },
    }


def run_ours(work: Work, folder: Path, *, threads: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train once; settings, one record a step, bytes of state, peak memory, wall time. Leaves nothing but a log."""
    folder.mkdir(parents=True, exist_ok=True)
    config, run_dir = folder / "config.yaml", folder / "run"
    config.write_text(yaml.safe_dump(configuration(work, threads), sort_keys=False))
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "grpofit", "train", str(config), "--plain", "--out", str(run_dir)]
    for override in overrides:
        command += ["--set", override]
    try:
        ran = run_watched(command, folder / "grpofit.log", {"OMP_NUM_THREADS": str(threads)})
        records = _records(run_dir)
        several = any(record["logs"]["micro_batches"] > 1 for record in records)
        return {
            "settings": _settings(run_dir, threads, overrides),
            "state_bytes": _state_bytes(run_dir, several),
            "records": records,
            "peak_rss_bytes": ran.peak_bytes,
            "helpers_bytes": ran.helpers_bytes,
            "wall_s": ran.wall_s,
        }
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def _records(run_dir: Path) -> list[dict[str, Any]]:
    """A step lasts from the end of the step before to the end of its records on disk; the first, as it says itself."""
    steps = [r for r in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if "step_time" in r]
    tokenizer = load_tokenizer(ModelConfig(name=str(run_dir / "final")), Path.cwd())
    records, before = [], None
    for step in steps:
        path = run_dir / "rollouts" / f"step-{step['step']:06d}.parquet"
        ended = path.stat().st_mtime_ns
        phases: dict[str, float] = {}
        for name, phase in _PHASES.items():
            phases[phase] = phases.get(phase, 0.0) + step.get(f"time/{name}_s", 0.0)
        trained = _trained(step, pq.read_table(path).to_pylist(), tokenizer)
        records.append(
            {
                "step_s": step["step_time"] if before is None else (ended - before) / 1e9,
                **phases,
                "generate": step["time/rollout_s"],
                "logs": {key: value for key, value in step.items() if isinstance(value, int | float)},
                "trained": trained.as_dict(),
            }
        )
        before = ended
    return records


def _trained(step: dict[str, Any], rows: list[dict[str, Any]], tokenizer: Any) -> Trained:
    """What passed through the network in training: tokens as the step counts them, attention from its rollouts.

    Where a prompt stands in several rows, or rows are padded, the attention of the repetition is not counted.
    """
    prompts = {row["group"]: row["prompt"] for row in rows}
    lengths = {group: len(tokenizer(text, add_special_tokens=False).input_ids) for group, text in prompts.items()}
    signal = {row["group"] for row in rows if row["advantage"]}
    trained = [row for row in rows if row["group"] in signal]
    pairs = sum(lengths[group] * (lengths[group] + 1) // 2 for group in signal)
    for row in trained:  # the last token of a completion predicts nothing
        inputs = row["completion_tokens"] - 1
        pairs += inputs * lengths[row["group"]] + inputs * (inputs + 1) // 2
    head_tokens = sum(row["completion_tokens"] for row in trained)
    return Trained(step["trained_tokens"], head_tokens, pairs, step["micro_batches"])


def _settings(run_dir: Path, threads: int, overrides: Sequence[str]) -> dict[str, Any]:
    config = load(run_dir / "config.yaml").config
    master = config.model.master_dtype == "float32"
    weights = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    return {
        "threads": threads,
        "weights": weights,
        "optimizer": f"AdamW on float32 masters, {config.optim.implementation}" if master else f"AdamW, {weights}",
        "master": master,
        "rounding": config.optim.rounding,
        "loss": config.algo.loss,
        "learning_rate": config.optim.lr,
        "compile": config.run.compile,
        "overrides": list(overrides),
        **{f"memory.{key}": value for key, value in config.memory.model_dump().items()},
    }


def _state_bytes(run_dir: Path, several_micro_batches: bool) -> dict[str, int]:
    """As the optimizer holds them: weights in their dtype; the bytes that a float32 master adds to them and two float32
    moments; gradients in the weights' dtype, in float32 where a step had several micro batches."""
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*/*.safetensors")
    with safe_open(checkpoint, "pt") as file:
        moments = [name for name in file.keys() if name.startswith("exp_avg_sq/")]  # noqa: SIM118 - not a mapping
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in moments)
    model = load(run_dir / "config.yaml").config.model
    of_weight = 4 if model.dtype == "float32" else 2
    of_master = {"float32": 0, "float16": 4}.get(model.dtype, 2) if model.master_dtype == "float32" else 0
    of_gradient = 4 if several_micro_batches else of_weight
    return {"weights": of_weight * count, "gradients": of_gradient * count, "optimizer": (8 + of_master) * count}


def model_size(model: Path) -> ModelSize:
    """The numbers of a Llama-shaped model that decide FLOPs."""
    config = json.loads((model / "config.json").read_text())
    return ModelSize(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocabulary=config["vocab_size"],
    )
