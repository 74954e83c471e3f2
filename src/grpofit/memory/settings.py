"""Memory settings with every `auto` replaced by a number.

Owns the defaults that stand in where nothing measured the card. No setting here changes the gradient beyond
rounding. Must not know about tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpofit.config import MemoryConfig

# Enough tokens to keep the matrix units busy, few enough that a small model's activations stay near 1 GiB. A group is
# split from four times as many only, since every part of it repeats the prompt.
_AUTO_MICRO_BATCH_TOKENS = 1024
_AUTO_WHOLE_GROUP_TOKENS = 4096
# Of float32 logits; small chunks cost another pass over the head's gradient each.
_AUTO_LOGPROB_CHUNK_BYTES = 192 * 1024**2


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """`None` means no limit. See `config.tree.MemoryConfig` for each field.

    `whole_group_tokens`: a group of up to so many tokens stays in one packed row, be it over `micro_batch_tokens`.
    """

    micro_batch_tokens: int | None
    generation_chunk: int | None
    checkpointing: Literal["none", "selective", "full", "offload"] = "none"
    logprob_chunk_tokens: int | None = None
    packing: bool = False
    mlp_tile_tokens: int | None = None
    whole_group_tokens: int = 0


def resolve_memory(config: MemoryConfig, vocab_size: int) -> MemorySettings:
    """Numbers for `auto`; `none` becomes None."""
    return MemorySettings(
        micro_batch_tokens=_number(config.micro_batch_tokens, _AUTO_MICRO_BATCH_TOKENS),
        generation_chunk=_number(config.generation_chunk, None),
        checkpointing="none" if config.checkpointing == "auto" else config.checkpointing,
        logprob_chunk_tokens=_number(
            config.logprob_chunk_tokens, max(_AUTO_LOGPROB_CHUNK_BYTES // (4 * vocab_size), 64)
        ),
        packing=config.packing == "auto",
        mlp_tile_tokens=_number(config.mlp_tile_tokens, None),
        whole_group_tokens=_AUTO_WHOLE_GROUP_TOKENS if config.micro_batch_tokens == "auto" else 0,
    )


def _number(value: int | str, auto: int | None) -> int | None:
    if value == "auto":
        return auto
    return None if value == "none" else int(value)
