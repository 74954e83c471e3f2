"""Every rule across keys: one configuration that breaks it, the change it proposes, and its nearest neighbours."""

from __future__ import annotations

import math
import re
import shlex
from copy import deepcopy
from typing import Any

import pytest

from grpofit.config import (
    AlgoConfig,
    Config,
    check_model_limits,
    load,
    resolved_clips,
    resolved_ratio,
    resume_conflicts,
)
from grpofit.config.rules import RULES, check
from grpofit.errors import ConfigError

BASE: dict[str, Any] = {"model": {"name": "m"}, "task": {"name": "arithmetic"}, "rewards": [{"name": "last_number"}]}
GYM = {"task.name": "reasoning_gym:chain_sum"}
FILE = {"task.name": None, "task.file": "rows.jsonl"}
DATASET = {"task.name": None, "task.dataset": "org/rows"}
REGEX = {"rewards.0.name": "regex", "rewards.0.pattern": r"\d"}
TWO = [{"name": "last_number"}, {"name": "answer_format"}]


def unchecked(changes: dict[str, Any]) -> Config:
    """The configuration with these changes, types checked and rules not."""
    data = deepcopy(BASE)
    for key, value in changes.items():
        holder: Any = data
        *path, last = key.split(".")
        for part in path:
            holder = holder[int(part)] if isinstance(holder, list) else holder.setdefault(part, {})
        holder[int(last) if isinstance(holder, list) else last] = deepcopy(value)
    return Config.model_validate(data)


