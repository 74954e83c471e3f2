"""Everything that is wrong is told at once, in our words, with value, origin and a change that helps."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpofit.config import load
from grpofit.config.describe import keys
from grpofit.config.yaml import dotted
from grpofit.errors import ConfigError


def error_of(*overrides: str, source="smollm2-arithmetic") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(source, list(overrides))
    return caught.value


def test_all_problems_at_once(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "model:\n"
        "  name: m\n"
        "  dtype: float8\n"  # a wrong word
        "task: {name: arithmetic, operations: [add, div]}\n"
        "rewards:\n"
        "  - {name: last_number, wieght: 2}\n"  # an unknown key
        "rollout:\n"
        "  group_size: 1\n"  # out of range
        '  max_prompt_tokens: "64"\n'  # the wrong type
        "  steps: 5\n"  # another section's key
        "algo: {loss: gspo, ratio: token}\n"  # a contradiction
    )
    error = error_of("run.seed=true", "nonsense", source=str(path))
    assert error.what == f"{path}: 9 problems"
    rows = error.values.splitlines()
    assert [row.partition(":")[0] for row in rows] == [str(number) for number in range(1, 10)]
    text = error.values
    assert f"model.dtype = float8 (file {path}, line 3)" in text
    assert f"task.operations = [add, div] (file {path}, line 4)" in text
    assert f"rewards.0.wieght = 2 (file {path}, line 6)" in text and "nearest: 'rewards.0.weight'" in text
    assert f"rollout.group_size = 1 (file {path}, line 8)" in text and "needs a whole number >= 2" in text
    assert f"rollout.max_prompt_tokens = '64' (file {path}, line 9)" in text
    assert "unknown key 'rollout.steps' (here it is 'run.steps')" in text
    assert f"algo.loss = gspo (file {path}, line 11), algo.ratio = token (file {path}, line 11)" in text
    assert "run.seed = true (--set)" in text
    assert "'--set nonsense' is not key=value" in text
    numbered = {
        number
        for part in (error.why, error.fix)
        for row in part.splitlines()
        for number in row.split(":")[0].split(", ")
    }
    assert numbered == {str(number) for number in range(1, 10)}


@pytest.mark.parametrize(
    ("override", "needs"),
    [
        ("run.steps=1.5", "a whole number >= 1"),
        ("run.steps=2.0", "a whole number >= 1"),
        ("run.steps=true", "a whole number >= 1"),
        ("run.steps='8'", "a whole number >= 1"),
        ("run.steps=0", "a whole number >= 1"),
        ("run.seed=-1", "a whole number >= 0 and < 2**63"),
        ("optim.lr=true", "a number > 0"),
        ("optim.lr='2e-5'", "a number > 0"),
        ("optim.lr=0", "a number > 0"),
        ("optim.lr=.inf", "a finite number"),
        ("rewards.0.weight=.nan", "a finite number"),
        ("rollout.top_p=1.01", "a number > 0 and <= 1"),
        ("memory.micro_batch_tokens=0", "a whole number >= 1, or auto, or none"),
        ("memory.micro_batch_tokens=some", "a whole number >= 1, or auto, or none"),
        ("memory.micro_batch_tokens=1.5", "a whole number >= 1, or auto, or none"),
        ("memory.micro_batch_tokens=true", "a whole number >= 1, or auto, or none"),
        ("algo.clip_low=low", "a number, or auto"),
        ("run.threads=0", "a whole number >= 1, or auto"),
        ("optim.max_grad_norm=0", "a number > 0, or null"),
        ("task.train_size=0", "a whole number >= 1, or null"),
        ("model.trust_remote_code=1", "true or false"),
        ("model.dtype=fp64", "auto, bfloat16, float16 or float32"),
        ("adapter=lora", "none"),
        ("run.device=gpu", "auto, cpu, cuda or cuda:0"),
        ("rollout.stop=5", "a list of text"),
        ("rollout.stop=['']", "a list of text"),
        ("task.operations=[]", "a list of add, sub or mul, at least one, or null"),
        ("task.terms=[1]", "a list of two whole numbers, or null"),
        ("task.terms=[1, 2.5]", "a list of two whole numbers, or null"),
        ("optim.betas=[0.9, true]", "a list of two numbers"),
        ("task.options=5", "a mapping of keys"),
        ("task.system=5", "text or null"),
        ("model.name=", "text"),
        ("model.name=''", "text"),
        ("rollout=5", "a mapping of keys"),
        ("memory=5", "auto, or none, or a mapping of keys"),
        ("rewards=[]", "a list of mappings, at least one"),
        ("rewards={name: last_number}", "a list of mappings, at least one"),
        ("rewards=[last_number]", "a mapping of keys"),
    ],
)
def test_wrong_values_are_worded_and_cured(override, needs):
    key = override.partition("=")[0]
    error = error_of(override)
    assert re.search(rf"'{key}(\.0)?' needs {re.escape(needs)}$", error.what), error.what
    assert f"{key}" in error.values and "(--set)" in error.values and error.why
    words = shlex.split(error.fix)
    flags = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    load("smollm2-arithmetic", [override, *flags])


def test_no_word_of_pydantic_reaches_the_user():
    text = str(error_of("run.steps=x", "memory.micro_batch_tokens=x", "bogus=1", "rewards=3", "model.name=null"))
    assert not re.search(r"pydantic|Input should|Extra inputs|errors\.|type=|constrained|literal\[", text)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("algo.loss=drgrpo", "--set algo.loss=dr_grpo"),
        ("rewards.0.name=last_nmber", "--set rewards.0.name=last_number"),
        ("run.steps=1_000", "--set run.steps=1000"),
        ("run.steps='8'", "--set run.steps=8"),
        ("optim.max_grad_norm=none", "--set optim.max_grad_norm=null"),
        ("model.trust_remote_code=off", "--set model.trust_remote_code=false"),
        ("run.trackers=wandb", "--set 'run.trackers=[wandb]'"),
        ("rollout.stop=END", "--set 'rollout.stop=[END]'"),
        ("model.revision=5", """--set "model.revision='5'\""""),
        ("task.operations=[add, div]", "--set 'task.operations=[add]'"),
        ("task.name=arithmetics", "--set task.name=arithmetic"),
    ],
)
def test_what_was_probably_meant_is_proposed(override, fix):
    assert error_of(override).fix.startswith(fix)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.group_sise", "rollout.group_size"),
        ("rewards.0.timeout", "rewards.0.timeout_s"),
        ("run.max_completion_tokens", "rollout.max_completion_tokens"),
        ("group_size", "rollout.group_size"),
        ("model.quantization", "quantization"),
        ("rolout", "rollout"),
        ("learningrate_", ""),
        ("run.num_generations", "rollout.group_size"),
        ("learning_rate", "optim.lr"),
        ("optim.micro_batch_token", "memory.micro_batch_tokens"),
    ],
)
def test_unknown_keys_name_the_nearest(key, meant):
    error = error_of(f"{key}=7")
    assert f"unknown key '{key}'" in error.what and f"{key} = 7 (--set)" in error.values
    if meant:
        assert f"'{meant}'" in error.what and meant in error.fix
    else:
        assert "there are model, adapter" in error.what and error.fix == f"remove '{key}'"


