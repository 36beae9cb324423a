"""A way to train: how it shards, recomputes and offloads, its memory, and its simulation.

:mod:`fsdpc.planning.planner` tries many ways; :mod:`fsdpc.planning.advice` tries changed runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from textwrap import wrap
from typing import Any, NamedTuple

from fsdpc.display.svg import milliseconds, size
from fsdpc.planning.fit_activations import blocks_of, recomputing
from fsdpc.planning.memory_plan import MemoryPlan, groups_on_hosts, memory_plan
from fsdpc.planning.simulate import Simulation, simulate
from fsdpc.sharding.offload import OffloadPolicy

CHECKPOINTS: tuple[str | float | None, ...] = (None, 0.5, "all")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options for :func:`plan` besides memory, ranks and bandwidths.

    Parameters
    ----------
    batch : int, default 1
        Sequences per rank per step; micro-batches divide it.
    seq : int, optional
        Tokens per sequence; by default the model's maximum.
    ranks_per_host : int, optional
        By default all ranks are on one host.
    folder : str, default "/var/tmp"
        Folder for offload to a disk, tried only on CPUs and if ``disk_bandwidth`` is given.
    simulated : dict, optional
        Other fields of :class:`SimulateOptions`, such as ``local_bandwidth``, for all choices.

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


class Case(NamedTuple):
    """The inputs that all choices of a plan share."""

    model: Any
    memory: float
    hosts: int
    per_host: int
    device: str
    options: PlanOptions
    simulated: dict[str, Any]
    network: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way to train and the resources it needs.

    ``memory`` is the bytes per rank, including its share of memory shared by the host's ranks.
    ``simulation`` is None if that exceeds the limit. ``reason`` explains the choice's ranking in
    words. ``checkpoint`` is the argument for :func:`fsdpc.checkpoint_activations`, and ``offload``
    is the value of ``--offload``, or "none".
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
        """Whether the choice fits in memory."""
        return self.simulation is not None

    def cells(self, tokens: int) -> tuple[str, str, str]:
        """Return step time, tokens per second and memory as text, given the ``tokens`` per step."""
        if self.simulation is None:
            return "-", "-", size(self.memory)
        step = self.simulation.step
        return milliseconds(step), f"{tokens / step:,.0f}", size(self.memory)

    @property
    def options(self) -> str:
        """Return the ``fsdpc train`` options that select this choice."""
        words = [f"--strategy {self.strategy}"]
        if self.strategy.startswith("HYBRID"):
            words += [f"--mesh {self.mesh[0]}x{self.mesh[1]}"]
        if self.checkpoint is not None:
            words += [f"--checkpoint-activations {self.checkpoint}"]
        if self.offload != "none":
            words += [f"--offload {self.offload}"]
        return " ".join([*words, f"--batch {self.micro_batch} --accumulate {self.accumulate}"])


def wrapped(options: str, width: int = 76) -> list[str]:
    """Wrap options into lines, without separating an option from its value."""
    pairs = options.replace(" ", "\0").replace("\0--", " --")
    lines = wrap(pairs, width, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\0", " ") for line in lines]


def activations(case: Case) -> dict[tuple[Any, int], int]:
    """Return activation bytes by recomputation (least first) and micro-batch (largest first)."""
    found = {}
    for which in _checkpoints(case.model):
        with recomputing(blocks_of(case.model), which):
            for micro in _micro_batches(case.options.batch):
                plan = memory_plan(case.model, 1, (micro, case.options.seq),
                                   mp_policy=case.simulated.get("mp_policy"))  # fmt: skip
                found[which, micro] = plan.activation or 0
    return found


def _checkpoints(model: Any) -> tuple[str | float | None, ...]:
    """Return the recomputations to try: only None without blocks or if they already recompute."""
    blocks = blocks_of(model)
    plain = blocks and not any("forward" in block.__dict__ for block in blocks)
    return CHECKPOINTS if plain else CHECKPOINTS[:1]


def _micro_batches(batch: int) -> list[int]:
    return [batch >> i for i in range(batch.bit_length()) if batch % (1 << i) == 0]


class Sharding(NamedTuple):
    """How a choice distributes the model."""

    strategy: str
    mesh: tuple[int, int]
    offload: OffloadPolicy | None


class Way:
    """A way to shard, with its engine memory and its choices of recomputation and micro-batch."""

    def __init__(self, case: Case, sharding: Sharding) -> None:
        self.case = case
        self.sharding = sharding
        given = case.simulated
        self.held: MemoryPlan = memory_plan(
            case.model, sharding.mesh, strategy=sharding.strategy, offload_policy=sharding.offload,
            mp_policy=given.get("mp_policy"), plan=given.get("plan"),
            optimizer=given.get("optimizer", "adamw"), state_dtype=given.get("state_dtype"),
            compression=given.get("compression"),
        ).for_device(case.device).for_hosts(case.hosts)  # fmt: skip
        local_size = groups_on_hosts(sharding.mesh, case.hosts, case.per_host)[0].local_size
        self.shared: int = local_size if case.device == "cpu" else 1  # on a host
        whole = self.held.unsharded
        self.engine: float = self.held.total - whole + whole / self.shared

    def choice(self, which: Any, micro: int, activation: int) -> Choice:
        """Return the choice, simulated if it fits."""
        case, (strategy, mesh, offload) = self.case, self.sharding
        accumulate = case.options.batch // micro
        made = partial(Choice, strategy=strategy, mesh=mesh, checkpoint=which,
                       offload="none" if offload is None else str(offload), micro_batch=micro,
                       accumulate=accumulate)  # fmt: skip
        if self.engine + activation <= case.memory:
            with recomputing(blocks_of(case.model), which):
                played = simulate(
                    case.model, (micro, case.options.seq), hosts=case.hosts,
                    ranks_per_host=case.per_host, **case.network,
                    **{**case.simulated, "strategy": strategy, "mesh": mesh,
                       "offload_policy": offload, "accumulate": accumulate},
                )  # fmt: skip
            activation = played.memory.activation or 0  # from the step, not from a dry run
            if self.engine + activation <= case.memory:
                return made(memory=self.engine + activation, simulation=played)
        why = _too_much(self.held, self.shared, activation)
        return made(memory=self.engine + activation, reason=why)


def _too_much(held: MemoryPlan, shared: int, activation: int) -> str:
    parts = {"unsharded": held.unsharded / shared, "master": held.master, "grad": held.grad,
             "state": held.state, "reduce": held.reduce, "activation": activation}  # fmt: skip
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    return "does not fit: " + " and ".join(f"{size(parts[n])} of {n}" for n in largest)
