"""Where the digits of a weight are that its dtype has no room for: float32 masters, or rounding by chance.

Owns how the float32 values that an optimizer updates are kept, read and rounded, one piece of a flattened parameter
at a time. Must not know how they are updated.

A bfloat16 is the upper half of a float32. So a bfloat16 weight and the 16 bits below it are a master: 4 bytes, where
a weight with a float32 copy takes 6.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from grpofit.data.keyed import stable_hash

_HALF = 0x8000


class Scratch:
    """Buffers for one piece, used again for the next: fresh memory each time costs more than the arithmetic in it."""

    def __init__(self, weights: int, device: torch.device) -> None:
        self.weights = weights
        self.wide, self.gradient = (torch.empty(weights, dtype=torch.float32, device=device) for _ in range(2))
        self.bits = torch.empty(weights, dtype=torch.int32, device=device)

    def pieces(self, count: int) -> list[slice]:
        """Slices of at most `weights` that make up `count`."""
        return [slice(start, min(start + self.weights, count)) for start in range(0, count, self.weights)]


class Master(Protocol):
    """The float32 values of a parameter."""

    def read(self, piece: slice, scratch: Scratch) -> Tensor:
        """[n] float32, to be changed in place and then written, before another piece is read."""

    def write(self, piece: slice, values: Tensor, scratch: Scratch, update: int) -> None:
        """Take what `read` gave, now changed, and round it to the weights. `values` may be spoilt.

        `update` counts the updates of this parameter: part of the key where chance rounds.
        """

    def whole(self, scratch: Scratch) -> Tensor:
        """What a checkpoint keeps, in the parameter's shape; the memory itself where that is possible."""


def make_master(
    parameter: nn.Parameter, *, keep: bool, rounding: Literal["nearest", "stochastic"], key: tuple[int, int]
) -> Master:
    """How the digits of `parameter` are kept.

    Args:
        keep: keep float32 values. Without, the weights are all there is, and `rounding` says how they are rounded.
        key: seed and number of the parameter; with the number of the update, it names every draw.
    """
    if parameter.dtype == torch.float32:
        return Itself(parameter)
    if keep:
        return LowerBits(parameter) if parameter.dtype == torch.bfloat16 else Copy(parameter)
    return ByChance(parameter, key) if rounding == "stochastic" else Nearest(parameter)


def flat(parameter: Tensor) -> Tensor:
    """[n], the same memory, without gradient."""
    return parameter.detach().view(-1)


class Itself:
    """A float32 parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def read(self, piece: slice, scratch: Scratch) -> Tensor:
        """See `Master`."""
        return flat(self._parameter)[piece]

    def write(self, piece: slice, values: Tensor, scratch: Scratch, update: int) -> None:
        """See `Master`."""

    def whole(self, scratch: Scratch) -> Tensor:
        """See `Master`."""
        return self._parameter.detach()


class Copy:
    """A float32 copy beside the parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter, self._copy = parameter, parameter.detach().float()

    def read(self, piece: slice, scratch: Scratch) -> Tensor:
        """See `Master`."""
        return flat(self._copy)[piece]

    def write(self, piece: slice, values: Tensor, scratch: Scratch, update: int) -> None:
        """See `Master`."""
        flat(self._parameter)[piece].copy_(values)

    def whole(self, scratch: Scratch) -> Tensor:
        """See `Master`."""
        return self._copy


class LowerBits:
    """A bfloat16 parameter and, beside it, what its master has beyond it: a signed 16-bit number of float32 steps.

    The weight is its master rounded to the nearest, halves away from zero. (To even, as torch does it, a half could
    have come from above or from below, and the master would need a 33rd bit.)
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._lower = torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False)

    def read(self, piece: slice, scratch: Scratch) -> Tensor:
        """See `Master`."""
        upper, lower = flat(self._parameter)[piece].view(torch.int16), flat(self._lower)[piece]
        bits, steps = scratch.wide[: len(lower)].view(torch.int32), scratch.bits[: len(lower)]
        torch.add(steps.copy_(lower), bits.copy_(upper), alpha=1 << 16, out=bits)
        return bits.view(torch.float32)

    def write(self, piece: slice, values: Tensor, scratch: Scratch, update: int) -> None:
        """See `Master`."""
        bits = values.view(torch.int32)
        flat(self._lower)[piece].copy_(bits)  # the lower 16 bits, read as a signed number
        flat(self._parameter)[piece].view(torch.int16).copy_(bits.add_(_HALF).bitwise_right_shift_(16))

    def whole(self, scratch: Scratch) -> Tensor:
        """See `Master`. A copy in host memory, since there may be no room beside the weights."""
        values = torch.empty(self._parameter.shape, dtype=torch.float32, device="cpu")
        for piece in scratch.pieces(values.numel()):
            flat(values)[piece].copy_(self.read(piece, scratch))
        return values


class Nearest:
    """A parameter without a master: an update smaller than half a step of its dtype is lost."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def read(self, piece: slice, scratch: Scratch) -> Tensor:
        """See `Master`."""
        weights = flat(self._parameter)[piece]
        return scratch.wide[: len(weights)].copy_(weights)

    def write(self, piece: slice, values: Tensor, scratch: Scratch, update: int) -> None:
        """See `Master`."""
        flat(self._parameter)[piece].copy_(values)

    def whole(self, scratch: Scratch) -> Tensor:
        """See `Master`."""
        return self._parameter.detach()


class ByChance(Nearest):
    """A bfloat16 parameter without a master, rounded up or down by chance: up as likely as the value is near.

    On average nothing is lost (stochastic rounding, arXiv:2010.06192, section 3). Every draw has a key, so that a
    resumed run draws the same.
    """

    def __init__(self, parameter: nn.Parameter, key: tuple[int, int]) -> None:
        assert parameter.dtype == torch.bfloat16, "only the upper half of a float32 can be rounded this way"
        super().__init__(parameter)
        self._key = key

    def write(self, piece: slice, values: Tensor, scratch: Scratch, update: int) -> None:
        """See `Master`."""
        bits, draws = values.view(torch.int32), scratch.bits[: len(values)]
        bits.add_(draws.copy_(self._draws(piece, update))).add_(_HALF)
        flat(self._parameter)[piece].view(torch.int16).copy_(bits.bitwise_right_shift_(16))

    def _draws(self, piece: slice, update: int) -> Tensor:
        """[n] int16, every value as likely."""
        device, count = self._parameter.device, piece.stop - piece.start
        generator = None
        if device.type != "meta":
            generator = torch.Generator(device).manual_seed(stable_hash(*self._key, update, piece.start))
        fours = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
        return fours.random_(-(2**63), None, generator=generator).view(torch.int16)[:count]