BROKEN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no task": ({"task.name": None}, ("task.name", "task.file", "task.dataset")),
    "two tasks": ({"task.file": "a.jsonl"}, ("task.name", "task.file")),
    "three tasks": ({"task.file": "a", "task.dataset": "b"}, ("task.name", "task.file", "task.dataset")),
    "unknown task": ({"task.name": "gsm9k"}, ("task.name",)),
    "reasoning_gym without data set": ({"task.name": "reasoning_gym:"}, ("task.name",)),
    "reasoning_gym without colon": ({"task.name": "reasoning_gym"}, ("task.name",)),
    "operations of gsm8k": ({"task.name": "gsm8k", "task.operations": ["add"]}, ("task.operations", "task.name")),
    "terms of a file": ({**FILE, "task.terms": [1, 2]}, ("task.terms", "task.file")),
    "options of arithmetic": ({"task.options": {"a": 1}}, ("task.options", "task.name")),
    "eval_file of a data set": ({**DATASET, "task.eval_file": "a.csv"}, ("task.eval_file", "task.dataset")),
    "dataset_config of a file": ({**FILE, "task.dataset_config": "main"}, ("task.dataset_config", "task.file")),
    "split of gsm8k": ({"task.name": "gsm8k", "task.split": "test"}, ("task.split", "task.name")),
    "eval_split of reasoning_gym": ({**GYM, "task.eval_split": "test"}, ("task.eval_split", "task.name")),
    "terms the wrong way": ({"task.terms": [20, 1]}, ("task.terms",)),
    "size among the options": ({**GYM, "task.options": {"size": 9}}, ("task.options.size", "task.train_size")),
    "seed among the options": ({**GYM, "task.options": {"seed": 9}}, ("task.options.seed", "task.split_seed")),
    "system without chat": ({"task.template": "none", "task.system": "Be brief."}, ("task.system", "task.template")),
    "kwargs without chat": (
        {"task.template": None, "task.chat_template_kwargs": {"enable_thinking": False}},
        ("task.chat_template_kwargs", "task.template"),
    ),
    "reward without source": ({"rewards.0.name": None}, ("rewards.0.name", "rewards.0.function")),
    "reward with two sources": ({"rewards.0.function": "a.py:f"}, ("rewards.0.name", "rewards.0.function")),
    "function without file": ({"rewards.0": {"function": "score"}}, ("rewards.0.function",)),
    "function without name": ({"rewards.0": {"function": "my.py"}}, ("rewards.0.function",)),
    "function with a call": ({"rewards.0": {"function": "my.py:score()"}}, ("rewards.0.function",)),
    "regex without pattern": ({"rewards.0.name": "regex"}, ("rewards.0.pattern",)),
    "regex that does not compile": ({"rewards.0.name": "regex", "rewards.0.pattern": "("}, ("rewards.0.pattern",)),
    "pattern without regex": ({"rewards.0.pattern": "x"}, ("rewards.0.pattern", "rewards.0.name")),
    "pattern of a function": (
        {"rewards.0": {"function": "a.py:f", "pattern": "x"}},
        ("rewards.0.pattern", "rewards.0.function"),
    ),
    "buffer_tokens without soft_overlong": (
        {"rewards.0.buffer_tokens": 4},
        ("rewards.0.buffer_tokens", "rewards.0.name"),
    ),
    "buffer longer than a completion": (
        {"rewards.0.name": "soft_overlong", "rewards.0.buffer_tokens": 513},
        ("rewards.0.buffer_tokens", "rollout.max_completion_tokens"),
    ),
    "same reward twice": ({"rewards": [TWO[0], TWO[1], TWO[0]]}, ("rewards.0.name", "rewards.2.name")),
    "functions of one name": (
        {"rewards": [{"function": "a.py:score"}, {"function": "b.c:score"}]},
        ("rewards.0.function", "rewards.1.function"),
    ),
    "task reward of arithmetic": ({"rewards.0.name": "task"}, ("rewards.0.name", "task.name")),
    "task reward of gsm8k": ({"rewards.0.name": "task", "task.name": "gsm8k"}, ("rewards.0.name", "task.name")),
    "task reward of a file": ({"rewards.0.name": "task", **FILE}, ("rewards.0.name", "task.file")),
    "all weights zero": (
        {"rewards": TWO, "rewards.0.weight": 0.0, "rewards.1.weight": 0.0},
        ("rewards.0.weight", "rewards.1.weight"),
    ),
    "gspo per token": ({"algo.loss": "gspo", "algo.ratio": "token"}, ("algo.loss", "algo.ratio")),
    "cispo per sequence": ({"algo.loss": "cispo", "algo.ratio": "sequence"}, ("algo.ratio", "algo.loss")),
    "sapo per sequence": ({"algo.loss": "sapo", "algo.ratio": "sequence"}, ("algo.ratio", "algo.loss")),
    "reinforce per sequence": ({"algo.loss": "reinforce", "algo.ratio": "sequence"}, ("algo.ratio", "algo.loss")),
    "clip_low of sapo": ({"algo.loss": "sapo", "algo.clip_low": 0.2}, ("algo.clip_low", "algo.loss")),
    "clip_high of reinforce": ({"algo.loss": "reinforce", "algo.clip_high": 0.2}, ("algo.clip_high", "algo.loss")),
    "clip_delta of reinforce": ({"algo.loss": "reinforce", "algo.clip_delta": 4.0}, ("algo.clip_delta", "algo.loss")),
    "clip_low of cispo": ({"algo.loss": "cispo", "algo.clip_low": 0.2}, ("algo.clip_low", "algo.loss")),
    "clip_delta of cispo": ({"algo.loss": "cispo", "algo.clip_delta": 4.0}, ("algo.clip_delta", "algo.loss")),
    "cispo capped below 1": ({"algo.loss": "cispo", "algo.clip_high": 0.28}, ("algo.clip_high", "algo.loss")),
    "clip_low of 1": ({"algo.clip_low": 1.0}, ("algo.clip_low",)),
    "clip_low below 0": ({"algo.clip_low": -0.1}, ("algo.clip_low",)),
    "clip_high below 0": ({"algo.clip_high": -0.1}, ("algo.clip_high",)),
    "clip_delta of 1": ({"algo.clip_delta": 1.0}, ("algo.clip_delta", "algo.clip_high")),
    "clip_delta within the clip": (
        {"algo.clip_delta": 1.25, "algo.clip_high": 0.28},
        ("algo.clip_delta", "algo.clip_high"),
    ),
    "gspo with grpo's clip_low": (
        {"algo.loss": "gspo", "algo.clip_low": 0.2},
        ("algo.clip_low", "algo.loss", "algo.ratio"),
    ),
    "grpo per sequence with its own clip_high": (
        {"algo.loss": "grpo", "algo.ratio": "sequence", "algo.clip_high": 0.28},
        ("algo.clip_high", "algo.loss", "algo.ratio"),
    ),
    "sapo's gate of grpo": ({"algo.loss": "grpo", "algo.sapo_tau_neg": 2.0}, ("algo.sapo_tau_neg", "algo.loss")),
    "with_signal and bnpo": (
        {"algo.denominator": "with_signal", "algo.loss": "bnpo"},
        ("algo.denominator", "algo.loss"),
    ),
    "with_signal and a KL term": (
        {"algo.denominator": "with_signal", "algo.beta": 0.04},
        ("algo.denominator", "algo.beta"),
    ),
    "with_signal and an entropy bonus": (
        {"algo.denominator": "with_signal", "algo.entropy_bonus": 0.01},
        ("algo.denominator", "algo.entropy_bonus"),
    ),
    "normalize_each and another advantage": (
        {"algo.combine": "normalize_each", "algo.advantage": None},
        ("algo.advantage", "algo.combine"),
    ),
    "warm-up longer than the run": ({"optim.warmup_steps": 101}, ("optim.warmup_steps", "run.steps")),
    "min_lr_frac of a constant rate": ({"optim.min_lr_frac": 0.1}, ("optim.min_lr_frac", "optim.schedule")),
    "beta of 1": ({"optim.betas": [0.9, 1.0]}, ("optim.betas",)),
    "negative beta": ({"optim.betas": [-0.1, 0.9]}, ("optim.betas",)),
    "float16 alone": ({"model.dtype": "float16", "model.master_dtype": None}, ("model.dtype", "model.master_dtype")),
    "flash attention in float32": (
        {"model.attention": "flash_attention_2", "model.dtype": "float32"},
        ("model.attention", "model.dtype"),
    ),
    "flash attention on the CPU": (
        {"model.attention": "flash_attention_2", "run.device": "cpu"},
        ("model.attention", "run.device"),
    ),
    "compiled layers, selective": (
        {"run.compile": "layers", "memory.checkpointing": "selective"},
        ("run.compile", "memory.checkpointing"),
    ),
    "compiled layers, MLP tiles": (
        {"run.compile": "layers", "memory.mlp_tile_tokens": 512},
        ("run.compile", "memory.mlp_tile_tokens"),
    ),
    "stochastic rounding with a master": (
        {"optim.rounding": "stochastic"},
        ("optim.rounding", "model.master_dtype"),
    ),
    "stochastic rounding of float32": (
        {"optim.rounding": "stochastic", "model.dtype": "float32", "model.master_dtype": None},
        ("optim.rounding", "model.dtype"),
    ),
    "stochastic rounding of float16": (
        {"optim.rounding": "stochastic", "model.dtype": "float16"},
        ("optim.rounding", "model.dtype"),
    ),
    "keep_best without evaluations": (
        {"run.keep_best": True, "run.eval_every": 0},
        ("run.keep_best", "run.eval_every"),
    ),
}

