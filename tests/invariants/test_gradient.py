"""What must not change a gradient: how rows share micro batches, their order, padding, chunks, checkpointing.

Every run goes through `training.step.update`. It is compared with a plain path that shares only the loss formula with
it: one unpadded row at a time, full logits, every row kept, autograd, torch's AdamW.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from families import family, gradients_seen, plain_logprobs, policy_of, random_prompt, random_rollout
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from grpofit.algo.losses import ALGORITHMS, Denominator, LossSpec, policy_loss
from grpofit.config import OptimConfig
from grpofit.memory.settings import MemorySettings
from grpofit.models.load import Policy
from grpofit.rollout.transformers import TransformersEngine
from grpofit.training.clock import Clock
from grpofit.training.optim import MasterAdamW
from grpofit.training.step import StepParts, StepSettings, UpdateResult, update
from grpofit.types import FinishReason, Rollout, Sampling

GROUP_SIZE = 3
ADVANTAGES = [(1.2, -0.5, -0.7), (0.0, 0.0, 0.0), (0.3, -1.1, 0.8), (-0.6, 1.2, -0.6)]  # the second: no signal
PROMPT_TOKENS = (4, 7, 1, 9)
COMPLETION_TOKENS = [(9, 3, 12), (2, 12, 5), (12, 1, 7), (6, 4, 12)]
MAX_COMPLETION_TOKENS = 12
TEMPERATURE = 0.7
PLAIN = MemorySettings(micro_batch_tokens=None, generation_chunk=None)
# AdamW's first step is the gradient's sign unless eps is large: rounding near 0 would then decide the second update.
OPTIM = OptimConfig(lr=2e-3, eps=0.1, implementation="loop")


def rollouts() -> list[Rollout]:
    """4 groups of 3 ragged rows; completions as long as the limit are truncated."""
    rows = []
    for group, lengths in enumerate(COMPLETION_TOKENS):
        prompt = random_prompt(group, PROMPT_TOKENS[group])
        for sample, length in enumerate(lengths):
            finish = FinishReason.LENGTH if length == MAX_COMPLETION_TOKENS else FinishReason.STOP
            rows.append(random_rollout(prompt, group, sample, length, finish))
            rows[-1].advantage = ADVANTAGES[group][sample]
    return rows


def settings_for(loss: str, memory: MemorySettings = PLAIN, **options: Any) -> StepSettings:
    """Settings of a case; loss terms and step settings may be mixed."""
    algorithm = ALGORITHMS[loss]
    terms = {"ratio": algorithm.ratio, "clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    step = {"iterations_per_batch": 1, "mask_truncated": False, "count_all_groups": True}
    names = {field.name for field in dataclasses.fields(LossSpec)}
    for name, value in options.items():
        (terms if name in names else step)[name] = value
    return StepSettings(
        seed=0,
        prompts_per_step=len(ADVANTAGES),
        group_size=GROUP_SIZE,
        sampling=Sampling(MAX_COMPLETION_TOKENS, temperature=TEMPERATURE),
        loss=LossSpec(loss=loss, max_completion_tokens=MAX_COMPLETION_TOKENS, **terms),
        advantage="group",
        combine="sum",
        max_grad_norm=None,
        memory=memory,
        **step,
    )


LOSSES = [loss for loss in ALGORITHMS if loss != "bnpo"]  # bnpo depends on the split by definition
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{loss: (loss, {}) for loss in LOSSES},
    **{f"{loss}, mu 2": (loss, {"iterations_per_batch": 2}) for loss in LOSSES},
    # Its own bounds would clip every row after a step as large as this.
    "gspo, mu 2": ("gspo", {"iterations_per_batch": 2, "clip_low": 0.1, "clip_high": 0.1}),
    **{f"{loss}, truncated masked": (loss, {"mask_truncated": True}) for loss in LOSSES},
    "dapo, k3": ("dapo", {"beta": 0.1}),
    "grpo, k1": ("grpo", {"beta": 0.1, "kl": "k1"}),
    "gspo, k2": ("gspo", {"beta": 0.1, "kl": "k2"}),
    "dapo, entropy": ("dapo", {"entropy_bonus": 0.05}),
    "dapo, groups with signal counted": ("dapo", {"count_all_groups": False}),
    "grpo, groups with signal counted": ("grpo", {"count_all_groups": False}),
    "grpo, everything": (
        "grpo",
        {"beta": 0.1, "entropy_bonus": 0.05, "iterations_per_batch": 2, "mask_truncated": True, "clip_delta": 3.0},
    ),
}
MEMORY: dict[str, MemorySettings] = {
    "one micro batch": PLAIN,
    "split": dataclasses.replace(PLAIN, micro_batch_tokens=50),
    "row by row": dataclasses.replace(PLAIN, micro_batch_tokens=1),
    "chunks of 1": dataclasses.replace(PLAIN, logprob_chunk_tokens=1),
    "chunks of 7": dataclasses.replace(PLAIN, logprob_chunk_tokens=7),
    "checkpointing": dataclasses.replace(PLAIN, checkpointing="full"),
    "packed": dataclasses.replace(PLAIN, packing=True),
    "packed, split": dataclasses.replace(PLAIN, packing=True, micro_batch_tokens=40),
    "packed, one completion at a time": dataclasses.replace(PLAIN, packing=True, micro_batch_tokens=1),
    "every lever on plain rows": MemorySettings(50, None, checkpointing="full", logprob_chunk_tokens=5),
    "every lever": MemorySettings(50, None, checkpointing="full", logprob_chunk_tokens=5, packing=True),
}


@cache
def start() -> PreTrainedModel:
    return family("llama tied")


@cache
def reference() -> Policy:
    """A policy near the start: its KL is neither 0 nor huge."""
    model = copy.deepcopy(start())
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return policy_of(model.requires_grad_(False))


def parts_for(settings: StepSettings, model: PreTrainedModel, *, master: bool = True) -> StepParts:
    policy = policy_of(model)
    model.train()
    if settings.memory.checkpointing != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = MasterAdamW(model.named_parameters(), OPTIM, master=master)
    return StepParts(
        policy,
        reference() if settings.loss.beta > 0 else None,
        TransformersEngine(policy, None),
        None,  # type: ignore[arg-type]  # an update looks at advantages, not at rewards
        [],
        optimizer,
        settings,
        Clock(),
    )


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(tensor.detach().double().flatten() for tensor in tensors)])


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def by_update(settings: StepSettings, rows: Sequence[Rollout]) -> tuple[list[UpdateResult], Tensor]:
    """What the step says, and the gradient of its last update: nothing is clipped, nothing zeroed after it."""
    parts = parts_for(settings, copy.deepcopy(start()))
    seen = gradients_seen(parts)
    results = update(parts, rows, OPTIM.lr)
    assert [result.finite for result in results] == [True] * settings.iterations_per_batch
    return results, flat(list(seen.values()))


def laid_out(model: PreTrainedModel, rows: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [B, T] of every row, computed alone."""
    columns = zip(*(plain_logprobs(model, row, TEMPERATURE) for row in rows), strict=True)
    logprobs, entropy = (
        torch.stack([pad(values, (0, MAX_COMPLETION_TOKENS - len(values))) for values in column]) for column in columns
    )
    return logprobs, entropy


