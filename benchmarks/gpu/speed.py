"""Time and memory on this device: one step of grpofit and of TRL, peaks of the checkpointing modes, decoding.

Owns what is measured. Every function runs in a process of its own, under the cap that `checkup.py` sets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from arch import ARCHITECTURES, made_up_rollouts, make_folder, open_parts, write_prompts
from transformers import AutoModelForCausalLM, GenerationConfig, PrinterCallback

from grpofit.training.step import collect, rollout_keys, update

MODEL = "qwen2.5-0.5b"
_STEPS = 4  # the first is warm-up


def sizes(tiny: bool) -> dict[str, int]:
    """Counts and lengths of a step."""
    if tiny:
        return {"prompts_per_step": 2, "group_size": 4, "prompt_tokens": 24, "max_completion_tokens": 8}
    return {"prompts_per_step": 8, "group_size": 8, "prompt_tokens": 512, "max_completion_tokens": 256}


def setup(folder: Path, tiny: bool, name: str = MODEL) -> tuple[Path, Path, dict[str, int]]:
    """Model folder, prompts, and the rollout counts of a step."""
    size = sizes(tiny)
    vocab_size = 512 if tiny else ARCHITECTURES[name][1]["vocab_size"]
    made = make_folder(name, folder / name, tiny=tiny)
    lengths = [size["prompt_tokens"]] * (size["prompts_per_step"] * (_STEPS + 1))
    prompts = write_prompts(folder / f"{name}.jsonl", lengths, vocab_size)
    return made, prompts, {key: value for key, value in size.items() if key != "prompt_tokens"}


def synchronised() -> float:
    """Seconds now, once the device has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peaks() -> dict[str, float | None]:
    """Allocated and reserved since the last `reset`, GiB; None without CUDA."""
    if not torch.cuda.is_available():
        return {"allocated_gib": None, "reserved_gib": None}
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def reset() -> None:
    """Start counting peaks anew."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_ours(folder: Path, tiny: bool) -> dict[str, Any]:
    """Whole steps of grpofit, bfloat16 weights with float32 masters."""
    made, prompts, counts = setup(folder, tiny)
    parts = open_parts(made, prompts, counts, {"run.steps": _STEPS})
    try:
        reset()
        steps = []
        for step in range(_STEPS):
            started = synchronised()
            rollouts, _ = collect(parts, step, _STEPS)
            sampled = synchronised()
            update(parts, rollouts, 1e-6)
            ended = synchronised()
            tokens = sum(len(r.completion.token_ids) for r in rollouts)
            steps.append({"step_s": ended - started, "rollout_s": sampled - started, "train_s": ended - sampled,
                          "completion_tokens": tokens})  # fmt: skip
        return {"settings": "bfloat16, float32 masters", **_medians(steps), **peaks(), "steps": steps}
    finally:
        parts.rewards.close()


def measure_trl(folder: Path, tiny: bool, *, liger: bool = False) -> dict[str, Any]:
    """Whole steps of TRL with bfloat16 weights and its own defaults; bfloat16 moments, so less state than grpofit."""
    for package in ("trl", "datasets", *(["liger_kernel"] if liger else [])):
        if find_spec(package) is None:
            return {"skipped": f"{package} is not installed"}
    import vs_trl_theirs

    made, prompts, counts = setup(folder, tiny)
    spec = {
        "shape": {"prompts": counts["prompts_per_step"], "group_size": counts["group_size"],
                  "completion_tokens": counts["max_completion_tokens"], "reward": "every_group"},
        "model": str(made), "ordered": str(prompts), "weights": "bfloat16", "autocast": True, "micro_batch": 8,
        "checkpointing": True, "temperature": 1.0, "loss": "dapo", "lr": 1e-6, "steps": _STEPS, "seed": 1,
        "device": "cuda" if torch.cuda.is_available() else "cpu", "liger": liger, "plain_words": True,
    }  # fmt: skip
    trainer = vs_trl_theirs.make_trainer(spec, str(folder / "trl"))
    stopwatch = vs_trl_theirs.Stopwatch()
    stopwatch.wrap(trainer, "_generate_and_score_completions", "rollout")
    callback = vs_trl_theirs.StepRecords(stopwatch)
    trainer.add_callback(callback)
    trainer.remove_callback(PrinterCallback)
    reset()
    trainer.train()
    rows = counts["prompts_per_step"] * counts["group_size"]
    steps = [
        {"step_s": r["step_s"], "rollout_s": r["rollout"], "train_s": r["step_s"] - r["rollout"],
         "completion_tokens": r["logs"]["completions/mean_length"] * rows}
        for r in callback.records
    ]  # fmt: skip
    return {"settings": vs_trl_theirs.settings_used(trainer), **_medians(steps), **peaks(), "steps": steps}


def measure_trl_liger(folder: Path, tiny: bool) -> dict[str, Any]:
    """TRL with Liger's kernels, if they are installed."""
    if not torch.cuda.is_available():
        return {"skipped": "Liger's kernels need a GPU"}
    return measure_trl(folder, tiny, liger=True)


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {key: median(step[key] for step in steps[1:]) for key in steps[0]}


