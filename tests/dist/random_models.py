"""Modules after a description, as they are sharded and as the twin runs them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import fsdpc
from fsdpc import functional as F
from fsdpc import nn
from tests.offload import on_disk

from .random_cases import Leaf, Node, Policy

WIDTH, INNER = 4, 7


class Oops(Exception):
    """What user code raises."""


class Control:
    """Raises in the n-th module that runs, forward or backward."""

    def __init__(self) -> None:
        self.forward_at = self.backward_at = -1

    def in_forward(self) -> None:
        self.forward_at -= 1
        if self.forward_at == -1:
            raise Oops("in forward")

    def in_backward(self, gradient: Any) -> None:
        self.backward_at -= 1
        if self.backward_at == -1:
            raise Oops("in backward")


class Builder:
    """Makes parameters: their values follow from their number alone."""

    def __init__(self, twin: bool, control: Control) -> None:
        self.twin, self.control, self.n = twin, control, 0

    def parameter(self, *shape: int, dtype: str, trainable: bool = True) -> nn.Parameter:
        """The next one."""
        self.n += 1
        value = np.random.default_rng([17, self.n]).normal(size=shape) * 0.6
        value = fsdpc.tensor(value.astype(np.float32)).to(dtype)
        return nn.Parameter(value, requires_grad=trainable)


class Layer(nn.Module):
    """A leaf; computes in the dtype of its parameters, whatever comes in."""

    def __init__(self, spec: Leaf, builder: Builder, compute: str | None, before: Any) -> None:
        super().__init__()
        self.kind = spec.kind
        dtype = compute or spec.dtype
        options = {"dtype": dtype, "trainable": spec.trainable}
        if spec.kind == "tied" and not (isinstance(before, Layer) and before.kind == "linear"):
            self.kind = "linear"
        if self.kind == "linear":
            self.weight = builder.parameter(WIDTH, WIDTH, **options)
            self.bias = builder.parameter(WIDTH, **options)
        elif self.kind == "tied":
            self.weight = before.weight
            self.bias = builder.parameter(WIDTH, dtype=self.weight.dtype.name)
        elif self.kind == "scale":
            self.weight = builder.parameter(WIDTH, **options)
        elif self.kind == "mlp":
            self.up = builder.parameter(INNER, WIDTH, **options)
            self.down = builder.parameter(WIDTH, INNER, **options)
        elif self.kind == "lora":
            self.weight = builder.parameter(WIDTH, WIDTH, dtype=dtype, trainable=False)
            self.a = builder.parameter(2, WIDTH, dtype=compute or "float32")
            self.b = builder.parameter(WIDTH, 2, dtype=compute or "float32")
        else:
            self.weight = builder.parameter(3, WIDTH, **options)
            self.empty = builder.parameter(0, WIDTH, **options)

    def forward(self, x: Any) -> Any:
        if self.kind in ("linear", "tied"):
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias).tanh()
        if self.kind == "scale":
            return x.to(self.weight.dtype) * self.weight
        if self.kind == "mlp":
            return F.linear(F.linear(x.to(self.up.dtype), self.up).tanh(), self.down)
        if self.kind == "lora":
            y = F.linear(x.to(self.weight.dtype), self.weight).to(self.a.dtype)
            return y + F.linear(F.linear(x.to(self.a.dtype), self.a), self.b)
        return x


class Tree(nn.Module):
    """A node; the twin casts where a unit would."""

    def __init__(self, spec: Node, builder: Builder, outer: Policy, masters: bool = False) -> None:
        super().__init__()
        self.spec, self.builder, self.masters = spec, builder, masters
        policy = spec.policy if spec.unit else outer
        compute = policy.param if builder.twin and not masters else None
        made: list[Any] = []
        for child in spec.children:
            before = made[-1] if made else None
            if isinstance(child, Leaf):
                made.append(Layer(child, builder, compute, before))
            else:
                made.append(Tree(child, builder, policy, masters))
        self.nodes = nn.ModuleList(made)

    def forward(self, x: Any, path: tuple[int, ...] | None = None) -> Any:
        twin, policy = self.builder.twin, self.spec.policy
        if twin and policy.param and policy.cast_inputs:
            x = x.to(policy.param)
        if not twin:
            self.builder.control.in_forward()
            if x.requires_grad and not x.is_leaf:
                x.register_hook(self.builder.control.in_backward)
        for i in self.spec.order if path is None else path:
            child = self.nodes[i]
            if isinstance(child, Tree) and child.spec.checkpoint and not twin:
                x = fsdpc.sharding.activation.checkpoint(child, x)
            else:
                x = child(x)
        return x.to(policy.output) if twin and policy.output else x


def build(root: Node, twin: bool, masters: bool = False, control: Control | None = None) -> Tree:
    """The tree from its description."""
    return Tree(root, Builder(twin, control or Control()), Policy(), masters)


def offload_of(spec: Node) -> Any:
    """What of a unit lies in this folder: params of all or none, the rest of some."""
    folder = os.environ.get("TEST_OFFLOAD")
    if not folder:
        return None
    rest = ("masters", "optimizer", "gradients")[: len(spec.order) % 4]
    return on_disk(Path(folder), "params", *rest)


def shard(tree: Tree, **options: Any) -> Tree:
    """Make units of the nodes that are to be units, children first."""
    for child in tree.nodes:
        if isinstance(child, Tree):
            shard(child, **options)
    spec = tree.spec
    if spec.unit:
        policy = fsdpc.MixedPrecisionPolicy(
            param_dtype=spec.policy.param,
            reduce_dtype=spec.policy.reduce,
            output_dtype=spec.policy.output,
            cast_forward_inputs=spec.policy.cast_inputs,
        )
        own = dict(options)
        if options["strategy"] == "FULL_SHARD" and spec.reshard is not None:
            own["reshard_after_forward"] = spec.reshard
        fsdpc.fully_shard(tree, mp_policy=policy, offload_policy=offload_of(spec), **own)
    return tree
