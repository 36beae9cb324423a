"""Advice on making a model fit: changes that a plan does not try on its own.

Each ladder yields increasingly drastic changes of one kind, and only the first one that fits is
advised. If no single change is enough, changes from two ladders are combined, then from three, and
so on. Memory is computed by :func:`fsdpc.memory_plan` and time by :func:`fsdpc.simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdpc import _core, lora
from fsdpc.display.svg import milliseconds, size
from fsdpc.models import GPT2, Llama
from fsdpc.nn.module import deferred_init
from fsdpc.planning.ways import Case, Choice, Sharding, Way, activations, wrapped
from fsdpc.sharding.offload import OffloadPolicy

if TYPE_CHECKING:
    from fsdpc.planning.planner import Plans

#: Fraction of the limit that should stay free for allocators and libraries.
ROOM = 0.1

#: What changes set besides options of the simulation.
OF_MODEL = {"lora", "seq"}


class Change(NamedTuple):
    """A change: the fields it sets, its command-line option, and what it costs besides time."""

    sets: dict[str, Any]
    option: str
    price: str
    alters: bool = False  # whether it changes the trained model or its data
    timed: bool = True  # whether the simulator models all of its time


def _offloads(case: Case) -> Iterator[Change]:
    if case.simulated.get("offload_policy") is not None:
        return
    tier, where = ("disk", "on a disk") if case.device == "cpu" else ("host", "in host memory")
    timed = tier == "disk" and case.simulated.get("disk_bandwidth", math.inf) < math.inf
    classes = ["optimizer", "masters", "gradients", "params"]
    # On a single rank, modules read the parameters directly from the optimizer's arrays.
    for most in range(2, 5 if case.hosts * case.per_host > 1 else 4):
        policy = OffloadPolicy(
            **dict.fromkeys(classes[:most], tier),
            path=case.options.folder if tier == "disk" else None,
        )
        price = f"{{offloaded}} {where}" + ("" if timed else "; the time is without the copies")
        yield Change({"offload_policy": policy}, f"--offload {policy}", price, timed=timed)


def _states(case: Case) -> Iterator[Change]:
    if case.simulated.get("state_dtype") in (None, _core.float32):
        for dtype, option in (_core.bfloat16, "bf16"), ("int8", "int8"):
            yield Change({"state_dtype": dtype}, f"--state-dtype {option}",
                         "the optimizer's states are rounded")  # fmt: skip


def _shorter(case: Case) -> Iterator[Change]:
    seq = case.options.seq or 0
    for part in (2, 4, 8):
        if seq % part == 0 and seq // part >= 128:
            yield Change({"seq": seq // part}, f"--seq {seq // part}",
                         "shorter sequences, so fewer tokens a step", alters=True)  # fmt: skip


def _adapters(case: Case) -> Iterator[Change]:
    model = case.model
    if isinstance(model, (Llama, GPT2)) and all(p.requires_grad for p in model.parameters()):
        yield Change({"lora": 16}, "--lora 16",
                     "trains only adapters; fsdpc train takes --init-from DIR too",
                     alters=True)  # fmt: skip


LADDERS = (_states, _offloads, _shorter, _adapters)


@dataclass(frozen=True, kw_only=True)
class Advised:
    """Changes that make the model fit, and the resulting choice."""

    changes: tuple[Change, ...]
    choice: Choice
    tokens: int
    offloaded: int  # a rank's bytes on a disk or in host memory

    @property
    def options(self) -> str:
        """The ``fsdpc train`` options for the changes, followed by those for the choice."""
        own, changes = self.choice.options, [each.option for each in self.changes]
        for each in changes:
            own = own.replace(f"{each} ", "")
        return " ".join([*changes, own])

    def cost(self) -> tuple[bool, bool, float]:
        """Return a sort key: unaltered runs first, then known times, then time per token."""
        assert self.choice.simulation is not None
        a_token = self.choice.simulation.step / self.tokens
        return (any(c.alters for c in self.changes), not all(c.timed for c in self.changes),
                float(f"{a_token:.3g}"))  # fmt: skip

    def __str__(self) -> str:
        assert self.choice.simulation is not None
        step = self.choice.simulation.step
        prices = "; ".join(c.price.format(offloaded=size(self.offloaded)) for c in self.changes)
        head = f"{size(self.choice.memory)} a rank, {milliseconds(step)}, " + (
            f"{self.tokens / step:,.0f} tokens/s:"
        )
        lines = [*wrapped(self.options), *wrap(f"({prices})", 76, break_on_hyphens=False)]
        return "\n".join([f"  {head}", *(f"    {line}" for line in lines)])


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Recommended changes, cheapest first; prints as a list."""

    title: str
    advised: tuple[Advised, ...] = ()

    def __str__(self) -> str:
        title = wrap(f"advice: {self.title}", 80, break_on_hyphens=False)
        return "\n".join([*title, *map(str, self.advised)])