def measure_modes(folder: Path, tiny: bool) -> dict[str, Any]:
    """Peak and time of one update under each checkpointing mode, everything in one micro batch, and plain rows."""
    made, prompts, counts = setup(folder, tiny)
    size = sizes(tiny)
    plain = {"packing": "none", "logprob_chunk_tokens": "none"}
    ways: dict[str, Mapping[str, Any]] = {
        "none": {},
        "selective": {"checkpointing": "selective"},
        "full": {"checkpointing": "full"},
        "offload": {"checkpointing": "offload"},
        "full, MLP tile": {"checkpointing": "full", "mlp_tile_tokens": 1024},
        "plain rows, full logits, full": {**plain, "checkpointing": "full"},
    }
    figures: dict[str, Any] = {}
    for name, keys in ways.items():
        overrides = {f"memory.{key}": value for key, value in {"micro_batch_tokens": "none", **keys}.items()}
        parts = open_parts(made, prompts, counts, overrides)
        try:
            chosen = parts.prompts[: max(2, size["prompts_per_step"] // 2)]
            lengths = [size["max_completion_tokens"]]
            rollouts = made_up_rollouts(chosen, counts["group_size"], lengths, parts.policy.model.config.vocab_size)
            update(parts, rollouts, 0.0)
            reset()
            started = synchronised()
            update(parts, rollouts, 0.0)
            figures[name] = {"update_s": synchronised() - started, **peaks()}
        except torch.OutOfMemoryError as error:
            figures[name] = {"out_of_memory": str(error).splitlines()[0]}
        finally:
            parts.rewards.close()
            del parts
            reset()
    return figures


def measure_decode(folder: Path, tiny: bool) -> dict[str, Any]:
    """Completion tokens/s of the engine and of `model.generate`, in turn."""
    made, prompts, counts = setup(folder, tiny)
    parts = open_parts(made, prompts, counts, {})
    model: Any = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
    model.to(parts.policy.device)
    config = GenerationConfig(
        max_new_tokens=counts["max_completion_tokens"], do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
        eos_token_id=1, pad_token_id=0, disable_compile=True,
    )  # fmt: skip
    chosen = parts.prompts[: counts["prompts_per_step"]]
    rows = [prompt for prompt in chosen for _ in range(counts["group_size"])]
    ids = torch.tensor([prompt.token_ids for prompt in rows], device=model.device)

    def engine(turn: int) -> int:
        keys = rollout_keys(chosen, counts["group_size"], seed=turn, step=0)
        done = parts.engine.generate(rows, keys, parts.settings.sampling)
        return sum(len(completion.token_ids) for completion in done)

    def generate(turn: int) -> int:
        torch.manual_seed(turn)
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        ended = out[:, ids.shape[1] :] == 1
        return int(((ended.cumsum(1) - ended.long()) == 0).sum())

    try:
        sides: dict[str, Callable[[int], int]] = {"engine": engine, "generate": generate}
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(3):
            for name, side in sides.items():
                started = synchronised()
                count = side(turn)
                rates[name].append(count / (synchronised() - started))
        found = {f"{name}_tokens_per_s": median(values[1:]) for name, values in rates.items()}
        return {**found, "ratio": found["engine_tokens_per_s"] / found["generate_tokens_per_s"]}
    finally:
        parts.rewards.close()


def write(result: Any, path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(result, indent=1))
