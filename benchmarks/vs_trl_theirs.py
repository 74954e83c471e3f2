"""One run of TRL's GRPOTrainer in this process; its figures go to a JSON file.

    python vs_trl_theirs.py SPEC.json RESULT.json

Owns TRL's settings, written out in full. Must not import grpofit, so that nothing of ours is counted or helps.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")

import torch
import transformers
import trl
import vs_trl_rewards
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]


class Stopwatch:
    """Seconds per phase of the step in progress, by wrapping the trainer's own methods."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, phase: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[phase] += time.perf_counter() - started

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


class StepRecords(TrainerCallback):
    """One record a step: from the end of the step before (or the start of training) to this step's end."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.records: list[dict[str, Any]] = []
        self._mark = self._tokens = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._mark = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        taken = self.stopwatch.take()
        spent = sum(taken.get(name, 0.0) for name in ("rollout", "forward", "backward"))
        self.records.append({"step_s": now - self._mark, **taken, "update": now - self._mark - spent})
        self._mark = now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if self.records and logs and "reward" in logs:
            own = {key: value for key, value in logs.items() if isinstance(value, int | float)}
            total = own["num_tokens"]  # TRL logs the total so far
            self.records[-1]["logs"] = own | {"num_tokens": total - self._tokens}
            self._tokens = total


def make_trainer(spec: dict[str, Any], folder: str) -> GRPOTrainer:
    shape = spec["shape"]
    rows = shape["prompts"] * shape["group_size"]
    micro_batch = min(spec["micro_batch"] or rows, rows)
    config = GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": spec["weights"]},
        bf16=spec["autocast"],
        gradient_checkpointing=spec["checkpointing"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        num_generations=shape["group_size"],
        max_completion_length=shape["completion_tokens"],
        temperature=spec["temperature"],
        loss_type=spec["loss"],
        beta=0.0,
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=spec["steps"],
        shuffle_dataset=False,
        seed=spec["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=spec["device"] == "cpu",
        use_liger_kernel=spec.get("liger", False),
    )
    ordered = [json.loads(line) for line in Path(spec["ordered"]).read_text().splitlines()]
    return GRPOTrainer(
        model=spec["model"],
        reward_funcs=getattr(vs_trl_rewards, shape["reward"]),
        args=config,
        train_dataset=Dataset.from_list(ordered),
        processing_class=PreTrainedTokenizerFast.from_pretrained(spec["model"]) if spec.get("plain_words") else None,
    )


def settings_used(trainer: GRPOTrainer) -> dict[str, Any]:
    """What decides speed and memory, as the trainer holds it."""
    args, model = trainer.args, trainer.model
    assert isinstance(args, GRPOConfig) and isinstance(model, PreTrainedModel)
    parameter = next(model.parameters())
    return {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "weights": str(parameter.dtype).removeprefix("torch."),
        "bf16_autocast": args.bf16,
        "optimizer": str(args.optim),
        "micro_batch_rows": args.per_device_train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "gradient_checkpointing": args.gradient_checkpointing,
        "attention": model.config._attn_implementation,
        "loss": args.loss_type,
        "learning_rate": args.learning_rate,
    }


def state_bytes(trainer: GRPOTrainer) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state as they are held, tied weights once."""
    assert isinstance(trainer.model, PreTrainedModel)
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    state: dict[Any, dict[str, Any]] = optimizer.state
    moments = [value for values in state.values() for value in values.values() if torch.is_tensor(value)]
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    return {"weights": weights, "gradients": weights, "optimizer": sum(v.nbytes for v in moments)}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(spec, folder)
        stopwatch = Stopwatch()
        stopwatch.wrap(trainer, "_generate_and_score_completions", "rollout")
        stopwatch.wrap(trainer, "_generate_single_turn", "generate")
        stopwatch.wrap(trainer, "_compute_loss", "forward")
        stopwatch.wrap(trainer.accelerator, "backward", "backward")
        callback = StepRecords(stopwatch)
        trainer.add_callback(callback)
        trainer.train()
    result = {
        "settings": settings_used(trainer),
        "state_bytes": state_bytes(trainer),
        "records": callback.records,
    }
    Path(sys.argv[2]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
