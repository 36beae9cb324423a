"""Optimizers against torch's on the same gradients, sharded or not; their states."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.needs import need_torch

import fsdpc
from fsdpc import nn, optim

torch = need_torch()

STEPS = 12
# Whole vectors for torch, whose kernels round otherwise in what is left over; odd rows for ranks.
SHAPES = {"matrix": (8, 6), "wide": (9, 64), "bias": (144,), "small": (2, 8)}


class Holder(nn.Module):
    """Parameters of several shapes whose gradients are what `feed` says."""

    def __init__(self, dtype: Any = fsdpc.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            start = np.random.default_rng(len(name)).standard_normal(shape)
            setattr(self, name, nn.Parameter(fsdpc.tensor(start).to(dtype)))

    def forward(self, gradients: dict[str, Any]) -> Any:
        total = None
        for name, p in self.named_parameters():
            term = (p * gradients[name]).sum()
            total = term if total is None else total + term
        return total


def gradients(step: int) -> dict[str, np.ndarray]:
    """With zeros among them; the same on every rank."""
    rng = np.random.default_rng(step)
    found = {}
    for name, shape in SHAPES.items():
        g = rng.standard_normal(shape)
        found[name] = np.where(rng.random(shape) < 0.2, 0.0, g).astype(np.float32)
    return found


def holder(sharded: bool, dtype: Any = fsdpc.float32) -> Holder:
    model = Holder(dtype)
    if sharded:
        fsdpc.fully_shard(model).set_gradient_divide_factor(1.0)
    return model


def run(model: Holder, optimizer: Any, steps: range = range(STEPS)) -> None:
    """Backward by way of the model, then a step; a sum over ranks in which one is not zero."""
    dtype = model.matrix.dtype
    share = 1.0 if model.matrix._unit is None or fsdpc.rank() == 0 else 0.0
    for step in steps:
        given = {name: fsdpc.tensor(g * share).to(dtype) for name, g in gradients(step).items()}
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: Holder) -> dict[str, np.ndarray]:
    return {n: as_numpy(fsdpc.full_tensor(p)) for n, p in model.named_parameters()}


def as_numpy(t: Any) -> np.ndarray:
    wide = t if t.dtype is fsdpc.float64 else t.to(fsdpc.float32)
    return wide.detach().numpy().copy()


def in_torch(
    make: Callable[[Any], Any], dtype: Any = torch.float32, steps: int = STEPS
) -> tuple[dict[str, Any], Any]:
    model = Holder(fsdpc.float64 if dtype is torch.float64 else fsdpc.float32)
    named = {
        n: torch.nn.Parameter(torch.from_numpy(p.detach().numpy().copy()))
        for n, p in model.named_parameters()
    }
    optimizer = make(list(named.values()))
    for step in range(steps):
        for name, g in gradients(step).items():
            named[name].grad = torch.from_numpy(g).to(dtype)
        optimizer.step()
    return named, optimizer


def same(ours: np.ndarray, theirs: np.ndarray, exact: bool = True) -> bool:
    return np.array_equal(ours, theirs) if exact else np.allclose(ours, theirs, 1e-5, 1e-6)


def assert_equal(ours: Any, theirs: Any, case: Any = "", exact: bool = True) -> None:
    for name, value in ours.items():
        assert same(value, theirs[name].detach().numpy(), exact), (name, case)


CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ("AdamW", "Adam", "SGD", "RMSprop")),
    ("AdamW", dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, maximize=True)),
    ("AdamW", dict(lr=1e-2, amsgrad=True)),
    ("AdamW", dict(lr=1e-2, betas=(0.3, 0.5))),
    ("Adam", dict(lr=1e-2, weight_decay=0.1, amsgrad=True, maximize=True)),
    ("SGD", dict(lr=0.1, weight_decay=0.1)),
    ("SGD", dict(lr=0.1, momentum=0.9)),
    ("SGD", dict(lr=0.1, momentum=0.9, dampening=0.4, weight_decay=0.02, maximize=True)),
    ("SGD", dict(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.02)),
    ("Lion", dict(lr=1e-2, betas=(0.9, 0.98), weight_decay=0.2)),
    ("RMSprop", dict(lr=1e-3, alpha=0.8, momentum=0.9, weight_decay=0.1, maximize=True)),
    ("RMSprop", dict(lr=1e-3, eps=1e-3, momentum=0.5, centered=True)),
]


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, line by line."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (m * b1).add(p.grad, alpha=1 - b1)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(update), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def reference(kind: str, options: dict[str, Any], fused: bool) -> Callable[[Any], Any]:
    if kind == "Lion":
        return lambda p: PaperLion(p, **options)
    how = dict(fused=True) if fused and kind.startswith("Adam") else dict(foreach=False)
    return lambda p: getattr(torch.optim, kind)(p, **options, **how)


def test_zero_grad_drops_gradients() -> None:
    layer = nn.Linear(2, 2)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    layer(fsdpc.ones(1, 2)).sum().backward()
    with pytest.raises(NotImplementedError, match="gradients are dropped, so that"):
        optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    assert layer.weight.grad is None


@pytest.mark.ranks([1, 2, 3])
def test_bits_of_torch() -> None:
    """By its fused Adams and plain SGD; in RMSprop, torch's square roots are not the nearest."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("torch has no fused multiply-add here")
    for kind, options in CASES:
        named, theirs = in_torch(reference(kind, options, fused=True))
        for sharded in (True, False) if fsdpc.world_size() == 1 else (True,):
            model = holder(sharded)
            optimizer = getattr(optim, kind)(model.parameters(), **options)
            run(model, optimizer)
            exact = kind != "RMSprop"
            assert_equal(values(model), named, (kind, options), exact)
            state = optim.get_optimizer_state_dict(model, optimizer)["state"]
            for name, p in named.items():
                for key, value in theirs.state[p].items():
                    if value is not None and key != "step":
                        ours = state[name].pop(key).numpy()
                        assert same(ours, value.numpy(), exact), (kind, options, name, key)
                assert state[name] == {"step": STEPS}


