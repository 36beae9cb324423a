"""What a checkpoint has of replicas that train apart (an Outer).

The model's tensors are the anchors, which replicas share, so such a checkpoint loads into any
model. Each replica's own masters and states are among the optimizer's tensors, as
"replicas.<r>.<parameter>.master" and "replicas.<r>.<parameter>.<state>". Ranks of other replicas
have empty shards of them, so all ranks list the same tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fsdpc import _core
from fsdpc.checkpoint.shards import Held, Saved, Shard, States, states_of
from fsdpc.optim.outer import ANCHOR, MOMENTUM, Rounds

T = TypeVar("T")
_OF_REPLICA = re.compile(r"replicas\.\d+\..*\.\w+")
MASTER = "master"


def check(state: Mapping[str, Any], units: Iterable[_core.Unit], doing: str) -> None:
    """Raise if a model's replicas train apart and the state lacks their Outer, or vice versa."""
    rounds, found = state.get("outer"), [unit for unit in units if unit.apart]
    if rounds is not None and not isinstance(rounds, Rounds):
        kind = type(rounds).__name__
        raise TypeError(f"'outer' must be an fsdpc.Outer or an fsdpc.torch.Outer, got {kind}")
    if found and rounds is None:
        raise ValueError(
            f"{doing} a model whose replicas train apart, such as unit '{found[0].name}', takes "
            "its Outer as 'outer'"
        )


class Replicas:
    """The tensors of an Outer, and of whatever else replicas do not share.

    Parameters
    ----------
    rounds : Rounds
    model : Module
    saved : Saved, optional
        The anchors and momentum to read; by default those that exist.
    """

    def __init__(self, rounds: Rounds, model: Any, saved: Saved | None = None) -> None:
        self.rounds: Rounds = rounds
        shard, replicas = rounds.comms()
        self.mine: int = replicas.rank
        self.count: int = replicas.size
        self.shards: int = shard.size
        self.states: States = states_of(rounds.optimizer, model, saved)
        ending = f".{ANCHOR}"
        self.anchors: dict[str, Shard] = {
            shard.name.removesuffix(ending): shard
            for shard in self.states.shards
            if shard.name.endswith(ending)
        }
        self.momentum: list[Shard] = [
            shard for shard in self.states.shards if not shard.name.endswith(ending)
        ]

    def split(self, held: Held) -> tuple[list[Shard], list[Shard]]:
        """Return a model's shards with anchors in the place of masters, and the masters."""
        shared, own = [], []
        for shard in held.shards:
            anchor = self.anchors.get(shard.name)
            if anchor is None:
                shared.append(shard)
                continue
            if not shard.unit:
                raise NotImplementedError(
                    f"a checkpoint with an Outer of '{shard.name}', of which ranks do not have "
                    "consecutive rows"
                )
            shared.append(replace(shard, memory=anchor.memory))
            own.append(replace(shard, name=f"{shard.name}.{MASTER}"))
        return shared, self.of_all(own)

    def of_all(self, shards: Iterable[Shard]) -> list[Shard]:
        """Return every replica's tensors of these names."""
        found = []
        for shard in shards:
            # A state that is whole on every rank has the rank as its copy.
            copy = 0 if shard.replica == self.mine else shard.replica - self.mine * self.shards
            empty = _core.zeros((0,), dtype=shard.memory.dtype)
            for r in range(self.count):
                name = f"replicas.{r}.{shard.name}"
                own = replace(shard, name=name, unit="", replica=copy)
                nothing = replace(own, first=0, numel=0, memory=empty, replica=0)
                found.append(own if r == self.mine else nothing)
        return found

    def own(self, given: Mapping[str, T]) -> dict[str, T]:
        """Return this replica's tensors in a checkpoint, by name without the replica."""
        start = f"replicas.{self.mine}."
        return {n.removeprefix(start): t for n, t in given.items() if n.startswith(start)}


def saved_of(content: Mapping[str, Any], given: Mapping[str, Any]) -> Saved:
    """Return the anchors and momentum that a checkpoint has."""
    steps = {name: int(count) for name, count in content["outer"]["steps"].items()}
    names = [name for name in given if is_outer(name)]
    return Saved(steps, [*names, *(f"{name}.{ANCHOR}" for name, n in steps.items() if n > 0)])


def is_outer(name: str) -> bool:
    """Return whether a name among the optimizer's tensors is that of an outer momentum."""
    return not is_of_replica(name) and name.endswith(f".{MOMENTUM}")


def is_of_replica(name: str) -> bool:
    """Return whether a name among the optimizer's tensors is of one replica."""
    return _OF_REPLICA.fullmatch(name) is not None
