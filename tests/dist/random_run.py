"""Runs a case on one rank, beside an unsharded twin that plays all ranks.

What is compared, and how closely:

- losses and the gradients of inputs: to the bit, as both run the same kernels on the same weights;
- gradients: within the roundings that the order of additions and the reduce dtype allow;
- an optimizer's step: the twin is given the sharded model's own gradients, then to the bit;
- whole parameters, by full_tensor and inside summon_full_params: to the bit.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

import fsdpc
from fsdpc import _core
from tests.events import event_counts

from .random_cases import Case
from .random_models import WIDTH, Control, Oops, Tree, build, shard

EPS = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-8, "float16": 2.0**-11}
FORWARDS = 4  # at most so many graphs at a time

Values = dict[str, np.ndarray]


def wide(tensor: Any) -> np.ndarray:
    """A tensor's values in float64."""
    return tensor.detach().double().numpy().copy()


def raw(tensor: Any) -> bytes:
    """A tensor's bytes."""
    return wide(tensor).tobytes()


def stepped_of(p: Any) -> Any:
    """A parameter as an optimizer computes with it."""
    return p.detach().clone() if p.dtype is fsdpc.float64 else p.detach().float().clone()


class Graph:
    """A forward whose backward is yet to come."""

    def __init__(self, loss: Any, x: Any, twins: list[tuple[Any, Any]]) -> None:
        self.loss, self.x, self.twins = loss, x, twins


