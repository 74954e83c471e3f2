"""Loading: sources, overrides, origins, paths, and that what is written out loads again."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpofit.config import Config, MemoryConfig, load, recipe_text, recipes
from grpofit.errors import ConfigError

MINIMAL = "model: {name: m}\ntask: {name: arithmetic}\nrewards: [{name: last_number}]\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write `my.yaml` in its own folder, away from the working directory; returns its path."""
    home = tmp_path / "elsewhere"
    home.mkdir()
    monkeypatch.chdir(home)

    def to(text: str) -> Path:
        path = tmp_path / "configs" / "my.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return to


def test_recipe_is_loaded_by_name():
    resolved = load("smollm2-arithmetic")
    config = resolved.config
    assert resolved.name == "smollm2-arithmetic"
    assert (config.model.name, config.task.terms, config.rewards[0].name) == ("smollm2-135m", (1, 20), "last_number")
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (8, 8)
    assert (config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens) == (64, 16)
    assert (config.algo.loss, config.optim.lr, config.memory) == ("grpo", 3e-5, MemoryConfig())
    assert config.task.prompt == "{{ question }} ="


def test_every_recipe_is_listed_loads_and_is_text():
    for info in recipes():
        assert load(info.name).name == info.name == info.path.stem
        assert info.summary and not info.summary.startswith(("#", info.name))
        assert recipe_text(info.name) == info.path.read_text(encoding="utf-8")


def test_unknown_recipe_names_the_nearest():
    for call in (load, recipe_text):
        with pytest.raises(ConfigError) as caught:
            call("smolm2-aritmetic")
        assert "smollm2-arithmetic" in caught.value.values and "grpofit recipes" in caught.value.fix


def test_file_wins_over_recipe_of_that_name(write, tmp_path, monkeypatch):
    path = write(MINIMAL)
    monkeypatch.chdir(path.parent)
    path.rename(path.with_name("smollm2-arithmetic"))
    assert load("smollm2-arithmetic").config.model.name == "m"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "- a\n", "just text\n"])
def test_text_without_keys(write, text):
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    assert "my.yaml" in caught.value.what and caught.value.fix


def test_missing_file_names_its_neighbour_and_a_folder_its_file(write):
    path = write(MINIMAL)
    with pytest.raises(ConfigError, match="cannot read") as caught:
        load(str(path.with_name("mi.yaml")))
    assert f"did you mean {path}?" in caught.value.fix
    path.rename(path.with_name("config.yaml"))
    with pytest.raises(ConfigError, match="cannot read") as caught:
        load(path.parent)
    assert str(path.with_name("config.yaml")) in caught.value.fix


def test_text_that_is_not_utf_8(write):
    path = write("")
    path.write_bytes(b"model: {name: \xff}\n")
    with pytest.raises(ConfigError, match="cannot read") as caught:
        load(path)
    assert "not UTF-8" in caught.value.values


def test_byte_order_mark_and_commented_out_section(write):
    assert load(write("\ufeff" + MINIMAL + "rollout:\n  # group_size: 4\n")).config.rollout.group_size == 8


def test_origins(write):
    path = write(MINIMAL + "rollout: {group_size: 4, top_p: 0.9}\nmemory: none\nalgo: {}\n")
    resolved = load(str(path), ["rollout.top_p=0.8", "rewards.0.weight=2", "task.terms=[1, 9]", "task.terms.1=7"])
    origins = resolved.origins
    assert origins["rollout.group_size"] == origins["model.name"] == origins["memory.checkpointing"] == f"file {path}"
    assert origins["rollout.top_p"] == origins["rewards.0.weight"] == origins["task.terms"] == "--set"
    assert origins["rollout.top_k"] == origins["algo.loss"] == origins["rewards.0.timeout_s"] == "default"
    assert resolved.config.task.terms == (1, 7)
    assert load("smollm2-arithmetic").origins["optim.lr"] == "recipe smollm2-arithmetic"
    assert load(resolved.config).origins["model.name"] == "python"


def test_origins_cover_every_key_once():
    resolved = load("smollm2-arithmetic")

    def leaf_keys(value, key=""):
        if isinstance(value, dict) and value:
            return [name for k, v in value.items() for name in leaf_keys(v, f"{key}.{k}")]
        if key == ".rewards":
            return [name for i, entry in enumerate(value) for name in leaf_keys(entry, f"{key}.{i}")]
        return [key.removeprefix(".")]

    assert list(resolved.origins) == leaf_keys(resolved.config.model_dump())