def test_defaults_are_torchs() -> None:
    for kind in ("AdamW", "Adam", "SGD", "RMSprop"):
        ours = getattr(optim, kind)([nn.Parameter(np.zeros(3))]).param_groups[0]
        theirs = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(3))]).param_groups[0]
        ours.pop("params")
        assert ours == {name: theirs[name] for name in ours}
        left = set(theirs) - set(ours) - {"params", "decoupled_weight_decay"}
        missing = {"SGD": {"capturable"}, "RMSprop": {"fused"}}.get(kind, set())
        assert left == {"foreach", "capturable", "differentiable", "fused"} - missing
    lion = optim.Lion([nn.Parameter(np.zeros(3))]).param_groups[0]
    assert lion["betas"] == (0.9, 0.99) and lion["weight_decay"] == 0


@pytest.mark.ranks([1, 2])
def test_float64() -> None:
    """Masters and states in float64; the order of operations differs in last bits alone."""
    near = dict(rtol=1e-13, atol=1e-13)
    for kind, options in CASES:
        model = holder(fsdpc.world_size() > 1, fsdpc.float64)
        optimizer = getattr(optim, kind)(model.parameters(), state_dtype="bfloat16", **options)
        run(model, optimizer)
        named, theirs = in_torch(reference(kind, options, fused=False), torch.float64)
        for name, value in values(model).items():
            assert value.dtype == np.float64
            np.testing.assert_allclose(value, named[name].detach().numpy(), **near)
        for name, entry in optim.get_optimizer_state_dict(model, optimizer)["state"].items():
            for key in set(entry) - {"step"}:
                assert entry[key].dtype is fsdpc.float64
                expect = theirs.state[named[name]][key].numpy()
                np.testing.assert_allclose(entry[key].numpy(), expect, **near)


