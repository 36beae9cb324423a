"""Choose what recomputes its activations, so that a step fits in a number of bytes.

The parts of a block are its direct children. For every set of parts, and for the whole block with
and without its products, two dry runs tell how many bytes one block saves if they recompute, and
how many FLOPs that costs. With
one budget, the cheapest mix needs at most two of these choices: the first blocks take the one that
saves more, since the last block's activations are needed again at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fsdpc.nn.module import Module
from fsdpc.planning.memory_plan import measure_step
from fsdpc.sharding.activation import checkpoint_activations
from fsdpc.sharding.fsdp_module import FSDPModule
from fsdpc.sharding.offload import OffloadPolicy
from fsdpc.sharding.policies import MixedPrecisionPolicy
from fsdpc.sharding.saved import leaves, planning
from fsdpc.sharding.tiles import is_tiled

_MOST_PARTS = 5  # of a block, whose sets are tried
_LEAST = 0.05  # of what a whole block saves: parts that save less, as norms do, stay as they are


@dataclass(frozen=True)
class FittedActivations:
    """What recomputes, and what a step then needs.

    ``modules`` are the names of the changed modules, ``keeping`` those among them that save their
    products, ``peak`` the activation bytes of a step, and ``recomputed`` the FLOPs of products that
    run again, as a fraction of a step's without recomputation.

    Examples
    --------
    >>> import fsdpc
    >>> print(fsdpc.FittedActivations(("layers.0.mlp", "layers.1.mlp"), 3 << 20, 0.125))
    3 MiB, 2 modules recompute, 12.5 % more FLOPs
    """

    modules: tuple[str, ...]
    peak: int
    recomputed: float
    keeping: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.peak / 2**20:,.0f} MiB, {len(self.modules)} modules recompute, "
            f"{100 * self.recomputed:.1f} % more FLOPs"
        )


def fit_activations(
    model: Any,
    batch: tuple[int, ...],
    memory: float,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> FittedActivations:
    """Make parts of a model's blocks recompute their activations, until a step fits.

    Parameters
    ----------
    model : Module
        A model with ``blocks()``, whose blocks are alike and recompute nothing yet, except in tiles
        (:func:`fsdpc.tile_tokens`). It may be sharded or deferred.
    batch : tuple of int
        The shape of a micro-batch, (sequences, tokens) for language models.
    memory : float
        Bytes for activations on one rank: what is left of its memory by the rest of
        :func:`fsdpc.memory_plan`.
    mp_policy : MixedPrecisionPolicy, optional
        The policy of the units, for a model that is not sharded yet.
    offload_policy : OffloadPolicy, optional
        The same; activations that it moves need less memory.

    Returns
    -------
    FittedActivations
        The modules that recompute. Results of training do not change.

    Raises
    ------
    ValueError
        The model has no blocks, some recompute already, or a step does not fit even if all do.

    Examples
    --------
    >>> import fsdpc
    >>> model = fsdpc.models.Llama(fsdpc.models.preset("2M"))
    >>> fitted = fsdpc.fit_activations(model, (4, 256), 40 << 20)
    >>> fitted.peak <= 40 << 20, len(fitted.modules) > 0
    (True, True)
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(f"fit_activations: {type(model).__name__} has no blocks()")
    names = {id(m): name for name, m in model.named_modules()}
    inside = [m for block in blocks for m in block.modules()]
    busy = [names[id(m)] for m in inside if "forward" in m.__dict__ and not is_tiled(m)]
    if busy:
        raise ValueError(f"fit_activations: '{busy[0]}' recomputes already")
    moving = not isinstance(model, FSDPModule) and leaves(offload_policy)
    leaving = dict.fromkeys(blocks, offload_policy) if moving else {}
    search = _Search(model, blocks, tuple(batch), mp_policy, leaving)
    chosen, peak, recomputed = search.best(memory)
    _recompute(chosen)
    modules = tuple(names[id(m)] for m, _ in chosen)
    keeping = tuple(names[id(m)] for m, save in chosen if save == "products")
    return FittedActivations(modules, peak, recomputed, keeping)


_PRODUCTS = "+"


@dataclass(frozen=True)
class _Choice:
    """The children of a block that recompute, by name; "" is the block itself.

    _PRODUCTS is the block too, and saves its products.
    """

    parts: tuple[str, ...]
    saved: float  # bytes per block
    cost: float  # FLOPs per block