def by_plain_path(settings: StepSettings, rows: Sequence[Rollout]) -> tuple[list[float], Tensor]:
    """Losses, and the gradient of the last update."""
    model = copy.deepcopy(start())
    adamw = torch.optim.AdamW(model.parameters(), OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.0)
    mask = torch.zeros(len(rows), MAX_COMPLETION_TOKENS)
    for i, row in enumerate(rows):
        mask[i, : len(row.completion.token_ids)] = not (settings.mask_truncated and row.truncated)
    signal = torch.tensor([len(set(ADVANTAGES[row.group])) > 1 for row in rows])
    counted = mask if settings.count_all_groups else mask[signal]
    denominator = Denominator(float(len(counted)), float(counted.sum()), 1)
    with torch.no_grad():
        ref = laid_out(reference().model, rows)[0] if settings.loss.beta > 0 else None
    old, losses = None, []
    for _ in range(settings.iterations_per_batch):
        adamw.zero_grad()
        logprobs, entropy = laid_out(model, rows)
        old = logprobs.detach() if old is None else old
        advantages = torch.tensor([row.advantage for row in rows])
        output = policy_loss(
            settings.loss, logprobs, old, advantages, mask, denominator, ref_logprobs=ref, entropy=entropy
        )
        output.loss.backward()
        adamw.step()
        losses.append(output.loss.item())
    return losses, flat([p.grad for p in model.parameters() if p.grad is not None])


