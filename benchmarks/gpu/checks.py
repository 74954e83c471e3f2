"""Correctness on this device: packed rows, chunked logprobs, recomputation, decoding, each against a plain path.

The plain path is the model of transformers itself: one unpadded row at a time, full logits, autograd, no cache. It
shares the loss formula with grpofit and nothing else. Must not measure time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arch import ARCHITECTURES, made_up_rollouts, make_folder, open_parts, write_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpofit.algo.losses import count_denominator, policy_loss
from grpofit.data.batching import make_micro_batches
from grpofit.models.attention import reading_packed_rows
from grpofit.rollout.sampling import keyed_uniforms, sample_tokens
from grpofit.training.step import StepParts, policy_logprobs, rollout_keys, update
from grpofit.types import Prompt, Rollout

FLOAT32_GRADIENT = 2e-5  # relative; sums in another order
FLOAT32_LOGPROB = 1e-4  # absolute
BFLOAT16_FACTOR = 1.3  # not further from float32 than transformers' own bfloat16, times this
_GROUP_SIZE = 4
_PROMPTS = (37, 5, 70, 19)
_COMPLETIONS = (21, 3, 40, 1, 33, 17)
_WINDOW = 16  # shorter than the rows
_MAX_VOCAB = 65536
_BUDGET = 150  # of tokens: groups are split over rows
# checkpointing, MLP tile, packing
_RECOMPUTED: tuple[tuple[str, str | int, str], ...] = (
    ("selective", "none", "auto"),
    ("full", "none", "auto"),
    ("offload", "none", "auto"),
    ("none", 11, "auto"),
    ("full", 11, "auto"),
    ("selective", "none", "none"),
    ("offload", 11, "none"),
)


@dataclass(frozen=True)
class Check:
    """One figure against its limit: it must not be above."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """False for nan, too."""
        return self.value <= self.limit


class Case:
    """A small deep model of one architecture with rollouts made up for it, and the plain path's answers."""

    def __init__(self, architecture: str, folder: Path, *, tiny: bool) -> None:
        self.name = architecture
        self.folder = make_folder(
            architecture, folder / architecture, tiny=tiny, layers=2, max_vocab=_MAX_VOCAB, window=_WINDOW
        )
        self.vocab_size = 512 if tiny else min(ARCHITECTURES[architecture][1]["vocab_size"], _MAX_VOCAB)
        self.prompts = write_prompts(folder / f"{architecture}.jsonl", _PROMPTS, self.vocab_size)
        self._plain: dict[torch.dtype, tuple[list[Tensor], dict[str, Tensor]]] = {}

    @contextmanager
    def parts(self, overrides: Mapping[str, Any]) -> Iterator[tuple[StepParts, list[Rollout]]]:
        """grpofit's parts with the given keys, and the rollouts."""
        counts = {"prompts_per_step": len(_PROMPTS), "group_size": _GROUP_SIZE, "max_completion_tokens": 40}
        parts = open_parts(self.folder, self.prompts, counts, {"model.dtype": "float32", **overrides})
        try:
            yield parts, made_up_rollouts(parts.prompts, _GROUP_SIZE, _COMPLETIONS, self.vocab_size)
        finally:
            parts.rewards.close()
            del parts
            clear()

    def ours(self, overrides: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Logprobs of the rows that are trained, and the gradient, of one update."""
        with self.parts(overrides) as (parts, rollouts):
            trained = [r for r in rollouts if r.group % 4 != 3]
            logprobs = _our_logprobs(parts, trained)
            gradient: dict[str, Tensor] = {}
            for name, parameter in parts.policy.model.named_parameters():
                parameter.register_hook(_adder(gradient, name))
            update(parts, rollouts, 0.0)
            return logprobs, gradient

    def plain(self, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The same by the plain path, computed once per dtype."""
        if dtype not in self._plain:
            with self.parts({}) as (parts, rollouts):
                loss = parts.settings.loss
            model = _plain_model(self.folder, dtype)
            temperature = 1.0
            rows = [r for r in rollouts if r.group % 4 != 3]
            denominator = count_denominator([len(r.completion.token_ids) for r in rollouts], micro_batches=1)
            logprobs = []
            for row in rows:  # one backward a row: the loss is a sum over rows
                values = _plain_logprobs(model, row, temperature)
                mask, advantage = torch.ones_like(values)[None], torch.tensor([row.advantage], device=values.device)
                policy_loss(loss, values[None], None, advantage, mask, denominator).loss.backward()
                logprobs.append(values.detach())
            gradient = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
            self._plain[dtype] = logprobs, gradient
            del model
            clear()
        return self._plain[dtype]


def clear() -> None:
    """Give freed memory back before the next case."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _adder(sums: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def add(gradient: Tensor) -> None:
        sums[name] = sums[name] + gradient.float() if name in sums else gradient.float()

    return add


def _plain_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Eager attention: it knows every window and softcap."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    assert isinstance(model, PreTrainedModel)
    return model


def _plain_logprobs(model: PreTrainedModel, row: Rollout, temperature: float) -> Tensor:
    """Logprobs [T] float32 of a completion."""
    prompt, completion = row.prompt.token_ids, row.completion.token_ids
    ids = torch.tensor([prompt + completion], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


@torch.no_grad()
def _our_logprobs(parts: StepParts, rows: Sequence[Rollout]) -> list[Tensor]:
    """Logprobs [T] of every row, as the step lays them out."""
    found: dict[int, Tensor] = {}
    with reading_packed_rows(*parts.models) if parts.packed else nullcontext():
        batches = make_micro_batches(
            rows,
            packed=parts.packed,
            budget_tokens=parts.settings.memory.micro_batch_tokens,
            pad_token_id=parts.policy.pad_token_id,
            mask_truncated=False,
            device=parts.policy.device,
        )
        for batch in batches:
            values, _ = policy_logprobs(parts, batch)
            for i, row in enumerate(batch.rows):
                found[row] = values[i, : len(rows[row].completion.token_ids)]
    return [found[i] for i in range(len(rows))]


def gradient_error(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """|got - expected| / |expected| over all weights; infinite where a gradient is missing."""
    if got.keys() != expected.keys():
        return float("inf")
    gaps = torch.stack([(got[name] - expected[name]).double().square().sum() for name in expected])
    sizes = torch.stack([value.double().square().sum() for value in expected.values()])
    return float((gaps.sum() / sizes.sum()).sqrt())


def logprob_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of a token."""
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(got, expected, strict=True))