SOUND: dict[str, dict[str, Any]] = {
    "base": {},
    "one term": {"task.terms": [7, 7]},
    "file with held-out file": {**FILE, "task.eval_file": "b.jsonl"},
    "data set with splits": {**DATASET, "task.split": "a", "task.eval_split": "b", "task.dataset_config": "main"},
    "options of reasoning_gym": {**GYM, "task.options": {"min_terms": 2}, "rewards.0.name": "task"},
    "function of a file": {"rewards.0": {"function": "dir with space/my_rewards.py:score_1"}},
    "function of a module": {"rewards.0": {"function": "pkg.rewards:score"}},
    "regex": REGEX,
    "buffer as long as a completion": {"rewards.0.name": "soft_overlong", "rewards.0.buffer_tokens": 512},
    "one weight zero, one negative": {"rewards": TWO, "rewards.0.weight": 0.0, "rewards.1.weight": -1.0},
    "gspo": {"algo.loss": "gspo", "algo.ratio": "sequence", "algo.clip_low": 3e-4, "algo.clip_high": 0.01},
    "grpo per sequence": {"algo.loss": "grpo", "algo.ratio": "sequence"},
    "cispo": {"algo.loss": "cispo", "algo.clip_high": 1.0},
    "no clip below": {"algo.clip_low": 0.0, "algo.clip_high": 0.0, "algo.clip_delta": 1.01},
    "sapo": {"algo.loss": "sapo", "algo.sapo_tau_pos": 2.0},
    "with_signal": {"algo.denominator": "with_signal"},
    "normalize_each": {"algo.combine": "normalize_each"},
    "warm-up as long as the run": {"optim.warmup_steps": 100},
    "falling rate": {"optim.min_lr_frac": 0.1, "optim.schedule": "cosine"},
    "no averages": {"optim.betas": [0.0, 0.0]},
    "float16 with masters": {"model.dtype": "float16"},
    "compiled layers, full": {"run.compile": "layers", "memory.checkpointing": "full"},
    "stochastic rounding": {"optim.rounding": "stochastic", "model.master_dtype": None},
    "flash attention": {"model.attention": "flash_attention_2", "model.dtype": "bfloat16"},
    "keep_best": {"run.keep_best": True},
    "KL switched off": {"algo.kl": "k2", "algo.beta": 0.0},
}