@cache
def expected(case: str) -> tuple[list[float], Tensor]:
    loss, options = CASES[case]
    return by_plain_path(settings_for(loss, **options), rollouts())


@cache
def whole(case: str) -> list[UpdateResult]:
    """The step's own numbers with every lever off."""
    loss, options = CASES[case]
    return by_update(settings_for(loss, **options), rollouts())[0]


def assert_as_expected(case: str, results: Sequence[UpdateResult], gradient: Tensor) -> None:
    losses, plain_gradient = expected(case)
    assert relative(gradient, plain_gradient) < 1e-5
    # A loss of centred advantages is a small difference of large terms.
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-5, abs=1e-6)
    assert results[-1].grad_norm == pytest.approx(float(plain_gradient.norm()), rel=1e-5)


# Every case through these; the other levers, one at a time, through a few cases.
FOR_ALL = ("one micro batch", "split", "every lever")
FOR_FEW = ("dapo", "gspo, mu 2", "grpo, everything")


@pytest.mark.parametrize(
    ("case", "lever"), [(case, lever) for case in CASES for lever in MEMORY if lever in FOR_ALL or case in FOR_FEW]
)
def test_memory_levers(case: str, lever: str) -> None:
    loss, options = CASES[case]
    results, gradient = by_update(settings_for(loss, MEMORY[lever], **options), rollouts())
    assert_as_expected(case, results, gradient)
    for ours, theirs in zip(results, whole(case), strict=True):
        assert ours.rows == theirs.rows
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_order_of_rows(case: str) -> None:
    loss, options = CASES[case]
    rows = rollouts()
    groups = [rows[start : start + GROUP_SIZE] for start in range(0, len(rows), GROUP_SIZE)]
    by_group = [
        dataclasses.replace(row, group=place)
        for place, group in enumerate([2, 0, 3, 1])
        for row in groups[group]
    ]  # fmt: skip
    within = list(chain.from_iterable(group[1:] + group[:1] for group in groups))
    for ordered in (by_group, within):
        results, gradient = by_update(settings_for(loss, MEMORY["split"], **options), ordered)
        assert_as_expected(case, results, gradient)


@pytest.mark.parametrize("loss", LOSSES)
def test_padding(loss: str) -> None:
    # A masked row takes no part in the loss, but its length decides how far all the others are padded.
    def with_length(count: int) -> tuple[list[UpdateResult], Tensor]:
        rows = rollouts()
        rows[2] = random_rollout(rows[2].prompt, 0, 2, count, FinishReason.LENGTH)
        rows[2].advantage = ADVANTAGES[0][2]
        return by_update(settings_for(loss, mask_truncated=True), rows)

    short, long = with_length(1), with_length(40)
    assert relative(long[1], short[1]) < 1e-5
    assert long[0][0].loss == pytest.approx(short[0][0].loss, rel=1e-5, abs=1e-6)


def test_second_update_is_off_policy() -> None:
    # Otherwise the cases with mu 2 would say nothing about ratios and clipping.
    for loss in ("dapo", "gspo"):
        first, second = whole(f"{loss}, mu 2")
        assert first.metrics["ratio"] == pytest.approx(1.0) and first.metrics["clip_region"] == 0.0
        assert second.metrics["kl_old"] > 1e-3
        assert 0.05 < second.metrics["clip_region"] < 0.95


