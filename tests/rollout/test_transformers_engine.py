"""The decode loop: batch shape never changes a completion, greedy equals `generate`, stopping, and what it leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from families import EOS_ID, FAMILIES, family, policy_of, random_prompt
from reference import MANY_EOS, ReplayRunner, sample_plainly

from grpofit.data.batching import make_micro_batches
from grpofit.models.head import token_logprobs
from grpofit.models.load import Policy
from grpofit.rollout import decode
from grpofit.rollout.transformers import TransformersEngine
from grpofit.types import Completion, FinishReason, Prompt, Rollout, RolloutKey, Sampling

GROUP_SIZE = 3
PROMPTS = [random_prompt(i, length) for i, length in enumerate((3, 11, 1, 6))]
ROWS = [prompt for prompt in PROMPTS for _ in range(GROUP_SIZE)]
KEYS = [RolloutKey(7, 0, p.row_id, i % GROUP_SIZE) for i, p in enumerate(ROWS)]
SAMPLING = Sampling(max_completion_tokens=14, temperature=0.9)


def tiny_policy(name: str = "llama tied", eos_token_ids: Sequence[int] = MANY_EOS) -> Policy:
    return policy_of(family(name), eos_token_ids)


def generate(
    policy: Policy,
    prompts: Sequence[Prompt] = ROWS,
    keys: Sequence[RolloutKey] = KEYS,
    sampling: Sampling = SAMPLING,
    chunk_rows: int | None = None,
) -> list[Completion]:
    return TransformersEngine(policy, chunk_rows).generate(prompts, keys, sampling)


def assert_same(got: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.token_ids, ours.finish, ours.text) == (theirs.token_ids, theirs.finish, theirs.text)
        torch.testing.assert_close(
            torch.tensor(ours.sampler_logprobs), torch.tensor(theirs.sampler_logprobs), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_completions_are_the_plain_ones(name: str) -> None:
    # Ragged prompts, some longer than the windows; chunks that cut groups apart; rows leaving at all times.
    policy = tiny_policy(name)
    expected = [sample_plainly(policy, prompt, key, SAMPLING) for prompt, key in zip(ROWS, KEYS, strict=True)]
    assert len({len(ids) for ids, _, _ in expected}) > 4, "too easy a batch"
    for chunk_rows in (None, 5):
        for row, completion in enumerate(generate(policy, chunk_rows=chunk_rows)):
            ids, logprobs, finish = expected[row]
            assert (completion.token_ids, completion.finish) == (ids, finish)
            assert completion.sampler_logprobs == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("frac", [0.0, 0.9])
@pytest.mark.parametrize("replayed", [False, True])
def test_when_rows_leave_does_not_change_a_completion(
    frac: float, replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 0: whenever one has finished, keys moved as often; 0.9: hardly ever.
    policy = tiny_policy()
    expected = generate(policy)
    monkeypatch.setattr(decode, "_DROP_AT_FRAC", frac)
    monkeypatch.setattr(decode, "_DROP_AT_FRAC_STATIC", frac)
    monkeypatch.setattr(decode, "_SHRINK_AT_FRAC", 1.0)
    runner = ReplayRunner()
    engine = TransformersEngine(policy, None, runner=runner if replayed else None)
    runner.replays = 0
    assert_same(engine.generate(ROWS, KEYS, SAMPLING), expected)
    # Few rows of the same shape follow each other where they leave at once.
    assert (runner.replays > 8) == (replayed and frac > 0)
    assert_same(engine.generate(ROWS[:4], KEYS[:4], SAMPLING), expected[:4])  # nothing of the first rollout is left


@pytest.mark.parametrize("sampling", [
    Sampling(max_completion_tokens=8, temperature=1.3, top_k=7),
    Sampling(max_completion_tokens=8, top_p=0.6),
    Sampling(max_completion_tokens=1),
    Sampling(max_completion_tokens=2, temperature=0.0),
])  # fmt: skip
def test_every_kind_of_sampling(sampling: Sampling) -> None:
    policy = tiny_policy("qwen3")
    for row, completion in enumerate(generate(policy, ROWS[:6], KEYS[:6], sampling)):
        ids, logprobs, finish = sample_plainly(policy, ROWS[row], KEYS[row], sampling)
        assert (completion.token_ids, completion.finish) == (ids, finish)
        assert completion.sampler_logprobs == pytest.approx(logprobs, abs=1e-5)


def test_batch_shape_does_not_change_a_completion() -> None:
    policy = tiny_policy()
    expected = generate(policy)
    lengths = [len(c.token_ids) for c in expected]
    assert len(set(lengths)) > 4 and {c.finish for c in expected} == set(FinishReason), "too easy a batch"
    for chunk_rows in (1, 5):
        assert_same(generate(policy, chunk_rows=chunk_rows), expected)

    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = generate(policy, [ROWS[i] for i in order], [KEYS[i] for i in order])
    assert_same(shuffled, [expected[i] for i in order])

    copies = [dataclasses.replace(prompt) for prompt in ROWS]  # equal, but each an object of its own
    assert_same(generate(policy, copies), expected)
    assert_same(generate(policy, ROWS[4:6], KEYS[4:6]), expected[4:6])


def test_one_key_one_completion() -> None:
    # The key names the draws: equal keys repeat a completion, the samples of a group differ.
    policy = tiny_policy(eos_token_ids=(EOS_ID,))
    first, second, again = generate(policy, [PROMPTS[0]] * 3, [KEYS[0], KEYS[1], KEYS[0]])
    assert first.token_ids == again.token_ids != second.token_ids
    shorter = generate(policy, [PROMPTS[0]], [KEYS[0]], dataclasses.replace(SAMPLING, max_completion_tokens=4))
    assert shorter[0].token_ids == first.token_ids[:4]


@pytest.mark.parametrize("name", ["llama tied", "gemma2", "gemma3", "qwen3", "mistral", "gpt2"])
def test_sampler_logprobs_are_the_policys(name: str) -> None:
    policy = tiny_policy(name)
    completions = generate(policy)
    rollouts = [Rollout(p, c, 0, 0) for p, c in zip(ROWS, completions, strict=True)]
    for batch in make_micro_batches(
        rollouts, budget_tokens=60, pad_token_id=policy.pad_token_id, mask_truncated=False, device=policy.device
    ):
        logprobs, _ = token_logprobs(
            policy.model, policy.head, batch.input_ids, batch.position_ids, batch.predict_index, batch.target_ids,
            temperature=SAMPLING.temperature, chunk_tokens=5, with_entropy=False,
        )  # fmt: skip
        torch.testing.assert_close(batch.to_rows(logprobs), batch.sampler_logprobs, atol=1e-4, rtol=0)


def greedy_by_generate(policy: Policy, prompt: Prompt, count: int) -> tuple[int, ...]:
    """Of transformers itself, one row, no padding."""
    ids = torch.tensor([prompt.token_ids])
    output = policy.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=list(policy.eos_token_ids),
        pad_token_id=policy.pad_token_id,
    )
    return tuple(output[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("name", ["llama tied", "gemma2", "gemma3", "qwen3", "mistral", "gpt2"])
def test_greedy_equals_generate(name: str) -> None:
    # Several EOS ids at once; the sliding windows are shorter than the longer prompts.
    policy = tiny_policy(name)
    sampling = Sampling(max_completion_tokens=12, temperature=0.0)
    prompts = [random_prompt(50 + i, length) for i, length in enumerate((2, 13, 7, 5, 9, 3))]
    keys = [RolloutKey(0, 0, p.row_id, 0) for p in prompts]
    completions = generate(policy, prompts, keys, sampling, chunk_rows=4)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == greedy_by_generate(policy, prompt, 12)
        stopped = completion.token_ids[-1] in MANY_EOS
        assert completion.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_eos_ends_a_completion_and_is_kept() -> None:
    for completion in generate(tiny_policy()):
        assert not set(completion.token_ids[:-1]) & set(MANY_EOS)
        assert len(completion.sampler_logprobs) == len(completion.token_ids)
        if completion.finish is FinishReason.STOP:
            assert completion.token_ids[-1] in MANY_EOS
        else:
            assert len(completion.token_ids) == SAMPLING.max_completion_tokens


def test_without_eos_the_limit_ends_it() -> None:
    policy = tiny_policy(eos_token_ids=(EOS_ID,))
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[EOS_ID] = 0.0
    completions = generate(policy, sampling=Sampling(max_completion_tokens=3, top_k=20))
    assert {(c.finish, len(c.token_ids)) for c in completions} == {(FinishReason.LENGTH, 3)}


def test_one_token() -> None:
    completions = generate(tiny_policy(), sampling=Sampling(max_completion_tokens=1))
    assert {len(c.token_ids) for c in completions} == {1}
    for completion in completions:
        stopped = completion.token_ids[0] in MANY_EOS
        assert completion.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def ascii_pair(text: str) -> int | None:
    """Where the first two neighbouring ASCII characters stand that are not the text's first ones."""
    return next((i for i in range(1, len(text) - 2) if text[i : i + 2].isascii()), None)