@pytest.mark.parametrize("name", BROKEN)
def test_rule_finds_exactly_its_problem(name):
    changes, keys = BROKEN[name]
    found = {problem.keys for problem in check(unchecked(changes))}
    # Three sources of a task are one problem; a wrong buffer of a wrong reward is one, too.
    assert found == {keys}
    (problem,) = check(unchecked(changes))
    assert problem.what and problem.why and problem.fix


@pytest.mark.parametrize("name", SOUND)
def test_sound_neighbours_pass(name):
    assert check(unchecked(SOUND[name])) == []


@pytest.mark.parametrize("name", [name for name in BROKEN if "--set" in check(unchecked(BROKEN[name][0]))[0].fix])
def test_every_proposed_change_cures(name):
    changes, _ = BROKEN[name]
    (problem,) = check(unchecked(changes))
    for alternative in re.split(r", or ", problem.fix):
        words = shlex.split(alternative)
        flags = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        assert flags, problem.fix
        data = unchecked(changes).model_dump(exclude_unset=True)
        for key in re.findall(r"remove (task\.options\.\w+)", alternative):
            del data["task"]["options"][key.rpartition(".")[2]]
        load(data, flags)


def test_every_rule_is_broken_by_some_case():
    silent = [rule.__name__ for rule in RULES if not any(rule(unchecked(changes)) for changes, _ in BROKEN.values())]
    assert silent == []


@pytest.mark.parametrize(
    ("changes", "ratio", "clips"),
    [
        ({}, "token", (0.2, 0.2)),
        ({"loss": "grpo"}, "token", (0.2, 0.2)),
        ({"loss": "grpo", "clip_high": 0.28}, "token", (0.2, 0.28)),
        ({"loss": "gspo"}, "sequence", (3e-4, 4e-4)),
        ({"loss": "gspo", "clip_low": 1e-3}, "sequence", (1e-3, 4e-4)),
        ({"loss": "bnpo", "ratio": "sequence"}, "sequence", (3e-4, 4e-4)),
        ({"loss": "cispo"}, "token", (1.0, 5.0)),
        ({"loss": "cispo", "clip_high": 3}, "token", (1.0, 3.0)),
        ({"loss": "sapo"}, "token", (1.0, math.inf)),
        ({"loss": "reinforce"}, "token", (1.0, math.inf)),
    ],
)
def test_auto_stands_for(changes, ratio, clips):
    algo = AlgoConfig(**changes)
    assert resolved_ratio(algo) == ratio
    assert resolved_clips(algo) == clips


