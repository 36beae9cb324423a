"""Which strategy, mesh, recomputation, offload and micro-batch to train with, and why.

Every choice is planned to the byte, and what fits is played on the engine's own schedule: nothing
here has a model of memory or time of its own. All choices train on the same batch, so the fastest
step is the best.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdpc import _core, _plan_page
from fsdpc._svg import milliseconds, size
from fsdpc.activation import checkpoint_activations
from fsdpc.device import check_device, get_default_device
from fsdpc.memory_plan import MemoryPlan, groups_on_hosts, memory_plan
from fsdpc.models import Llama
from fsdpc.models.config import ModelConfig, of_transformers
from fsdpc.nn.module import Module, deferred_init
from fsdpc.offload import OffloadPolicy
from fsdpc.policies import MixedPrecisionPolicy
from fsdpc.simulate import SimulateOptions, Simulation, simulate

if TYPE_CHECKING:
    from fsdpc._advice import Advice

CHECKPOINTS: tuple[str | float | None, ...] = (None, 0.5, "all")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What :func:`plan` may be told besides memory, ranks and wires.

    Parameters
    ----------
    batch : int, default 1
        Sequences of a rank in a step; micro-batches divide it.
    seq : int, optional
        Words in a sequence; by default the longest that the model takes.
    ranks_per_host : int, optional
        By default all ranks are on one host.
    folder : str, default "/var/tmp"
        For offload to a disk, which is tried where ``disk_bandwidth`` is given; CPUs alone.
    simulated : dict, optional
        Other fields of :class:`SimulateOptions`, as ``local_bandwidth``; for all choices.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.PlanOptions(batch=8, seq=2048).batch
    8
    """

    batch: int = 1
    seq: int | None = None
    ranks_per_host: int | None = None
    folder: str = "/var/tmp"
    simulated: dict[str, Any] = field(default_factory=dict)


