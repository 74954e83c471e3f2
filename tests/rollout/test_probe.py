"""Which models decode by group, and what a user is told of the others."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, WINDOW, build_model, family, policy_of, random_prompt
from reference import MANY_EOS, sample_plainly
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig

from grpofit.models.load import Policy
from grpofit.rollout.probe import attention_windows, find_fault
from grpofit.rollout.runner import PlainRunner
from grpofit.rollout.transformers import TransformersEngine
from grpofit.types import RolloutKey, Sampling


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_decodes_by_group(name: str) -> None:
    engine = TransformersEngine(policy_of(family(name)), None)
    assert engine.notes == []


def test_windows() -> None:
    assert attention_windows(family("llama")) == [None, None]
    assert attention_windows(family("mistral")) == [WINDOW, WINDOW]
    assert attention_windows(family("gemma3")) == [WINDOW, None]


def sinks() -> PreTrainedModel:
    """Its attention has a learnt weight for seeing nothing."""
    model = build_model("gpt_oss", num_local_experts=2, num_experts_per_tok=1, head_dim=8, sliding_window=WINDOW,
                        attn_implementation="eager")  # fmt: skip
    return model


def chunks() -> PreTrainedModel:
    """Its attention sees a token's own chunk only."""
    config = Llama4TextConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_chunk_size=WINDOW, num_local_experts=2,
        max_position_embeddings=64, moe_layers=[], pad_token_id=256, eos_token_id=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("build", "reason"), [(sinks, "its attention takes s_aux"), (chunks, "not every layer is plain or sliding-window")]
)
def test_others_decode_with_the_librarys_cache_and_say_so(build, reason: str) -> None:
    policy = Policy(build(), tiny_tokenizer(), None, MANY_EOS, 64, [])
    engine = TransformersEngine(policy, None)
    assert len(engine.notes) == 1
    assert engine.notes[0].startswith("decoding with transformers' own KV cache, which is slower: ")
    assert reason in engine.notes[0]
    prompts = [random_prompt(i, length) for i, length in enumerate((2, 7))]
    keys = [RolloutKey(0, 0, i, 0) for i in range(2)]
    sampling = Sampling(max_completion_tokens=8)
    for prompt, key, completion in zip(prompts, keys, engine.generate(prompts, keys, sampling), strict=True):
        ids, logprobs, finish = sample_plainly(policy, prompt, key, sampling)
        assert (completion.token_ids, completion.finish) == (ids, finish)
        assert completion.sampler_logprobs == pytest.approx(logprobs, abs=1e-5)


def test_wrong_logits_are_noticed() -> None:
    # Under sdpa transformers leaves the softcap out, and so trains another model than the one decoded here.
    model = build_model("gemma2", **{**FAMILIES["gemma2"][1], "attn_implementation": "sdpa"})
    fault = find_fault(model, attention_windows(model), PlainRunner())
    assert fault is not None and "logits would be off by" in fault


@pytest.mark.parametrize("training", [True, False])
def test_construction_leaves_the_mode(training: bool) -> None:
    policy = policy_of(family("llama"))
    policy.model.train(training)
    TransformersEngine(policy, None)
    assert policy.model.training is training