def limits(prompt: int, completion: int) -> Config:
    return unchecked({"rollout.max_prompt_tokens": prompt, "rollout.max_completion_tokens": completion})


@pytest.mark.parametrize("positions", [None, 1024, 2048])
def test_model_limits_allow_what_fits(positions):
    check_model_limits(limits(512, 512), positions)


@pytest.mark.parametrize(
    ("prompt", "completion", "fix"),
    [
        (512, 4096, "--set rollout.max_completion_tokens=3584"),
        (
            2048,
            2049,
            "--set rollout.max_completion_tokens=2048, or --set rollout.max_prompt_tokens=2047",
        ),
        (4096, 1, "--set rollout.max_prompt_tokens=4095"),
        (4096, 4096, "--set rollout.max_prompt_tokens=2048 --set rollout.max_completion_tokens=2048"),
    ],
)
def test_model_limits_give_numbers_that_fit(prompt, completion, fix):
    with pytest.raises(ConfigError) as caught:
        check_model_limits(limits(prompt, completion), 4096)
    error = caught.value
    assert error.fix == fix
    assert f"together {prompt + completion}, {prompt + completion - 4096} too many" in error.values
    assert "4096 positions" in error.what and error.why


@pytest.mark.parametrize(
    "key",
    [
        "run.steps",
        "run.eval_every",
        "run.eval_pass_k",
        "run.checkpoint_every",
        "run.keep_last",
        "run.max_nonfinite_steps",
        "memory.micro_batch_tokens",
        "memory.generation_chunk",
        "memory.logprob_chunk_tokens",
    ],
)
def test_resume_may_change(key):
    assert resume_conflicts(unchecked({}), unchecked({key: 7})) == []


def test_resume_may_change_the_other_kinds_too():
    changes = {"run.keep_best": True, "run.trackers": ["wandb"], "memory.checkpointing": "full"}
    assert resume_conflicts(unchecked({}), unchecked({**changes, "run.max_reward_error_frac": 0.5})) == []


@pytest.mark.parametrize(
    ("old", "new", "conflicts"),
    [
        ({}, {"run.seed": 2}, [("run.seed", 1, 2)]),
        ({}, {"run.threads": 2}, [("run.threads", "auto", 2)]),
        ({}, {"optim.lr": 1e-5, "algo.loss": "grpo"}, [("algo.loss", "dapo", "grpo"), ("optim.lr", 1e-6, 1e-5)]),
        ({}, {"optim.betas": [0.9, 0.95]}, [("optim.betas", (0.9, 0.999), (0.9, 0.95))]),
        ({"rewards": TWO}, {}, [("rewards.1.name", "answer_format", None), ("rewards.1.weight", 1.0, None)]),
        (
            GYM,
            {**GYM, "task.options": {"min_terms": 2}},
            [("task.options", {}, None), ("task.options.min_terms", None, 2)],
        ),
        (
            {"optim.schedule": "linear"},
            {"optim.schedule": "linear", "run.steps": 200},
            [("run.steps", 100, 200)],
        ),
        ({"optim.schedule": "linear"}, {"run.steps": 200}, [("optim.schedule", "linear", "constant")]),
    ],
)
def test_resume_conflicts(old, new, conflicts):
    found = resume_conflicts(unchecked(old), unchecked(new))
    assert [entry for entry in found if entry[0] != "rewards.1.timeout_s"] == conflicts


def test_resume_of_the_same_configuration():
    assert resume_conflicts(unchecked(REGEX), unchecked(REGEX)) == []
