"""Same rollouts, same weights: TRL's loss and gradients against grpofit's.

    python benchmarks/parity_trl.py [--loss dapo grpo ...] [--variant off-policy ...] [--json FILE]

For every loss that TRL also has, a real `GRPOTrainer` on a tiny random Llama (float32, CPU, built here, nothing is
downloaded) gets fixed ragged rollouts through its own `rollout_func`, computes rewards, advantages, old and reference
logprobs, splits them into micro batches, and runs its own `training_step` on each, as its training loop does. grpofit
gets the same rollouts and weights: a plain padded forward, `chunked_logprobs`, `policy_loss`, in micro batches cut
differently from TRL's (but for `bnpo`, which depends on the cut).

Printed per case: relative difference of the step's loss and the largest relative difference of a parameter's gradient
(norm of the difference over norm of TRL's). Where TRL computes something else on purpose or by accident, `DIFFERENCES`
says what; the difference must then vanish when that one thing is computed TRL's way. Exit code 1 when a figure is over
1e-4 and not explained so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl_step import (
    GROUP_SIZE,
    MAX_COMPLETION_TOKENS,
    REWARD_WEIGHTS,
    REWARDS,
    ROWS,
    TEMPERATURE,
    Rollouts,
    Trl,
    TrlStep,
    copied,
    make_model,
    make_rollouts,
    padded,
    quiet,
)

from grpofit.algo.advantages import advantages
from grpofit.algo.logprobs import chunked_logprobs
from grpofit.algo.losses import ALGORITHMS, Denominator, LossSpec, count_denominator, policy_loss

TOLERANCE = 1e-4
LOSS_FLOOR = 0.01  # a loss nearer to 0 than this is compared absolutely: its terms are of size 1 and cancel
OUR_MICRO_BATCHES = [[7, 0, 11, 15, 4, 2], [9], [1, 3, 14, 5, 6, 13, 8, 10, 12]]

# TRL's names for what `algo.loss` names. GSPO is a setting there, not a loss.
TRL_LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo"},
}
# Clips (low, high, delta) narrow enough to act on these rollouts.
CLIPS = {"gspo": (0.06, 0.08, 1.12), "cispo": (0.2, 1.1, 0.0)}
OTHER_CLIPS = (0.2, 0.28, 1.3)
SURROGATE = ("dapo", "grpo", "dr_grpo", "bnpo", "gspo")


@dataclass(frozen=True)
class Variant:
    """One way to run every loss: TRL's settings, ours, and the shape of the step."""

    trl: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    losses: tuple[str, ...] = tuple(TRL_LOSSES)
    off_policy: bool = True
    full_length: bool = False
    delta: bool = False
    updates: int = 1  # optimizer updates per batch of rollouts


SEQUENCE = {"importance_sampling_level": "sequence"}
VARIANTS = {
    "on-policy": Variant(off_policy=False),
    "off-policy": Variant(),
    "sequence ratio": Variant(SEQUENCE, {"ratio": "sequence"}, ("dapo", "dr_grpo", "bnpo", "cispo", "sapo")),
    "kl": Variant({"beta": 0.1}, {"beta": 0.1}),
    "delta": Variant(losses=SURROGATE, delta=True),
    "truncated masked": Variant({"mask_truncated_completions": True}),
    "all together": Variant(
        {"beta": 0.1, "mask_truncated_completions": True}, {"beta": 0.1}, losses=SURROGATE, delta=True
    ),
    "entropy, equal lengths": Variant({"entropy_coef": 0.1}, {"entropy_bonus": 0.1}, full_length=True),
    "entropy": Variant({"entropy_coef": 0.1}, {"entropy_bonus": 0.1}),
    "two updates a batch": Variant(updates=2),
}


