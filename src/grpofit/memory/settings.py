"""Memory settings with every `auto` replaced by a number.

Owns the defaults that stand in where nothing measured the card. No setting here changes the gradient beyond
rounding. Must not know about tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpofit.config import MemoryConfig

# Enough tokens to keep the matrix units busy, few enough that a small model's activations stay near 2 GiB.
_AUTO_MICRO_BATCH_TOKENS = 2048
# 1,024 x 150,000 logits in float32 are 0.6 GiB.
_AUTO_LOGPROB_CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """`None` means no limit. See `config.tree.MemoryConfig` for each field."""

    micro_batch_tokens: int | None
    generation_chunk: int | None
    checkpointing: Literal["none", "selective", "full", "offload"] = "none"
    logprob_chunk_tokens: int | None = None
    packing: bool = False
    mlp_tile_tokens: int | None = None


def resolve_memory(config: MemoryConfig) -> MemorySettings:
    """Numbers for `auto`; `none` becomes None."""
    return MemorySettings(
        micro_batch_tokens=_number(config.micro_batch_tokens, _AUTO_MICRO_BATCH_TOKENS),
        generation_chunk=_number(config.generation_chunk, None),
        checkpointing="none" if config.checkpointing == "auto" else config.checkpointing,
        logprob_chunk_tokens=_number(config.logprob_chunk_tokens, _AUTO_LOGPROB_CHUNK_TOKENS),
        packing=config.packing == "auto",
        mlp_tile_tokens=_number(config.mlp_tile_tokens, None),
    )


def _number(value: int | str, auto: int | None) -> int | None:
    if value == "auto":
        return auto
    return None if value == "none" else int(value)
