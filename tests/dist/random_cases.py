"""Cases of the property test as plain data: a tree of modules, options, a script of what to do.

Drawn in the parent (random_draw.py), sent to ranks, printed when one fails: everything that a case
does follows from it. Numbers in a script are taken modulo what there is to choose from, so every
script is legal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Leaf:
    """A layer with parameters of its own."""

    kind: str
    dtype: str = "float32"
    trainable: bool = True


@dataclass(frozen=True)
class Policy:
    """A MixedPrecisionPolicy by names; None: as it is."""

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_inputs: bool = True


@dataclass(frozen=True)
class Node:
    """A module of modules, run in `order`: some twice, some not at all."""

    children: tuple[Any, ...]
    order: tuple[int, ...]
    unit: bool = False
    checkpoint: bool = False
    reshard: bool | None = None
    policy: Policy = Policy()


@dataclass(frozen=True)
class Case:
    """One model and what is done to it."""

    root: Node
    strategy: str
    input_grad: bool
    paths: tuple[tuple[int, ...], ...]
    script: tuple[tuple[str, int, int], ...]

    def describe(self) -> str:
        """The case as the lines of a report."""
        lines = [f"strategy={self.strategy} input_grad={self.input_grad} paths={self.paths}"]

        def show(node: Any, depth: int) -> None:
            pad = "  " * depth
            if isinstance(node, Leaf):
                lines.append(f"{pad}{node}")
                return
            lines.append(
                f"{pad}Node(order={node.order}, unit={node.unit}, checkpoint={node.checkpoint}, "
                f"reshard={node.reshard}, {node.policy})"
            )
            for child in node.children:
                show(child, depth + 1)

        show(self.root, 0)
        lines += [f"    {op}" for op in self.script]
        return "\n".join(lines)
