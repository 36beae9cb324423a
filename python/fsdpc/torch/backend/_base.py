"""What a process group is, and how it posts operations."""

from __future__ import annotations

import threading
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
        self,
        group: _core.Group,
        rank: int,
        size: int,
        ranks: list[int],
        timeout_s: float,
        options: Any = None,
    ) -> None:
        super().__init__(rank, size)
        self._timeout_s = timeout_s
        group.set_timeout(timeout_s)
        self._group, self._rank, self._size = group, rank, size
        self._ranks = ranks  # of the default group, in this group's order
        self._unfinished: dict[int, Operation] = {}  # the caller need not keep them
        self._name = ""
        self._options = options  # of the other devices' back ends
        self._others: dist.ProcessGroup | None = None
        self._others_turn = threading.Lock()

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

    supports_splitting = supports_coalescing = False

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type == "cpu" or self._config() is None:
            return self  # torch asks for that of `device_id` before it registers the group
        others = self.others()
        if others is None:
            raise InvalidArgument(f"No backend type associated with device type {device}")
        return others._get_backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", *self._other_kinds())]

    def _config(self) -> str | None:
        """Return what the user named, such as "cpu:fsdpc,cuda:nccl"; None until it is known."""
        return dist.distributed_c10d._world.pg_backend_config.get(self)

    def _other_kinds(self) -> dict[str, str]:
        """Return the back ends of other devices."""
        pairs = (pair.split(":") for pair in (self._config() or "").split(",") if ":" in pair)
        return {kind: name for kind, name in pairs if kind != "cpu" and name != self.name()}

    def others(self) -> dist.ProcessGroup | None:
        """Return the group of the other devices' back ends, or None if there are none.

        torch lets a process group in Python replace a whole group. The first tensor on another
        device therefore creates the group for them, like torch's own back ends their connections.
        """
        with self._others_turn:
            kinds = self._other_kinds()
            if self._others is None and kinds:
                self._others = dist.new_group(
                    self._ranks, timedelta(seconds=self._timeout_s),
                    ",".join(f"{kind}:{name}" for kind, name in kinds.items()), self._options,
                    use_local_synchronization=True, sort_ranks=False,
                )  # fmt: skip
        return self._others

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._coalescing(device)._end_coalescing(device)

    def _coalescing(self, device: torch.device) -> Any:
        others = None if torch.device(device).type == "cpu" else self.others()
        return super() if others is None else others

    @property
    def core(self) -> _core.Group:
        """The group of the C library."""
        return self._group

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later waits."""
        self._timeout_s = timeout.total_seconds()
        self._group.set_timeout(self._timeout_s)
        if self._others is not None:
            self._others.set_timeout(timeout)

    def leave(self) -> None:
        """Leave the group of the C library."""
        self._unfinished.clear()
        self._group.close()

    def shutdown(self) -> None:
        """Leave the group; its operations must be done."""
        self.leave()
        if self._others is not None and self is not dist.group.WORLD:  # torch ends all with WORLD
            dist.destroy_process_group(self._others)
        self._others = None

    def abort(self) -> None:
        """Make the operations of all ranks fail."""
        self._group.abort(f"rank {self._rank} called abort()")
        if self._others is not None:
            self._others.abort()

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