def test_stop_string_cuts_the_text_and_keeps_the_tokens() -> None:
    policy = tiny_policy(eos_token_ids=(EOS_ID,))
    sampling = Sampling(max_completion_tokens=40)
    free = generate(policy, sampling=sampling)
    row, place = next((i, p) for i, c in enumerate(free) if (p := ascii_pair(c.text)) is not None)
    stop = free[row].text[place : place + 2]  # two tokens, so it is found where the second one comes
    stopped = generate(policy, sampling=dataclasses.replace(sampling, stop=("never there", stop)))
    completion = stopped[row]
    assert completion.finish is FinishReason.STOP
    assert completion.text == free[row].text[: free[row].text.index(stop)]
    count = len(completion.token_ids)
    assert completion.token_ids == free[row].token_ids[:count]
    assert completion.sampler_logprobs == pytest.approx(free[row].sampler_logprobs[:count], abs=1e-5)
    assert stop in policy.tokenizer.decode(completion.token_ids)
    assert stop not in policy.tokenizer.decode(completion.token_ids[:-1])
    others = [i for i, c in enumerate(free) if stop not in c.text]
    assert others
    assert_same([stopped[i] for i in others], [free[i] for i in others])


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_left_as_it_was(training: bool) -> None:
    policy = tiny_policy()
    policy.model.train(training)
    generate(policy)
    assert policy.model.training is training