class Ours:
    """grpofit's side: plain padded forward, chunked logprobs, policy loss."""

    def __init__(self, rollouts: Rollouts, trl: TrlStep, reference: dict[str, Tensor], mask_truncated: bool) -> None:
        self.rollouts, self.trl = rollouts, trl
        self.model = make_model()
        self.reference, self.mask_truncated = reference, mask_truncated
        self.clipped = 0.0

    def logprobs(self, rows: list[int], entropy_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Policy logprobs, entropies and completion mask, each [len(rows), T]; prompt and completion unbroken."""
        sequences = [self.rollouts.prompts[i] + self.rollouts.completions[i] for i in rows]
        width = max(map(len, sequences))
        token_ids = torch.tensor([padded(ids, width) for ids in sequences])
        attention_mask = torch.tensor([[int(t < len(ids)) for t in range(width)] for ids in sequences])
        hidden = self.model.model(input_ids=token_ids, attention_mask=attention_mask).last_hidden_state
        starts = torch.tensor([[len(self.rollouts.prompts[i])] for i in rows])
        lengths = torch.tensor([[len(self.rollouts.completions[i])] for i in rows])
        columns = torch.arange(int(lengths.max()))
        exists = columns < lengths
        positions = (starts + columns).clamp(max=width - 1)
        row, column = exists.nonzero(as_tuple=True)
        at = positions[row, column]
        logprobs, entropy = chunked_logprobs(
            hidden[row, at - 1],
            self.model.lm_head.weight,
            token_ids[row, at],
            temperature=TEMPERATURE,
            chunk_tokens=5,
            with_entropy=True,
            entropy_gradient=entropy_gradient,
        )
        assert entropy is not None
        blank = torch.full(exists.shape, torch.nan)
        kept = torch.tensor([[not (self.mask_truncated and self.rollouts.truncated()[i])] for i in rows])
        return blank.index_put((row, column), logprobs), blank.index_put((row, column), entropy), exists & kept

    def with_weights(self, weights: dict[str, Tensor] | None, rows: list[int]) -> Tensor | None:
        if weights is None:
            return None
        self.model.load_state_dict(weights)
        with torch.no_grad():
            return self.logprobs(rows, False)[0]

    def denominator(self, parts: list[list[int]]) -> Denominator:
        skipped = [self.mask_truncated and cut for cut in self.rollouts.truncated()]
        rows = [row for part in parts for row in part]
        tokens = [0 if skipped[i] else len(self.rollouts.completions[i]) for i in rows]
        return count_denominator(tokens, micro_batches=len(parts))

    def gradient(
        self, spec: LossSpec, parts: list[list[int]], per_row: Tensor, denominator: Denominator | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of one optimizer step."""
        denominator = denominator or self.denominator(parts)
        old = [self.with_weights(self.trl.old_weights, rows) for rows in parts]
        ref = [self.with_weights(self.reference, rows) for rows in parts]
        self.model.load_state_dict(self.trl.weights)
        self.model.zero_grad()
        total, clipped = 0.0, torch.zeros(2)
        for rows, old_logprobs, ref_logprobs in zip(parts, old, ref, strict=True):
            logprobs, entropy, mask = self.logprobs(rows, spec.entropy_bonus > 0)
            output = policy_loss(
                spec,
                logprobs,
                old_logprobs,
                per_row[rows],
                mask,
                denominator,
                ref_logprobs=ref_logprobs,
                entropy=entropy,
            )
            output.loss.backward()
            total += output.loss.item()
            clipped += output.metrics.get("clip_region", output.metrics.get("clip_high", torch.zeros(2)))
        self.clipped = (clipped[0] / clipped[1].clamp(min=1)).item()
        return total, {name: p.grad.clone() for name, p in self.model.named_parameters()}


Result = tuple[float, dict[str, Tensor]]


def trl_entropy(ours: Ours, spec: LossSpec, parts: list[list[int]]) -> Result:
    """The loss without bonus, plus TRL's bonus; that one is `bnpo`'s reduction of a step without advantages."""
    loss, gradients = ours.gradient(replace(spec, entropy_bonus=0.0), parts, ours.trl.advantages)
    bonus_spec = replace(spec, loss="bnpo", beta=0.0)
    bonus, bonus_gradients = ours.gradient(bonus_spec, ours.trl.micro_batches, torch.zeros(ROWS))
    return loss + bonus, {name: gradient + bonus_gradients[name] for name, gradient in gradients.items()}


def trl_window(ours: Ours, spec: LossSpec, parts: list[list[int]]) -> Result:
    """The same numerator over TRL's token count: all rollouts' tokens divided by the number of updates."""
    everything = ours.denominator([list(range(ROWS))])
    share = sum(map(len, parts)) / ROWS
    return ours.gradient(spec, parts, ours.trl.advantages, replace(everything, tokens=everything.tokens * share))


@dataclass(frozen=True)
class Difference:
    """What TRL computes otherwise, for which losses, and our computation with just that one thing TRL's way."""

    losses: tuple[str, ...]
    reason: str
    trl_way: Callable[[Ours, LossSpec, list[list[int]]], Result]


DIFFERENCES = {
    "entropy": Difference(
        tuple(name for name in TRL_LOSSES if name != "bnpo"),
        "TRL's bonus is the mean over micro batches of each one's token-mean entropy, so it depends on how the step is "
        "split; grpofit's takes the loss's own reduction over the whole step",
        trl_entropy,
    ),
    "two updates a batch": Difference(
        ("dapo", "cispo"),
        "TRL divides by the average token count of an update (all rollouts' tokens / number of updates); grpofit by "
        "the tokens of the rows in this very update, so that every step is a true token mean",
        trl_window,
    ),
}


def compare(name: str, variant_name: str, trl: Trl, reference: dict[str, Tensor]) -> dict[str, Any]:
    """One case: the row of the table."""
    variant = VARIANTS[variant_name]
    low, high, delta = CLIPS.get(name, OTHER_CLIPS)
    settings = {"epsilon": low, "epsilon_high": high, **TRL_LOSSES[name], **variant.trl}
    options = {"ratio": ALGORITHMS[name].ratio, "clip_low": low, "clip_high": high, **variant.ours}
    if variant.delta:
        settings["delta"] = options["clip_delta"] = delta
    spec = LossSpec(loss=name, max_completion_tokens=MAX_COMPLETION_TOKENS, **options)
    rollouts = make_rollouts(variant.full_length)
    theirs = trl.step(rollouts, variant.updates, variant.off_policy, settings)
    ours = Ours(rollouts, theirs, reference, settings.get("mask_truncated_completions", False))
    held = {row for part in theirs.micro_batches for row in part}
    cut = [[row for row in part if row in held] for part in OUR_MICRO_BATCHES]
    parts = theirs.micro_batches if name == "bnpo" else [part for part in cut if part]
    loss_error, gradient_error = errors(ours.gradient(spec, parts, theirs.advantages), theirs)
    row = {"loss": name, "variant": variant_name, "loss_error": loss_error, "gradient_error": gradient_error}
    row |= {"clipped_frac": ours.clipped, "trl_loss": theirs.loss, "verdict": "equal", "reason": ""}
    if max(loss_error, gradient_error) > TOLERANCE:
        difference = DIFFERENCES.get(variant_name)
        row["verdict"] = "DIFFERS"
        if difference and name in difference.losses:
            left = errors(difference.trl_way(ours, spec, parts), theirs)
            row |= {"explained_loss_error": left[0], "explained_gradient_error": left[1]}
            if max(left) <= TOLERANCE:
                row |= {"verdict": "explained", "reason": difference.reason}
    return row


def errors(ours: Result, theirs: TrlStep) -> tuple[float, float]:
    """Relative difference of the loss, and the largest one of a parameter's gradient."""
    loss, gradients = ours
    assert gradients.keys() == theirs.gradients.keys()
    by_parameter = [(gradients[k] - g).norm() / g.norm() for k, g in theirs.gradients.items()]
    # not max(): a NaN must not hide behind a number
    worst = torch.stack(by_parameter).nan_to_num(nan=torch.inf).amax().item()
    return abs(loss - theirs.loss) / max(abs(theirs.loss), LOSS_FLOOR), worst


ADVANTAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "group": ({"scale_rewards": "group"}, {"kind": "group"}),
    "batch": ({"scale_rewards": "batch"}, {"kind": "batch"}),
    "none": ({"scale_rewards": "none"}, {"kind": "none"}),
    "normalize_each": ({"multi_objective_aggregation": "normalize_then_sum"}, {"combine": "normalize_each"}),
}


