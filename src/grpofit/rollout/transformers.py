"""Engine `transformers`: samples with the policy's own forward.

Owns drawing, stopping and the completions' records; decoding is `rollout/decode.py`. Must not know about rewards or
training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from grpofit.models.load import Policy
from grpofit.rollout.base import Progress
from grpofit.rollout.decode import Decoder, GroupDecoder, PlainDecoder
from grpofit.rollout.probe import attention_windows, find_fault
from grpofit.rollout.runner import GraphRunner, PlainRunner, Runner
from grpofit.rollout.sampling import keyed_uniforms, sample_tokens
from grpofit.types import Completion, FinishReason, Prompt, RolloutKey, Sampling


@contextmanager
def _evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode inside, the mode it had afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@dataclass(slots=True)
class _Row:
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


class TransformersEngine:
    """Samples with the policy that is being trained, so there is nothing to keep in step.

    Attributes:
        notes: what a user should be told about how it decodes.
    """

    def __init__(self, policy: Policy, chunk_rows: int | None, *, runner: Runner | None = None) -> None:
        """`chunk_rows`: completions sampled at once; None: all. `runner`: None chooses by device."""
        self._policy = policy
        self._chunk_rows = chunk_rows
        self._runner = runner or (GraphRunner() if policy.device.type == "cuda" else PlainRunner())
        self.notes: list[str] = []
        with _evaluation_mode(policy.model):
            self._windows = self._usable_windows()

    def _usable_windows(self) -> list[int | None] | None:
        """For `GroupDecoder`; None where only `PlainDecoder` gives the model's own logits."""
        model = self._policy.model
        windows = attention_windows(model)
        fault: str | None = "not every layer is plain or sliding-window attention"
        if windows is not None:
            fault = find_fault(model, windows, self._runner)
            if fault is not None and self._runner.static:
                self.notes.append(f"decoding without CUDA graphs: {fault}")
                self._runner = PlainRunner()
                fault = find_fault(model, windows, self._runner)
        if fault is not None:
            self.notes.append(f"decoding with transformers' own KV cache, which is slower: {fault}")
            return None
        return windows

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[RolloutKey],
        sampling: Sampling,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """See `rollout.base.Engine.generate`."""
        size = self._chunk_rows or max(len(prompts), 1)
        done: list[Completion] = []
        # Checkpointing, which acts in training mode, would switch the KV cache off.
        with _evaluation_mode(self._policy.model):
            for start in range(0, len(prompts), size):
                chunk = slice(start, start + size)

                def report(finished: int, before: int = start) -> None:
                    if progress is not None:
                        progress(before + finished, len(prompts))

                try:
                    done += self._generate_chunk(prompts[chunk], keys[chunk], sampling, report)
                finally:
                    self._runner.reset()
        return done

    def _generate_chunk(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[RolloutKey],
        sampling: Sampling,
        report: Callable[[int], None],
    ) -> list[Completion]:
        limit = sampling.max_completion_tokens
        rows = [_Row() for _ in prompts]
        uniforms = keyed_uniforms(keys, limit).to(self._policy.device)
        logprobs = torch.zeros(len(rows), limit, device=self._policy.device)  # read once, at the end
        decoder = self.decoder([prompt.token_ids for prompt in prompts], limit)
        logits = decoder.logits
        alive = list(range(len(rows)))  # row of each batch entry
        index = torch.tensor(alive, device=self._policy.device)
        for position in range(limit):
            ids, logprobs[index, position] = sample_tokens(logits, uniforms[index, position], sampling)
            self._record(rows, alive, ids.tolist(), sampling)
            keep = [i for i, row in enumerate(alive) if rows[row].finish is None]
            report(sum(row.finish is not None for row in rows))
            if not keep:
                break
            if len(keep) <= len(alive) * (1 - decoder.drop_at_frac):
                decoder.keep(keep)
                alive = [alive[i] for i in keep]
                index, ids = torch.tensor(alive, device=index.device), ids[keep]
            logits = decoder.step(ids)
        return [self._complete(row, values, sampling) for row, values in zip(rows, logprobs.tolist(), strict=True)]

    def decoder(self, prompts: Sequence[tuple[int, ...]], max_completion_tokens: int) -> Decoder:
        """What decodes rows with these prompts [B]."""
        if self._windows is None:
            return PlainDecoder(self._policy.model, prompts)
        return GroupDecoder(self._policy.model, self._windows, prompts, max_completion_tokens, self._runner)

    def _record(self, rows: list[_Row], alive: list[int], ids: list[int], sampling: Sampling) -> None:
        for row_index, token_id in zip(alive, ids, strict=True):
            row = rows[row_index]
            if row.finish is not None:  # finished, but not dropped from the batch yet
                continue
            row.token_ids.append(token_id)
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

    def _complete(self, row: _Row, logprobs: list[float], sampling: Sampling) -> Completion:
        text = self._decode(row.token_ids)
        cut = min((text.find(stop) for stop in sampling.stop if stop in text), default=len(text))
        return Completion(
            token_ids=tuple(row.token_ids),
            sampler_logprobs=tuple(logprobs[: len(row.token_ids)]),
            finish=row.finish or FinishReason.LENGTH,
            text=text[:cut],
        )
