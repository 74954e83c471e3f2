"""Completion tokens per second of grpofit's decode loop and of `model.generate`, in turn on the same prompts.

    python vs_trl_decode.py SPEC.json RESULT.json       run in a process of its own

Owns that comparison. Must not know training. Both have bfloat16 weights of their own and the same sampling settings;
what each does before it can sample (compilation, capture) is in `first_s`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from grpofit.config import ModelConfig, TaskConfig
from grpofit.data.prompts import build_prompts
from grpofit.models.load import load_policy
from grpofit.rollout.transformers import TransformersEngine
from grpofit.types import Prompt, RolloutKey, Sampling


class Ours:
    """The engine of a training run."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._policy = load_policy(ModelConfig(name=spec["model"]), Path.cwd(), torch.device(spec["device"]))
        self._policy.model.train()
        self._engine = TransformersEngine(self._policy, None)
        self._sampling = Sampling(spec["completion_tokens"], temperature=spec["temperature"])

    def prompts(self, spec: dict[str, Any]) -> list[Prompt]:
        """The rows' prompts, each repeated for its group."""
        rows = [json.loads(line) for line in Path(spec["ordered"]).read_text().splitlines()[: spec["prompts"]]]
        task = TaskConfig(file="unused.jsonl", template="none" if isinstance(rows[0]["prompt"], str) else "chat")
        return build_prompts(rows, task, self._policy.tokenizer, 1_000_000).prompts

    def __call__(self, prompts: list[Prompt], turn: int) -> int:
        """Sample once; completion tokens."""
        keys = [RolloutKey(turn, 0, prompt.row_id, i) for i, prompt in enumerate(prompts)]
        return sum(len(c.token_ids) for c in self._engine.generate(prompts, keys, self._sampling))


class Generate:
    """`model.generate` as TRL calls it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16).to(spec["device"])
        self._eos = int(self._model.generation_config.eos_token_id)
        self._config = GenerationConfig(
            max_new_tokens=spec["completion_tokens"],
            do_sample=True,
            temperature=spec["temperature"],
            top_p=1.0,
            top_k=0,
            eos_token_id=self._eos,
            pad_token_id=self._eos,
            disable_compile=True,
        )

    @torch.no_grad()
    def __call__(self, prompts: list[Prompt], turn: int) -> int:
        """Sample once; completion tokens, the first EOS of each row included."""
        torch.manual_seed(turn)
        longest = max(len(prompt.token_ids) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self._eos)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            start = longest - len(prompt.token_ids)
            ids[row, start:], mask[row, start:] = torch.tensor(prompt.token_ids), 1
        device = self._model.device
        out = self._model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=self._config
        )
        ended = out[:, longest:] == self._eos
        before = (ended.cumsum(1) - ended.long()) == 0
        return int(before.sum())


def compare(spec: dict[str, Any]) -> dict[str, Any]:
    """Tokens/s of both, in turn, `turns` times after one warm-up each."""
    ours, theirs = Ours(spec), Generate(spec)
    prompts = [prompt for prompt in ours.prompts(spec) for _ in range(spec["group_size"])]
    sides: dict[str, Callable[[list[Prompt], int], int]] = {"grpofit": ours, "generate": theirs}
    first: dict[str, float] = {}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[int]] = {name: [] for name in sides}
    for turn in range(spec["turns"] + 1):
        for name, side in sides.items():
            started = time.perf_counter()
            count = side(prompts, turn)
            spent = time.perf_counter() - started
            if turn == 0:
                first[name] = spent
                continue
            rates[name].append(count / spent)
            tokens[name].append(count)
    return {
        "rows": len(prompts),
        "tokens": {name: median(values) for name, values in tokens.items()},
        "tokens_per_s": {name: median(values) for name, values in rates.items()},
        "ratio": median(a / b for a, b in zip(rates["grpofit"], rates["generate"], strict=True)),
        "first_s": first,
    }


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    Path(sys.argv[2]).write_text(json.dumps(compare(spec)))


if __name__ == "__main__":
    main()