def test_trl_names_point_to_keys_that_exist():
    from grpofit.config.problems import _TRL_NAMES

    known = {dotted(entry.path) for entry in keys()}
    assert {target for target in _TRL_NAMES.values() if target != "rewards"} <= known
    assert not {name for name in _TRL_NAMES if name in {key.rpartition(".")[2] for key in known}}


def test_missing_required_keys(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("run: {steps: 3}\n")
    error = error_of(source=str(path))
    assert [row.partition(": ")[2] for row in error.values.splitlines()] == [
        "'model' is missing: no model",
        "'task' is missing: no task",
        "'rewards' is missing: no rewards",
    ]
    words = shlex.split(error.fix)
    load(path, [words[i + 1] for i, word in enumerate(words) if word == "--set"])


def test_rules_about_a_wrong_key_wait_for_it():
    # `task.flie` was meant to be the source: that there is none is not a second problem.
    error = error_of("task={flie: rows.jsonl}")
    assert error.what.startswith("recipe smollm2-arithmetic: unknown key 'task.flie'")
    # A loss that does not exist says nothing about the ratio.
    assert "unknown" not in error_of("algo.loss=gspoo", "algo.ratio=token").what
    assert "needs" in error_of("algo.loss=gspoo", "algo.ratio=token").what


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["rewards.1.weight=2"], "'rewards' has 1 entries"),
        (["rewards.x.weight=2"], "'rewards' has 1 entries"),
        (["rewards.-1.weight=2"], "'rewards' has 1 entries"),
        (["model.name.x=2"], "'model.name' holds a value"),
        (["=2"], "not key=value"),
        (["run.steps"], "not key=value"),
        (["task.prompt={{ question }}"], "not YAML"),
        (["run..steps=1"], "has no place"),
    ],
)
def test_overrides_without_a_place(overrides, what):
    error = error_of(*overrides)
    assert what in error.what and error.why and error.fix


def test_template_override_gets_quotes_that_work():
    (flag,) = re.findall(r"--set (.+?)   ", error_of("task.prompt={{ question }}").fix)
    assert load("smollm2-arithmetic", shlex.split(flag)).config.task.prompt == "{{ question }}"


def test_long_values_are_cut():
    error = error_of(f"run.steps={'x' * 500}")
    assert len(max(error.values.splitlines(), key=len)) < 130


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(
    [dotted(entry.path) for entry in keys()] + ["model", "task", "rewards", "rewards.0", "run", "memory"]
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, ANY, max_size=3))
def test_whatever_is_written_is_a_configuration_or_a_config_error(changes):
    try:
        load("smollm2-arithmetic", changes)
    except ConfigError as error:
        assert error.values and error.why and error.fix