_Part = tuple[Module, str]  # and what it saves


def _parts_of(blocks: list[Module], parts: tuple[str, ...]) -> list[_Part]:
    return [
        ({"": b, _PRODUCTS: b, **dict(b.named_children())}[name],
         "products" if name == _PRODUCTS else "inputs")
        for b in blocks for name in parts
    ]  # fmt: skip


def _recompute(parts: list[_Part]) -> None:
    for module, save in parts:
        checkpoint_activations([module], save=save)


class _Search:
    def __init__(
        self, model: Any, blocks: list[Module], batch: tuple[int, ...], policy: Any,
        leaving: dict[Any, Any],
    ):  # fmt: skip
        self.model, self.blocks, self.batch, self.policy = model, blocks, batch, policy
        self.leaving = leaving
        self.peak, self.flops = self.measure([])

    def measure(self, chosen: list[_Part]) -> tuple[int, float]:
        with _undone([module for module, _ in chosen]):
            _recompute(chosen)
            with planning(self.leaving):
                return measure_step(self.model, self.batch, self.policy)

    def choices(self) -> list[_Choice]:
        """Return what a block can do: nothing, recompute sets of its parts, or recompute all."""
        whole = self.choice(("",))
        parts = [name for name, _ in self.blocks[0].named_children()]
        single = [self.choice((p,)) for p in parts]
        single = [c for c in single if c.saved >= _LEAST * whole.saved]
        most = len(single) if len(single) <= _MOST_PARTS else 1
        worth = [c.parts[0] for c in single]
        sets = [s for n in range(2, most + 1) for s in combinations(worth, n)]
        products = self.choice((_PRODUCTS,))
        return [_Choice((), 0, 0), products, *single, *map(self.choice, sets), whole]

    def choice(self, parts: tuple[str, ...]) -> _Choice:
        """Measure a choice that all blocks but the last take, which is needed again at once."""
        taking = self.blocks[: max(len(self.blocks) - 1, 1)]
        peak, flops = self.measure(_parts_of(taking, parts))
        n = len(taking)
        return _Choice(parts, (self.peak - peak) / n, (flops - self.flops) / n)

    def best(self, memory: float) -> tuple[list[_Part], int, float]:
        """Return the cheapest modules with which a step fits, its peak and what it costs."""
        if self.peak <= memory:
            return [], self.peak, 0.0
        known, n = self.choices(), len(self.blocks)
        plans = [
            (k * strong.cost + (n - k) * weak.cost, -k * strong.saved - (n - k) * weak.saved, k)
            + (strong, weak)
            for strong in known for weak in known for k in range(1, n + 1)
            if strong.saved > weak.saved and strong.cost >= weak.cost
        ]  # fmt: skip
        plans.sort(key=lambda plan: plan[:3])
        least = self.peak
        for _, change, k, strong, weak in plans:
            if self.peak + change > memory * 1.02:  # what the dry run says decides
                continue
            chosen = _parts_of(self.blocks[:k], strong.parts)
            chosen += _parts_of(self.blocks[k:], weak.parts)
            peak, flops = self.measure(chosen)
            least = min(least, peak)
            if peak <= memory:
                return chosen, peak, flops / self.flops - 1
        whole = self.measure([(block, "inputs") for block in self.blocks])[0]
        raise ValueError(
            f"fit_activations: a step over {self.batch} needs {min(least, whole):,} bytes of "
            f"activations even if all blocks recompute; {memory:,.0f} bytes are given"
        )


def blocks_of(model: Any) -> list[Module]:
    """Return a model's blocks, or an empty list if it does not name them."""
    return list(model.blocks()) if callable(getattr(model, "blocks", None)) else []


@contextmanager
def recomputing(modules: list[Module], which: Any = "all") -> Iterator[None]:
    """Apply :func:`fsdpc.checkpoint_activations` inside the block; modules recompute nothing yet.

    With ``which`` None, nothing changes.
    """
    if which is None:
        yield
        return
    with _undone(modules):
        checkpoint_activations(modules, which)
        yield


@contextmanager
def _undone(modules: list[Module]) -> Iterator[None]:
    """Take recomputation back at the end of the block."""
    try:
        yield
    finally:
        for module in modules:
            if not is_tiled(module):
                module.__dict__.pop("forward", None)