def test_groups_without_signal_are_left_out() -> None:
    # That the gradient is that of all rows is shown above.
    for options, rows in [({}, 9), ({"beta": 0.1}, 12), ({"entropy_bonus": 0.05}, 12)]:
        results, _ = by_update(settings_for("dapo", **options), rollouts())
        assert results[0].rows == rows


def test_no_signal_at_all() -> None:
    rows = rollouts()
    for row in rows:
        row.advantage = 0.0
    results, gradient = by_update(settings_for("dapo"), rows)
    assert (results[0].loss, results[0].grad_norm, results[0].rows, results[0].metrics) == (0.0, 0.0, 0, {})
    assert results[0].weights_changed_frac == 0.0
    assert not gradient.any()


# bfloat16


def in_bfloat16(rows: Sequence[Rollout], *, master: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of one update, one row a micro batch; the same gradients added in float64, and in bfloat16."""
    model = copy.deepcopy(start()).to(torch.bfloat16)
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    narrow = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    settings = settings_for("dapo", MEMORY["row by row"])

    def watch(name: str, parameter: torch.nn.Parameter) -> None:
        def add(gradient: Tensor) -> None:
            sums[name] += gradient.double()
            narrow[name] += gradient

        parameter.register_hook(add)

    for name, parameter in model.named_parameters():
        watch(name, parameter)
    parts = parts_for(settings, model, master=master)
    seen = gradients_seen(parts)
    update(parts, rows, OPTIM.lr)
    return flat([seen[name] for name in sums]), flat(list(sums.values())), flat([narrow[name] for name in sums])


def test_bfloat16_gradients_are_added_in_float32() -> None:
    rows = [dataclasses.replace(row, group=row.group + 4 * turn) for turn in range(4) for row in rollouts()]
    rounded = copy.deepcopy(start()).to(torch.bfloat16).float()
    parts = parts_for(settings_for("dapo"), rounded)
    seen = gradients_seen(parts)
    update(parts, rows, OPTIM.lr)
    float32 = flat(list(seen.values()))

    for master in (True, False):
        added, exact, narrow = in_bfloat16(rows, master=master)
        assert relative(added, exact) < 1e-6
        assert relative(narrow, exact) > 3e-3  # what adding in bfloat16 would have made of it
        # What is left is the rounding of forward and backward: some units of 2^-8.
        assert relative(added, float32) < 12 * 2**-8
        assert relative(added, float32) < relative(narrow, float32)


# gradients that are not finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"iterations_per_batch": 2}, {"beta": 0.1, "entropy_bonus": 0.05}])
def test_not_finite_leaves_the_optimizer_untouched(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = copy.deepcopy(start()).to(dtype)
    parts = parts_for(settings_for("dapo", MEMORY["split"], **options), model)
    optimizer = parts.optimizer
    assert all(result.finite for result in update(parts, rollouts(), OPTIM.lr))
    weight = model.model.layers[1].mlp.up_proj.weight
    healthy = weight[3, 3].item()
    with torch.no_grad():
        weight[3, 3] = torch.inf
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    weights_before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    (result,) = update(parts, rollouts(), OPTIM.lr)
    assert not result.finite and result.weights_changed_frac is None
    assert not (torch.isfinite(torch.tensor([result.loss, result.grad_norm])).all())
    for name, tensor in optimizer.state_tensors().items():
        # With other lower bits an infinite weight's master reads as NaN.
        assert torch.allclose(tensor, before[name], rtol=0, atol=0, equal_nan=True), name
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights_before[name]), name

    # Nothing of it is left in the gradients.
    assert not optimizer.gradients()
    with torch.no_grad():
        weight[3, 3] = healthy
    assert all(result.finite for result in update(parts, rollouts(), OPTIM.lr))
    assert all(torch.isfinite(tensor).all() for tensor in optimizer.state_tensors().values())
