"""From rows to token ids, with real tokenizers small enough to be made here; and the order of prompts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpofit.config.tree import TaskConfig
from grpofit.data.prompts import build_prompts, prompts_for_step
from grpofit.errors import DataError
from grpofit.types import Prompt

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
CHAT = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"


def make_tokenizer(*, adds_bos: bool = False, chat_template: str | None = None):
    """One token a character; `<s>` is the BOS."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(c): c for c in range(3, 127)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex("."), "isolated")
    if adds_bos:
        inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    return tokenizer


def build(rows, tokenizer, limit=100, **keys):
    return build_prompts(rows, TaskConfig(**{"file": "rows.jsonl", **keys}), tokenizer, limit)


def explained(*args, **keys) -> str:
    with pytest.raises(DataError) as caught:
        build(*args, **keys)
    assert [label for label, _ in caught.value.parts()] == ["got", "why", "fix"]
    return str(caught.value)


def codes(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


ROWS = [{"prompt": "ab", "answer": "1"}]
MESSAGES = [{"prompt": [{"role": "user", "content": "ab"}], "answer": "1"}]


class TestBarePrompts:
    def test_text_is_tokenised_as_it_is(self):
        prompt = build(ROWS, make_tokenizer()).prompts[0]
        assert prompt == Prompt(0, "ab", "ab", codes("ab"), {"answer": "1"})

    def test_the_bos_that_the_tokenizer_adds(self):
        assert build(ROWS, make_tokenizer(adds_bos=True)).prompts[0].token_ids == (1, *codes("ab"))

    def test_no_second_bos_where_the_text_begins_with_one(self):
        rows = [{"prompt": "<s>ab"}, {"prompt": "ab"}]
        prompts = build(rows, make_tokenizer(adds_bos=True)).prompts
        assert [prompt.token_ids for prompt in prompts] == [(1, *codes("ab"))] * 2

    def test_no_bos_where_the_tokenizer_adds_none(self):
        tokenizer = make_tokenizer(chat_template=CHAT)
        assert 1 not in build(ROWS, tokenizer).prompts[0].token_ids
        assert 1 not in build(ROWS, tokenizer, template="none").prompts[0].token_ids

    def test_a_template_over_columns(self):
        rows = [{"question": "1+1", "answer": "2"}]
        prompt = build(rows, make_tokenizer(), prompt="Q: {{ question }}\n").prompts[0]
        assert (prompt.text, prompt.columns) == ("Q: 1+1\n", rows[0])

    @pytest.mark.parametrize(
        ("name", "text"),
        [("arithmetic", "What is 1+1? Answer with only the number."), ("gsm8k", "1+1"), ("reasoning_gym:ab", "1+1")],
    )
    def test_default_templates_of_named_tasks(self, name, text):
        prompts = build([{"question": "1+1", "answer": "2"}], make_tokenizer(), file=None, name=name).prompts
        assert prompts[0].text == text


class TestChat:
    def test_auto_applies_the_template_with_the_models_turn_open(self):
        result = build(ROWS, make_tokenizer(chat_template=CHAT))
        prompt = result.prompts[0]
        assert prompt.text == "<user>ab\n<assistant>"
        assert prompt.token_ids == codes(prompt.text)
        assert prompt.messages == [{"role": "user", "content": "ab"}]
        assert (prompt.conversational, result.chat) == (False, True)

    def test_template_none_leaves_the_text_bare(self):
        prompt = build(ROWS, make_tokenizer(chat_template=CHAT), template="none").prompts[0]
        assert (prompt.text, prompt.messages) == ("ab", "ab")

    def test_no_second_bos(self):
        tokenizer = make_tokenizer(adds_bos=True, chat_template="{{ bos_token }}" + CHAT)
        ids = build(ROWS, tokenizer).prompts[0].token_ids
        assert ids[0] == 1
        assert ids.count(1) == 1

    def test_a_template_without_bos_gets_none(self):
        assert 1 not in build(ROWS, make_tokenizer(adds_bos=True, chat_template=CHAT)).prompts[0].token_ids

    def test_system_message(self):
        prompt = build(ROWS, make_tokenizer(chat_template=CHAT), system="be brief").prompts[0]
        assert prompt.text == "<system>be brief\n<user>ab\n<assistant>"

    def test_messages_of_the_row(self):
        prompt = build(MESSAGES, make_tokenizer(chat_template=CHAT)).prompts[0]
        assert (prompt.text, prompt.conversational) == ("<user>ab\n<assistant>", True)
        assert prompt.messages == MESSAGES[0]["prompt"]

    def test_a_conversation_that_ends_with_the_assistant_is_continued(self):
        rows = [{"prompt": [*MESSAGES[0]["prompt"], {"role": "assistant", "content": "So"}]}]
        assert build(rows, make_tokenizer(chat_template=CHAT)).prompts[0].text == "<user>ab\n<assistant>So"

    def test_chat_template_kwargs(self):
        template = CHAT + "{% if thinking %}<think>{% endif %}"
        tokenizer = make_tokenizer(chat_template=template)
        assert build(ROWS, tokenizer, chat_template_kwargs={"thinking": True}).prompts[0].text.endswith("<think>")

    @pytest.mark.parametrize(
        ("rows", "chat_template", "keys", "part"),
        [
            (ROWS, None, {"template": "chat"}, "the tokenizer has no chat template"),
            (MESSAGES, None, {}, "the rows' prompts are lists of messages"),
            (MESSAGES, CHAT, {"template": "none"}, "--set task.template=chat"),
            (ROWS, None, {"system": "be brief"}, "task.system is set"),
            (ROWS, CHAT, {"chat_template_kwargs": {"tokenize": True}}, "remove tokenize"),
            (ROWS, "{{ raise_exception('no system role') }}", {}, "no system role"),
            ([{"prompt": [{"role": "system", "content": "x"}]}], CHAT, {"system": "y"}, "a system message of its own"),
            ([{"question": "x"}], CHAT, {}, "row 1 has no prompt"),
        ],
    )
    def test_mistakes(self, rows, chat_template, keys, part):
        assert part in explained(rows, make_tokenizer(chat_template=chat_template), **keys)


LENGTHS = [{"prompt": "a" * n} for n in (5, 3, 4, 9)]


class TestLength:
    def test_long_prompts_are_left_out_and_counted_never_cut(self):
        result = build(LENGTHS, make_tokenizer(), limit=4)
        assert [prompt.text for prompt in result.prompts] == ["aaa", "aaaa"]
        assert [prompt.row_id for prompt in result.prompts] == [1, 2]
        assert (result.dropped, result.longest_tokens) == (2, 4)

    def test_no_prompt_short_enough(self):
        text = explained(LENGTHS, make_tokenizer(), limit=2)
        assert "the shortest has 3 tokens" in text
        assert "rollout.max_prompt_tokens=" in text

    def test_more_rows_than_one_batch_of_the_tokenizer(self):
        rows = [{"prompt": "b" * (1 + n % 3)} for n in range(2500)]
        prompts = build(rows, make_tokenizer()).prompts
        assert [len(prompt.token_ids) for prompt in prompts] == [1 + n % 3 for n in range(2500)]


def some_prompts(count: int) -> list[Prompt]:
    return [Prompt(row, str(row), str(row), (row,), {}) for row in range(count)]


class TestOrder:
    @given(n=st.integers(1, 30), count=st.integers(1, 40), seed=st.integers(-5, 5), step=st.integers(0, 100))
    @settings(max_examples=150, deadline=None)
    def test_a_step_takes_each_prompt_as_often_as_any_other(self, n, count, seed, step):
        chosen = prompts_for_step(some_prompts(n), count, seed, step)
        times = Counter(prompt.row_id for prompt in chosen)
        assert len(chosen) == count
        assert set(times.values()) <= ({1} if count <= n else {count // n, -(-count // n)})
        assert chosen == prompts_for_step(some_prompts(n), count, seed, step)

    def test_an_epoch_takes_every_prompt_once(self):
        prompts = some_prompts(12)
        for epoch in range(3):
            rows = [p.row_id for s in range(4) for p in prompts_for_step(prompts, 3, 5, 4 * epoch + s)]
            assert sorted(rows) == list(range(12))

    def test_epochs_seeds_and_steps_differ(self):
        prompts = some_prompts(40)
        orders = [
            tuple(p.row_id for p in prompts_for_step(prompts, 40, seed, step)) for seed in (1, 2) for step in range(3)
        ]
        assert len(set(orders)) == 6

    def test_all_prompts_come_up_when_the_step_does_not_divide(self):
        """5 prompts, 3 a step: one step an epoch, two prompts left out of each, never the same two for long."""
        prompts = some_prompts(5)
        times = Counter(p.row_id for step in range(200) for p in prompts_for_step(prompts, 3, 0, step))
        assert min(times.values()) > 90  # 120 expected; 90 is more than four standard deviations (6.9) below


def test_half_a_character_is_named_with_its_row() -> None:
    rows = [{"prompt": "whole"}, {"prompt": "half \ud800"}]
    with pytest.raises(DataError, match="prompt of row 2 holds half a character") as raised:
        build(rows, make_tokenizer())
    assert raised.value.fix
