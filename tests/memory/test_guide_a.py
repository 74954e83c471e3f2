"""Guide A's step on meta: every weight of Qwen2.5-Math-1.5B, 8 prompts of 512 tokens, 4 completions of 128 each, all 32
in one micro batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from families import random_prompt, random_rollout
from tiny import tiny_tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from grpofit.algo.logprobs import entropy_from_logits, logprobs_from_logits
from grpofit.algo.losses import LossSpec
from grpofit.config import OptimConfig
from grpofit.memory.ledger import Category, Ledger, Snapshot
from grpofit.memory.settings import MemorySettings
from grpofit.models.head import Head
from grpofit.models.load import Policy
from grpofit.models.recompute import apply_recompute
from grpofit.training import step
from grpofit.training.clock import Clock
from grpofit.training.optim import MasterAdamW
from grpofit.training.step import StepParts, StepSettings, update
from grpofit.types import FinishReason, Rollout, Sampling

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 4, 512, 128
ALL_AT_ONCE = MemorySettings(micro_batch_tokens=None, generation_chunk=None, packing=True)


def qwen() -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def rollouts(*, shared: bool) -> list[Rollout]:
    """`shared`: the completions of a prompt are one group; else every one a group with a prompt of its own."""
    rows = []
    for prompt in range(PROMPTS):
        text = random_prompt(prompt, PROMPT_TOKENS)
        for sample in range(GROUP_SIZE):
            group = prompt if shared else prompt * GROUP_SIZE + sample
            row = random_rollout(text, group, sample, COMPLETION_TOKENS, FinishReason.STOP)
            rows.append(dataclasses.replace(row, advantage=(-1.0) ** sample))
    return rows


class FullLogits(Head):
    """Logits of all completion tokens at once, by autograd."""

    def logprobs(self, hidden, token_ids, *, temperature, with_entropy, **_):  # type: ignore[no-untyped-def]
        logits = functional.linear(hidden, self.module.weight)
        return logprobs_from_logits(logits, token_ids, temperature), entropy_from_logits(logits.detach(), temperature)


def peak(memory: MemorySettings, head: type[Head], shared: bool, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    """What is alive at the peak of an update."""
    model = qwen().train()
    apply_recompute(model, memory.checkpointing, memory.mlp_tile_tokens)
    policy = Policy(model, tiny_tokenizer(), head(model.get_output_embeddings()), (0,), None, [], packs=True)
    monkeypatch.setattr(step, "read_back", lambda values: [1.0] * values.numel())
    settings = StepSettings(
        seed=1, prompts_per_step=PROMPTS, group_size=GROUP_SIZE if shared else 1, sampling=Sampling(COMPLETION_TOKENS),
        loss=LossSpec(loss="dapo", max_completion_tokens=COMPLETION_TOKENS), advantage="group", combine="sum",
        iterations_per_batch=1, mask_truncated=False, count_all_groups=True, max_grad_norm=1.0, memory=memory,
    )  # fmt: skip
    ledger = Ledger(vocab_size=model.config.vocab_size)
    with ledger:
        ledger.register([*model.named_parameters(), *model.named_buffers()], Category.WEIGHTS)
        with ledger.category(Category.OPTIMIZER):
            optimizer = MasterAdamW(model.named_parameters(), OptimConfig(implementation="loop"), master=True)
        ledger.register_gradients(model.named_parameters())
        ledger.watch(model)
        parts = StepParts(policy, None, None, None, [], optimizer, settings, Clock())  # type: ignore[arg-type]
        [result] = update(parts, rollouts(shared=shared), lr=1e-6)
    assert result.micro_batches == 1
    return ledger.peak()


def beside_state(snapshot: Snapshot) -> int:
    """Bytes at the peak minus weights, all their gradients and the optimizer state."""
    parts = snapshot.by_category()
    weights = parts[Category.WEIGHTS]
    return snapshot.alive_bytes - 2 * weights - parts[Category.OPTIMIZER]


def test_levers_take_a_tenth_of_the_plain_paths_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain path keeps every prompt's activations for each of its completions, and all completions' logits."""
    plain = beside_state(peak(ALL_AT_ONCE, FullLogits, False, monkeypatch))
    levers = dataclasses.replace(ALL_AT_ONCE, checkpointing="full", logprob_chunk_tokens=256, mlp_tile_tokens=1024)
    lean = beside_state(peak(levers, Head, True, monkeypatch))
    assert 0 < lean < plain / 10
