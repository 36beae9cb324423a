"""What a process group is, and how it posts operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpc import _core
from fsdpc.torch.backend._works import (
    InvalidArgument,
    Operation,
    deadlines,
    described,
    is_async,
    n_bytes,
)

_LOOKED_AT = 4  # operations in flight, by each new one


class Base(dist.ProcessGroup):
    """What all kinds of operations share."""

    def __init__(
        self, group: _core.Group, rank: int, size: int, ranks: list[int], timeout_s: float
    ) -> None:
        super().__init__(rank, size)
        self._timeout_s = timeout_s
        group.set_timeout(timeout_s)
        self._group, self._rank, self._size = group, rank, size
        self._ranks = ranks  # of the default group, in this group's order
        self._unfinished: dict[int, Operation] = {}  # the caller need not keep them
        self._name = ""

    # -- what torch asks for --

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def name(self) -> str:
        """Return the back end's name."""
        return "fsdpc"

    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def group_name(self) -> str:
        """The name under which torch knows the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _get_backend(self, device: torch.device) -> Base:
        if torch.device(device).type != "cpu":
            raise InvalidArgument(f"No backend type associated with device type {device}")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def core(self) -> _core.Group:
        """The group of the C library."""
        return self._group

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later waits."""
        self._timeout_s = timeout.total_seconds()
        self._group.set_timeout(self._timeout_s)

    def shutdown(self) -> None:
        """Leave the group; its operations must be done."""
        self._unfinished.clear()
        self._group.close()

    def abort(self) -> None:
        """Make the operations of all ranks fail."""
        self._group.abort(f"rank {self._rank} called abort()")

    def __repr__(self) -> str:
        return f"<process group of fsdpc: rank {self._rank} of {self._size}>"

    # -- posting --

    def _done(
        self,
        handles: Sequence[_core.GroupWork],
        result: list[Tensor],
        opts: Any,
        finish: Callable[[], Any] | None = None,
    ) -> Operation:
        work = Operation(handles, result, finish)
        if not is_async(opts):
            work.wait()
            return work
        for key in list(islice(self._unfinished, _LOOKED_AT)):
            other = self._unfinished.pop(key, None)
            if other is not None:
                self._unfinished[key] = other  # the oldest ones take turns
                other.advance()
        self._unfinished[id(work)] = work
        work.forget = partial(self._unfinished.pop, id(work), None)
        return work

    def _exchange(
        self,
        send: Tensor,
        recv: Tensor,
        most: int,
        extents: list[tuple[int, int, int]],
        root: int,
        what: str,
    ) -> _core.GroupWork:
        return self._group.exchange(
            (send, recv), send.data_ptr(), n_bytes(send), recv.data_ptr(), most, extents, root,
            what,
        )  # fmt: skip

    def _gather(
        self, tensor: Tensor, whole: Tensor | None = None
    ) -> tuple[_core.GroupWork, Tensor]:
        """Gather a tensor of every rank; return their elements, in rank order."""
        dense = tensor.contiguous()
        if whole is None:
            whole = torch.empty(self._size * tensor.numel(), dtype=tensor.dtype)
        handle = self._group.all_gather(
            (whole, dense), dense.data_ptr(), whole.data_ptr(), n_bytes(dense), described(dense)
        )
        return handle, whole

    def _gather_now(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked."""
        handle, whole = self._gather(tensor)
        with deadlines():
            handle.wait()
        return whole.view(self._size, *tensor.shape)
