"""The language-model head: from hidden states to the logprobs of given tokens.

Owns how an architecture turns its last hidden states into logits (bias, scale, softcap) and the check that this
reproduces the model's own logits. Must not know about rollouts, losses or batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpofit.algo.logprobs import chunked_logprobs, entropy_from_logits, logprobs_from_logits
from grpofit.algo.packing import Packing

_PROBE_TOKENS = 7
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# A model rounds its logits after each of division, tanh and product, the head once: in units of the largest logit.
_PROBE_ROUNDINGS = 2


@dataclass(frozen=True, slots=True)
class Head:
    """Weight [V, H] and the scalars applied to its output: `softcap * tanh(scale * (h @ W.T + b) / softcap)`."""

    module: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def logprobs(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        *,
        temperature: float,
        chunk_tokens: int | None,
        with_entropy: bool,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs [N] float32 of `token_ids` [N] given `hidden` [N, H], and the entropy [N] float32 if asked."""
        return chunked_logprobs(
            hidden,
            self.module.weight,
            token_ids,
            bias=self.module.bias,
            scale=self.scale,
            softcap=self.softcap,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
        )


def find_head(model: PreTrainedModel) -> Head | None:
    """The head of `model`, or None where the formula above does not give the model's own logits.

    None is not an error: logprobs are then taken from the model's full logits, which costs memory.
    """
    module = model.get_output_embeddings()
    if not isinstance(module, nn.Linear):
        return None
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    head = Head(module, scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
    return head if _reproduces_logits(model, head) else None


def hidden_states(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, **packing: Any) -> Tensor:
    """Last hidden states [B, S, H], after the final norm. Padding must be on the right: no mask is passed."""
    hidden: Tensor = model.base_model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, **packing
    ).last_hidden_state
    return hidden


@torch.no_grad()
def _reproduces_logits(model: PreTrainedModel, head: Head) -> bool:
    vocab_size = model.get_input_embeddings().get_parameter("weight").shape[0]
    ids = (torch.arange(_PROBE_TOKENS, device=model.device) * 7919 % vocab_size)[None]
    positions = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    was_training = model.training
    model.eval()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    hidden = hidden_states(model, ids, positions)[0]
    model.train(was_training)
    theirs = logits.float().log_softmax(-1)
    rounding = _PROBE_ROUNDINGS * torch.finfo(logits.dtype).eps * logits.abs().max().item()
    tolerance = max(_PROBE_TOLERANCE.get(hidden.dtype, 1e-4), rounding)
    # Every token of the vocabulary would be a large check; the argmax and a spread of others is enough to see a
    # missing scale, bias or softcap.
    for token_ids in (theirs.argmax(-1), ids[0], ids[0].flip(0)):
        ours, _ = head.logprobs(hidden, token_ids, temperature=1.0, chunk_tokens=None, with_entropy=False)
        gap = (ours - theirs.gather(-1, token_ids[:, None])[:, 0]).abs().max()
        if not gap <= tolerance:  # NaN is no match either
            return False
    return True


def token_logprobs(
    model: PreTrainedModel,
    head: Head | None,
    input_ids: Tensor,
    position_ids: Tensor,
    predict_index: Tensor,
    target_ids: Tensor,
    *,
    packing: Packing | None = None,
    temperature: float,
    chunk_tokens: int | None,
    with_entropy: bool,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Logprobs of the tokens that follow chosen positions.

    Args:
        input_ids: [B, S] int64, padded on the right; or a packed row [1, S].
        position_ids: int64 of the same shape.
        predict_index: [N] int64 into the flattened [B * S].
        target_ids: [N] int64, the token after each of those positions.
        packing: of a packed row; the model must be told, see `models.attention.reading_packed_rows`.
        chunk_tokens: logits of so many tokens exist at once; None: all N.
        entropy_gradient: whether the entropy carries a gradient (needed for an entropy bonus only).

    Returns:
        logprobs [N] float32 at `temperature`, and entropy [N] float32 or None.
    """
    packed = {} if packing is None else {"packing": packing}
    if head is not None:
        hidden = hidden_states(model, input_ids, position_ids, **packed).flatten(0, 1).index_select(0, predict_index)
        return head.logprobs(
            hidden,
            target_ids,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
        )
    logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **packed).logits
    logits = logits.flatten(0, 1).index_select(0, predict_index)
    watched = logits if entropy_gradient else logits.detach()
    entropy = entropy_from_logits(watched, temperature) if with_entropy else None
    return logprobs_from_logits(logits, target_ids, temperature), entropy
