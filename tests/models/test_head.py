"""The head against the model's own logits: many architectures, padded batches, every chunk size, every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from families import FAMILIES, build_model, family, plain_logprobs, ragged_rollouts
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpofit.data.batching import MicroBatch, make_micro_batches
from grpofit.models.head import Head, _reproduces_logits, find_head, token_logprobs
from grpofit.types import Rollout

TEMPERATURE = 0.7
ROLLOUTS = ragged_rollouts(prompts=(3, 9, 5, 12), completions=(7, 1, 10, 4))
N = sum(len(r.completion.token_ids) for r in ROLLOUTS)


def one_batch(rollouts: Sequence[Rollout]) -> MicroBatch:
    (batch,) = make_micro_batches(
        rollouts, budget_tokens=None, pad_token_id=0, mask_truncated=False, device=torch.device("cpu")
    )
    return batch


def batched(
    model: PreTrainedModel, head: Head | None, chunk_tokens: int | None, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [N] of all completions in one padded batch."""
    batch = one_batch(ROLLOUTS)
    logprobs, entropy = token_logprobs(
        model, head, batch.input_ids, batch.position_ids, batch.predict_index, batch.target_ids,
        temperature=TEMPERATURE, chunk_tokens=chunk_tokens, with_entropy=True, entropy_gradient=entropy_gradient,
    )  # fmt: skip
    assert entropy is not None
    return logprobs, entropy


def row_by_row(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The same, one unpadded row at a time, from full logits."""
    rows = [plain_logprobs(model, ROLLOUTS[i], TEMPERATURE) for i in one_batch(ROLLOUTS).rows]
    return torch.cat([logprobs for logprobs, _ in rows]), torch.cat([entropy for _, entropy in rows])


def gradients(model: PreTrainedModel, outputs: tuple[Tensor, Tensor], entropy_weight: float = 0.0) -> dict[str, Tensor]:
    """Gradients of a fixed random combination of logprobs, plus the entropies times a weight."""
    weights = torch.randn(N, generator=torch.Generator().manual_seed(2))
    total = (weights * outputs[0]).sum()
    if entropy_weight:
        total = total + entropy_weight * outputs[1].sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        # A gradient that cancels to nearly nothing (a key's bias) is as exact as the terms that cancel.
        allowed = 1e-5 * gradient.norm() + 1e-7 * largest
        error = (got[name] - gradient).norm()
        assert error <= allowed, f"{name}: {error / gradient.norm():.1e}"


@pytest.mark.parametrize("name", FAMILIES)
def test_padded_batch_equals_rows_alone(name: str) -> None:
    model = family(name)
    head = find_head(model)
    assert head is not None
    expected = row_by_row(model)
    expected_gradients = gradients(model, expected)
    for chunk_tokens in (None, 1, 7, N, N + 5):
        got = batched(model, head, chunk_tokens)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)
        assert_same_gradients(gradients(model, got), expected_gradients)


@pytest.mark.parametrize("name", ["llama tied", "gemma2"])
def test_entropy_has_a_gradient_when_asked(name: str) -> None:
    model = family(name)
    expected = gradients(model, row_by_row(model), entropy_weight=0.3)
    for head in (find_head(model), None):
        got = gradients(model, batched(model, head, 7, entropy_gradient=True), entropy_weight=0.3)
        assert_same_gradients(got, expected)


def test_entropy_has_no_gradient_unless_asked() -> None:
    model = family("llama")
    _, entropy = batched(model, find_head(model), 7)
    assert not entropy.requires_grad


@pytest.mark.parametrize(
    ("name", "change"),
    [("cohere", {"scale": 1.0}), ("granite", {"scale": 1.0}), ("gemma2", {"softcap": None})],
)
def test_the_scalars_of_these_models_matter(name: str, change: dict[str, float | None]) -> None:
    # Otherwise the tests above could not see them go missing.
    model = family(name)
    head = find_head(model)
    assert head is not None
    wrong, _ = batched(model, dataclasses.replace(head, **change), None)
    assert (wrong - row_by_row(model)[0]).abs().max() > 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_head_is_found_in_bfloat16(name: str) -> None:
    model = family(name).to(torch.bfloat16)
    assert find_head(model) is not None


def test_head_is_found_in_bfloat16_with_large_softcapped_logits() -> None:
    # Logits of size 26 under Gemma 2's own softcap: the model rounds them three times, the head once; these weights
    # put 0.15 between the two.
    model = build_model("gemma2", head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=30.0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        model.model.norm.weight.fill_(8.0)
    model = model.to(torch.bfloat16)
    head = find_head(model)
    assert head is not None
    # A missing softcap is still seen.
    assert not _reproduces_logits(model, dataclasses.replace(head, softcap=None))


class ScaledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OwnHead(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden).square()


def scaled_head() -> PreTrainedModel:
    model = family("llama")
    scaled = ScaledLinear(32, model.config.vocab_size, bias=False)
    scaled.weight = model.lm_head.weight
    model.lm_head = scaled
    return model


def own_head() -> PreTrainedModel:
    model = family("llama")
    model.lm_head = OwnHead(model.lm_head)
    return model


def unused_softcap() -> PreTrainedModel:
    model = family("llama")
    model.config.final_logit_softcapping = 2.0
    return model


def multiplied_logits() -> PreTrainedModel:
    # This architecture multiplies by the number that Granite divides by.
    return build_model("hyperclovax", logits_scaling=0.5)


@pytest.mark.parametrize("build", [scaled_head, own_head, unused_softcap, multiplied_logits])
def test_head_that_cannot_be_reproduced(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    assert find_head(model) is None
    got, expected = batched(model, None, 7), row_by_row(model)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)
    assert_same_gradients(gradients(model, got), gradients(model, expected))


@pytest.mark.parametrize("training", [True, False])
def test_finding_the_head_leaves_the_mode(training: bool) -> None:
    model = family("llama").train(training)
    find_head(model)
    assert model.training is training


def test_weights_that_are_not_finite_are_not_called_reproduced() -> None:
    model = family("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    assert find_head(model) is None
