"""Outer steps (DiLoCo) against the same training spelled out in one process, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import MismatchError, nn
from fsdpc.distributed import pretend
from tests.dist.common import CLIP, LR, assert_same, batch, build, parameters, tree_sum

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
PLAIN: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "nesterov": False}


def start(replicas: int, shards: int, **options: Any) -> tuple[Any, Any, Any]:
    """A sharded model, its optimizer and its outer steps."""
    model = build(True, mesh=fsdpc.init_device_mesh("cpu", (replicas, shards)))
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=LR)
    return model, optimizer, fsdpc.Outer(model, **options)


def inner_step(model: Any, optimizer: Any, step: int, rank: int | None = None) -> float:
    model(*batch(step, fsdpc.rank() if rank is None else rank)).backward()
    norm = float(fsdpc.clip_grad_norm_(model, CLIP))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def averaged_grads(model: Any, step: int, ranks: range) -> None:
    """Set the gradients that a shard group has, in a model of one process."""
    grads = []
    for rank in ranks:
        model.zero_grad()
        model(*batch(step, rank)).backward()
        grads.append({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
    for name, p in model.named_parameters():
        mean = tree_sum([g[name] for g in grads]) * np.float32(1 / len(ranks))
        p.grad = fsdpc.from_numpy(mean)


class Spelled:
    """DiLoCo in one process: a model for each replica, and one with the anchors."""

    def __init__(self, replicas: int, shards: int, every: int, groups: int, outer: Any) -> None:
        self.every, self.groups, self.shards = every, groups, shards
        self.models = [build(sharded=False) for _ in range(replicas)]
        self.optimizers = [fsdpc.optim.AdamW(m.parameters(), lr=LR) for m in self.models]
        self.anchor = build(sharded=False)
        named = dict(self.anchor.named_parameters())
        blocks = [f"model.layers.{i}." for i in range(len(self.anchor.blocks()))]
        of_unit = [[n for n in named if n.startswith(block)] for block in blocks]
        of_unit.insert(0, [n for n in named if not n.startswith(tuple(blocks))])  # the embedding's
        self.names: list[list[str]] = [[] for _ in range(groups)]
        for i, names in enumerate(of_unit):
            self.names[i * groups // len(of_unit)] += names
        self.sgd = [
            fsdpc.optim.SGD([named[n] for n in names], **outer) for names in self.names
        ]

    def step(self, step: int) -> list[float]:
        norms = []
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            averaged_grads(model, step, range(i * self.shards, (i + 1) * self.shards))
            norms.append(float(fsdpc.clip_grad_norm_(model, CLIP)))
            optimizer.step()
        for group in range(self.groups):
            if (step + 1) % self.every == (group + 1) * self.every // self.groups % self.every:
                self.meet(group)
        return norms

    def meet(self, group: int) -> None:
        anchors = dict(self.anchor.named_parameters())
        replicas = [dict(model.named_parameters()) for model in self.models]
        for name in self.names[group]:
            deltas = [anchors[name].detach().numpy() - r[name].detach().numpy() for r in replicas]
            mean = tree_sum(deltas) * np.float32(1 / len(replicas))
            anchors[name].grad = fsdpc.from_numpy(mean)
        self.sgd[group].step()
        with fsdpc.no_grad():
            for name in self.names[group]:
                for r in replicas:
                    r[name].copy_(anchors[name].detach())


def compare(
    replicas: int, shards: int, steps: int, every: int, groups: int, outer: dict[str, Any]
) -> None:
    model, optimizer, rounds = start(replicas, shards, every=every, groups=groups, **outer)
    spelled = Spelled(replicas, shards, every, groups, outer)
    mine = fsdpc.rank() // shards
    for step in range(steps):
        norm = inner_step(model, optimizer, step)
        rounds.step()
        assert norm == spelled.step(step)[mine], step
        assert_same(parameters(model), parameters(spelled.models[mine]))
    assert rounds.calls == steps


@pytest.mark.ranks(4)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("outer", [NESTEROV, PLAIN, {**NESTEROV, "nesterov": False}])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)])
def test_bits_are_those_of_one_process(
    mesh: tuple[int, int], outer: dict[str, Any], groups: int
) -> None:
    compare(*mesh, steps=10, every=4, groups=groups, outer=outer)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)])
def test_one_step_rounds_without_momentum_average_the_parameters(mesh: tuple[int, int]) -> None:
    """anchor - mean(anchor - parameter) in float32, on every replica."""
    model, optimizer, rounds = start(*mesh, every=1, **PLAIN)
    before = parameters(model)
    for step in range(3):
        inner_step(model, optimizer, step)
        after = parameters(model)
        rounds.step()
        for name, value in parameters(model).items():
            every = fsdpc.all_gather(after[name][None]).reshape(4, -1)[:: mesh[1]]
            deltas = [before[name].ravel() - each for each in every]
            want = before[name].ravel() - tree_sum(deltas) * np.float32(1 / mesh[0])
            np.testing.assert_array_equal(value.ravel(), want)
        before = parameters(model)


@pytest.mark.ranks(4)
def test_replicas_with_the_same_data_train_as_one() -> None:
    """Their differences are equal, and powers of two of them average exactly."""
    model, optimizer, rounds = start(2, 2, every=3, **PLAIN)
    alone = build(sharded=False)
    own = fsdpc.optim.AdamW(alone.parameters(), lr=LR)
    anchors = parameters(alone)
    for step in range(6):
        inner_step(model, optimizer, step, fsdpc.rank() % 2)
        rounds.step()
        averaged_grads(alone, step, range(2))
        fsdpc.clip_grad_norm_(alone, CLIP)
        own.step()
        if step % 3 == 2:
            with fsdpc.no_grad():
                for name, p in alone.named_parameters():
                    value = p.detach().numpy()
                    p.copy_(fsdpc.from_numpy(anchors[name] - (anchors[name] - value)))
            anchors = parameters(alone)
        assert_same(parameters(model), parameters(alone))


@pytest.mark.ranks(4)
def test_accumulation_and_deterministic_mode() -> None:
    fsdpc.shutdown()
    fsdpc.init(deterministic=True)
    compare(2, 2, steps=4, every=2, groups=1, outer=NESTEROV)


@pytest.mark.ranks(2)
def test_loss_scalers_of_replicas_skip_together() -> None:
    fsdpc.manual_seed(0)
    model = fsdpc.fully_shard(nn.Linear(8, 4), mesh=fsdpc.init_device_mesh("cpu", (2, 1)))
    optimizer = fsdpc.optim.SGD(model.parameters(), lr=0.1)
    rounds, scaler = fsdpc.Outer(model, every=2), fsdpc.amp.LossScaler(3, hysteresis=1)
    before = parameters(model)
    for infinite in (True, False):
        loss = model(fsdpc.ones(1, 8)).sum()
        if infinite and fsdpc.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (parameters(model)["bias"] == before["bias"]).all() == infinite
    rounds.step()
    assert scaler.get_scale() == 4.0


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)])
def test_steps_inside_backward_have_the_same_bits(mesh: tuple[int, int]) -> None:
    found = []
    for inside in (False, True):
        model, optimizer, rounds = start(*mesh, every=2, **NESTEROV)
        if inside:
            optimizer.step_in_backward()
        for step in range(4):
            model(*batch(step, fsdpc.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            rounds.step()
        found.append(parameters(model))
    assert_same(*found)


@pytest.mark.ranks(2)
def test_audits_are_refused() -> None:
    model = fsdpc.fully_shard(nn.Linear(8, 4), mesh=fsdpc.init_device_mesh("cpu", (2, 1)))
    fsdpc.Outer(model, every=2)
    with pytest.raises(NotImplementedError, match="whose replicas train apart"):
        fsdpc.audit(model, every=1)


@pytest.mark.ranks(2)
def test_the_step_is_the_definition() -> None:
    """In float64, with numbers of the paper's update written out."""
    fsdpc.manual_seed(3)
    model = nn.Linear(5, 3, bias=False).to(fsdpc.float64)
    fsdpc.fully_shard(model, mesh=fsdpc.init_device_mesh("cpu", (2, 1)))
    rounds = fsdpc.Outer(model, every=2, **NESTEROV)
    optimizer = fsdpc.optim.SGD(model.parameters(), lr=0.1)
    anchor = fsdpc.full_tensor(model.weight).numpy().copy()
    replicas, momentum = [anchor.copy(), anchor.copy()], np.zeros_like(anchor)
    for step in range(6):
        for rank, value in enumerate(replicas):
            value -= 0.1 * np.full((3, 5), step + 1.0 + 10 * rank)
        x = np.full((1, 5), step + 1.0 + 10 * fsdpc.rank())
        model(fsdpc.tensor(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rounds.step()
        if step % 2:
            mean = np.mean([anchor - value for value in replicas], 0)
            momentum = 0.9 * momentum + mean
            anchor = anchor - 0.7 * (mean + 0.9 * momentum)
            replicas = [anchor.copy(), anchor.copy()]
        np.testing.assert_allclose(
            fsdpc.full_tensor(model.weight).numpy(), replicas[fsdpc.rank()], rtol=1e-12
        )
    np.testing.assert_allclose(
        rounds.optimizer.state(model.weight)["outer_momentum"].numpy(), momentum, rtol=1e-12
    )


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize(("form", "error"), [(None, 0), ("bf16", 0.003), ("int8", 0.01)])
def test_replicas_get_the_same_bits_with_any_form(form: str | None, error: float) -> None:
    pretend.on_hosts(2)
    fsdpc.init()
    model, optimizer, rounds = start(2, 2, every=2, compression=form, **NESTEROV)
    spelled = Spelled(2, 2, 2, 1, NESTEROV)
    for step in range(2):
        inner_step(model, optimizer, step)
        rounds.step()
        spelled.step(step)
    for name, value in parameters(model).items():
        every = fsdpc.all_gather(value[None]).reshape(4, -1)
        assert (every == every[0]).all(), name
        want = dict(spelled.anchor.named_parameters())[name].detach().numpy()
        assert np.abs(value - want).max() <= error, name
    fsdpc.shutdown()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)])
