"""``torch.distributed.init_process_group("fsdpc")``: collectives over the ranks' shared memory.

Importing :mod:`fsdpc.torch` registers the back end. Every process group on one host is a group of
the C library (csrc/comm/group.h) with its own deadline, and independent of the engine. A group's
ranks meet through the group's store, or through the default group if that is ours. Groups that
span several hosts use gloo.

An operation without ``async_op`` runs during the call. One with ``async_op`` advances whenever this
rank waits for anything, or tests it; ``get_future()`` waits.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import time
import uuid
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpc import _core
from fsdpc.distributed.environment import this_host
from fsdpc.torch.backend._calls import operation
from fsdpc.torch.backend._copies import Copies
from fsdpc.torch.backend._reductions import Reductions
from fsdpc.torch.backend._works import (
    ANY,
    Async,
    Operation,
    all_of,
    check,
    deadlines,
    dense_of,
    n_bytes,
)

NAME = "fsdpc"
_MONITOR = 0x7FFFFFFF  # the tag of monitored_barrier's messages
_log = logging.getLogger(__name__)
_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


class ProcessGroup(Reductions, Copies):
    """A process group of ranks on one host; created by ``init_process_group`` or ``new_group``."""

    @operation("send")
    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Operation:
        """Send a tensor to a rank of the group."""
        check(tensors)
        handles = []
        for tensor in tensors:
            dense = tensor.contiguous()
            handles.append(self._group.send(dense, dense.data_ptr(), n_bytes(dense), dst, tag))
        return self._done(handles[::-1], tensors, Async)

    @operation("recv")
    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Operation:
        """Receive a tensor from a rank of the group."""
        return self._receive(tensors, src, tag)

    def _receive(self, tensors: list[Tensor], src: int, tag: int) -> Operation:
        check(tensors)
        handles, backs = [], []
        for tensor in tensors:
            dense, back = dense_of(tensor)
            handles.append(self._group.recv(dense, dense.data_ptr(), n_bytes(dense), src, tag))
            backs.append(back)
        return self._done(handles[::-1], tensors, Async, all_of(backs))

    @operation("recv")
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Operation:
        """Receive a tensor from any rank of the group."""
        return self._receive(tensors, ANY, tag)

    @operation("barrier")
    def barrier(self, opts: Any = None) -> Operation:
        """Wait for all ranks."""
        return self._done([self._group.barrier("barrier")], [], opts)

    @operation("monitored_barrier")
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; rank 0's error names the first late rank, or all of them."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        limit = f"in {int(seconds * 1000)} ms"
        byte = torch.zeros(1, dtype=torch.uint8)
        if self._rank != 0:
            try:
                self.send([byte], 0, _MONITOR).wait()
                self.recv([byte], 0, _MONITOR).wait()
            except (OSError, RuntimeError) as error:
                raise RuntimeError(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors "
                    f"while waiting for send/recv from rank 0: {error}"
                ) from error
            return
        if seconds <= 0:
            raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {limit[3:]}.")
        end = time.monotonic() + seconds
        works = {p: self.recv([byte.clone()], p, _MONITOR) for p in range(1, self._size)}
        while works and time.monotonic() < end:
            works = {p: work for p, work in works.items() if not work.is_completed()}
            time.sleep(0.0005 if works else 0)
        if works:
            late = sorted(works) if wait_all_ranks else [min(works)]
            text = f"Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, late))} "
            text += f"failed to pass monitoredBarrier {limit}"
            self._group.abort(text)
            raise RuntimeError(text)
        for p in range(1, self._size):
            self.send([byte], p, _MONITOR).wait()


def _opened(group: _core.Group, *arguments: Any) -> ProcessGroup:
    made = ProcessGroup(group, *arguments)
    _open.add(made)
    return made


def _create(given: Any, options: Any) -> Any:
    """Create a group, for torch: its ranks meet through the store or as part of the default."""
    rank, size, store = given.group_rank, given.group_size, given.store
    ranks = list(given.global_ranks_in_group) or list(range(size))
    default = dist.distributed_c10d._world.default_pg
    seconds = given.timeout.total_seconds()
    if isinstance(default, ProcessGroup):
        identity = hashlib.sha256(given.group_id.encode()).digest()[:8]
        with deadlines():
            group = default.core.part(ranks, int.from_bytes(identity, "little"))
        return _opened(group, rank, size, ranks, seconds, options)
    meeting = store.add(f"meetings/{rank}", 1)  # a store may outlive several default groups
    store.set(f"{meeting}/host/{rank}", this_host()[0])
    if rank == 0:
        hosts = {store.get(f"{meeting}/host/{other}") for other in range(size)}
        secret = f"{uuid.uuid4().hex} {uuid.uuid4().hex}"
        store.set(f"{meeting}/meet", f"{len(hosts)} c10d:{secret}")
    n_hosts, address, secret = store.get(f"{meeting}/meet").decode().split()
    if int(n_hosts) > 1:
        if rank == 0:
            _log.warning("%d ranks on %s hosts: gloo carries this process group", size, n_hosts)
        return dist.ProcessGroupGloo(store, rank, size, given.timeout)
    with deadlines():
        group = _core.Group(rank, size, address, secret, seconds)
    return _opened(group, rank, size, ranks, seconds, options)


@atexit.register
def _leave() -> None:
    for group in list(_open):
        group.leave()


def register() -> None:
    """Register the back end with torch, once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
