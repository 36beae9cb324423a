"""Recommend the strategy, mesh, recomputation, offload and micro-batch for a training run.

Every choice's memory is planned to the byte, and choices that fit are simulated on the engine's own
schedule. This module does not model memory or time itself. All choices train on batches of the same
size, so the fastest step is the best.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from fsdpc import _core
from fsdpc.display.svg import size
from fsdpc.models import Llama
from fsdpc.models.config import ModelConfig, of_transformers
from fsdpc.nn.module import Module, deferred_init
from fsdpc.planning import plan_page
from fsdpc.planning.advice import Advice, advise
from fsdpc.planning.memory_plan import groups_on_hosts
from fsdpc.planning.simulate import SimulateOptions, Simulation
from fsdpc.planning.ways import Case, Choice, PlanOptions, Sharding, Way, activations, wrapped
from fsdpc.sharding.offload import OffloadPolicy
from fsdpc.sharding.policies import MixedPrecisionPolicy
from fsdpc.tensors.device import check_device, get_default_device


@dataclass(frozen=True, kw_only=True, repr=False)
class Plans:
    """A table of all choices: first those that fit, by step time, then the others, by memory.

    ``tokens`` is the number of tokens per step over all ranks, ``limit`` the memory limit per rank
    in bytes. In a notebook it is displayed as a table and a picture of the fastest step.

    Examples
    --------
    >>> import fsdpc
    >>> found = fsdpc.plan(fsdpc.models.preset("2M"), memory=60e6, ranks=2, bandwidth=10e9,
    ...                    flops=50e9, seq=64)
    >>> found.best is found.choices[0]
    True
    """

    title: str
    choices: tuple[Choice, ...]
    tokens: int
    limit: float
    case: Case = field(repr=False, compare=False)

    def save(self, path: str | os.PathLike[str], rows: int = 10) -> None:
        """Write an HTML page with pictures of shard owners, memory, and the step over time.

        Parameters
        ----------
        path : path
            Path of the HTML file.
        rows : int, default 10
            Number of choices in the page's table.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        text = plan_page.page_of(self, self.case.model, self.case.simulated.get("plan"), rows)
        Path(path).write_text(text, encoding="utf-8")

    def _repr_html_(self) -> str:
        """Return a table and a picture, for display in notebooks."""
        return plan_page.summary(self, 10)

    @property
    def best(self) -> Choice:
        """The fastest choice that fits.

        Raises
        ------
        ValueError
            No choice fits; the message states how much memory the smallest one needs.
        """
        first = self.choices[0]
        if not first.fits:
            raise ValueError(
                f"nothing fits: {first.options} needs least, {size(first.memory)}, among them "
                f"{first.reason.partition(': ')[2]}; use more ranks or larger GPUs"
            )
        return first

    def advise(self) -> Advice:
        """Look for changes that make the model fit, if it does not fit or only barely fits.

        Changes include bf16 optimizer states, offload (also of gradients), shorter sequences and
        LoRA, and combinations of these if one is not enough. Printing the result lists them.
        """
        return advise(self)

    def table(self, rows: int | None = None) -> str:
        """Return the first rows as text, or all rows by default."""
        head = f"{'step':>11} {'tokens/s':>10} {'memory':>10}  options of fsdpc train"
        lines = [*wrap(self.title, 80), head]
        for c in self.choices[:rows]:
            step, rate, memory = c.cells(self.tokens)
            first, *rest = [*wrapped(c.options, 45), *wrap(c.reason, 45, break_on_hyphens=False)]
            lines += [f"{step:>11} {rate:>10} {memory:>10}  {first}",
                      *(f"{'':35}{each}" for each in rest)]  # fmt: skip
        left = len(self.choices) - len(self.choices[:rows])
        return "\n".join(lines + [f"and {left} more"] * bool(left))

    def __repr__(self) -> str:
        return str(self)  # for the interactive prompt

    def __str__(self) -> str:
        return self.table()


def plan(
    model: Any, *, memory: float, ranks: int, bandwidth: float, flops: float, **options: Any
) -> Plans:
    """Try ways to train a model on any cluster, real or planned, and rank them.

    Parameters
    ----------
    model : Module, ModelConfig, or a LLaMA-like model or configuration of transformers
        An unsharded model; it may be deferred, so any size is possible. It is not changed.
    memory : float
        Memory limit per rank in bytes: its GPU's memory, or its share of the host's.
    ranks : int
    bandwidth : float
        Bytes per second that a host sends to other hosts. On one host without ``local_bandwidth``,
        bytes per second that a rank sends within the host.
    flops : float
        Floating point operations per second that a rank achieves in matrix products.
    **options
        Fields of :class:`PlanOptions` and :class:`SimulateOptions`, and ``latency`` in seconds.

    Returns
    -------
    Plans

    Raises
    ------
    TypeError
        Unknown option.
    ValueError
        A cluster parameter is out of range, or the model is sharded or unsupported.

    Notes
    -----
    It tries all strategies, hybrid ones with every mesh that fits the hosts; recomputation of
    none, half or all of the blocks; micro-batches by factors of two; and the optimizer on a disk,
    unless ``offload_policy`` is given. If nothing fits, try :meth:`Plans.advise`. Choices that fit
    by :func:`fsdpc.memory_plan` are played by :func:`fsdpc.simulate`, with its limitations.

    Examples
    --------
    >>> import fsdpc
    >>> found = fsdpc.plan(fsdpc.models.preset("41M"), memory=500e6, ranks=2, bandwidth=10e9,
    ...                    flops=100e9, seq=256)
    >>> found.best.options
    '--strategy SHARD_GRAD_OP --checkpoint-activations 0.5 --batch 1 --accumulate 1'
    """
    case = _case(model, memory, ranks, bandwidth, flops, options)
    kept = activations(case)
    ways = [
        Way(case, Sharding(strategy, mesh, offload))
        for strategy, mesh in _meshes(case.hosts, case.per_host)
        for offload in _offloads(case)
    ]
    found = sorted((way.choice(*key, n) for way in ways for key, n in kept.items()), key=_rank)
    best = found[0]
    explained = tuple(
        Choice(**{**vars(c), "reason": _why(c.simulation, best.simulation)})
        if c.simulation is not None and best.simulation is not None
        else c
        for c in found
    )
    o, hosts = case.options, case.hosts
    return Plans(
        title=f"{ranks} rank{'s' * (ranks > 1)} ({case.device}) on "
        f"{hosts} host{'s' * (hosts > 1)}, {size(memory)} each, "
        f"{o.batch} x {o.seq} words of a rank in a step",
        choices=explained,
        tokens=o.batch * (o.seq or 0) * ranks,
        limit=memory,
        case=case,
    )


