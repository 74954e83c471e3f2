"""GRPO in one file: the trainer's own pure functions, called in the order in which they act.

Not the product: rollouts come from `generate`, everything stays on one device, nothing is saved. What it is for:
reading the algorithm in one sitting, and checking the trainer, whose first step has the same loss (a test holds this).

    python examples/minimal_grpo.py --model smollm2-135m --steps 30

One step, in the words of the field:
1. take P prompts, sample G completions of each from the policy: one group a prompt
2. score every completion with a plain function: the reward
3. advantage = reward, centred on its group's mean and divided by the group's standard deviation
4. logprobs of the sampled tokens under the policy
5. loss = clipped surrogate of ratio x advantage; on-policy the ratio is 1, its gradient is what matters
6. backward, clip the gradient's norm, step
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from grpofit.algo.advantages import advantages
from grpofit.algo.logprobs import logprobs_from_logits
from grpofit.algo.losses import LossSpec, count_denominator, policy_loss
from grpofit.config import ModelConfig
from grpofit.data.rewards import last_number
from grpofit.models.load import Policy, load_policy


@dataclass(frozen=True)
class Sample:
    """One prompt with one completion, as token ids."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


def sample_group(
    policy: Policy, prompt: str, group_size: int, max_completion_tokens: int, temperature: float
) -> list[Sample]:
    """Step 1 for one prompt."""
    ids = policy.tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    output = policy.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        num_return_sequences=group_size,
        max_new_tokens=max_completion_tokens,
        eos_token_id=list(policy.eos_token_ids),
        pad_token_id=policy.pad_token_id,
    )
    return [Sample(ids[0].tolist(), up_to_eos(row, policy.eos_token_ids)) for row in output[:, ids.shape[1] :].tolist()]


def up_to_eos(ids: Sequence[int], eos_token_ids: Sequence[int]) -> list[int]:
    """The completion ends with its first EOS, which belongs to it; what follows is padding."""
    ends = [i for i, token_id in enumerate(ids) if token_id in eos_token_ids]
    return list(ids[: ends[0] + 1]) if ends else list(ids)


def step_loss(
    policy: Policy,
    samples: Sequence[Sample],
    rewards: Sequence[float],
    group_size: int,
    spec: LossSpec,
    temperature: float,
) -> Tensor:
    """Steps 3 to 5 over all samples at once; groups stand together."""
    rows, length = len(samples), max(len(s.completion_ids) for s in samples)
    width = max(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    input_ids = torch.full((rows, width), policy.pad_token_id)
    completion_mask = torch.zeros(rows, length)
    for i, sample in enumerate(samples):
        whole = [*sample.prompt_ids, *sample.completion_ids]
        input_ids[i, : len(whole)] = torch.tensor(whole)
        completion_mask[i, : len(sample.completion_ids)] = 1

    # Padding stands on the right, where causal attention does not look, so no attention mask is needed.
    logits = policy.model(input_ids=input_ids, use_cache=False).logits
    logprobs = torch.stack(
        [completion_logprobs(logits[i], sample, length, temperature) for i, sample in enumerate(samples)]
    )
    denominator = count_denominator([len(s.completion_ids) for s in samples], micro_batches=1)
    advantage = advantages(torch.tensor(rewards), group_size)
    return policy_loss(spec, logprobs, None, advantage, completion_mask, denominator).loss


def completion_logprobs(logits: Tensor, sample: Sample, length: int, temperature: float) -> Tensor:
    """Logprobs [T] of the completion tokens from a row's logits [S, V]; a token is predicted one position earlier."""
    first = len(sample.prompt_ids) - 1
    count = len(sample.completion_ids)
    logprobs = logprobs_from_logits(logits[first : first + count], torch.tensor(sample.completion_ids), temperature)
    return torch.nn.functional.pad(logprobs, (0, length - count))


def main() -> None:
    """Train on sums a + b and print the mean reward of every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step (P)")
    parser.add_argument("--group-size", type=int, default=8, help="completions per prompt (G)")
    parser.add_argument("--max-completion-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    # float32 weights: in bfloat16 an update of this size would round away without the trainer's master copy.
    policy = load_policy(ModelConfig(name=args.model, dtype="float32"), Path.cwd(), torch.device("cpu"))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=args.lr, weight_decay=0.0)
    spec = LossSpec(loss="grpo", max_completion_tokens=args.max_completion_tokens)

    for step in range(1, args.steps + 1):
        samples, rewards = [], []
        for a, b in torch.randint(1, 21, (args.prompts, 2)).tolist():
            message = [{"role": "user", "content": f"What is {a} + {b}? Answer with only the number."}]
            prompt = policy.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            group = sample_group(policy, prompt, args.group_size, args.max_completion_tokens, args.temperature)
            samples += group
            texts = policy.tokenizer.batch_decode([s.completion_ids for s in group], skip_special_tokens=True)
            rewards += [float(last_number(text, a + b).value or 0.0) for text in texts]
        loss = step_loss(policy, samples, rewards, args.group_size, spec, args.temperature)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}/{args.steps} reward {sum(rewards) / len(rewards):.2f} gradient norm {norm:.2f}", flush=True)


if __name__ == "__main__":
    main()
