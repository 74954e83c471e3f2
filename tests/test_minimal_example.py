"""examples/minimal_grpo.py: short, working, and equal to the trainer in loss and gradient."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from families import gradients_seen
from run_factory import HERE, small_letters, tiny_config, train

from grpofit import api
from grpofit.config import ModelConfig
from grpofit.models.load import Policy, load_policy
from grpofit.training.clock import Clock
from grpofit.training.records import read_metrics
from grpofit.training.setup import build_evaluator, build_parts, step_settings
from grpofit.training.step import collect, update
from grpofit.types import Reason, Score

FILE = Path(__file__).parents[1] / "examples" / "minimal_grpo.py"
CPU = torch.device("cpu")


def load_example():
    spec = importlib.util.spec_from_file_location("minimal_grpo", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


example = load_example()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Stop strings end completions at very different lengths; one micro batch; no clipping of the gradient."""
    document = tiny_config(tmp_path_factory.mktemp("tiny"))
    document["rollout"] |= {"group_size": 5, "max_completion_tokens": 16, "temperature": 0.9, "stop": list("efghijkl")}
    document["optim"] |= {"max_grad_norm": None}
    document["memory"] = "none"
    return document


@pytest.fixture(scope="module")
def policy(config) -> Policy:
    return load_policy(ModelConfig(name=config["model"]["name"], dtype="float32"), Path.cwd(), CPU)


def test_at_most_200_lines():
    assert len(FILE.read_text().splitlines()) <= 200


@pytest.mark.parametrize(
    "ids, ended",
    [
        ([5, 6, 7], [5, 6, 7]),
        ([5, 9, 7], [5, 9]),
        ([5, 9, 9, 9], [5, 9]),
        ([9], [9]),
        ([5, 8, 9], [5, 8]),  # two ids end a completion
        ([], []),
    ],
)
def test_up_to_eos(ids, ended):
    assert example.up_to_eos(ids, (9, 8)) == ended


def test_sample_group(policy):
    """With a quarter of the vocabulary as EOS, completions end early, each with its first EOS."""
    ending = dataclasses.replace(policy, eos_token_ids=tuple(range(0, 256, 4)))
    torch.manual_seed(0)
    samples = example.sample_group(ending, "What is 3 + 4?", 16, 12, 1.0)
    prompt_ids = policy.tokenizer("What is 3 + 4?", add_special_tokens=False).input_ids
    assert len(samples) == 16 and all(sample.prompt_ids == prompt_ids for sample in samples)
    for sample in samples:
        *body, last = sample.completion_ids
        assert not set(body) & set(ending.eos_token_ids)
        assert last in ending.eos_token_ids or len(sample.completion_ids) == 12
    assert len({tuple(sample.completion_ids) for sample in samples}) > 8
    assert len({len(sample.completion_ids) for sample in samples}) > 3
    torch.manual_seed(0)
    assert example.sample_group(ending, "What is 3 + 4?", 16, 12, 1.0) == samples


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_the_first_step_is_the_trainers(config, loss, tmp_path):
    changes = {"algo.loss": loss, "run.steps": 1, "run.eval_every": 0}
    run_dir = train(config, changes, out=tmp_path / "run").run_dir
    [recorded] = [record for record in read_metrics(run_dir / "metrics.jsonl") if "loss" in record]

    resolved = api.load(config, changes)
    evaluator, prompts = build_evaluator(resolved, CPU, functions={HERE: small_letters})
    settings = step_settings(resolved.config, evaluator.policy.vocab_size)
    parts = build_parts(resolved, evaluator, prompts, Clock())
    rollouts, _ = collect(parts, 0, 1)
    lengths = {len(rollout.completion.token_ids) for rollout in rollouts}
    assert len(lengths) > 4, "the completions must differ in length, or both losses are the same"
    trained = gradients_seen(parts)
    [result] = update(parts, rollouts, lr=1e-3)
    evaluator.rewards.close()

    policy = load_policy(resolved.config.model, resolved.base_dir, CPU)
    samples = [example.Sample(rollout.prompt.token_ids, rollout.completion.token_ids) for rollout in rollouts]
    rewards = [rollout.reward for rollout in rollouts]
    temperature = settings.sampling.temperature
    value = example.step_loss(policy, samples, rewards, settings.group_size, settings.loss, temperature)
    value.backward()

    assert value.item() == pytest.approx(result.loss, abs=1e-6) == pytest.approx(recorded["loss"], abs=1e-6)
    if loss == "dapo":
        assert abs(result.loss) > 0.01  # on-policy the mean over rows is 0 by construction, that over tokens is not
    norms = []
    for name, parameter in policy.model.named_parameters():
        norms.append(trained[name].norm())
        assert norms[-1] > 1e-3, name
        assert (parameter.grad - trained[name]).norm() < 2e-6 * norms[-1], name
    assert torch.stack(norms).norm().item() == pytest.approx(recorded["grad_norm"], rel=1e-6)


def run_main(monkeypatch, capsys, *arguments: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["minimal_grpo.py", *arguments])
    example.main()
    return capsys.readouterr().out.splitlines()


def test_main(config, monkeypatch, capsys):
    small = ("--model", config["model"]["name"], "--steps", "2", "--prompts", "2", "--group-size", "3")
    lines = run_main(monkeypatch, capsys, *small, "--max-completion-tokens", "6")
    assert [re.sub(r"\d\.\d\d", "N", line) for line in lines] == [
        "step 1/2 reward N gradient norm N",
        "step 2/2 reward N gradient norm N",
    ]

    # A random model writes no right sum; with a reward that it can get, there is something to learn from.
    def reward(text: str, answer: object) -> Score:
        return Score(small_letters([text])[0], Reason.SCORED)

    monkeypatch.setattr(example, "last_number", reward)
    lines = run_main(monkeypatch, capsys, *small, "--max-completion-tokens", "16")
    assert all(float(line.rpartition(" ")[2]) > 0.01 for line in lines)