def _case(
    model: Any, memory: float, ranks: int, bandwidth: float, flops: float, options: dict[str, Any]
) -> Case:
    own = {each.name for each in fields(PlanOptions)} - {"simulated"}
    theirs = {each.name for each in fields(SimulateOptions)} - _CHOSEN
    latency = options.pop("latency", 0.0)
    if unknown := sorted(set(options) - own - theirs):
        raise TypeError(f"plan() has no option '{unknown[0]}'; there are {sorted(own | theirs)}")
    given = {name: value for name, value in options.items() if name in theirs}
    given.setdefault("mp_policy", MixedPrecisionPolicy(param_dtype=_core.bfloat16,
                                                      reduce_dtype=_core.float32))  # fmt: skip
    o = PlanOptions(**{n: v for n, v in options.items() if n in own}, simulated=given)
    model = _as_model(model)
    if o.seq is None:
        o = PlanOptions(**{**vars(o), "seq": model.config.max_seq})
    per_host = o.ranks_per_host or ranks
    for name, value in (("ranks", ranks), ("ranks_per_host", per_host), ("batch", o.batch),
                        ("seq", o.seq or 0)):  # fmt: skip
        if value < 1 or value != int(value):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if not memory > 0:
        raise ValueError(f"memory must be above 0 bytes, got {memory!r}")
    if ranks % per_host:
        raise ValueError(f"{ranks} ranks on hosts of {per_host}: every host has as many")
    if ranks == per_host:
        given.setdefault("local_bandwidth", bandwidth)
    device = given.get("device") or get_default_device()
    check_device(device)
    network = {"bandwidth": bandwidth, "latency": latency, "flops": flops}
    return Case(model, memory, ranks // per_host, per_host, device, o, given, network)


#: Simulation options that belong to a choice.
_CHOSEN = {"strategy", "mesh", "accumulate", "reshard_after_forward"}


def _as_model(model: Any) -> Any:
    if isinstance(model, Module):
        return model
    config = getattr(model, "config", model)
    if not isinstance(config, ModelConfig):
        if not hasattr(config, "hidden_size"):
            raise ValueError(
                f"{type(model).__name__} is neither an fsdpc.nn.Module nor a configuration of a "
                "LLaMA-like model: plan() builds a deferred twin of those"
            )
        config = of_transformers(config.to_dict())
    with deferred_init():
        return Llama(config)


def _meshes(hosts: int, per_host: int) -> Iterator[tuple[str, tuple[int, int]]]:
    world = hosts * per_host
    yield "NO_SHARD", (world, 1)
    if world == 1:
        return
    for name in ("SHARD_OPTIM", "SHARD_GRAD_OP", "FULL_SHARD"):
        yield name, (1, world)
    for shard in range(2, world):
        if world % shard:
            continue
        try:
            groups_on_hosts((world // shard, shard), hosts, per_host)
        except ValueError:
            continue
        yield "HYBRID_SHARD", (world // shard, shard)
        yield "HYBRID_SHARD_ZERO2", (world // shard, shard)


def _offloads(case: Case) -> list[OffloadPolicy | None]:
    given = case.simulated.get("offload_policy")
    if given is not None:
        return [given]
    if case.device != "cpu" or case.simulated.get("disk_bandwidth", math.inf) == math.inf:
        return [None]
    on_disk = partial(OffloadPolicy, path=case.options.folder)
    return [None, on_disk(optimizer="disk"), on_disk(optimizer="disk", masters="disk")]


def _rank(c: Choice) -> tuple[bool, float, float]:
    """Return the sort key: step time to four significant digits, then memory."""
    step = c.simulation.step if c.simulation is not None else 0.0
    return not c.fits, float(f"{step:.4g}"), c.memory


def _why(mine: Simulation, best: Simulation) -> str:
    waits = sorted(mine.exposed.items(), key=lambda item: -item[1])
    longest = waits[0][0] if waits else "nothing"
    share = f"computes {mine.compute / mine.step:.0%} of the step"
    if mine.exposed_total > 0.005 * mine.step:
        share += f", waits most for {longest}"
    if mine is best:
        return "fastest: " + share
    slower = mine.step / best.step - 1
    more = [
        f"{1e3 * (a - b):,.3g} ms more {what}"
        for what, a, b in (("computing", mine.compute, best.compute),
                           ("waiting", mine.exposed_total, best.exposed_total))
        if a - b > 0.002 * best.step
    ]  # fmt: skip
    return f"{slower:.1%} slower: {' and '.join(more)}" if more else f"as fast to 0.4 %: {share}"
