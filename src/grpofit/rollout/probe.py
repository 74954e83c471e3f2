"""Whether a model's keys and values may be kept by `GroupCache`: what its configuration says, and a trial.

Owns the trial. Must not know about prompts or sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpofit.rollout.decode import Decoder, GroupDecoder, PlainDecoder, TokenIds
from grpofit.rollout.runner import Runner

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.3}
"""Error of the logits, relative to their spread, that rounding explains: in bfloat16 a few unrelated tokens of a real
model, read with a cache or without, give logits up to 10% of their spread apart."""
_TOLERANCE_OVER_PLAIN = 3.0
"""Where transformers' own cache does worse than that on the same tokens, it is the yardstick."""


def attention_windows(model: PreTrainedModel) -> list[int | None] | None:
    """The sliding window of each layer, None where it sees everything; no list for any other kind of layer."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    windows: list[int | None] = []
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return None
        windows.append(getattr(layer, "sliding_window", None))
    return windows or None


@torch.no_grad()
def find_fault(model: PreTrainedModel, windows: list[int | None], runner: Runner) -> str | None:
    """Why decoding by group with this runner would not give the model's own logits, in words; None if it does.

    The model has to be in evaluation mode. Windows longer than a few tokens are not tried: they are what transformers
    itself reads from the configuration.
    """
    vocab_size = model.get_input_embeddings().get_parameter("weight").shape[0]
    tokens = [int(i * 7919 % vocab_size) for i in range(1, 17)]
    long, short, fed = tuple(tokens[:6]), tuple(tokens[6:8]), tokens[8:14]
    rows = [long, long, short]
    try:
        error = _error(model, GroupDecoder(model, windows, rows, len(fed) + 1, runner), rows, fed)
        plain = _error(model, PlainDecoder(model, rows), rows, fed)
    except Exception as problem:  # any architecture's own code runs here
        return f"{type(problem).__name__}: {problem}"
    finally:
        runner.reset()
    if not error <= max(_TOLERANCE.get(model.dtype, 1e-3), _TOLERANCE_OVER_PLAIN * plain):  # NaN is no match either
        return f"logits would be off by {error:.1%} of their spread, against {plain:.1%}"
    return None


def _error(model: PreTrainedModel, decoder: Decoder, rows: list[TokenIds], fed: list[int]) -> float:
    """Largest error of a decoder's logits against a forward without any cache; the first row leaves on the way."""
    logits, worst = decoder.logits, 0.0
    for step, token in enumerate(fed):
        expected = torch.stack([_last_logits(model, row) for row in rows])
        gap = (logits.float() - expected).square().mean(-1).sqrt() / expected.std(-1)
        worst = max(worst, gap.max().item()) if gap.isfinite().all() else float("inf")
        if step == 1:
            rows = rows[1:]
            decoder.keep(range(1, len(rows) + 1))
        ids = [token + row for row in range(len(rows))]
        logits = decoder.step(torch.tensor(ids, device=model.device))
        rows = [(*row, id_) for row, id_ in zip(rows, ids, strict=True)]
    return worst


def _last_logits(model: PreTrainedModel, token_ids: TokenIds) -> Tensor:
    """[V] float32."""
    ids = torch.tensor([token_ids], device=model.device)
    positions = torch.arange(len(token_ids), device=model.device)[None]
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, -1]
    return logits.float()
