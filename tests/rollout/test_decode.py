"""Decoders against the model without a cache: every family, ragged prompts, rows leaving, windows, softcaps, memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from families import FAMILIES, WINDOW, build_model, family, random_prompt
from reference import ReplayRunner, last_logits
from transformers import PreTrainedModel

from grpofit.rollout import decode
from grpofit.rollout.decode import Decoder, GroupDecoder, PlainDecoder
from grpofit.rollout.probe import attention_windows
from grpofit.rollout.runner import PlainRunner, Runner

# Longer and shorter than the windows, one token alone, groups of unequal size, a group that is not in one place.
PROMPTS = [random_prompt(i, length).token_ids for i, length in enumerate((9, 1, 4, 6))]
ROWS = [PROMPTS[i] for i in (0, 0, 0, 1, 2, 2, 0, 3)]
STEPS = 2 * WINDOW + 1


def group_decoder(
    model: PreTrainedModel, rows: Sequence[tuple[int, ...]] = ROWS, runner: Runner | None = None
) -> GroupDecoder:
    windows = attention_windows(model)
    assert windows is not None
    return GroupDecoder(model, windows, rows, STEPS + 1, runner or PlainRunner())


@torch.no_grad()
def assert_model_logits(model: PreTrainedModel, decoder: Decoder, leaving: dict[int, Sequence[int]]) -> None:
    """Feed random tokens; logits must be the model's own. `leaving`: at a step, which places of the batch stay."""
    tokens = random.Random(3)
    texts, logits = list(ROWS), decoder.logits
    for step in range(STEPS):
        expected = torch.stack([last_logits(model, text) for text in texts])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        if step in leaving:
            decoder.keep(leaving[step])
            texts = [texts[place] for place in leaving[step]]
        ids = [tokens.randrange(256) for _ in texts]
        logits = decoder.step(torch.tensor(ids))
        texts = [(*text, token) for text, token in zip(texts, ids, strict=True)]


# The second group leaves, then rows of others, then all but two of which one is not the first of its group.
LEAVING = {1: [0, 1, 2, 4, 5, 6, 7], 3: [0, 2, 3, 5, 6], 4: [4, 1, 3]}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["group", "replayed", "plain"])
def test_logits_are_the_models(name: str, kind: str) -> None:
    model = family(name)
    runner = ReplayRunner()
    decoder: Decoder
    if kind == "plain":
        decoder = PlainDecoder(model, ROWS)
    else:
        decoder = group_decoder(model, runner=runner if kind == "replayed" else None)
    if kind == "replayed":
        assert_model_logits(model, decoder, {4: LEAVING[1]})
        assert runner.replays == STEPS - 2 * 2  # of either set of rows the first step runs, the second is recorded
    else:
        assert_model_logits(model, decoder, LEAVING)


@pytest.mark.parametrize("static", [False, True])
def test_a_row_leaving_at_every_step(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_SHRINK_AT_FRAC", 1.0)  # keys are moved whenever they can be
    model = family("gemma2")
    leaving = {step: range(1, len(ROWS) - step) for step in range(len(ROWS) - 1)}
    assert_model_logits(model, group_decoder(model, runner=PlainRunner(static=static)), leaving)


def test_attention_without_its_softcap() -> None:
    # The family has one; where the configuration has none, None is passed on.
    model = build_model("gemma2", **{**FAMILIES["gemma2"][1], "attn_logit_softcapping": None})
    assert_model_logits(model, group_decoder(model), {})


def test_prompts_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_PREFILL_TOKENS", 12)  # 9 + 1 are two pieces, since padded they are 18
    model = family("gemma3")
    seen: list[tuple[int, ...]] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    decoder = group_decoder(model)
    hook.remove()
    assert seen == [(1, 9), (1, 9), (2, 4), (1, 6)]  # the first prompt has four rows where two are the average
    assert_model_logits(model, decoder, LEAVING)


def test_each_prompt_is_read_and_kept_once() -> None:
    model = family("llama")
    rows = [prompt for prompt in PROMPTS[:3] for _ in range(5)]
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    decoder = group_decoder(model, rows)
    hook.remove()
    assert seen == [3 * 9]
    # Keys and values, 2 layers, 2 heads of 8 numbers of 4 bytes.
    token_bytes = 2 * 2 * 2 * 8 * 4
    assert decoder.kv_bytes() == token_bytes * (3 * 9 + 15 * STEPS)
    decoder.keep([3, 5])
    assert decoder.kv_bytes() == token_bytes * (2 * 9 + 2 * STEPS)


@torch.no_grad()
def test_leaving_rows_are_freed_only_when_it_pays() -> None:
    decoder = group_decoder(family("llama"), [PROMPTS[0]] * 8)
    before = decoder.kv_bytes()
    decoder.keep(range(7))
    assert decoder.kv_bytes() == before
    decoder.keep(range(5))
    assert decoder.kv_bytes() < before


@torch.no_grad()
def test_attention_is_put_back() -> None:
    model = family("llama")
    model.set_attn_implementation("eager")
    decoder = group_decoder(model)
    decoder.step(torch.zeros(len(ROWS), dtype=torch.int64))
    assert model.config._attn_implementation == "eager"

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.get_output_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        decoder.step(torch.zeros(len(ROWS), dtype=torch.int64))
    hook.remove()
    assert model.config._attn_implementation == "eager"
    model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False)  # and works


def test_no_more_tokens_than_there_is_room_for() -> None:
    decoder = GroupDecoder(family("llama"), [None, None], ROWS[:1], 2, PlainRunner())
    ids = torch.tensor([1])
    with torch.no_grad():
        decoder.step(ids)
        with pytest.raises(AssertionError, match="no room for completion token 1 of 1"):
            decoder.step(ids)