def logprob_spread(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Root mean square of the differences of all tokens."""
    return float((torch.cat(list(got)).float() - torch.cat(list(expected)).float()).square().mean().sqrt())


def against_plain(case: Case, what: str, overrides: Mapping[str, Any]) -> list[Check]:
    """Float32: logprobs and gradient of one update against the plain path."""
    logprobs, gradient = case.ours(overrides)
    plain_logprobs, plain_gradient = case.plain(torch.float32)
    return [
        Check(f"{case.name}, {what}: logprobs", logprob_error(logprobs, plain_logprobs), FLOAT32_LOGPROB),
        Check(f"{case.name}, {what}: gradient", gradient_error(gradient, plain_gradient), FLOAT32_GRADIENT),
    ]


def check_packing(folder: Path, tiny: bool) -> Iterator[Check]:
    """Every family, packed and plain rows, in float32; packed rows in bfloat16 beside transformers' own bfloat16."""
    for name in (
        "qwen2.5-0.5b",
        "qwen3-0.6b",
        "llama-3.2-1b",
        "mistral-7b",
        "phi-3-mini",
        "gemma-3-270m",
        "gemma-2-2b",
    ):
        case = Case(name, folder, tiny=tiny)
        with case.parts({}) as (parts, _):
            yield Check(f"{name}: rows are packed (0: yes)", float(not parts.packed), 0.0)
        yield from against_plain(case, "packed", {"memory.micro_batch_tokens": "none"})
        yield from against_plain(case, "packed, split", {"memory.micro_batch_tokens": _BUDGET})
        yield from against_plain(case, "plain rows", {"memory.packing": "none", "memory.micro_batch_tokens": _BUDGET})
        exact_logprobs, exact_gradient = case.plain(torch.float32)
        logprobs, gradient = case.ours({"model.dtype": "bfloat16", "memory.micro_batch_tokens": _BUDGET})
        theirs, their_gradient = case.plain(torch.bfloat16)
        limit = BFLOAT16_FACTOR * gradient_error(their_gradient, exact_gradient)
        yield Check(f"{name}, packed bfloat16: gradient", gradient_error(gradient, exact_gradient), limit)
        limit = BFLOAT16_FACTOR * logprob_spread(theirs, exact_logprobs)
        yield Check(f"{name}, packed bfloat16: logprobs", logprob_spread(logprobs, exact_logprobs), limit)


def check_logprobs(folder: Path, tiny: bool) -> Iterator[Check]:
    """Chunks that do not divide, one token, everything at once; with and without softcapped logits."""
    for name in ("qwen2.5-0.5b", "phi-3-mini", "gemma-2-2b"):
        case = Case(name, folder, tiny=tiny)
        for chunk in ("none", 7, 1):
            yield from against_plain(case, f"logprob chunk {chunk}", {"memory.logprob_chunk_tokens": chunk})


def check_recompute(folder: Path, tiny: bool) -> Iterator[Check]:
    """Every checkpointing mode and tiled MLPs, packed and plain."""
    for name in ("qwen2.5-0.5b", "gemma-2-2b"):
        case = Case(name, folder, tiny=tiny)
        for mode, tile, packing in _RECOMPUTED:
            what = f"checkpointing {mode}, MLP tile {tile}, packing {packing}"
            keys = {"checkpointing": mode, "mlp_tile_tokens": tile, "packing": packing, "micro_batch_tokens": _BUDGET}
            yield from against_plain(case, what, {f"memory.{key}": value for key, value in keys.items()})
        if not tiny:  # minutes on a CPU
            yield from against_plain(case, "compiled layers", {"run.compile": "layers"})


def check_decode(folder: Path, tiny: bool) -> Iterator[Check]:
    """The engine against decoding without a cache; twice, with other rows and changed weights in between.

    Whatever the engine captured in its first rollout must see the second one's weights, rows and lengths.
    """
    for name in ("qwen2.5-0.5b", "gemma-3-270m", "gemma-2-2b"):
        made = make_folder(
            name, folder / f"decode-{name}", tiny=tiny, layers=2, max_vocab=_MAX_VOCAB, window=_WINDOW, eos_every=25
        )
        prompts = write_prompts(folder / f"decode-{name}.jsonl", (9, 30, 21, 4, 50, 33), 512)
        counts = {"prompts_per_step": 4, "group_size": _GROUP_SIZE, "max_completion_tokens": 24}
        for dtype in ("float32", "bfloat16"):
            parts = open_parts(made, prompts, counts, {"model.dtype": dtype})
            try:
                yield from _two_rollouts(parts, f"{name} {dtype}", exact=dtype == "float32")
            finally:
                parts.rewards.close()
                del parts
                clear()


def _two_rollouts(parts: StepParts, what: str, *, exact: bool) -> Iterator[Check]:
    for turn, chosen in enumerate((parts.prompts[:4], parts.prompts[3:])):
        rows = [prompt for prompt in chosen for _ in range(_GROUP_SIZE)]
        keys = rollout_keys(chosen, _GROUP_SIZE, seed=1, step=turn)
        completions = parts.engine.generate(rows, keys, parts.settings.sampling)
        uniforms = keyed_uniforms(keys, parts.settings.sampling.max_completion_tokens)
        differ, gaps = 0, []
        for row, completion in enumerate(completions):
            if exact:
                differ += completion.token_ids != _decode_without_cache(parts, rows[row], uniforms[row])
            rollout = Rollout(rows[row], completion, 0, 0)
            with torch.no_grad():
                again = _plain_logprobs(parts.policy.model, rollout, parts.settings.sampling.temperature)
            gaps.append((again.cpu() - torch.tensor(completion.sampler_logprobs)).abs())
        if exact:
            yield Check(f"{what}, rollout {turn + 1}: completions that differ", float(differ), 0.0)
        mean = float(torch.cat(gaps).mean())
        yield Check(f"{what}, rollout {turn + 1}: sampler's logprobs, mean gap", mean, 1e-4 if exact else 0.05)
        groups = [
            Rollout(rows[i], c, i // _GROUP_SIZE, i % _GROUP_SIZE, advantage=(-1.0) ** i)
            for i, c in enumerate(completions)
        ]
        update(parts, groups, 1e-2)  # far enough that stale weights would show


@torch.no_grad()
def _decode_without_cache(parts: StepParts, prompt: Prompt, uniforms: Tensor) -> tuple[int, ...]:
    """One row, the whole text through the model for every token. uniforms: [T]."""
    model, sampling = parts.policy.model, parts.settings.sampling
    model.eval()
    ids = list(prompt.token_ids)
    for position in range(sampling.max_completion_tokens):
        logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[:, -1]
        drawn, _ = sample_tokens(logits, uniforms[position : position + 1].to(model.device), sampling)
        ids.append(int(drawn))
        if ids[-1] in parts.policy.eos_token_ids:
            break
    model.train()
    return tuple(ids[len(prompt.token_ids) :])