def test_section_override_replaces_it_with_its_origins(write):
    resolved = load(write(MINIMAL + "rollout: {group_size: 4}\n"), ["rollout={top_k: 5}"])
    assert (resolved.config.rollout.group_size, resolved.config.rollout.top_k) == (8, 5)
    assert (resolved.origins["rollout.group_size"], resolved.origins["rollout.top_k"]) == ("default", "--set")


def test_origins_of_free_mappings(write):
    text = MINIMAL.replace("arithmetic", "reasoning_gym:chain_sum") + ""
    path = write(text.replace("task: {", "task: {options: {min_terms: 2, max_terms: 3}, "))
    resolved = load(str(path), ["task.options.max_terms=4"])
    assert resolved.config.task.options == {"min_terms": 2, "max_terms": 4}
    assert resolved.origins["task.options.min_terms"] == f"file {path}"
    assert resolved.origins["task.options.max_terms"] == "--set"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optim.lr=2e-5", "optim.lr", 2e-5),
        ("optim.lr=1", "optim.lr", 1.0),
        ("model.revision=off", "model.revision", "off"),
        ("model.revision='1e3'", "model.revision", "1e3"),
        ("task.prompt=a=b", "task.prompt", "a=b"),
        (" rollout.top_k = 5", "rollout.top_k", 5),
        ("task.prompt=What is {{ question }}?", "task.prompt", "What is {{ question }}?"),
        (r'rollout.stop=["\n", "###"]', "rollout.stop", ["\n", "###"]),
        ("optim.max_grad_norm=null", "optim.max_grad_norm", None),
        ("optim.max_grad_norm=", "optim.max_grad_norm", None),
        ("algo.advantage=null", "algo.advantage", "none"),
        ("memory.micro_batch_tokens=~", "memory.micro_batch_tokens", "none"),
    ],
)
def test_override_values_are_yaml(override, path, value):
    resolved = load("smollm2-arithmetic", [override])
    section, key = path.split(".")
    found = getattr(getattr(resolved.config, section), key)
    assert found == value and type(found) is type(value)


def test_mapping_overrides_take_values_as_they_are(tmp_path):
    data = tmp_path / "rows.jsonl"
    resolved = load(
        "smollm2-arithmetic",
        {"task": {"file": data}, "rewards.0.weight": 3, "optim.betas": (0.8, 0.9), "model.revision": "1e3"},
    )
    assert resolved.config.task.file == str(data) and resolved.config.task.name is None
    assert resolved.config.rewards[0].weight == 3.0
    assert resolved.config.optim.betas == (0.8, 0.9) and resolved.config.model.revision == "1e3"
    assert resolved.origins["task.file"] == "--set"


def test_one_text_is_one_override():
    assert load("smollm2-arithmetic", "run.seed=7").config.run.seed == 7


def test_last_override_wins():
    assert load("smollm2-arithmetic", ["run.seed=7", "run.seed=8"]).config.run.seed == 8


def test_overrides_do_not_touch_what_they_were_given():
    overrides = {"task": {"name": "arithmetic", "terms": [1, 5]}, "task.terms.1": 9}
    assert load("smollm2-arithmetic", overrides).config.task.terms == (1, 9)
    assert overrides["task"] == {"name": "arithmetic", "terms": [1, 5]}


@pytest.mark.parametrize("word", ["auto", "none"])
def test_memory_words_stand_for_every_field(write, word):
    for resolved in (load(write(MINIMAL + f"memory: {word}\n")), load(write(MINIMAL), [f"memory={word}"])):
        assert resolved.config.memory == MemoryConfig(**dict.fromkeys(MemoryConfig.model_fields, word))
    changed = load(write(MINIMAL + f"memory: {word}\n"), ["memory.generation_chunk=3"]).config.memory
    assert changed.generation_chunk == 3 and changed.checkpointing == word


def test_files_are_relative_to_their_yaml_and_to_the_working_directory_in_overrides(write):
    path = write(
        "model: {name: ./models/a}\ntask: {file: data/a.jsonl, eval_file: ../b.csv}\n"
        "rewards: [{function: r.py:score}, {function: pkg.mod:score2}]\n"
    )
    here, there = Path.cwd(), path.parent
    resolved = load(path)
    assert resolved.base_dir == there
    assert resolved.config.model.name == str(there / "models" / "a")
    assert resolved.config.task.file == str(there / "data" / "a.jsonl")
    assert resolved.config.task.eval_file == str(there.parent / "b.csv")
    assert [reward.function for reward in resolved.config.rewards] == [f"{there / 'r.py'}:score", "pkg.mod:score2"]
    changed = load(path, ["task.file=c.jsonl", "rewards.0.function=sub/s.py:f", "model.name=w.gguf"]).config
    assert changed.task.file == str(here / "c.jsonl")
    assert changed.rewards[0].function == f"{here / 'sub' / 's.py'}:f"
    assert changed.model.name == str(here / "w.gguf")