def test_checkpointing_does_not_change_rollouts() -> None:
    policy = tiny_policy()
    expected = generate(policy)
    policy.model.train()
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(generate(policy), expected)
    assert policy.model.is_gradient_checkpointing


def test_progress_at_every_token() -> None:
    policy = tiny_policy()
    seen: list[tuple[int, int]] = []
    completions = TransformersEngine(policy, 5).generate(ROWS, KEYS, SAMPLING, lambda *state: seen.append(state))
    lengths = [len(c.token_ids) for c in completions]
    expected = []
    for start in (0, 5, 10):
        chunk = lengths[start : start + 5]
        expected += [(start + sum(n <= token for n in chunk), 12) for token in range(1, max(chunk) + 1)]
    assert seen == expected


def test_progress_may_abandon_the_rollout() -> None:
    policy = tiny_policy()
    policy.model.train()
    expected = generate(policy)

    def progress(done: int, total: int) -> None:
        if done > 6:  # in the middle of the second chunk
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TransformersEngine(policy, 5).generate(ROWS, KEYS, SAMPLING, progress)
    assert policy.model.training
    assert policy.model.config._attn_implementation == "sdpa"
    assert_same(generate(policy), expected)


def test_no_rows() -> None:
    assert generate(tiny_policy(), [], []) == []


def test_smollm2(smollm2: Policy) -> None:
    questions = ["What is 7 + 5?", "Name one river that flows through Paris, and one that flows through London.", "Hi"]
    prompts = []
    for row, question in enumerate(questions):
        text = smollm2.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(Prompt(row, text, question, tuple(smollm2.tokenizer(text).input_ids), {}))
    rows = [prompt for prompt in prompts for _ in range(2)]
    keys = [RolloutKey(1, 0, p.row_id, i % 2) for i, p in enumerate(rows)]
    sampling = Sampling(max_completion_tokens=8)
    wide = generate(smollm2, rows, keys, sampling, chunk_rows=8)
    narrow = generate(smollm2, rows, keys, sampling, chunk_rows=3)
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.sampler_logprobs == pytest.approx(theirs.sampler_logprobs, abs=1e-3)
    assert len({c.token_ids for c in wide}) > 3

    greedy = generate(smollm2, prompts[:2], keys[:2], dataclasses.replace(sampling, temperature=0.0))
    assert [c.token_ids for c in greedy] == [greedy_by_generate(smollm2, p, 8) for p in prompts[:2]]
