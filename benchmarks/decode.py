"""How fast are rollouts? grpofit's decoding and `model.generate` in turn, in one process, on the same prompts.

    python benchmarks/decode.py                                  # smollm2-arithmetic: its real rollouts, 8 x 8 x 24
    python benchmarks/decode.py --model runs/latest/final        # the same, with trained weights
    python benchmarks/decode.py --turns 9 --json decode.json

Three tables: completion tokens/s where rows end by themselves; at a fixed length, no row ending; and where the time
of a decode step goes. Both sides sample at the recipe's temperature from the whole vocabulary, in the recipe's dtype;
`generate` has sdpa attention and its default cache. Figures are medians over turns; a row's tokens count up to its
first EOS. Exit code 1 if a ratio is below its goal.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from grpofit.config import Config, load
from grpofit.data.prompts import build_prompts, prompts_for_step
from grpofit.data.tasks import load_task
from grpofit.models.load import Policy, load_policy
from grpofit.rollout.sampling import sample_tokens
from grpofit.rollout.transformers import TransformersEngine
from grpofit.training.setup import choose_device, set_threads
from grpofit.types import Prompt, RolloutKey, Sampling


class Ours:
    """grpofit's engine as a training run has it."""

    def __init__(self, policy: Policy, sampling: Sampling, *, endless: bool) -> None:
        if endless:
            policy = dataclasses.replace(policy, eos_token_ids=(vocabulary(policy),))
        self._engine = TransformersEngine(policy, None)
        self._sampling = sampling
        self.notes = self._engine.notes

    def __call__(self, rows: Sequence[Prompt], turn: int) -> int:
        """Sample once; completion tokens."""
        keys = [RolloutKey(0, turn, prompt.row_id, i) for i, prompt in enumerate(rows)]
        return sum(len(completion.token_ids) for completion in self._engine.generate(rows, keys, self._sampling))


class Generate:
    """`model.generate` of transformers."""

    def __init__(self, policy: Policy, sampling: Sampling, *, endless: bool) -> None:
        self._model = policy.model.eval()
        self._eos = torch.tensor([vocabulary(policy)] if endless else policy.eos_token_ids, device=policy.device)
        self._settings = {
            "do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0, "use_cache": True,
            "max_new_tokens": sampling.max_completion_tokens, "eos_token_id": self._eos.tolist(), "pad_token_id": 0,
        }  # fmt: skip

    @torch.no_grad()
    def __call__(self, rows: Sequence[Prompt], turn: int) -> int:
        """Sample once; completion tokens."""
        torch.manual_seed(turn)
        longest = max(len(prompt.token_ids) for prompt in rows)
        ids = torch.tensor([(0,) * (longest - len(p.token_ids)) + p.token_ids for p in rows])
        mask = torch.tensor([[0] * (longest - len(p.token_ids)) + [1] * len(p.token_ids) for p in rows])
        device = self._model.device
        out = self._model.generate(ids.to(device), attention_mask=mask.to(device), **self._settings)[:, longest:]
        ends = torch.isin(out, self._eos).long()
        return int((ends.cumsum(1) - ends == 0).sum())


def vocabulary(policy: Policy) -> int:
    """Its size, which is no token's id."""
    return int(policy.model.get_output_embeddings().weight.shape[0])


