"""Sampling without a cache: the plainest correct decoder, and a runner that replays a step as a graph does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from families import EOS_ID
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from grpofit.models.load import Policy
from grpofit.rollout.sampling import keyed_uniforms, sample_tokens
from grpofit.types import FinishReason, Prompt, RolloutKey, Sampling

# One token in ten ends a completion: rows finish all along the way, and are dropped from the batch in several steps.
MANY_EOS = (*range(0, EOS_ID, 10), EOS_ID)

Plain = tuple[tuple[int, ...], tuple[float, ...], FinishReason]


@torch.no_grad()
def last_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """[V] of the token after these: one row, no padding, no cache."""
    logits: Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1]
    return logits


def sample_plainly(policy: Policy, prompt: Prompt, key: RolloutKey, sampling: Sampling) -> Plain:
    """Token ids, logprobs and finish reason of one completion; the whole text is read again for every token."""
    uniforms = keyed_uniforms([key], sampling.max_completion_tokens)[0]
    ids: list[int] = []
    logprobs: list[float] = []
    for uniform in uniforms:
        logits = last_logits(policy.model, (*prompt.token_ids, *ids))
        token, logprob = sample_tokens(logits[None], uniform[None], sampling)
        ids.append(int(token))
        logprobs.append(float(logprob))
        if ids[-1] in policy.eos_token_ids:
            return tuple(ids), tuple(logprobs), FinishReason.STOP
    return tuple(ids), tuple(logprobs), FinishReason.LENGTH


class ReplayRunner:
    """Does with a step what a CUDA graph does, on the CPU: operations are recorded once and then repeated.

    Like a graph it has the tensors and every number of the recorded call in it, and refuses a step that reads a
    value from a tensor. `replays` counts.
    """

    static = True

    def __init__(self) -> None:
        self.replays = 0
        self.reset()

    def run(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """As `GraphRunner.run`."""
        if key != self._seen:
            self.reset()
            self._seen = key
            return step()
        if self._graph is None:
            self._graph = make_fx(lambda _: step())(torch.zeros(1))
        else:
            self.replays += 1
        return self._graph(torch.zeros(1))

    def reset(self) -> None:
        """As `GraphRunner.reset`."""
        self._seen: Hashable = None
        self._graph: Any = None
