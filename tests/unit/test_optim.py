"""Optimizers against torch's on the same gradients, sharded or not; their states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn, optim

torch = pytest.importorskip("torch")

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


def assert_equal(ours: dict[str, np.ndarray], theirs: dict[str, Any], case: Any = "") -> None:
    for name, value in ours.items():
        assert np.array_equal(value, theirs[name].detach().numpy()), (name, case)


CASES = [
    ("AdamW", {}),
    ("AdamW", dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, maximize=True)),
    ("AdamW", dict(lr=1e-2, amsgrad=True)),
    ("AdamW", dict(lr=1e-2, betas=(0.3, 0.5))),
    ("Adam", {}),
    ("Adam", dict(lr=1e-2, weight_decay=0.1, amsgrad=True, maximize=True)),
    ("SGD", {}),
    ("SGD", dict(lr=0.1, weight_decay=0.1)),
    ("SGD", dict(lr=0.1, momentum=0.9)),
    ("SGD", dict(lr=0.1, momentum=0.9, dampening=0.4, weight_decay=0.02, maximize=True)),
    ("SGD", dict(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.02)),
    ("Lion", dict(lr=1e-2, betas=(0.9, 0.98), weight_decay=0.2)),
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
    how = dict(fused=True) if fused and kind != "SGD" else dict(foreach=False)
    return lambda p: getattr(torch.optim, kind)(p, **options, **how)


@pytest.mark.ranks([1, 2, 3])
def test_bits_of_torch() -> None:
    """fp32 parameters and states are torch's to the bit, by its fused Adams and its plain SGD."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("torch has no fused multiply-add here")
    for kind, options in CASES:
        named, theirs = in_torch(reference(kind, options, fused=True))
        for sharded in (True, False) if fsdpc.world_size() == 1 else (True,):
            model = holder(sharded)
            optimizer = getattr(optim, kind)(model.parameters(), **options)
            run(model, optimizer)
            assert_equal(values(model), named, (kind, options))
            state = optim.get_optimizer_state_dict(model, optimizer)["state"]
            for name, p in named.items():
                for key, value in theirs.state[p].items():
                    if value is not None and key != "step":
                        ours = state[name].pop(key).numpy()
                        assert np.array_equal(ours, value.numpy()), (kind, options, name, key)
                assert state[name] == {"step": STEPS}


def test_defaults_are_torchs() -> None:
    for kind in ("AdamW", "Adam", "SGD"):
        ours = getattr(optim, kind)([nn.Parameter(np.zeros(3))]).param_groups[0]
        theirs = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(3))]).param_groups[0]
        ours.pop("params")
        assert ours == {name: theirs[name] for name in ours}
        left = set(theirs) - set(ours) - {"params", "decoupled_weight_decay"}
        assert left == {"foreach", "capturable", "differentiable", "fused"} - (
            {"capturable"} if kind == "SGD" else set()
        )
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
    shard = sum(int(np.prod(shape)) for shape in SHAPES.values()) * 4 / fsdpc.world_size()
    assert one >= shard
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