@pytest.mark.parametrize("dtype", [fsdpc.float16, fsdpc.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.ranks(2)
def test_narrow_masters(dtype: Any) -> None:
    """Every step is the fp32 step rounded to the dtype once; states are fp32."""
    for kind, options in CASES:
        model = holder(True, dtype)
        optimizer = getattr(optim, kind)(model.parameters(), **options)
        twin = holder(False, fsdpc.float32)
        named, start = dict(twin.named_parameters()), values(model)
        with fsdpc.no_grad():
            for name, p in named.items():
                p.copy_(fsdpc.tensor(start[name]))
        beside = getattr(optim, kind)(twin.parameters(), **options)
        for step in range(3):
            run(model, optimizer, range(step, step + 1))
            for name, g in gradients(step).items():
                named[name].grad = fsdpc.tensor(g).to(dtype).to(fsdpc.float32)
            beside.step()
            for name, value in values(model).items():
                with fsdpc.no_grad():
                    named[name].copy_(named[name].detach().to(dtype).to(fsdpc.float32))
                assert np.array_equal(value, named[name].detach().numpy()), (kind, step, name)


@pytest.mark.ranks([1, 2, 3])
def test_groups_have_their_own_options() -> None:
    model = holder(True)
    groups = [
        {"params": [model.matrix, model.bias], "lr": 1e-2, "weight_decay": 0.5},
        {"params": [model.wide], "betas": (0.5, 0.6), "amsgrad": True},
        {"params": [model.small], "lr": 0.0},
    ]
    optimizer = optim.AdamW(groups[:2], lr=3e-3)
    optimizer.add_param_group(groups[2])
    run(model, optimizer, range(3))
    optimizer.param_groups[1]["lr"] = 1e-3
    run(model, optimizer, range(3, 6))
    named, _ = in_torch(lambda p: torch.optim.SGD(p, lr=0.0))
    theirs = torch.optim.AdamW(
        [
            {"params": [named["matrix"], named["bias"]], "lr": 1e-2, "weight_decay": 0.5},
            {"params": [named["wide"]], "betas": (0.5, 0.6), "amsgrad": True},
            {"params": [named["small"]], "lr": 0.0},
        ],
        lr=3e-3,
        fused=True,
    )
    for step in range(6):
        if step == 3:
            theirs.param_groups[1]["lr"] = 1e-3
        for name, g in gradients(step).items():
            named[name].grad = torch.from_numpy(g)
        theirs.step()
    assert_equal(values(model), named)
    assert set(optimizer.state(model.wide)) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert set(optimizer.state(model.bias)) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.ranks([1, 2])
def test_what_has_no_gradient_is_skipped() -> None:
    """Frozen parameters and units without a backward keep values, states and step count."""
    model = holder(True)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    assert optimizer.step_count(model.wide) == 0
    run(model, optimizer, range(2))
    before = values(model), optimizer.state(model.wide)["momentum_buffer"].numpy()
    model.wide.requires_grad_(False)
    run(model, optimizer, range(2, 3))
    assert np.array_equal(values(model)["wide"], before[0]["wide"])
    assert not np.array_equal(values(model)["bias"], before[0]["bias"])
    assert np.array_equal(optimizer.state(model.wide)["momentum_buffer"].numpy(), before[1])
    assert optimizer.step_count(model.wide) == 2 and optimizer.step_count(model.bias) == 3


@pytest.mark.ranks([1, 2])
def test_states_are_as_many_as_needed() -> None:
    def grown(make: Callable[[Any], Any], dtype: Any = fsdpc.float32) -> float:
        model = holder(True, dtype)
        run(model, optim.SGD(model.parameters(), lr=0.0), range(2))
        before = fsdpc.memory_stats()["state_bytes"]
        optimizer = make(model.parameters())
        run(model, optimizer, range(2))
        return fsdpc.memory_stats()["state_bytes"] - before

    one = grown(optim.Lion)
    assert one >= sum(map(np.prod, SHAPES.values())) * 4 / fsdpc.world_size()
    assert grown(optim.SGD) == 0

    def states(n: int) -> Any:
        return pytest.approx(n * one, abs=256)  # each begins at a multiple of 64 bytes

    assert grown(lambda p: optim.SGD(p, momentum=0.5)) == states(1)
    assert grown(optim.AdamW) == states(2)
    assert grown(lambda p: optim.Adam(p, amsgrad=True)) == states(3)
    assert grown(lambda p: optim.AdamW(p, state_dtype=fsdpc.bfloat16)) == states(1)
    assert grown(optim.AdamW, fsdpc.float64) == states(4)


@pytest.mark.ranks([1, 2])
def test_momentum_that_is_switched_on_later_begins_with_the_gradient() -> None:
    model = holder(True)
    optimizer = optim.SGD(model.parameters(), lr=0.1, dampening=0.5)
    named, _ = in_torch(lambda p: torch.optim.SGD(p, lr=0.0))
    theirs = torch.optim.SGD(list(named.values()), lr=0.1, dampening=0.5)
    for step in range(5):
        if step == 2:
            optimizer.param_groups[0]["momentum"] = theirs.param_groups[0]["momentum"] = 0.9
        run(model, optimizer, range(step, step + 1))
        for name, g in gradients(step).items():
            named[name].grad = torch.from_numpy(g)
        theirs.step()
    assert_equal(values(model), named)


# ---- states


class Nested(nn.Module):
    """Two units, so that full names are not those inside of the units."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        fsdpc.manual_seed(3)
        self.inner = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7))
        self.outer = nn.Linear(7, 3)
        if sharded:
            fsdpc.fully_shard(self.inner)
            fsdpc.fully_shard(self)

    def forward(self, x: Any) -> Any:
        return self.outer(self.inner(x))


NAMES = {"inner.0.weight", "inner.0.bias", "inner.1.weight", "inner.1.bias", "outer.weight",
         "outer.bias"}  # fmt: skip
KINDS: dict[str, Callable[..., Any]] = {
    "AdamW": partial(optim.AdamW, lr=1e-2, amsgrad=True),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.2),
    "Lion": partial(optim.Lion, lr=1e-2),
}


def train(model: Any, optimizer: Any, steps: range) -> None:
    """All ranks see the same batch, of numbers whose mean over four or fewer ranks is exact."""
    for step in steps:
        x = np.random.default_rng(step).integers(-4, 5, (4, 6)).astype(np.float32)
        model(fsdpc.tensor(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Everything as arrays, to be compared."""
    found = optim.get_optimizer_state_dict(model, optimizer)
    states = {
        name: {k: v if k == "step" else as_numpy(v) for k, v in entry.items()}
        for name, entry in found["state"].items()
    }
    return {**found, "state": states, "values": values(model)}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["param_groups"] == b["param_groups"]
    assert_equal(a["values"], {n: torch.from_numpy(v) for n, v in b["values"].items()})
    assert a["state"].keys() == b["state"].keys()
    for name, entry in a["state"].items():
        assert entry.keys() == b["state"][name].keys()
        for key, value in entry.items():
            assert np.array_equal(value, b["state"][name][key]), (name, key)


@pytest.mark.parametrize("dtype", [fsdpc.float32, fsdpc.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.ranks([1, 2, 3])
def test_sharded_is_plain_to_the_bit(dtype: Any) -> None:
    """So any number of ranks is any other; bf16 states are rounded by seed, not by rank."""
    for kind in (optim.AdamW, optim.Lion, partial(optim.SGD, momentum=0.9)):
        found = []
        for sharded in (True, False):
            model = holder(sharded)
            optimizer = kind(model.parameters(), lr=1e-2, state_dtype=dtype, seed=5)
            run(model, optimizer, range(4))
            for entry in optim.get_optimizer_state_dict(model, optimizer)["state"].values():
                assert all(v.dtype is dtype for k, v in entry.items() if k != "step")
            found.append(state_of(model, optimizer))
        assert_same(*found)
        if dtype is fsdpc.bfloat16:
            model = holder(True)
            other = kind(model.parameters(), lr=1e-2, state_dtype=dtype, seed=6)
            run(model, other, range(4))
            states = state_of(model, other)["state"]["wide"], found[0]["state"]["wide"]
            assert any(not np.array_equal(states[0][k], states[1][k]) for k in states[0])


@pytest.mark.ranks([1, 2, 3])
def test_states_go_from_one_run_to_the_next() -> None:
    """Saved by one kind of model, loaded by the other, and trained on as if nothing happened."""
    for kind in KINDS.values():
        for saved, loaded in ((True, False), (False, True), (True, True)):
            first = Nested(saved)
            optimizer = kind(first.parameters())
            train(first, optimizer, range(3))
            optimizer.param_groups[0]["lr"] = 0.02
            state = optim.get_optimizer_state_dict(first, optimizer)
            assert state["state"].keys() == NAMES
            assert set(state["param_groups"][0]["params"]) == NAMES
            second = Nested(loaded)
            fresh = kind(second.parameters(), lr=0.7)
            train(second, fresh, range(7, 8))  # what it had is forgotten
            second.load_state_dict(first.state_dict())
            optim.set_optimizer_state_dict(second, fresh, state)
            assert_same(state_of(first, optimizer), state_of(second, fresh))
            train(first, optimizer, range(3, 5))
            train(second, fresh, range(3, 5))
            if fsdpc.world_size() != 3:  # the mean of three equal gradients is not exact
                assert_same(state_of(first, optimizer), state_of(second, fresh))


@pytest.mark.ranks(2)
def test_names_that_were_given() -> None:
    model = Nested(True)
    optimizer = optim.AdamW(model.named_parameters())
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    assert state["state"].keys() == NAMES
    again = Nested(True)
    other = optim.AdamW(again.named_parameters())
    other.load_state_dict(state)
    assert other.step_count(again.outer.weight) == 2
    full = state["state"]["outer.weight"]["exp_avg"]
    assert full.shape == (3, 7) and np.any(full.numpy())
    nameless = optim.AdamW(again.parameters())
    with pytest.raises(ValueError, match="6 parameters of group 0 have no name"):
        nameless.state_dict()
    with pytest.raises(ValueError, match="4 parameters of group 0 have no name"):
        optim.get_optimizer_state_dict(again.outer, nameless)


def test_repr_shows_groups_and_options() -> None:
    w, b = nn.Linear(2, 2).parameters()
    text = repr(optim.SGD([{"params": [w], "lr": 0.5}, {"params": [b]}], lr=0.1, momentum=0.9))
    assert text.startswith("SGD (\nParameter Group 0\n    dampening: 0.0\n    lr: 0.5\n")
    assert "Parameter Group 1" in text and "    momentum: 0.9\n" in text and text.endswith("\n)")


@pytest.mark.ranks(2)
def test_states_that_do_not_fit() -> None:
    """Every difference is named, and nothing is changed."""
    model = Nested(True)
    optimizer = optim.AdamW(model.named_parameters(), lr=0.5)
    train(model, optimizer, range(1))
    before = state_of(model, optimizer)
    good = optimizer.state_dict()

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            optimizer.load_state_dict({**good, **changes})

    def one(**changes: Any) -> dict[str, Any]:
        entry = {**good["state"]["outer.bias"], **changes}
        return {**good["state"], "outer.bias": {k: v for k, v in entry.items() if v is not None}}

    group = {**good["param_groups"][0], "lr": 0.1}
    with pytest.raises(KeyError, match="missing {'param_groups'}"):
        optimizer.load_state_dict({"state": {}})
    refused(ValueError, "is of 2 parameter groups, the optimizer has 1", param_groups=[group] * 2)
    refused(ValueError, r"unknown options \['speed'\]", param_groups=[{**group, "speed": 1}])
    refused(TypeError, "exp_avg of 'outer.bias': complex64",
            state=one(exp_avg=np.ones(3, np.complex64)), param_groups=[group])  # fmt: skip
    refused(ValueError, "lr is out of range: -1", param_groups=[{**group, "lr": -1}])
    refused(KeyError, r"missing \['outer.bias'\], unexpected \['b'\]",
            param_groups=[{**group, "params": [*(NAMES - {"outer.bias"}), "b"]}])  # fmt: skip
    refused(KeyError, r"has not: \['ghost'\]", state={"ghost": {}}, param_groups=[group])
    refused(KeyError, r"'outer.bias' does not fit AdamW: missing \['exp_avg_sq'\]",
            state=one(exp_avg_sq=None), param_groups=[group])  # fmt: skip
    refused(KeyError, r"unexpected \['momentum_buffer'\]",
            state=one(momentum_buffer=np.zeros(3)), param_groups=[group])  # fmt: skip
    refused(ValueError, r"exp_avg of 'outer.bias': \(4,\) given, \(3,\) wanted",
            state=one(exp_avg=np.zeros(4)), param_groups=[group])  # fmt: skip
    assert_same(before, state_of(model, optimizer))


@pytest.mark.ranks([1, 2, 3])
def test_views_of_states() -> None:
    """Rows in the shape of p.local, writable, and alive after the optimizer."""
    model, twin = holder(True), holder(True)
    for kind in KINDS.values():
        optimizer, other = kind(model.parameters()), kind(twin.parameters())
        run(model, optimizer, range(3))
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            views = other.state_views(q)
            assert list(views) == [key for key in optimizer.state(p) if key != "step"]
            for key, view in views.items():
                assert view.shape == p.local.shape == optimizer.state(p)[key].shape
                assert not view.numpy().any(), name
                view.copy_(optimizer.state_views(p)[key])
            other.set_step_count(q, optimizer.step_count(p))
            with fsdpc.no_grad():
                q.local.copy_(p.local)
        run(model, optimizer, range(3, 5))
        run(twin, other, range(3, 5))
        assert_same(state_of(model, optimizer), state_of(twin, other))
        view = other.state_views(twin.wide)
        expect = {key: each.numpy().copy() for key, each in view.items()}
        other.set_step_count(twin.bias, 0)
        assert not any(v.numpy().any() for v in other.state_views(twin.bias).values())
        with pytest.raises(ValueError, match="'bias' cannot have made -1 steps"):
            other.set_step_count(twin.bias, -1)
        del other
        gc.collect()
        for key, each in view.items():
            assert np.array_equal(each.numpy(), expect[key])


@pytest.mark.ranks(1)
def test_stochastic_rounding_keeps_small_changes() -> None:
    """A moment that nearest rounding would freeze follows its gradient, on average."""
    p = nn.Parameter(np.zeros(20000, np.float32))
    optimizer = optim.Lion([p], lr=0.0, betas=(0.9, 0.999), state_dtype="bfloat16")
    expect = 0.0
    for _ in range(300):
        p.grad = fsdpc.tensor(np.ones(20000, np.float32))
        optimizer.step()
        expect = 0.999 * expect + 0.001
    mean = optimizer.state(p)["exp_avg"].to(fsdpc.float32).numpy().mean()
    # 300 roundings of at most 2^-10 each, 20000 times: a standard error below 1e-4
    assert abs(mean - expect) < 5e-4


# ---- options

BAD = [
    ("AdamW", dict(lr=-1.0), ValueError, "lr is out of range: -1.0"),
    ("AdamW", dict(lr=float("nan")), ValueError, "lr is out of range: nan"),
    ("AdamW", dict(lr="fast"), TypeError, "lr must be a number, got 'fast'"),
    ("Adam", dict(betas=(0.9, 1.0)), ValueError, r"betas is out of range: \(0.9, 1.0\)"),
    ("Adam", dict(betas=0.9), TypeError, "betas must be two numbers, got 0.9"),
    ("Adam", dict(eps=-1e-8), ValueError, "eps is out of range: -1e-08"),
    ("SGD", dict(momentum=-0.1), ValueError, "momentum is out of range: -0.1"),
    ("SGD", dict(weight_decay=-1), ValueError, "weight_decay is out of range: -1"),
    ("SGD", dict(nesterov=True), ValueError, "nesterov needs momentum and no dampening, got mom"),
    ("SGD", dict(nesterov=True, momentum=0.9, dampening=0.5), ValueError, "and dampening 0.5"),
    ("Lion", dict(betas=(-0.1, 0.9)), ValueError, r"betas is out of range: \(-0.1, 0.9\)"),
    ("Lion", dict(state_dtype="float16"), TypeError, "float32, bfloat16 or int8, not float16"),
]


@pytest.mark.parametrize(("kind", "options", "error", "text"), BAD)
def test_bad_options(kind: str, options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        getattr(optim, kind)([nn.Parameter(np.zeros(3))], **options)


def test_bad_options_of_groups() -> None:
    p = nn.Parameter(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"group 0 has unknown options \['momentum'\]"):
        optim.AdamW([{"params": [p], "momentum": 0.9}])
    optimizer = optim.SGD([p], lr=0.1)
    optimizer.param_groups[0]["momentum"] = -1
    p.grad = fsdpc.tensor(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="momentum is out of range: -1"):
        optimizer.step()
    assert not p.detach().numpy().any()
    with pytest.raises(ValueError, match=r"number 0 of group 1 \(3,\) float32 was given before"):
        optimizer.add_param_group({"params": [p]})


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "rmsprop"])
def test_fsdpc_train_learns_by_each(name: str, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be, that is the question; " * 400)
    options = ["--ranks", "1", "--steps", "20", "--batch", "4", "--seq", "32", "--sample", "0"]
    command = [sys.executable, "-m", "fsdpc", "train", *options, "--optimizer", name]
    done = subprocess.run([*command, "--data", str(text), "--metrics", str(metrics)],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in metrics.read_text().splitlines()][:20]
    rates = {"adamw": 1.5e-3, "adam": 1.5e-3, "sgd": 0.1, "lion": 3e-4, "rmsprop": 1e-3}
    assert max(step["lr"] for step in steps) == pytest.approx(rates[name])
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]


def test_one_parameter() -> None:
    """A tensor can be iterated over, and its rows are no parameters."""
    p = fsdpc.nn.Parameter(fsdpc.ones(2, 2))
    with pytest.raises(TypeError, match="put the one into a list"):
        fsdpc.optim.SGD(p, lr=1.0)
    assert fsdpc.optim.SGD([{"params": p}], lr=1.0).param_groups[0]["params"][0] is p
