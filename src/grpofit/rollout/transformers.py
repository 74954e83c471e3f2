"""Engine `transformers`: a decode loop over the policy's own forward.

Owns prefill, the KV cache, stopping. Each prompt passes through the network once, its KV is then repeated for the
rows of its group; finished rows are dropped from the batch. Must not know about rewards or training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from grpofit.models.load import Policy
from grpofit.rollout.base import Progress
from grpofit.rollout.sampling import keyed_uniforms, sample_tokens
from grpofit.types import Completion, FinishReason, Prompt, RolloutKey, Sampling

# Dropping rows copies the KV cache, so it waits until this share of the rows has finished.
_COMPACT_AT_FRAC = 0.125


@dataclass(slots=True)
class _Row:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None


class TransformersEngine:
    """Samples with the policy that is being trained, so there is nothing to keep in step."""

    def __init__(self, policy: Policy, chunk_rows: int | None) -> None:
        """`chunk_rows`: completions sampled at once; None: all."""
        self._policy = policy
        self._chunk_rows = chunk_rows

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[RolloutKey],
        sampling: Sampling,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """See `rollout.base.Engine.generate`."""
        model = self._policy.model
        was_training = model.training
        # Checkpointing, which acts in training mode, would switch the KV cache off.
        model.eval()
        try:
            size = self._chunk_rows or max(len(prompts), 1)
            done: list[Completion] = []
            for start in range(0, len(prompts), size):
                chunk = slice(start, start + size)

                def report(finished: int, before: int = start) -> None:
                    if progress is not None:
                        progress(before + finished, len(prompts))

                done += self._generate_chunk(prompts[chunk], keys[chunk], sampling, report)
            return done
        finally:
            model.train(was_training)

    def _generate_chunk(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[RolloutKey],
        sampling: Sampling,
        report: Callable[[int], None],
    ) -> list[Completion]:
        device = self._policy.device
        rows = [_Row() for _ in prompts]
        uniforms = keyed_uniforms(keys, sampling.max_completion_tokens).to(device)
        cache, mask, logits = self._prefill(prompts)
        alive = list(range(len(rows)))  # row of each batch entry
        for position in range(sampling.max_completion_tokens):
            index = torch.tensor(alive, device=device)
            ids, logprobs = sample_tokens(logits, uniforms[index, position], sampling)
            self._record(rows, alive, ids.tolist(), logprobs.tolist(), sampling)
            keep = [i for i, row in enumerate(alive) if rows[row].finish is None]
            report(sum(row.finish is not None for row in rows))
            if not keep:
                break
            if len(keep) <= len(alive) * (1 - _COMPACT_AT_FRAC):
                select = torch.tensor(keep, device=device)
                cache.batch_select_indices(select)
                mask, ids = mask[select], ids[select]
                alive = [alive[i] for i in keep]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            logits = self._forward(ids[:, None], mask, cache)
        return [self._complete(row, sampling) for row in rows]

    def _prefill(self, prompts: Sequence[Prompt]) -> tuple[DynamicCache, Tensor, Tensor]:
        """KV cache, attention mask [B, S] and next-token logits [B, V] of the rows."""
        distinct = list({id(p): p for p in prompts}.values())
        place = {id(p): i for i, p in enumerate(distinct)}
        longest = max(len(p.token_ids) for p in distinct)
        device = self._policy.device
        input_ids = torch.full((len(distinct), longest), self._policy.pad_token_id)
        mask = torch.zeros(len(distinct), longest, dtype=torch.long)
        for i, prompt in enumerate(distinct):
            input_ids[i, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[i, longest - len(prompt.token_ids) :] = 1
        mask = mask.to(device)
        cache = DynamicCache(config=self._policy.model.config)
        logits = self._forward(input_ids.to(device), mask, cache)
        if len(distinct) < len(prompts):
            repeat = torch.tensor([place[id(p)] for p in prompts], device=device)
            cache.batch_select_indices(repeat)
            mask, logits = mask[repeat], logits[repeat]
        return cache, mask, logits

    def _forward(self, input_ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Next-token logits [B, V]. input_ids [B, new]; mask [B, past + new], 1 on real tokens, padding left."""
        new = input_ids.shape[1]
        position_ids = (mask.cumsum(-1) - 1).clamp_min(0)[:, -new:]
        logits: Tensor = self._policy.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    def _record(
        self, rows: list[_Row], alive: list[int], ids: list[int], logprobs: list[float], sampling: Sampling
    ) -> None:
        for row_index, token_id, logprob in zip(alive, ids, logprobs, strict=True):
            row = rows[row_index]
            if row.finish is not None:  # finished, but not dropped from the batch yet
                continue
            row.token_ids.append(token_id)
            row.logprobs.append(logprob)
            if token_id in self._policy.eos_token_ids or (sampling.stop and self._hits_stop(row, sampling)):
                row.finish = FinishReason.STOP
            elif len(row.token_ids) == sampling.max_completion_tokens:
                row.finish = FinishReason.LENGTH

    def _hits_stop(self, row: _Row, sampling: Sampling) -> bool:
        text = self._decode(row.token_ids)
        return any(stop in text for stop in sampling.stop)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = self._policy.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _complete(self, row: _Row, sampling: Sampling) -> Completion:
        text = self._decode(row.token_ids)
        cut = min((text.find(stop) for stop in sampling.stop if stop in text), default=len(text))
        return Completion(
            token_ids=tuple(row.token_ids),
            sampler_logprobs=tuple(row.logprobs),
            finish=row.finish or FinishReason.LENGTH,
            text=text[:cut],
        )