class Run:
    """A sharded model, its twin, and what gradients ought to be."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.control = Control()
        self.model: Any = shard(
            build(case.root, False, control=self.control), strategy=case.strategy
        )
        self.twin = build(case.root, True)
        self.masters = build(case.root, True, masters=True)
        self.params = dict(self.model.named_parameters())
        self.own = dict(self.masters.named_parameters())
        self.copies = dict(self.twin.named_parameters())
        self.refresh_twin()
        self.optimizer = fsdpc.optim.AdamW(self.params.values(), lr=0.05)
        # Gradients are fp32 also of 16-bit parameters, so those are stepped as fp32 and rounded.
        self.stepped = {n: fsdpc.nn.Parameter(stepped_of(p)) for n, p in self.own.items()}
        self.reference = fsdpc.optim.AdamW(self.stepped.values(), lr=0.05)
        self.units = [m for m in self.model.modules() if isinstance(m, fsdpc.FSDPModule)]
        self.graphs: list[Graph] = []
        self.forget_gradients()
        self.sync, self.batches, self.crc = True, 0, 0

    def forget_gradients(self) -> None:
        """After zero_grad."""
        self.total: Values = {}  # averaged over ranks
        self.scale: dict[str, float] = {}  # magnitudes that were added up
        self.terms, self.clipped = 0, 0.0
        self.forget_local()

    def forget_local(self) -> None:
        """What no_sync had added up is dropped."""
        self.local: list[Values] = [{} for _ in range(fsdpc.world_size())]

    def note(self, data: bytes) -> None:
        """Make the digest depend on this."""
        self.crc = _core.crc32c(self.crc, data)

    # ---- batches, losses

    def batch(self, rank: int) -> tuple[Any, Any]:
        """Input and weights of the loss of a rank's current batch."""
        rng = np.random.default_rng([self.batches, rank])
        x = fsdpc.tensor(rng.normal(size=(3, WIDTH)).astype(np.float32))
        return x, fsdpc.tensor(rng.normal(size=(3, WIDTH)).astype(np.float32))

    def losses(self, a: int, b: int) -> tuple[Any, Any, list[tuple[Any, Any]]]:
        """Loss of the sharded model and of the twin on every rank."""
        path = None if a % 3 == 0 else self.case.paths[a % 3 - 1]
        module, twin = self.model, self.twin
        if b == 6 and module._fsdpc_unit.has_root:  # a unit by itself, inside the whole
            which = a % len(self.units)
            if self.units[which] is not self.model:
                names = {id(m): n for n, m in self.model.named_modules()}
                module = self.units[which]
                twin, path = self.twin.get_submodule(names[id(module)]), None
        self.batches += 1
        x, weights = self.batch(fsdpc.rank())
        x.requires_grad = self.case.input_grad
        loss = (module(x, path).to("float32") * weights).sum()
        twins = []
        for rank in range(fsdpc.world_size()):
            x2, weights = self.batch(rank)
            x2.requires_grad = self.case.input_grad
            twins.append(((twin(x2, path).to("float32") * weights).sum(), x2))
        mine = twins[fsdpc.rank()][0]
        assert raw(loss) == raw(mine), f"loss {float(loss)!r}, the twin's {float(mine)!r}"
        self.note(raw(loss))
        return loss, x, twins

    # ---- operations of a script

    def forward(self, a: int, b: int) -> None:
        """With gradients; b = 7 raises in the a-th module."""
        if b == 7:
            self.control.forward_at = a % 4
            x, _ = self.batch(fsdpc.rank())
            try:
                self.model(x)
            except Oops:
                self.model.reset_iter_state()
                self.forget_local()
            self.control.forward_at = -1
        elif len(self.graphs) < FORWARDS:
            self.graphs.append(Graph(*self.losses(a, b)))

    def backward(self, a: int, b: int) -> None:
        """Of the newest or the oldest graph; b = 7 raises in it."""
        if not self.graphs:
            return
        graph = self.graphs.pop(0 if a % 2 else -1)
        if not graph.loss.requires_grad:
            return
        self.control.backward_at = a // 2 if b == 7 else -1
        try:
            graph.loss.backward()
        except Oops:
            self.control.backward_at = -1
            self.model.reset_iter_state()
            self.zero(0, 0)
            return
        self.control.backward_at = -1
        self.add_twin_gradients(graph)
        if self.case.input_grad:
            mine = graph.twins[fsdpc.rank()][1].grad
            assert (graph.x.grad is None) == (mine is None)
            assert mine is None or raw(graph.x.grad) == raw(mine), "gradient of the input"

    def add_twin_gradients(self, graph: Graph) -> None:
        ranks = fsdpc.world_size()
        self.terms += 1
        for rank, (loss, _) in enumerate(graph.twins):
            self.twin.zero_grad()
            if loss.requires_grad:  # a checkpoint's result does, whatever is in it
                loss.backward()
            for name, p in self.copies.items():
                if p.grad is not None:
                    g, local = wide(p.grad), self.local[rank]
                    local[name] = local[name] + g if name in local else g
                    self.scale[name] = self.scale.get(name, 0.0) + float(np.abs(g).max(initial=0))
        if not self.sync:
            return
        for local in self.local:
            for name, g in local.items():
                self.total[name] = self.total.get(name, 0.0) + g / ranks
        self.forget_local()

    def check_gradients(self) -> dict[str, Any]:
        """Compare all gradients; returns those of the sharded model."""
        found = {}
        for name, p in self.params.items():
            g = fsdpc.full_grad(p)
            want = self.total.get(name)
            assert (g is None) == (want is None), f"{name}: a gradient on one side alone"
            if g is None:
                continue
            found[name] = g
            self.note(raw(g))
            eps = max([*self.epsilons[name], self.clipped])
            bound = 6 * eps * self.scale.get(name, 0.0) * (1 + self.terms)
            wrong = np.abs(wide(g) - want).max(initial=0.0)
            assert wrong <= bound, f"gradient of {name} is off by {wrong:.3g}, bound {bound:.3g}"
        return found

    @property
    def epsilons(self) -> dict[str, list[float]]:
        """Roundings that gradients of each parameter may have."""
        if not hasattr(self, "_epsilons"):
            self._epsilons: dict[str, list[float]] = {}
            for name in self.params:
                dtypes = [self.own[name].dtype.name, self.copies[name].dtype.name]
                node: Any = self.twin
                for part in ["", *name.split(".")]:
                    node = node.get_submodule(part) if part in node._modules else node
                    if isinstance(node, Tree) and node.spec.unit:
                        reduce = node.spec.policy.reduce
                dtypes += [reduce] if reduce else []
                dtypes = [d for d in dtypes[1:]] + ["float32"] * (dtypes[0] != "float64")
                self._epsilons[name] = [EPS[d] for d in dtypes]
        return self._epsilons

    def check_values(self) -> None:
        """Compare all parameters to the bit."""
        for name, p in self.params.items():
            value = fsdpc.full_tensor(p)
            assert raw(value) == raw(self.own[name]), f"value of {name}"
            self.note(raw(value))

    def refresh_twin(self) -> None:
        with fsdpc.no_grad():
            for name, p in self.copies.items():
                p.copy_(self.own[name].detach().to(p.dtype))

    def step(self, a: int, b: int) -> None:
        """An optimizer's step on both; graphs of before are refused.

        What is done next finds it ended, or going on; its gradients may be gone by then, and rates
        others.
        """
        found = self.check_gradients()
        for name, p in self.stepped.items():
            with fsdpc.no_grad():
                p.copy_(stepped_of(self.own[name]))
            p.grad = found.get(name)
        self.optimizer.step()
        self.reference.step()
        with fsdpc.no_grad():
            for name in found:
                self.own[name].copy_(self.stepped[name].detach().to(self.own[name].dtype))
        self.refresh_twin()
        if b == 0:
            self.check_values()
        elif b == 1:
            for state in map(self.optimizer.state, self.params.values()):
                for part in state.values():
                    self.note(str(part).encode() if isinstance(part, int | None) else raw(part))
        elif b < 5:
            self.zero(0, 0)
        for optimizer in (self.optimizer, self.reference):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + a)
        old = [graph.loss for graph in self.graphs if graph.loss.requires_grad]
        self.graphs.clear()
        if old and a % 2:
            try:
                old[-1].backward()
            except RuntimeError as error:
                assert "changed between forward and" in str(error), error
                self.forget_local()
            else:
                raise AssertionError("a graph older than the weights was accepted")

    def zero(self, a: int, b: int) -> None:
        """Drop gradients."""
        self.model.zero_grad()
        self.forget_gradients()

    def accumulate(self, a: int, b: int) -> None:
        """Micro-steps under no_sync and one outside."""
        before = self.sync
        with self.model.no_sync():
            self.sync = False
            for _ in range(1 + a % 2):
                self.forward(0, 0)
                self.backward(0, 0)
        self.sync = before
        self.forward(0, 0)
        self.backward(0, 0)

    def sync_(self, a: int, b: int) -> None:
        self.sync = bool(a % 2)
        self.model.set_requires_gradient_sync(self.sync)

    def clip(self, a: int, b: int) -> None:
        """By the global norm, which is checked too."""
        before = {n: wide(g) for n, g in self.check_gradients().items()}
        norm = float(fsdpc.clip_grad_norm_(self.model, 0.5))
        want = sum(float((g**2).sum()) for g in before.values()) ** 0.5
        assert abs(norm - want) <= 1e-6 * want + 1e-30, (norm, want)
        factor = min(1.0, 0.5 / (want + 1e-6))
        for name, g in before.items():
            self.total[name] = g * factor
            self.scale[name] = self.scale.get(name, 0.0) * factor
        self.terms += 1
        self.clipped = EPS["float32"]  # the factor is fp32, also of fp64 gradients

    def eval(self, a: int, b: int) -> None:
        """A forward without gradients."""
        with fsdpc.no_grad():
            self.losses(a, b % 6)

    def freeze(self, a: int, b: int) -> None:
        """Of one parameter, or the other way round."""
        self.zero(0, 0)
        self.graphs.clear()
        name = list(self.params)[(a + 8 * (b // 2)) % len(self.params)]
        for side in (self.params, self.own, self.copies):
            side[name].requires_grad = bool(b % 2)

    def hold(self, a: int, b: int) -> None:
        """Other numbers of forwards on every rank, and no communication."""
        with self.model.hold():
            _core.trace_reset()
            with fsdpc.no_grad():
                for _ in range((a + fsdpc.rank()) % 3):
                    batches = self.batches
                    self.losses(0, 0)
                    self.batches = batches
            counts = event_counts()
            assert not any(counts[kind] for kind in ("gather", "reduce", "collective", "epoch"))
        self.batches += 1

    def unshard(self, a: int, b: int) -> None:
        """Hold a unit's parameters over a forward."""
        if not self.model._fsdpc_unit.has_root:
            return
        unit = self.units[a % len(self.units)]
        handle = unit.unshard(async_op=bool(b % 2))
        if handle is not None:
            handle.wait()
        self.eval(0, 0)
        unit.reshard()

    def summon(self, a: int, b: int) -> None:
        """Edit a parameter in its whole copy."""
        self.graphs.clear()
        name = list(self.params)[(a + 8 * b) % len(self.params)]
        with fsdpc.summon_full_params(self.model, writeback=bool(b % 2)), fsdpc.no_grad():
            for n, p in self.params.items():
                assert p.dtype is self.own[n].dtype and raw(p) == raw(self.own[n]), n
            self.params[name].copy_(self.params[name] * 0.75)
        if b % 2:
            with fsdpc.no_grad():
                self.own[name].copy_(self.own[name] * 0.75)
            self.refresh_twin()
        self.check_values()

    def reshard_after_forward(self, a: int, b: int) -> None:
        self.model.set_reshard_after_forward(bool(a % 2), recurse=bool(b % 2))

    def reshard_after_backward(self, a: int, b: int) -> None:
        self.model.set_reshard_after_backward(bool(a % 2), recurse=bool(b % 2))

    def reset(self, a: int, b: int) -> None:
        """reset_iter_state with nothing wrong."""
        self.model.reset_iter_state()
        self.forget_local()


def run_case(case: Case) -> int:
    """Run a case; returns a checksum of all losses, gradients and parameters on this rank."""
    fsdpc.manual_seed(0)
    run = Run(case)
    for op, a, b in case.script:
        getattr(run, {"sync": "sync_"}.get(op, op))(a, b)
    run.check_gradients()
    run.check_values()
    crc = run.crc
    fsdpc.barrier()  # a model may not go while a peer still reduces with it
    del run
    gc.collect()
    return crc