def compare(sides: dict[str, Any], batches: Sequence[Sequence[Prompt]]) -> dict[str, Any]:
    """Tokens/s of both sides in turn on every batch; the first batch warms up and does not count."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[int]] = {name: [] for name in sides}
    for turn, rows in enumerate(batches):
        for name, side in sides.items():
            started = synchronised()
            count = side(rows, turn)
            spent = synchronised() - started
            if turn > 0:
                rates[name].append(count / spent)
                tokens[name].append(count)
    return {
        "rows": len(batches[0]),
        "tokens": {name: median(values) for name, values in tokens.items()},
        "tokens_per_s": {name: median(values) for name, values in rates.items()},
        "ratio": median(a / b for a, b in zip(*rates.values(), strict=True)),
    }


def synchronised() -> float:
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def step_parts(policy: Policy, prompts: Sequence[Prompt], sampling: Sampling, turns: int) -> dict[str, Any]:
    """Medians in ms: reading the prompts, the forward of a step, drawing its tokens; and how `generate` draws them."""
    policy.model.eval()
    engine = TransformersEngine(policy, None)
    parts: dict[str, list[float]] = {"prefill": [], "forward": [], "sampling": [], "generate's sampling": []}

    def timed(part: str, work: Callable[[], Any]) -> Any:
        started = synchronised()
        result = work()
        parts[part].append(1e3 * (synchronised() - started))
        return result

    token_ids = [prompt.token_ids for prompt in prompts]
    uniforms = torch.rand(len(prompts), dtype=torch.float64, device=policy.device)
    for _ in range(turns):
        decoder = timed("prefill", lambda: engine.decoder(token_ids, sampling.max_completion_tokens))
        logits = decoder.logits
        for _ in range(sampling.max_completion_tokens - 1):
            ids, _ = timed("sampling", lambda logits=logits: sample_tokens(logits, uniforms, sampling))
            logits = timed("forward", lambda decoder=decoder, ids=ids: decoder.step(ids))
        timed("generate's sampling", lambda logits=logits: torch.multinomial(
            (logits.float() / (sampling.temperature or 1.0)).softmax(-1), 1))  # fmt: skip
    return {"rows": len(prompts), "ms": {part: median(values) for part, values in parts.items()}}


def rows_of(prompts: list[Prompt], config: Config, turn: int) -> list[Prompt]:
    """The rows of a training step."""
    chosen = prompts_for_step(prompts, config.rollout.prompts_per_step, config.run.seed, turn)
    return [prompt for prompt in chosen for _ in range(config.rollout.group_size)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-arithmetic")
    parser.add_argument("--model", help="a folder with other weights, such as a run's final/")
    parser.add_argument("--tokens", type=int, default=24, help="longest completion (default 24)")
    parser.add_argument("--fixed-rows", type=int, default=32)
    parser.add_argument("--fixed-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--goals", type=float, nargs=2, default=[2.5, 1.7], metavar=("ROLLOUTS", "FIXED"))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Measure, print, write the JSON."""
    args = parse()
    transformers.utils.logging.disable_progress_bar()
    resolved = load(args.recipe)
    config = resolved.config
    device = choose_device("auto")
    threads = set_threads("auto")
    settings = config.model.model_copy(update={"name": args.model}) if args.model else config.model
    policy = load_policy(settings, Path.cwd(), device)
    other = load_policy(settings.model_copy(update={"attention": "auto"}), Path.cwd(), device)
    task = load_task(config.task, resolved.base_dir)
    prompts = build_prompts(task.train, config.task, policy.tokenizer, config.rollout.max_prompt_tokens).prompts
    free = Sampling(args.tokens, temperature=config.rollout.temperature)
    fixed = Sampling(args.fixed_tokens, temperature=config.rollout.temperature)
    batches = [rows_of(prompts, config, turn) for turn in range(args.turns + 1)]
    few = [rows[: args.fixed_rows] for rows in batches]

    print(f"{settings.name}, {policy.model.dtype}, {device}, {threads} threads")
    record: dict[str, Any] = {"model": settings.name, "device": str(device), "threads": threads}
    missed = False
    for name, sampling, rows, endless, goal in (
        ("real rollouts", free, batches, False, args.goals[0]),
        ("fixed length", fixed, few, True, args.goals[1]),
    ):
        sides = {
            "grpofit": Ours(policy, sampling, endless=endless),
            "generate": Generate(other, sampling, endless=endless),
        }
        record[name] = found = compare(sides, rows)
        missed |= found["ratio"] < goal
        print(
            f"{name}: {found['rows']} rows, at most {sampling.max_completion_tokens} tokens: "
            + ", ".join(f"{side} {rate:,.0f} tokens/s" for side, rate in found["tokens_per_s"].items())
            + f"; {found['ratio']:.2f} times (goal {goal})", flush=True,
        )  # fmt: skip
        for note in sides["grpofit"].notes:
            print(f"  {note}")
    record["step"] = [step_parts(policy, batches[0][:count], free, 2) for count in (len(batches[0]), args.fixed_rows)]
    for step in record["step"]:
        print(f"{step['rows']} rows: " + ", ".join(f"{part} {ms:.1f} ms" for part, ms in step["ms"].items()))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
