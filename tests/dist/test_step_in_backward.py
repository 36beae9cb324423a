"""Steps inside backward: the bits of steps after it, with memory for two units' gradients."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import lr_scheduler, nn, optim
from fsdpc.monitor.auditor import Auditor

WIDTHS = (48, 80, 80, 80, 80, 33, 48)


class Net(nn.Module):
    """Layers of several sizes, and parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(WIDTHS, WIDTHS[1:], strict=False)
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairs])
        self.scale = nn.Parameter(fsdpc.ones(WIDTHS[-1]))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.scale).sum()


def build(**options: Any) -> Net:
    fsdpc.manual_seed(7)
    model = Net()
    for layer in model.layers:
        fsdpc.fully_shard(layer, **options)
    return fsdpc.fully_shard(model, **options)


def batch(step: int) -> Any:
    rng = np.random.default_rng([step, fsdpc.rank()])
    return fsdpc.tensor(rng.standard_normal((4, WIDTHS[0])).astype(np.float32))


def values(model: Net) -> dict[str, np.ndarray]:
    return {n: fsdpc.full_tensor(p).numpy().copy() for n, p in model.named_parameters()}


def train(model: Net, optimizer: Any, schedule: Any, steps: range, call_step: bool = True) -> None:
    for step in steps:
        model(batch(step)).backward()
        if call_step:
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD"])
def test_bits_of_steps_after_backward(kind: str, strategy: str) -> None:
    """Learning rates change at every step; calls of step() find nothing to do."""
    found = []
    for inside in (False, True, True):
        model = build(strategy=strategy)
        optimizer = getattr(optim, kind)(model.parameters(), lr=0.05)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if inside:
            optimizer.step_in_backward()
        train(model, optimizer, schedule, range(4), call_step=len(found) < 2)
        assert optimizer.step_count(model.scale) == 4
        found.append(values(model))
    for name, value in found[0].items():
        for other in found[1:]:
            assert np.array_equal(value, other[name]), name


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("param_dtype", ["bfloat16", None])
def test_gradients_need_two_units(param_dtype: str | None) -> None:
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=param_dtype)
    before = fsdpc.memory_stats()["grad_bytes"]
    model = build(mp_policy=policy)
    optimizer = optim.AdamW(model.parameters())
    optimizer.step_in_backward()
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    train(model, optimizer, schedule, range(3))
    plan = fsdpc.memory_plan(model, step_in_backward=True)
    assert fsdpc.memory_stats()["grad_bytes"] - before == plan.grad
    assert plan.grad < 0.75 * fsdpc.memory_plan(model).grad
    optimizer.step_in_backward(False)
    assert fsdpc.memory_stats()["grad_bytes"] - before == fsdpc.memory_plan(model).grad
    model(batch(3)).backward()
    assert model.scale.grad is not None
    optimizer.step()


@pytest.mark.ranks([1, 2])
def test_micro_steps_without_synchronisation() -> None:
    found = []
    for inside in (False, True):
        model = build()
        optimizer = optim.AdamW(model.parameters(), lr=0.05)
        if inside:
            optimizer.step_in_backward()
        for step in range(4):
            model.set_requires_gradient_sync(step % 2 == 1)
            model(batch(step)).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(values(model))
    for name, value in found[0].items():
        assert np.array_equal(value, found[1][name]), name


@pytest.mark.ranks([1, 2])
def test_units_that_do_not_run_are_not_stepped() -> None:
    model = build()
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    optimizer.step_in_backward()
    model(batch(0)).backward()
    before = values(model)
    model.layers[0](batch(1)).sum().backward()
    after = values(model)
    assert not np.array_equal(before["layers.0.weight"], after["layers.0.weight"])
    assert np.array_equal(before["layers.1.weight"], after["layers.1.weight"])