def test_home_and_absolute_paths(write, monkeypatch):
    monkeypatch.setenv("HOME", "/somebody")
    text = MINIMAL.replace("name: arithmetic", "file: ~/a.jsonl, eval_file: /b.csv")
    task = load(write(text)).config.task
    assert (task.file, task.eval_file) == ("/somebody/a.jsonl", "/b.csv")


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "smollm2-135m", "gpt2"])
def test_hub_ids_stay(write, name):
    assert load(write(MINIMAL.replace("name: m", f"name: {name}"))).config.model.name == name


def test_a_folder_called_like_a_hub_id_is_that_folder(write):
    path = write(MINIMAL.replace("name: arithmetic", "dataset: org/rows"))
    assert load(path).config.task.dataset == "org/rows"
    (path.parent / "org" / "rows").mkdir(parents=True)
    assert load(path).config.task.dataset == str(path.parent / "org" / "rows")


def test_a_kept_copy_holds_anywhere(write, tmp_path):
    path = write("model: {name: m}\ntask: {file: a.jsonl}\nrewards: [{function: mine:score}]\n")
    resolved = load(path)
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(resolved.to_yaml(comment_origins=True), encoding="utf-8")
    again = load(run / "config.yaml")
    assert again.config == resolved.config
    assert again.base_dir == resolved.base_dir == path.parent


def test_to_yaml_says_where_each_value_is_from():
    text = load("smollm2-arithmetic", ["run.seed=5"]).to_yaml(comment_origins=True)
    rows = {row.split(":")[0].strip(" -"): row for row in text.splitlines()}
    assert rows["seed"].endswith("# --set") and rows["seed"].split()[1] == "5"
    assert rows["lr"].endswith("# recipe smollm2-arithmetic") and rows["top_k"].endswith("# default")
    assert "# --set" not in load("smollm2-arithmetic", ["run.seed=5"]).to_yaml(comment_origins=False)


FLOATS = st.floats(min_value=1e-300, max_value=1e300)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "optim.lr": FLOATS,
        "optim.eps": FLOATS,
        "algo.beta": FLOATS,
        "rewards.0.weight": st.floats(allow_nan=False, allow_infinity=False, min_value=1e-9),
        "rollout.stop": st.lists(TEXTS, max_size=3),
        "rollout.temperature": FLOATS | st.integers(1, 9),
        "task.prompt": TEXTS,
        "task.system": TEXTS,
        "task.chat_template_kwargs": st.dictionaries(
            TEXTS,
            st.recursive(PLAIN, lambda x: st.lists(x, max_size=2) | st.dictionaries(TEXTS, x, max_size=2)),
            max_size=2,
        ),
        "memory": st.sampled_from(["auto", "none"]),
        "memory.micro_batch_tokens": st.sampled_from(["auto", "none"]) | st.integers(1, 10**9),
        "run.seed": st.integers(0, 2**63 - 1),
    },
)


@settings(max_examples=15, deadline=None)
@given(CHANGES)
def test_what_is_written_out_loads_again(changes):
    resolved = load("smollm2-arithmetic", changes)
    with tempfile.TemporaryDirectory() as folder:
        for comments in (True, False):
            path = Path(folder) / "config.yaml"
            path.write_text(resolved.to_yaml(comment_origins=comments), encoding="utf-8")
            again = load(path)
            assert again.config == resolved.config
            assert again.to_yaml(comment_origins=False).split("\n", 1)[1] == resolved.to_yaml(False).split("\n", 1)[1]


def test_a_config_made_in_python_is_checked_too():
    config = Config(model={"name": "m"}, task={"name": "arithmetic"}, rewards=[{"name": "task"}])
    with pytest.raises(ConfigError) as caught:
        load(config)
    assert "rewards.0.name = task (python)" in caught.value.values


def test_values_that_are_not_plain_data():
    with pytest.raises(ConfigError, match=r"'run\.seed' is not plain data"):
        load("smollm2-arithmetic", {"run.seed": object()})
    with pytest.raises(ConfigError, match=r"'task\.options' is not plain data"):
        load("smollm2-arithmetic", {"task.options": {1: 2}})


def test_import_reads_nothing_heavy():
    code = "import sys, grpofit.config; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not set(done.stdout.split()) & {"torch", "transformers", "numpy", "jinja2", "datasets", "rich", "typer"}
