"""Packed rows in real architectures: the same logits, logprobs and gradients as plain rows."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, build_model, family, plain_logprobs, random_prompt, random_rollout
from torch import nn
from transformers import PreTrainedModel

from grpofit.algo.packing import Packing
from grpofit.data.batching import make_micro_batches
from grpofit.models import attention
from grpofit.models.attention import reading_packed_rows, why_not_packed
from grpofit.models.head import find_head, token_logprobs
from grpofit.types import FinishReason, PackedGroup

CPU = torch.device("cpu")
TEMPERATURE = 0.7
# Prompts and completions longer and shorter than the window of 4; a completion of one token has none in the row.
LENGTHS = {0: (3, [7, 1, 5]), 1: (9, [2, 10]), 2: (12, [1]), 3: (2, [3, 3])}
ROLLOUTS = [
    random_rollout(random_prompt(group, prompt), group, sample, length, FinishReason.STOP)
    for group, (prompt, lengths) in LENGTHS.items()
    for sample, length in enumerate(lengths)
]


def flat_gradient(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def packed_logprobs(model: PreTrainedModel, budget_tokens: int | None) -> dict[int, torch.Tensor]:
    """Logprobs [T] of every rollout, and the gradient of their sum weighted by place in `model`."""
    found = {}
    head = find_head(model)
    with reading_packed_rows(model):
        for batch in make_micro_batches(
            ROLLOUTS, packed=True, budget_tokens=budget_tokens, pad_token_id=0, mask_truncated=False, device=CPU
        ):
            assert batch.packing is not None
            flat, _ = token_logprobs(
                model, head, batch.input_ids, batch.position_ids, batch.predict_index, batch.target_ids,
                packing=Packing(batch.packing, CPU), temperature=TEMPERATURE, chunk_tokens=5, with_entropy=False,
            )  # fmt: skip
            rows = batch.to_rows(flat)
            sum(weigh(rows[i], row) for i, row in enumerate(batch.rows)).backward()
            for i, row in enumerate(batch.rows):
                found[row] = rows[i, : len(ROLLOUTS[row].completion.token_ids)].detach()
    return found


def weigh(logprobs: torch.Tensor, row: int) -> torch.Tensor:
    """Every token of every row counts differently, so that no mixing up cancels."""
    return (logprobs * torch.cos(torch.arange(len(logprobs)) + 10.0 * row)).sum()


@pytest.mark.parametrize("budget_tokens", [None, 20], ids=["one row", "groups split"])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_are_plain_rows(name: str, budget_tokens: int | None) -> None:
    packed, plain = family(name), family(name)
    assert why_not_packed(packed) is None
    found = packed_logprobs(packed, budget_tokens)
    for row, rollout in enumerate(ROLLOUTS):
        logprobs, _ = plain_logprobs(plain, rollout, TEMPERATURE)
        weigh(logprobs, row).backward()
        torch.testing.assert_close(found[row], logprobs.detach(), atol=1e-5, rtol=1e-5)
    expected = flat_gradient(plain)
    assert (flat_gradient(packed) - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_second_completion_has_the_logits_of_its_own_text(name: str) -> None:
    model = family(name)
    prompt, first, second = (random_prompt(i, n).token_ids for i, n in enumerate((6, 5, 7)))
    packing = Packing([PackedGroup(0, 6, (5, 7))], CPU)
    positions = torch.tensor([[*range(6), *range(6, 11), *range(6, 13)]])
    with torch.no_grad():
        with reading_packed_rows(model):
            ids = torch.tensor([prompt + first + second])
            packed = model(input_ids=ids, position_ids=positions, use_cache=False, packing=packing).logits[0, -7:]
        plain = model(input_ids=torch.tensor([prompt + second]), use_cache=False).logits[0, -7:]
    torch.testing.assert_close(packed, plain, atol=2e-5, rtol=1e-5)


def test_without_the_attention_function_positions_that_restart_are_taken_apart() -> None:
    """Why the function is needed: transformers sees two sequences, and the second completion loses its prompt."""
    model = family("llama")
    prompt, first, second = (random_prompt(i, n).token_ids for i, n in enumerate((6, 5, 7)))
    ids, positions = torch.tensor([prompt + first + second]), torch.tensor([[*range(11), *range(6, 13)]])
    with torch.no_grad():
        wrong = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, -7:]
        right = model(input_ids=torch.tensor([prompt + second]), use_cache=False).logits[0, -7:]
    assert (wrong - right).abs().max() > 0.01


def test_the_attention_of_the_model_comes_back() -> None:
    model = family("qwen3")
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="on purpose"), reading_packed_rows(model):
        assert model.config._attn_implementation == attention.NAME
        raise RuntimeError("on purpose")
    assert model.config._attn_implementation == before


def broken(change: str) -> PreTrainedModel:
    model = family("llama")
    if change == "state":  # a layer that mixes neighbours in the row, as convolutions and state spaces do
        inner = model.model.layers[0].mlp.forward
        model.model.layers[0].mlp.forward = lambda x: inner(x + x.roll(1, dims=1))
    elif change == "own attention":
        layer = model.model.layers[0].self_attn
        inner = nn.functional.scaled_dot_product_attention

        def own(hidden_states, **_):  # type: ignore[no-untyped-def]
            q = layer.q_proj(hidden_states)[None]
            return layer.o_proj(inner(q, q, q, is_causal=True)[0]), None

        layer.forward = own
    elif change == "unknown layer":
        model.config.layer_types = ["full_attention", "linear_attention"]
    elif change == "window kept back":  # one longer than the probe: nothing but its absence shows it
        model = build_model("gemma3_text", **{**FAMILIES["gemma3"][1], "sliding_window": 50})
        for layer in model.model.layers:
            layer.self_attn.sliding_window = None
    else:
        inner = model.model.forward

        def extra(*args, **kwargs):  # type: ignore[no-untyped-def]
            return inner(*args, **kwargs, s_aux=torch.zeros(4))

        model.model.forward = extra
    return model


REASONS = {
    "state": "different hidden states",
    "own attention": "different hidden states",
    "unknown layer": "linear_attention",
    "window kept back": "not told its sliding window",
    "sinks": "s_aux",
}


@pytest.mark.parametrize("change", REASONS)
def test_an_architecture_that_cannot_is_found(change: str) -> None:
    reason = why_not_packed(broken(change))
    assert reason is not None and REASONS[change] in reason