def advise(plans: Plans) -> Advice:
    """Return changes that make the model fit, or none if it already fits comfortably."""
    limit = plans.limit
    fitting = [c.memory for c in plans.choices if c.fits]
    if fitting and min(fitting) <= (1 - ROOM) * limit:
        return Advice(title=f"it fits, in {size(min(fitting))} of {size(limit)} or more")
    wanted = (1 - ROOM) * limit if fitting else limit
    found = _search(plans.case._replace(memory=wanted))
    order = "what trains the same comes first, then the fastest"
    if not fitting and not found:
        return Advice(title="no change of states, offload, sequences and adapters is enough: use "
                      "more ranks, or larger ones")  # fmt: skip
    if not fitting:
        return Advice(title=f"nothing fits as asked; each of these does ({order}):", advised=found)
    title = f"it fits with only {size(limit - min(fitting))} to spare; "
    more = f"these leave {ROOM:.0%} ({order}):" if found else "use more ranks, or larger ones"
    return Advice(title=title + more, advised=found)


def _search(case: Case) -> tuple[Advised, ...]:
    ladders = [rungs for rungs in (list(make(case)) for make in LADDERS) if rungs]
    tries = _Tries(case)
    for count in range(1, len(ladders) + 1):
        found: list[Advised] = []
        for some in combinations(ladders, count):
            fitting = (a for rungs in product(*some) if (a := tries.first(rungs)) is not None)
            found += islice(fitting, 1)
        if found:
            return tuple(sorted(found, key=Advised.cost))
    return ()


class _Tries:
    """Plans changed configurations, caching results that several of them share."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.models: dict[int, Any] = {0: case.model}
        self.activations: dict[tuple[int, int], dict[Any, int]] = {}

    def _changed(self, sets: dict[str, Any]) -> tuple[Case, dict[Any, int]]:
        rank, seq = sets.get("lora", 0), sets.get("seq", self.case.options.seq)
        if rank not in self.models:
            with deferred_init():
                self.models[rank] = type(self.case.model)(self.case.model.config)
            lora.apply(self.models[rank], rank)
        simulated = self.case.simulated | {k: v for k, v in sets.items() if k not in OF_MODEL}
        case = self.case._replace(
            model=self.models[rank], options=replace(self.case.options, seq=seq),
            simulated=simulated,
        )  # fmt: skip
        if (rank, seq) not in self.activations:
            self.activations[rank, seq] = activations(case)
        return case, self.activations[rank, seq]

    def first(self, changes: Sequence[Change]) -> Advised | None:
        """Return the fitting choice with the least recomputation and the largest micro-batches."""
        sets = {name: value for change in changes for name, value in change.sets.items()}
        case, activations = self._changed(sets)
        ranks = case.hosts * case.per_host
        policy = case.simulated.get("offload_policy")
        shard = Sharding("FULL_SHARD" if ranks > 1 else "NO_SHARD", (1, ranks), policy)
        way = Way(case, shard)
        for key, activation in activations.items():
            choice = way.choice(*key, activation)
            if choice.fits:
                assert choice.simulation is not None
                return Advised(
                    changes=tuple(changes), choice=choice,
                    tokens=case.options.batch * (case.options.seq or 0) * ranks,
                    offloaded=way.held.file + way.held.pinned,
                )  # fmt: skip
        return None