def compare_advantages(kind: str, trl: Trl) -> dict[str, Any]:
    """One kind: our function against what TRL made of the same rewards."""
    settings, ours = ADVANTAGES[kind]
    theirs = trl.advantages(make_rollouts(full_length=False), **settings)
    rewards = torch.tensor([[torch.nan if value is None else value for value in row] for row in REWARDS])
    mine = advantages(rewards, GROUP_SIZE, weights=torch.tensor(REWARD_WEIGHTS), **ours)
    error = ((mine - theirs).abs().max() / theirs.abs().max()).item()
    verdict = "equal" if error <= TOLERANCE else "DIFFERS"
    return {"advantage": kind, "error": error, "verdict": verdict}


def run(losses: Iterable[str], variants: Iterable[str], report: Callable[[str], None] = print) -> dict[str, Any]:
    """All chosen cases; `ok` says whether every figure is equal or explained."""
    import trl as trl_package

    reference = copied(make_model())
    rows, advantage_rows = [], []
    versions = {"trl": trl_package.__version__, "torch": torch.__version__}
    report(f"TRL {versions['trl']}, torch {versions['torch']}, float32 on CPU; tolerance {TOLERANCE:g} relative")
    report(f"{'loss':<8} {'variant':<23} {'loss':>9} {'gradients':>9} {'clipped':>7}  verdict")
    with tempfile.TemporaryDirectory() as folder:
        trl = Trl(Path(folder))
        for name in losses:
            for variant in variants:
                if name not in VARIANTS[variant].losses:
                    continue
                row = compare(name, variant, trl, reference)
                rows.append(row)
                figures = f"{row['loss_error']:9.1e} {row['gradient_error']:9.1e} {row['clipped_frac']:7.0%}"
                left = f": {row['explained_gradient_error']:.1e} TRL's way" if "explained_gradient_error" in row else ""
                report(f"{name:<8} {variant:<23} {figures}  {row['verdict']}{left}")
        for kind in ADVANTAGES:
            row = compare_advantages(kind, trl)
            advantage_rows.append(row)
            report(f"advantages {kind:<20} {row['error']:9.1e} {'':>17}  {row['verdict']}")
    for variant in dict.fromkeys(row["variant"] for row in rows if row["reason"]):
        report(f"explained, {variant}: {DIFFERENCES[variant].reason}.")
    ok = all(row["verdict"] != "DIFFERS" for row in rows + advantage_rows)
    return {"ok": ok, **versions, "tolerance": TOLERANCE, "cases": rows, "advantages": advantage_rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", nargs="+", choices=TRL_LOSSES, default=list(TRL_LOSSES))
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    result = run(arguments.loss, arguments.variant)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
