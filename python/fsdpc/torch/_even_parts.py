"""Checkpoints of parameters whose shards are not consecutive elements, or are not on all ranks.

Files hold each parameter in its logical order, and a rank reads and writes consecutive elements. A
parameter that is sharded along another dimension, or over tensor parallel ranks as well, is
therefore gathered, one at a time, and each rank of the world takes an even part of it. Loading does
the opposite.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from fsdpc import distributed
from fsdpc.torch import _device
from fsdpc.torch._unit import UnitState


def is_consecutive(state: UnitState, index: int) -> bool:
    """Return whether the ranks of the world have consecutive elements of a parameter."""
    ranks = prod(comm.size for comm in state.comms)
    return state.layouts[index].is_plain and ranks == distributed.world_size()


def _chunk(numel: int) -> int:
    return -(-numel // distributed.world_size())


def first_of(shape: Sequence[int]) -> int:
    """Return the first element of this rank's part."""
    return min(prod(shape), _chunk(prod(shape)) * distributed.rank())


def part_of(full: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's part of a full tensor."""
    first = first_of(full.shape)
    return full.detach().reshape(-1)[first : first + _chunk(full.numel())].clone()


def empty_part(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros for this rank's part of a tensor."""
    numel = min(_chunk(prod(shape)), prod(shape) - first_of(shape))
    return torch.zeros(numel, dtype=dtype, device=_device.home())


def full_of(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the full tensor of all ranks' parts; collective."""
    chunk = _chunk(prod(shape))
    padded = part.new_zeros(chunk)
    padded[: part.numel()] = part
    every = distributed.world().all_gather(_device.to_engine(padded.view(torch.uint8)))
    flat = _device.to_torch(every).reshape(-1).view(part.dtype)
    return flat[: prod(shape)].view(*shape).clone()
