"""TRL driven by fixed rollouts: a real `GRPOTrainer` on a tiny random Llama, stepped as its training loop steps it.

Owns the tiny model, tokenizer, rollouts and rewards that comparisons share, and TRL's side of them. Must not know
grpofit, so that nothing of ours can leak into the figures compared with. Nothing is downloaded.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

PROMPTS, GROUP_SIZE, MAX_COMPLETION_TOKENS = 4, 4, 9
ROWS = PROMPTS * GROUP_SIZE
MICRO_BATCH_ROWS = 4  # 4 micro batches, of mixed groups: TRL shuffles the rows
VOCABULARY, PAD, EOS = 50, 0, 1
TEMPERATURE = 0.9


def quiet() -> None:
    """No progress bars, no advice: the rollouts are odd on purpose."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Rollouts:
    """The step's fixed rollouts: token ids per row, groups contiguous; `names` are the prompts' texts."""

    names: list[str]
    prompts: list[list[int]]
    completions: list[list[int]]

    def truncated(self) -> list[bool]:
        return [ids[-1] != EOS for ids in self.completions]


def make_rollouts(full_length: bool) -> Rollouts:
    generator = torch.Generator().manual_seed(5)

    def ids(length: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    prompts = [ids(length) for length in (3, 6, 4, 5)]
    lengths = [3, 9, 1, 6, 8, 9, 2, 5, 9, 7, 4, 3, 6, 8, 9, 7]
    completions = [ids(MAX_COMPLETION_TOKENS if full_length else length) for length in lengths]
    ended = [row if len(row) == MAX_COMPLETION_TOKENS else [*row[:-1], EOS] for row in completions]
    rows = [i for i in range(PROMPTS) for _ in range(GROUP_SIZE)]
    return Rollouts([f"t{i + 2}" for i in rows], [prompts[i] for i in rows], ended)


# Two reward functions; None: does not apply. Row 2 has no reward at all, row 5 is alone in its group in having the
# second, and the third group has equal totals from unequal rewards.
REWARDS: list[tuple[float | None, float | None]] = [
    (1.0, 0.5), (0.0, 0.5), (None, None), (0.3, None),
    (0.1, None), (0.1, -2.0), (0.7, None), (0.0, None),
    (1.0, 0.0), (0.5, 1.0), (0.0, 2.0), (1.0, 0.0),
    (0.2, 0.3), (0.9, 1.0), (0.4, 0.0), (0.0, 0.6),
]  # fmt: skip
REWARD_WEIGHTS = [1.0, 0.5]


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": PAD, "<eos>": EOS} | {f"t{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        initializer_range=0.2,
        dtype="float32",
    )
    return AutoModelForCausalLM.from_config(config)


def perturb(model: PreTrainedModel, size: float, seed: int) -> None:
    """Move every weight, as optimizer steps would have."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


@dataclass
class TrlStep:
    """What one optimizer step of TRL gave: loss, gradients, and which rows its micro batches held."""

    loss: float
    gradients: dict[str, Tensor]
    micro_batches: list[list[int]]
    advantages: Tensor  # [ROWS], in the rollouts' order
    old_weights: dict[str, Tensor] | None
    weights: dict[str, Tensor]


class Trl:
    """TRL's side: one trainer per case, fed with fixed rollouts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_model().save_pretrained(folder / "reference")  # TRL loads its reference from the policy's path
        self.tokenizer = make_tokenizer()

    def trainer(self, rollouts: Rollouts, **settings: Any) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        def first(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
            return [REWARDS[rollouts.completions.index(ids)][0] for ids in completion_ids]

        def second(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
            return [REWARDS[rollouts.completions.index(ids)][1] for ids in completion_ids]

        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            assert prompts == rollouts.names
            return {"prompt_ids": rollouts.prompts, "completion_ids": rollouts.completions, "logprobs": None}

        policy = AutoModelForCausalLM.from_pretrained(self.folder / "reference", dtype=torch.float32)
        perturb(policy, 0.05, seed=1)
        config = GRPOConfig(
            output_dir=str(self.folder / "trainer"),
            per_device_train_batch_size=MICRO_BATCH_ROWS,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_COMPLETION_TOKENS,
            temperature=TEMPERATURE,
            reward_weights=REWARD_WEIGHTS,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            use_bias_correction_kl=False,
            **settings,
        )
        return GRPOTrainer(
            model=policy,
            reward_funcs=[first, second],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": rollouts.names}),
            processing_class=self.tokenizer,
            rollout_func=rollout,
        )

    def step(self, rollouts: Rollouts, updates: int, off_policy: bool, settings: dict[str, Any]) -> TrlStep:
        """One optimizer step, in the calls that `Trainer._inner_training_loop` makes for it."""
        per_generation = ROWS // MICRO_BATCH_ROWS
        accumulation = per_generation // updates
        # With two iterations over the batch, TRL keeps old logprobs; the step measured is then the second pass.
        iterations = 2 if off_policy else 1
        trainer = self.trainer(
            rollouts,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=per_generation,
            num_iterations=iterations,
            **settings,
        )
        trainer.current_gradient_accumulation_steps = accumulation
        trainer.model.train()
        batch = [{"prompt": name} for name in rollouts.names]
        old_weights = None
        if off_policy:
            old_weights = copied(trainer.model)
            trainer._prepare_inputs(batch)
            perturb(trainer.model, 0.015, seed=7)
            trainer._step = per_generation
        losses = [float(trainer.training_step(trainer.model, batch, None)) for _ in range(accumulation)]
        parts = [locate(rollouts, inputs) for inputs in trainer._buffered_inputs]
        given = torch.cat([inputs["advantages"] for inputs in trainer._buffered_inputs])
        ordered = torch.empty_like(given)
        ordered[[row for part in parts for row in part]] = given
        gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        return TrlStep(sum(losses), gradients, parts[:accumulation], ordered, old_weights, copied(trainer.model))

    def advantages(self, rollouts: Rollouts, **settings: Any) -> Tensor:
        trainer = self.trainer(
            rollouts, gradient_accumulation_steps=4, steps_per_generation=ROWS // MICRO_BATCH_ROWS, **settings
        )
        trainer.model.train()
        return trainer._generate_and_score_completions([{"prompt": name} for name in rollouts.names])["advantages"]


def copied(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def locate(rollouts: Rollouts, inputs: dict[str, Tensor]) -> list[int]:
    """Which rows of the rollouts TRL put into a micro batch (it shuffles them)."""
    rows = []
    for prompt, mask, completion in zip(
        inputs["prompt_ids"].tolist(), inputs["prompt_mask"].tolist(), inputs["completion_ids"].tolist(), strict=True
    ):
        ids = [token for token, real in zip(prompt, mask, strict=True) if real]
        matches = [
            i for i in range(ROWS)
            if rollouts.prompts[i] == ids and completion == padded(rollouts.completions[i], len(completion))
        ]  # fmt: skip
        assert len(matches) == 1, "rollouts must be distinct"
        rows += matches
    return rows


def padded(ids: list[int], length: int) -> list[int]:
    return ids + [PAD] * (length - len(ids))