def wrapped(options: str, width: int = 76) -> list[str]:
    """Return lines of options, each with its value on the same line."""
    pairs = options.replace(" ", "\0").replace("\0--", " --")
    lines = wrap(pairs, width, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\0", " ") for line in lines]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train, and what it takes.

    ``memory`` are bytes of a rank, its share of what the ranks of a host have in common included.
    ``simulation`` is None where that is more than there is. ``reason`` says in words why the choice
    is where it is. ``checkpoint`` is what :func:`fsdpc.checkpoint_activations` is given, and
    ``offload`` what ``--offload`` takes, or "none".
    """

    strategy: str
    mesh: tuple[int, int]
    checkpoint: str | float | None
    offload: str
    micro_batch: int
    accumulate: int
    memory: float
    simulation: Simulation | None = None
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether it needs no more memory than there is."""
        return self.simulation is not None

    @property
    def options(self) -> str:
        """Return the options of ``fsdpc train`` that choose it."""
        words = [f"--strategy {self.strategy}"]
        if self.strategy.startswith("HYBRID"):
            words += [f"--mesh {self.mesh[0]}x{self.mesh[1]}"]
        if self.checkpoint is not None:
            words += [f"--checkpoint-activations {self.checkpoint}"]
        if self.offload != "none":
            words += [f"--offload {self.offload}"]
        return " ".join([*words, f"--batch {self.micro_batch} --accumulate {self.accumulate}"])


@dataclass(frozen=True, kw_only=True, repr=False)
class Plans:
    """All choices, the fastest that fit first, then the others by memory; printing shows a table.

    ``tokens`` are those of all ranks in a step, ``limit`` the bytes that a rank may have. In a
    notebook it is a table with a picture of the fastest step.

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
        """Write a page of pictures: who owns which rows, the memory, and the step over time.

        Parameters
        ----------
        path : path
            Of an HTML file.
        rows : int, default 10
            Choices in its table.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        text = _plan_page.page_of(self, self.case.model, self.case.simulated.get("plan"), rows)
        Path(path).write_text(text, encoding="utf-8")

    def _repr_html_(self) -> str:
        """Return a table and a picture, which notebooks show."""
        return _plan_page.summary(self, 10)

    @property
    def best(self) -> Choice:
        """The fastest that fits.

        Raises
        ------
        ValueError
            None fits; the message says how much the smallest needs.
        """
        first = self.choices[0]
        if not first.fits:
            raise ValueError(
                f"nothing fits: {first.options} needs least, {size(first.memory)}, among them "
                f"{first.reason.partition(': ')[2]}; use more ranks or larger GPUs"
            )
        return first

    def advise(self) -> Advice:
        """Look for changes by which it fits, if it does not or only just; printing shows them.

        They are bf16 states of the optimizer, offload, gradients too, shorter sequences and LoRA,
        and pairs of these if one is not enough.
        """
        from fsdpc._advice import advise

        return advise(self)

    def table(self, rows: int | None = None) -> str:
        """Return the first rows as text; all by default."""
        head = f"{'step':>11} {'tokens/s':>10} {'memory':>10}  options of fsdpc train"
        lines = [*wrap(self.title, 80), head]
        for c in self.choices[:rows]:
            step, rate = "-", "-"
            if c.simulation is not None:
                step = milliseconds(c.simulation.step)
                rate = f"{self.tokens / c.simulation.step:,.0f}"
            first, *rest = [*wrapped(c.options, 45), *wrap(c.reason, 45, break_on_hyphens=False)]
            lines += [f"{step:>11} {rate:>10} {size(c.memory):>10}  {first}",
                      *(f"{'':35}{each}" for each in rest)]  # fmt: skip
        left = len(self.choices) - len(self.choices[:rows])
        return "\n".join(lines + [f"and {left} more"] * bool(left))

    def __repr__(self) -> str:
        return str(self)  # what a prompt shows

    def __str__(self) -> str:
        return self.table()


class Case(NamedTuple):
    """What all choices of a plan have in common."""

    model: Any
    memory: float
    hosts: int
    per_host: int
    device: str
    options: PlanOptions
    simulated: dict[str, Any]
    wires: dict[str, float]


def plan(
    model: Any, *, memory: float, ranks: int, bandwidth: float, flops: float, **options: Any
) -> Plans:
    """Try ways to train a model on a cluster that need not be here, and rank them.

    Parameters
    ----------
    model : Module, ModelConfig, or a LLaMA-like model or configuration of transformers'
        Not sharded; deferred ones of any size. It is left as it was.
    memory : float
        Bytes that a rank may have: of its GPU, or its share of the host's.
    ranks : int
    bandwidth : float
        Bytes a second that a host sends to others; on one host without ``local_bandwidth``, that a
        rank sends inside it.
    flops : float
        Floating point operations a second that a rank reaches in products.
    **options
        Fields of :class:`PlanOptions` and of :class:`SimulateOptions`, and ``latency`` in seconds.

    Returns
    -------
    Plans

    Raises
    ------
    TypeError
        There is no such option.
    ValueError
        A number that no cluster has, or a model that is sharded or not one of these.

    Notes
    -----
    It tries the strategies, hybrid ones with all meshes that fit hosts; recomputation of no, half
    of the and all blocks; micro-batches by factors of two; and a disk for the optimizer, unless an
    ``offload_policy`` is given. :meth:`Plans.advise` goes on where nothing fits. What fits
    by :func:`fsdpc.memory_plan` is played by :func:`fsdpc.simulate`, whose limits are its own.

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
    wires = {"bandwidth": bandwidth, "latency": latency, "flops": flops}
    return Case(model, memory, ranks // per_host, per_host, device, o, given, wires)


#: Options of a simulation that are a choice's.
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


def _micro_batches(batch: int) -> list[int]:
    return [batch >> i for i in range(batch.bit_length()) if batch % (1 << i) == 0]


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


def _blocks(model: Any) -> list[Any]:
    return list(model.blocks()) if callable(getattr(model, "blocks", None)) else []


def _checkpoints(model: Any) -> tuple[str | float | None, ...]:
    """Not where blocks are recomputed already, or there are none."""
    blocks = _blocks(model)
    plain = blocks and not any("forward" in block.__dict__ for block in blocks)
    return CHECKPOINTS if plain else CHECKPOINTS[:1]


@contextmanager
def _recomputing(model: Any, which: Any) -> Iterator[None]:
    if which is not None:
        checkpoint_activations(_blocks(model), which)
    try:
        yield
    finally:
        for block in _blocks(model) if which is not None else ():
            block.__dict__.pop("forward", None)


def activations(case: Case) -> dict[tuple[Any, int], int]:
    """Bytes by recomputation and micro-batch: no recomputation and large micro-batches first."""
    found = {}
    for which in _checkpoints(case.model):
        with _recomputing(case.model, which):
            for micro in _micro_batches(case.options.batch):
                plan = memory_plan(case.model, 1, (micro, case.options.seq),
                                   mp_policy=case.simulated.get("mp_policy"))  # fmt: skip
                found[which, micro] = plan.activation or 0
    return found


class Sharding(NamedTuple):
    """How a choice spreads a model."""

    strategy: str
    mesh: tuple[int, int]
    offload: OffloadPolicy | None


class Way:
    """One way to shard: what the engine holds, and choices of how to spend activations on it."""

    def __init__(self, case: Case, sharding: Sharding) -> None:
        self.case = case
        self.sharding = sharding
        given = case.simulated
        self.held: MemoryPlan = memory_plan(
            case.model, sharding.mesh, strategy=sharding.strategy, offload_policy=sharding.offload,
            mp_policy=given.get("mp_policy"), plan=given.get("plan"),
            optimizer=given.get("optimizer", "adamw"), state_dtype=given.get("state_dtype"),
        ).for_device(case.device).for_hosts(case.hosts)  # fmt: skip
        lanes = groups_on_hosts(sharding.mesh, case.hosts, case.per_host)[0].lanes
        self.shared: int = lanes if case.device == "cpu" else 1  # ranks of a host read one wire
        self.engine: float = self.held.total - self.held.wire + self.held.wire / self.shared

    def choice(self, which: Any, micro: int, activation: int) -> Choice:
        """Play it if it fits."""
        case, (strategy, mesh, offload) = self.case, self.sharding
        accumulate = case.options.batch // micro
        made = partial(Choice, strategy=strategy, mesh=mesh, checkpoint=which,
                       offload="none" if offload is None else str(offload), micro_batch=micro,
                       accumulate=accumulate)  # fmt: skip
        if self.engine + activation <= case.memory:
            with _recomputing(case.model, which):
                played = simulate(
                    case.model, (micro, case.options.seq), hosts=case.hosts,
                    ranks_per_host=case.per_host, **case.wires,
                    **{**case.simulated, "strategy": strategy, "mesh": mesh,
                       "offload_policy": offload, "accumulate": accumulate},
                )  # fmt: skip
            activation = played.memory.activation or 0  # of the step, not of a dry run
            if self.engine + activation <= case.memory:
                return made(memory=self.engine + activation, simulation=played)
        why = _too_much(self.held, self.shared, activation)
        return made(memory=self.engine + activation, reason=why)


def _rank(c: Choice) -> tuple[bool, float, float]:
    """Steps that are the same to four digits go by memory."""
    step = c.simulation.step if c.simulation is not None else 0.0
    return not c.fits, float(f"{step:.4g}"), c.memory


def _too_much(held: MemoryPlan, shared: int, activation: int) -> str:
    parts = {"wire": held.wire / shared, "master": held.master, "grad": held.grad,
             "state": held.state, "reduce": held.reduce, "activation": activation}  # fmt: skip
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    return "does not fit: " + " and ".join(f"{size(parts[n])} of {n}" for n in largest)


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
