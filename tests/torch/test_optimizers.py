"""Optimizers on sharded torch models: their states, schedules, scaling; bad input."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc.torch import (
    fully_shard,
    get_optimizer_state_dict,
    optim,
    set_optimizer_state_dict,
)
from tests.unit.test_optim import PaperLion

from .common import (
    assert_same_parameters,
    average_grads,
    batch,
    build,
    full,
    full_parameters,
    loss_of,
    shard,
    train_twins,
    twin,
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "amsgrad", "RMSprop", "Lion"])
def test_ten_steps_as_torch(kind: str) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if kind == "SGD":
        options.update(momentum=0.9, nesterov=True)
    if kind == "RMSprop":
        options.update(lr=1e-3, momentum=0.9, centered=True)
    if kind == "amsgrad":
        options.update(amsgrad=True)
    if kind == "Lion":
        options.update(lr=1e-3, betas=(0.9, 0.98))
    name = "AdamW" if kind == "amsgrad" else kind
    model = build()
    plain = twin(model)
    ours = shard(model)
    mine = getattr(optim, name)(ours.parameters(), **options)
    theirs = PaperLion if kind == "Lion" else getattr(torch.optim, name)
    train_twins(ours, plain, (mine, theirs(plain.parameters(), **options)), 10)


#: Optimizers with the state that they have of each parameter.
RESUMED = {
    "torch AdamW": (partial(torch.optim.AdamW, lr=1e-2), "exp_avg"),
    "AdamW": (partial(optim.AdamW, lr=1e-2), "exp_avg"),
    "torch SGD": (partial(torch.optim.SGD, lr=1e-2, momentum=0.9), "momentum_buffer"),
    "SGD": (partial(optim.SGD, lr=1e-2, momentum=0.9), "momentum_buffer"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", RESUMED)
def test_states_by_name_resume_to_the_bit(kind: str) -> None:
    make, state = RESUMED[kind]

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, batch(step, fsdpc.rank())).backward()
            optimizer.step()

    first = shard(build())
    optimizer = make(first.parameters())
    train(first, optimizer, range(3))
    weights = {k: v.clone() for k, v in first.state_dict().items()}
    states = get_optimizer_state_dict(first, optimizer)
    assert states["state"]["first.weight"][state].shape == (20, 7)
    own = copy.deepcopy(optimizer.state_dict())
    train(first, optimizer, range(3, 6))
    expected = full_parameters(first)
    for by_name in (True, False):
        second = shard(build(seed=9))
        resumed = make(second.parameters(), lr=1.0)
        second.load_state_dict(weights)
        if by_name:
            set_optimizer_state_dict(second, resumed, states)
        else:
            resumed.load_state_dict(own)
        train(second, resumed, range(3, 6))
        for name, value in full_parameters(second).items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.ranks(1)
def test_momentum_of_torchs_sgd_goes_over() -> None:
    """It counts no steps, and its first momentum is a copy of a gradient."""
    model, plain = build(), build()
    fully_shard(model)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, batch(0, 0)).backward()
    loss_of(plain, batch(0, 0)).backward()
    theirs.step()
    reference.step()
    ours = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    ours.step()
    reference.step()
    assert_same_parameters(model, plain)


@pytest.mark.ranks(2)
def test_schedules_groups_and_scaler() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    found = []
    for m, make in ((ours, optim.AdamW), (plain, torch.optim.AdamW)):
        groups = [
            {"params": [p for p in m.parameters() if p.dim() >= 2], "weight_decay": 0.3},
            {"params": [p for p in m.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = make(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(m, batch(step, fsdpc.rank()))
            if step == 2 and fsdpc.rank() == 0:
                loss = loss * float("inf")  # one rank overflows: all skip
            scaler.scale(loss).backward()
            if m is plain:
                average_grads(plain)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        found.append(scaler.get_scale())
    assert found == [512.0, 512.0]
    assert_same_parameters(ours, plain)


@pytest.mark.ranks(2)
def test_bf16_masters() -> None:
    model = build().to(torch.bfloat16)
    plain = twin(model)
    ours = shard(model)
    for kind in (torch.optim.SGD, optim.SGD):
        optimizer = kind(ours.parameters(), lr=0.1)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        x = batch(0, fsdpc.rank()).bfloat16()
        for m in (ours, plain):
            m.zero_grad()
            loss_of(m, x).backward()
        average_grads(plain)
        assert ours.first.weight.grad.dtype is torch.bfloat16
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1e9)
        optimizer.step()
        theirs.step()
        # One bf16 rounding of a gradient, and of the sum over ranks.
        assert_same_parameters(ours, plain, rtol=2e-2, atol=2e-3)


@pytest.mark.ranks(2)
def test_bad_input() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    early = list(net.parameters())
    fully_shard(net)
    with pytest.raises(ValueError, match="belongs to no sharded module"):
        optim.AdamW(early)
    stale = torch.optim.SGD(early, lr=0.1)
    net(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"made before fully_shard.*'0.weight'"):
        stale.step()
    for bad, error, match in (
        (nn.ModuleList([nn.Linear(2, 2)]), ValueError, "no forward of its own"),
        (nn.Embedding(4, 4, max_norm=1.0), NotImplementedError, "nn.Embedding whose max_norm"),
        (nn.Embedding(4, 4, sparse=True), NotImplementedError, "nn.Embedding whose sparse makes"),
        (nn.EmbeddingBag(4, 4, sparse=True), NotImplementedError, "nn.EmbeddingBag whose sparse"),
        (nn.EmbeddingBag(4, 4, max_norm=1.0), NotImplementedError, "nn.EmbeddingBag whose max"),
        (net, AssertionError, "sharded already"),
    ):
        with pytest.raises(error, match=match):
            fully_shard(bad)
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="'scale' is a scalar"):
        fully_shard(scalar)
    strided = nn.Linear(3, 2)
    strided.weight = nn.Parameter(torch.zeros(3, 2).t())
    with pytest.raises(NotImplementedError, match=r"'weight' \(2, 3\) is not contiguous"):
        fully_shard(strided)
    with pytest.raises(TypeError, match="fully_shard takes a torch"):
        fully_shard(3)
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        twin(net)
    with pytest.raises(ValueError, match="out of range"):
        optim.AdamW(net.parameters(), lr=-1)
    for kind in (optim.AdamW, optim.Adam, optim.SGD, optim.RMSprop):
        with pytest.raises(NotImplementedError, match=r"differentiable.*torch\.optim"):
            kind(net.parameters(), differentiable=True)
    with pytest.raises(NotImplementedError, match="set_all_reduce_hook"):
        net.set_all_reduce_hook(lambda t: None)


@pytest.mark.ranks([1, 2])
def test_an_optimizer_that_stepped_before_sharding_is_refused() -> None:
    model = build()
    other = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = torch.optim.SGD([other], lr=0.1)
    loss_of(model, batch(0, 0)).backward()
    optimizer.step()
    others.step()
    ours = shard(model)
    loss_of(ours, batch(0, 0)).backward()
    with pytest.raises(RuntimeError, match="made before fully_shard.*make it after"):
        optimizer.step()
    other.grad = torch.ones(3)
    others.step()  # has nothing of the model
    assert torch.equal(other.detach(), torch.full((3,), 0.9))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_bits_of_torchs_fused_steps(kind: str) -> None:
    """But for elements that fill no vector (of 8, or at most 16), which torch takes one by one."""
    torch.manual_seed(0)
    plain = nn.Linear(25, 3)
    ours = twin(plain)
    fully_shard(ours)
    options = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}
    optimizer = getattr(optim, kind)(ours.parameters(), **options)
    theirs = getattr(torch.optim, kind)(plain.parameters(), fused=True, **options)
    for _ in range(10):
        x = torch.randn(4, 25)
        for m, each in ((ours, optimizer), (plain, theirs)):
            each.zero_grad()
            m(x).square().mean().backward()
            each.step()
    whole = 75 - 75 % 16
    p, q = ours.weight, plain.weight
    assert torch.equal(full(p).reshape(-1)[:whole], q.detach().reshape(-1)[:whole])
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        a = full(optimizer.shard_state(p)[name]).reshape(-1)
        b = theirs.state[q][name].reshape(-1)
        assert torch.equal(a[:whole], b[:whole]), name
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


#: Optimizers that read rows, columns or products of parameters.
STRUCTURED: dict[str, Any] = {
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.02),
    "Adafactor foreach": lambda ps: torch.optim.Adafactor(ps, lr=0.02, foreach=True),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.02),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
}


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("kind", sorted(STRUCTURED))
def test_optimizers_that_read_whole_parameters(kind: str) -> None:
    """They compute with DTensors what they compute with plain tensors."""
    model = build()
    plain = twin(model)
    ours = shard(model)
    optimizers = [STRUCTURED[kind](list(m.parameters())) for m in (ours, plain)]
    for step in range(3):
        for m, optimizer in zip((ours, plain), optimizers, strict=True):

            def closure(m: Any = m, optimizer: Any = optimizer, step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(m, batch(step, 0))  # LBFGS compares losses: equal on all ranks
                loss.backward()
                return loss.detach()

            optimizer.step(closure)
    # Muon multiplies in bf16, in which sums of other order round differently.
    tolerance = 5e-2 if kind == "Muon" and fsdpc.world_size() > 1 else 1e-4
    assert_same_parameters(ours, plain, rtol=tolerance, atol=tolerance / 10)
