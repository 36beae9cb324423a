"""The clock that replays a recorded step and computes when each operation moves its bytes.

:mod:`fsdpc.simulate` passes a step that the engine recorded. From this record, the clock computes
the step's duration, the rank's waits, and the times at which each operation ran.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fsdpc import _core
from fsdpc.planning.memory_plan import HostGroup
from fsdpc.planning.played import Event, Played

if TYPE_CHECKING:
    from fsdpc.planning.simulate import SimulateOptions


# ---- traffic ----


class Load(NamedTuple):
    """The cost of an operation: bytes between and within hosts, messages per rank, and seconds.

    ``core`` is the seconds that the rank's own core spends on it instead of computing.
    """

    between: float
    inside: float
    messages: int
    latency: float
    seconds: float
    core: float = 0.0


class Network:
    """Computes the bytes that an operation sends over each link, and its uncontended duration."""

    def __init__(
        self, *, bandwidth: float, latency: float, options: SimulateOptions, device: str,
        messages: dict[str, int],
    ) -> None:  # fmt: skip
        self.bandwidth: float = bandwidth
        self.latency: float = latency
        self.o: SimulateOptions = options
        self.is_ring: bool = device == "cuda"
        self.messages: dict[str, int] = messages  # their bytes, from the engine's plan

    def load(
        self, kind: str, group: HostGroup, full: float, element: int, form: str = "exact"
    ) -> Load:
        """Return the load of a "gather", "reduce" or "all_reduce" of ``full`` bytes."""
        if self.is_ring:
            return self._ring(kind, group, full)
        hosts, local_size, per_host = group
        wide = full / element * max(4, element)  # sums are sent in fp32
        hops = 2 if kind == "all_reduce" and hosts > 2 and form == "exact" else 1
        replicas = 2 * wide / hosts if hops == 2 else wide  # csrc/comm/hosts_reduce.c
        crossing = {"gather": full / hosts, "reduce": wide / hosts, "all_reduce": replicas}[kind]
        if form != "exact":
            share = full / element / local_size / (hosts if kind == "reduce" else 1)
            crossing = local_size * _core.codec_bytes(form, math.ceil(share))
        inside = {"gather": 0.0, "reduce": local_size * full,
                  "all_reduce": local_size * local_size * full}[kind]
        if local_size == 1:
            inside = 0.0
        elif kind == "all_reduce" and hosts > 1:
            inside += local_size * wide
        return self._crossing(group, crossing, inside, hops=hops)

    def _crossing(
        self, group: HostGroup, bytes_to_each: float, inside: float = 0.0, header: bool = True,
        hops: int = 1,
    ) -> Load:
        """Return the load if every host sends this many bytes to every other host."""
        hosts, local_size, per_host = group
        messages = (hops + header) * (hosts - 1)
        headers = local_size * self.messages["header"] if header else 0
        between = (hosts - 1) * (bytes_to_each + headers) * per_host
        seconds = inside / local_size / self.o.local_bandwidth
        seconds += max(between / self.bandwidth, messages * self.o.message)
        return Load(
            between, inside * per_host, messages, hops * self.latency if hosts > 1 else 0.0,
            seconds, core=2 * between / (local_size * per_host) / self.o.core_bandwidth,
        )  # fmt: skip

    def _ring(self, kind: str, group: HostGroup, full: float) -> Load:
        hosts, local_size, per_host = group
        ranks = hosts * local_size
        rounds = 2 if kind == "all_reduce" else 1
        share = rounds * full * (ranks - 1) / ranks  # that every rank forwards
        between = share * per_host if hosts > 1 else 0.0
        copies = local_size if hosts == 1 else local_size - 1
        inside = share * per_host * copies if local_size > 1 else 0.0
        local = share / self.o.local_bandwidth if local_size > 1 else 0.0
        hops = (hosts - 1) * self.latency + (ranks - hosts) * self.o.local_latency
        messages = rounds * (ranks - 1) if hosts > 1 else 0
        return Load(
            between, inside, messages, rounds * hops, max(local, between / self.bandwidth)
        )

    def values(self, group: HostGroup, message: str, header: bool = True) -> Load:
        """Return the load of a note or agreement, which each rank sends to one rank per host."""
        if self.is_ring:  # the clock for GPUs does not count these
            return Load(0.0, 0.0, 0, 0.0, 0.0)
        return self._crossing(group, group.local_size * self.messages[message], header=header)


# ---- the clock ----


@dataclass
class Operation:
    """An operation in progress: its latency, then its time on an unshared link, in seconds.

    ``kind`` is what the engine posted for ``unit``, "" for notes; ``begin`` and ``end`` are the
    times when it began and ended.
    """

    latency: float
    seconds: float
    link: str
    after: Operation | None = None
    done: bool = False
    kind: str = ""
    unit: int = -1
    bytes: float = 0.0
    begin: float = math.inf
    end: float = math.inf


class Wait(NamedTuple):
    """Seconds a rank spends only waiting for gathers, reductions and agreements."""

    what: str
    begin: float
    end: float


@dataclass
class _Sent:
    between: float = 0.0
    inside: float = 0.0
    messages: int = 0


class Clock:
    """Plays a recorded step: one thread computes and waits while operations run concurrently.

    Operations of the same kind run in order. Operations of different kinds run concurrently and
    share the links.
    """

    def __init__(
        self, record: Played, groups: tuple[HostGroup, HostGroup], network: Network, flops: float
    ) -> None:
        self.record: Played = record
        self.network: Network = network
        self.flops: float = flops
        self.shards: HostGroup = groups[0]
        self.replicas: HostGroup = groups[1]
        self.n_shards: int = self.shards.hosts * self.shards.local_size
        self.now: float = 0.0
        kinds = ("gather", "reduce", "sum")
        self.streams: dict[str, deque[Operation]] = {kind: deque() for kind in kinds}
        self.gathers: dict[int, Operation] = {}
        self.sums: dict[int, Operation] = {}
        self.brought: set[int] = set()  # units whose rows from other hosts have arrived
        self.exposed: dict[str, float] = {"gather": 0.0, "reduce": 0.0, "agree": 0.0}
        self.sent: _Sent = _Sent()
        self.seconds: deque[int] = self._find_seconds()
        self.to_agree: bool = False
        self.posting: Event | None = None  # the current event of the record
        self.times: list[float] = []  # of each event
        self.operations: list[Operation] = []
        self.waits: list[Wait] = []

    def play(self) -> None:
        """Play the whole record."""
        handlers: dict[str, Callable[[int, int], None]] = {
            "epoch": self._epoch, "gather": self._gather, "gather_done": self._gather_done,
            "backward": self._backward, "reduce": self._reduce, "all_reduce": self._all_reduce,
            "reduce_done": self._reduce_done,
        }  # fmt: skip
        before = self.record.events[0].flops
        for event in self.record.events:
            self._compute((event.flops - before) / self.flops)
            before = event.flops
            self.times.append(self.now)
            self.posting = event
            if handler := handlers.get(event.kind):
                handler(event.unit, event.bytes)

    def _find_seconds(self) -> deque[int]:
        """Return the bytes of the second stage that each reduction starts when it ends.

        CPUs on several hosts start it at that point (csrc/engine/reduce.c), but the record shows it
        where the program must wait for it. 0 means that there is no second stage.
        """
        crosses = not self.network.is_ring and self.replicas.hosts > 1
        found: list[int] = []
        last: dict[int, int] = {}  # each unit's last reduction
        for event in self.record.events:
            if event.kind == "reduce":
                last[event.unit] = len(found)
                found.append(0)
            elif event.kind == "all_reduce" and crosses:
                found[last[event.unit]] = event.bytes
        return deque(found)

    # -- events of the record --

    def _epoch(self, unit: int, n_bytes: int) -> None:
        if self.to_agree:  # at the end of backward: which parameters were used
            used = [(self.replicas, "agreement of replicas"), (self.shards, "agreement")]
            for group, message in used:
                self._wait("agree", self._post("sum", self.network.values(group, message)))
            self.to_agree = False
        note = self.network.values(self.shards, "note of an epoch", header=False)
        self._wait("agree", self._post("sum", note))

    def _gather(self, unit: int, n_bytes: int) -> None:
        if not self.network.is_ring and unit in self.brought:
            return  # the host has kept the other hosts' rows
        self.brought.add(unit)
        codes = 0 if self.network.is_ring else self.record.codes[unit] * self.n_shards
        load = self.network.load("gather", self.shards, codes or n_bytes, 1)
        self.gathers[unit] = self._post("gather", load)

    def _gather_done(self, unit: int, n_bytes: int) -> None:
        self._wait("gather", self.gathers.pop(unit, None))

    def _backward(self, unit: int, n_bytes: int) -> None:
        self.to_agree = True

    def _reduce(self, unit: int, n_bytes: int) -> None:
        second = self.seconds.popleft()
        if self.n_shards == 1:
            return  # only replicas: there is only the second stage
        form = self.record.forms[unit]
        load = self.network.load(
            "reduce", self.shards, n_bytes, self.record.reduce_sizes[unit], form
        )
        first = self.sums[unit] = self._post("reduce", load)
        if second:
            load = self.network.load("all_reduce", self.replicas, second, 4, form)
            both = self.sums[unit] = self._post("sum", load, first)
            both.kind, both.bytes = "all_reduce", second

    def _all_reduce(self, unit: int, n_bytes: int) -> None:
        first = self.sums.get(unit)
        if first and first.after:
            return  # posted together with the first stage
        element = 4 if first else self.record.reduce_sizes[unit]
        if first and not self.network.is_ring:
            self._wait("reduce", first)
        form = self.record.forms[unit]
        load = self.network.load("all_reduce", self.replicas, n_bytes, element, form)
        self.sums[unit] = self._post("sum", load, first)

    def _reduce_done(self, unit: int, n_bytes: int) -> None:
        self._wait("reduce", self.sums.pop(unit, None))

    # -- time --

    def _post(self, stream: str, load: Load, after: Operation | None = None) -> Operation:
        self.sent.between += load.between
        self.sent.inside += load.inside
        self.sent.messages += load.messages
        op = Operation(load.latency, load.seconds, "between" if load.between else "inside", after)
        self.streams[stream].append(op)
        if self.posting is not None and self.posting.kind in ("gather", "reduce", "all_reduce"):
            op.kind, op.unit, op.bytes = self.posting.kind, self.posting.unit, self.posting.bytes
            self.operations.append(op)
        self._compute(load.core)
        return op

    def _compute(self, seconds: float) -> None:
        until = self.now + seconds
        if self.network.o.overlap:
            self._move(until, None)
        self.now = until

    def _wait(self, what: str, op: Operation | None) -> None:
        begin = self.now
        if op is not None:
            self._move(math.inf, op)
        self.exposed[what] += self.now - begin
        if self.now > begin:
            self.waits.append(Wait(what, begin, self.now))

    def _move(self, until: float, awaited: Operation | None) -> None:
        """Advance all operations to a given time, or until the awaited one ends."""
        while self.now < until and not (awaited and awaited.done):
            heads = [q for q in self.streams.values() if q and (not q[0].after or q[0].after.done)]
            if not heads:
                return
            rates = []
            for q in heads:
                busy = [p for p in heads if p[0].latency <= 0 and p[0].link == q[0].link]
                rates.append(1.0 if q[0].latency > 0 else 1 / len(busy))
            left = [(q[0].latency or q[0].seconds) / rate for q, rate in zip(heads, rates)]
            passed = min(*left, until - self.now)
            for q, rate, rest in zip(heads, rates, left):
                op, ends = q[0], rest <= passed
                op.begin = min(op.begin, self.now)
                if op.latency > 0:
                    op.latency = 0.0 if ends else op.latency - passed
                    ends = ends and op.seconds <= 0
                else:
                    op.seconds = 0.0 if ends else op.seconds - passed * rate
                if ends:
                    op.done, op.end = True, self.now + passed
                    q.popleft()
            self.now += passed