def test_memory_is_planned(mesh: tuple[int, int], hosts: int) -> None:
    pretend.on_hosts(hosts)
    fsdpc.init()
    for form in (None, "int8"):
        fsdpc.reset_peak_memory_stats()
        before = fsdpc.memory_stats()
        model, optimizer, rounds = start(*mesh, every=2, compression=form)
        for step in range(4):
            inner_step(model, optimizer, step)
            rounds.step()
        stats = fsdpc.memory_stats()
        plan = fsdpc.memory_plan(model, outer=form or True)
        for category in ("master", "grad", "state", "reduce"):
            used = stats[f"{category}_peak_bytes"] - before[f"{category}_bytes"]
            assert used == getattr(plan, category), (form, category)
        if form is None:
            assert plan == fsdpc.memory_plan(model)
            assert plan == fsdpc.memory_plan(build(False), mesh, outer=True)
        del model, optimizer, rounds
    fsdpc.shutdown()


@pytest.mark.ranks(2)
def test_what_is_refused() -> None:
    fsdpc.manual_seed(0)
    mesh = fsdpc.init_device_mesh("cpu", (2, 1))
    model = fsdpc.fully_shard(nn.Linear(8, 4), mesh=mesh)
    for options, message in (
        ({"every": 0}, "every=0: a round has one step or more"),
        ({"every": 4, "groups": 5}, "groups=5: from 1 to the 4 steps of a round"),
        ({"every": 4, "groups": 2}, "groups=2: the model has 1 trainable units"),
        ({"every": 4, "momentum": 0.0}, "nesterov needs momentum"),
        ({"every": 4, "lr": -1.0}, "lr is out of range"),
        ({"every": 4, "compression": "int7"}, "int7"),
    ):
        with pytest.raises(ValueError, match=message):
            fsdpc.Outer(model, **options)
    with pytest.raises(ValueError, match="2 trainable parameters are not sharded"):
        fsdpc.Outer(nn.Linear(2, 2), every=2)
    with pytest.raises(ValueError, match="has no replicas for outer steps"):
        fsdpc.Outer(fsdpc.fully_shard(nn.Linear(2, 2)), every=2)
    narrow = fsdpc.fully_shard(nn.Linear(2, 2).to(fsdpc.bfloat16), mesh=mesh)
    with pytest.raises(TypeError, match="float32 and float64 parameters, not of 'weight'"):
        fsdpc.Outer(narrow, every=2)
    model(fsdpc.ones(1, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="set up outer steps before the first forward"):
        fsdpc.Outer(model, every=2)
    other = fsdpc.fully_shard(nn.Linear(8, 4), mesh=mesh)
    rounds = fsdpc.Outer(other, every=2)
    with pytest.raises(ValueError, match="has an Outer already"):
        fsdpc.Outer(other, every=2)
    del rounds
    fsdpc.Outer(other, every=2)


@pytest.mark.ranks(2)
def test_replicas_start_equal_and_train_the_same_parameters() -> None:
    mesh = fsdpc.init_device_mesh("cpu", (2, 1))
    fsdpc.manual_seed(0)
    model = fsdpc.fully_shard(nn.Linear(8, 4), mesh=mesh)
    local = model._fsdpc_unit.local(0)
    with fsdpc.no_grad():
        local.fill_(float(fsdpc.rank()))
    with pytest.raises(MismatchError, match="replicas start from different values of 'weight'"):
        fsdpc.Outer(model, every=2)
    for frozen in (True, False):
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
        model[1].bias.requires_grad_(not frozen)
        fsdpc.fully_shard(model, mesh=mesh)
        rounds = fsdpc.Outer(model, every=1)
        model[1].bias.requires_grad_(frozen)
        with pytest.raises(RuntimeError, match="1 parameters were frozen .* is '1.bias'"):
            rounds.step()


@pytest.mark.ranks(4)
def test_frozen_units_belong_to_the_model() -> None:
    """They have one schedule with the others, which does not meet replicas."""
    mesh = fsdpc.init_device_mesh("cpu", (2, 2))
    fsdpc.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4))
    for p in model[0].parameters():
        p.requires_grad_(False)
    for layer in model:
        fsdpc.fully_shard(layer, mesh=mesh)
    fsdpc.fully_shard(model, mesh=mesh)
    rounds = fsdpc.Outer(model, every=4)
    optimizer = fsdpc.optim.SGD(model[1:].parameters(), lr=0.1)
    for _ in range(4 if fsdpc.rank() < 2 else 6):  # more steps than the other replica
        model(fsdpc.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(unit.apart for unit in rounds._units())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["lr", "anchor"])
def test_replicas_that_drift_apart_fail(what: str) -> None:
    model, optimizer, rounds = start(2, 1, every=1)
    if fsdpc.rank() == 1 and what == "lr":
        rounds.lr = 0.5
    elif fsdpc.rank() == 1:
        rounds.optimizer.state_views(next(iter(model.parameters())))["anchor"].fill_(0.5)
    inner_step(model, optimizer, 0)
    with pytest.raises(MismatchError, match="replicas need the same lr, .* the same anchors"):
        rounds.step()


@pytest.mark.ranks(2)
def test_offloaded_masters_are_refused(tmp_path: Any) -> None:
    mesh = fsdpc.init_device_mesh("cpu", (2, 1))
    policy = fsdpc.OffloadPolicy(masters="disk", optimizer="disk", path=tmp_path)
    model = fsdpc.fully_shard(nn.Linear(8, 4), mesh=mesh, offload_policy=policy)
    with pytest.raises(NotImplementedError, match="Outer needs masters, gradients and states"):
        fsdpc.Outer(model, every=2)