@pytest.mark.ranks([1, 2])
def test_second_backward_of_a_forward_is_refused() -> None:
    model = build()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    optimizer.step_in_backward()
    loss = model(batch(0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="changed between forward and backward|was stepped"):
        loss.backward()


@pytest.mark.ranks([1, 2])
def test_a_unit_that_runs_twice_is_named() -> None:
    model = build()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    optimizer.step_in_backward()
    x = model.layers[0](fsdpc.ones(2, WIDTHS[0]))
    with pytest.raises(RuntimeError, match="layers.1' was stepped inside this backward"):
        model.layers[1](model.layers[1](x)).sum().backward()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("end", ["leave", "drop"])
def test_sums_of_micro_steps_are_not_lost(end: str) -> None:
    model, plain = build(), build()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    optimizer.step_in_backward()
    for each in (model, plain):
        each.set_requires_gradient_sync(False)
        each(batch(0)).backward()
        each.set_requires_gradient_sync(True)
    with pytest.raises(NotImplementedError, match="has gradients"):
        optimizer.step_in_backward(False)
    if end == "leave":
        model(batch(1)).backward()
        optimizer.step_in_backward(False)
    else:
        del optimizer
        model(batch(1)).backward()
        optim.SGD(model.parameters(), lr=0.05).step()
    plain(batch(1)).backward()
    optim.SGD(plain.parameters(), lr=0.05).step()
    for name, value in values(plain).items():
        assert np.array_equal(value, values(model)[name]), name


class Pairs(nn.Module):
    """Pairs of layers, each inside a unit; `act` is called with each pair's number in backward."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        pairs = [nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48)) for _ in range(4)]
        self.pairs = nn.ModuleList(pairs)
        self.act = act

    def forward(self, x: Any) -> Any:
        for i, pair in enumerate(self.pairs):
            x = pair(x).tanh()
            x.register_hook(lambda _, i=i: self.act(i))
        return x.sum()


@pytest.mark.ranks(2)
def test_gradients_that_are_dropped_give_their_memory_back() -> None:
    """zero_grad() inside backward, while reductions wait for a slow rank."""
    at = [0]

    def act(i: int) -> None:
        if i == 3 and fsdpc.rank() == 1:
            time.sleep(0.2)
        if i in at:
            optimizer.zero_grad()

    model = Pairs(act)
    for pair in model.pairs:
        fsdpc.fully_shard(pair[0])
        fsdpc.fully_shard(pair)
    fsdpc.fully_shard(model)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    optimizer.step_in_backward()
    plan = fsdpc.memory_plan(model, step_in_backward=True).grad
    before = fsdpc.memory_stats()["grad_bytes"]
    for i in range(3):
        at[:] = [i]
        model(fsdpc.ones(2, 48)).backward()
    assert fsdpc.memory_stats()["grad_bytes"] == before >= plan


@pytest.mark.ranks([1, 2])
def test_an_error_that_all_ranks_make_is_survived() -> None:
    model = build()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    optimizer.step_in_backward()
    model(batch(0)).backward()
    before = values(model)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr is out of range"):
        model(batch(1)).backward()
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.zero_grad()
    for name, value in values(model).items():
        assert np.array_equal(value, before[name]), name
    model(batch(2)).backward()
    assert not np.array_equal(values(model)["scale"], before["scale"])


@pytest.mark.ranks([1, 2])
def test_one_large_unit() -> None:
    """The blocks have the sizes of the two largest units."""
    model = nn.Sequential(*[nn.Linear(n, 48) for n in (1000, 48, 48, 48)])
    for layer in model:
        fsdpc.fully_shard(layer)
    fsdpc.fully_shard(model)
    before = fsdpc.memory_stats()["grad_bytes"]
    usual = fsdpc.memory_plan(model).grad
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    optimizer.step_in_backward()
    for _ in range(2):
        model(fsdpc.ones(2, 1000)).sum().backward()
    plan = fsdpc.memory_plan(model, step_in_backward=True).grad
    assert fsdpc.memory_stats()["grad_bytes"] - before == plan - usual < 0


@pytest.mark.ranks(1)
def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = build()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    with pytest.raises(NotImplementedError, match="was not given its parameter .*bias"):
        optim.AdamW(matrices).step_in_backward()
    muon = optim.Muon([{"params": matrices}, {"params": vectors, "use_muon": False}])
    with pytest.raises(NotImplementedError, match="Muon needs all matrices at once"):
        muon.step_in_backward()
    with pytest.raises(NotImplementedError, match="outside of units"):
        optim.AdamW(nn.Linear(2, 2).parameters()).step_in_backward()
    offloaded = build(offload_policy=fsdpc.OffloadPolicy(optimizer="disk", path=tmp_path))
    with pytest.raises(NotImplementedError, match="it is offloaded"):
        optim.AdamW(offloaded.parameters()).step_in_backward()
    optimizer = optim.AdamW(model.parameters())
    model(batch(0)).backward()
    with pytest.raises(NotImplementedError, match="it has gradients"):
        optimizer.step_in_backward()
    optimizer.zero_grad()
    optimizer.step_in_backward()
    with pytest.raises(NotImplementedError, match="another optimizer steps it"):
        optim.SGD(model.parameters()).step_in_backward()
    model(batch(0)).backward()
    with pytest.raises(NotImplementedError, match="add_param_group.*call step_in_backward"):
        optimizer.add_param_group({"params": [nn.Parameter(fsdpc.ones(2))]})
    with pytest.raises(NotImplementedError, match="no gradients to clip"):
        Auditor(model, 1, True)
    with pytest.raises(NotImplementedError, match="replicas of shards"):
        fsdpc.memory_plan(model, (2, 2), step_in_backward=True)
    model.set_requires_all_reduce(False)
    with pytest.raises(NotImplementedError, match=r"has set_requires_all_reduce\(False\)"):
        model(batch(0)).backward()
    for clip in (fsdpc.clip_grad_norm_, fsdpc.clip_grad_value_):
        with pytest.raises(NotImplementedError, match="no gradients to clip.*step_in_backward"):
            clip(model, 1.0)
