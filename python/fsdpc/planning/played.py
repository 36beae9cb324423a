"""Record one of the engine's steps for any world size, on a device that computes nothing.

Only kernels and peers are replaced; units, epochs, prefetches, reductions and the optimizer's step
are the engine's own. Peers are simulated, and memory is counted but never touched. The trace
records the order in which operations were posted, where the program waited for them, and how many
floating point operations preceded them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fsdpc import _core, optim
from fsdpc.distributed import group
from fsdpc.nn import init
from fsdpc.nn.module import Module, Parameter, deferred_init
from fsdpc.planning.memory_plan import check_left
from fsdpc.planning.snapshot import Snapshot
from fsdpc.sharding import rules
from fsdpc.sharding.fully_shard import fully_shard
from fsdpc.sharding.mesh import DeviceMesh

_STEPS = 3  # the first records; the second is the first to replay the record


class Event(NamedTuple):
    """An engine event on a unit, with its kind (see csrc/base/trace.h) and the FLOPs before it."""

    kind: str
    unit: int
    bytes: int
    flops: int
    backward: bool


class Sample(NamedTuple):
    """The activation bytes before event ``at`` of a step, and their peak since the last sample."""

    at: int
    now: int
    peak: int


@dataclass(frozen=True, kw_only=True)
class Played:
    """The events of one step, and the memory that the engine used."""

    events: tuple[Event, ...]
    samples: tuple[Sample, ...]
    units: tuple[str, ...]
    reduce_sizes: tuple[int, ...]  # element size in each unit's reductions
    forms: tuple[str, ...]  # in which each unit's sums travel between hosts
    codes: tuple[int, ...]  # what a rank sends to each other host in a unit's gathers; 0: slices
    memory: dict[str, int]

    @property
    def flops(self) -> int:
        """The number of floating point operations in the step."""
        return self.events[-1].flops - self.events[0].flops


def play_step(
    model: Module,
    shape: tuple[int, ...],
    mesh: tuple[int, int],
    options: dict[str, Any],
    *,
    optimizer: str,
    accumulate: int,
    orders: bool,
) -> Played:
    """Record a step of rank 0 without other ranks, then restore the model.

    Parameters
    ----------
    model : Module
        An unsharded model; its parameters may be deferred.
    shape : tuple of int
        Per-rank batch shape, as for :func:`fsdpc.memory_plan`.
    mesh : (replicate, shard)
    options : dict
        Additional :func:`fully_shard` options.
    optimizer : str
    accumulate : int
        Micro-steps in the step.
    orders : bool
        Whether operations are ordered by streams, as on GPUs; otherwise the host waits for them.
    """

    def steps() -> Played:
        world = group._world
        classes = [(m, type(m)) for m in model.modules()]
        with Snapshot(model):
            try:
                group._world = _core.Comm(0, mesh[0] * mesh[1], None)
                return _play(model, shape, mesh, options, optim.BY_NAME[optimizer], accumulate)
            finally:
                group._world = world
                for m, cls in classes:
                    object.__setattr__(m, "__class__", cls)

    played, left = _core.play(steps, orders)
    check_left(model, left)
    return played


def _play(
    model: Any,
    shape: tuple[int, ...],
    mesh: tuple[int, int],
    options: dict[str, Any],
    make_optimizer: Callable[..., Any],
    accumulate: int,
) -> Played:
    _without_memory(model)
    comms = [_core.Comm(0, size, None) for size in mesh]
    fully_shard(model, mesh=DeviceMesh(comms, ("replicate", "shard"), mesh), **options)
    optimizer = make_optimizer(model.parameters(), lr=1e-3)
    inputs = _inputs(model, shape)
    sampler = _Sampler(model)
    for _ in range(_STEPS):
        sampler.begin()
        for _ in range(accumulate):
            loss = model(*inputs)
            (loss if loss.ndim == 0 else loss.sum()).backward()
            sampler.take()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        sampler.take()
    units = rules.units_of(model)
    own = [u.params[0][1] if u.params else _core.float32 for u in units]
    sizes = [(u.reduce_dtype or u.param_dtype or d).itemsize for u, d in zip(units, own)]
    return Played(
        events=tuple(sampler.events),
        samples=tuple(sampler.samples),
        units=tuple(u.name for u in units),
        reduce_sizes=tuple(sizes),
        forms=tuple(u.reduce_codec for u in units),
        codes=tuple(u.gather_bytes if u.gather_codec != "exact" else 0 for u in units),
        memory=sampler.peaks,
    )


class _Sampler:
    """Samples the trace and the memory after each unit's forward and before its backward.

    Each sample resets the peaks; the maximum over all samples is the peak of the recorded steps.
    """

    def __init__(self, model: Any) -> None:
        self.peaks: dict[str, int] = {}
        self.begin()
        for m in {id(m): m for _, m in rules.sharded_modules(model)}.values():
            m.__dict__["forward"] = self._sampled(m.forward)

    def begin(self) -> None:
        """Discard the previous step, except for its peaks."""
        self.events: list[Event] = []
        self.samples: list[Sample] = []
        _core.trace_reset()
        self.take()

    def take(self, _: Any = None) -> None:
        """Sample the current memory."""
        stats = _core.memory_stats()
        for key, value in stats.items():
            if key.endswith("_peak_bytes"):
                name = key.removesuffix("_peak_bytes")
                self.peaks[name] = max(value, self.peaks.get(name, 0))
        self.events += [Event(kind, unit, n, at, back)
                        for kind, unit, _, n, at, back in _core.trace_events()]  # fmt: skip
        _core.trace_reset()
        _core.reset_peak_memory_stats()
        self.samples.append(
            Sample(len(self.events), stats["activation_bytes"], stats["activation_peak_bytes"])
        )

    def _sampled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def sampled(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            self.take()
            if isinstance(out, _core.Tensor) and out.requires_grad:
                out.register_hook(self.take)
            return out

        return sampled


def _without_memory(model: Module) -> None:
    """Replace the model's own parameters with deferred ones."""
    made: dict[int, Parameter] = {}
    with deferred_init():
        for m in model.modules():
            for name, p in m._parameters.items():
                if p is None:
                    continue
                if id(p) not in made:
                    values = _core.empty_deferred(p.shape, dtype=p.dtype)
                    made[id(p)] = init.zeros_(Parameter(values, requires_grad=p.requires_grad))
                m._parameters[name] = made[id(p)]


def _inputs(model: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return token ids and targets for models from :mod:`fsdpc.models`, and floats for others."""
    if hasattr(getattr(model, "config", None), "vocab_size"):
        ids = np.zeros(shape, np.int64)
        return ids, ids
    dtypes = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    dtype = next(dtypes, _core.float32)
    return (_core.empty(shape, dtype=dtype),)
