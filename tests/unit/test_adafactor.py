"""Adafactor against its definition in float64, torch's, and itself on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import given
from tests.given import assert_bits, everything
from tests.needs import need_torch

import fsdpc
from fsdpc import checkpoint, nn, optim

torch = need_torch()

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (24, 10),
    "wide": (9, 128),
    "long": (1100, 70),
    "stack": (5, 7, 24),
    "kernel": (6, 2, 3, 3),
    "bias": (30,),
    "row": (1, 8),
    "single": (1,),
}
STEPS = 4
OPTIONS: list[dict[str, Any]] = [
    dict(lr=0.02),
    dict(lr=0.3, weight_decay=0.1, d=1.5, beta2_decay=-0.5, eps=(1e-3, 1e-2)),
    dict(lr=0.02, maximize=True),
]


def gradients(step: int) -> dict[str, np.ndarray]:
    """Gradients whose rows and columns differ in size by orders of magnitude."""
    rng = np.random.default_rng(step)
    found = {}
    for name, shape in SHAPES.items():
        g = rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape))
        if len(shape) == 2:
            g = g * np.exp(3 * rng.standard_normal((1, shape[1])))
        found[name] = np.asarray(g, dtype=np.float32)
    return found


def holder(is_sharded: bool, **options: Any) -> given.Holder:
    model = given.Holder(SHAPES)
    return given.sharded(model, **options) if is_sharded else model


def run(model: Any, optimizer: Any, steps: range = range(STEPS), clip: float = 0) -> None:
    given.run(model, optimizer, gradients, steps, clip)


def definition(
    p: np.ndarray, grads: list[np.ndarray], lr: float = 1e-2, beta2_decay: float = -0.8,
    eps: tuple[Any, float] = (None, 1e-3), d: float = 1.0, weight_decay: float = 0.0,
    maximize: bool = False,
) -> np.ndarray:  # fmt: skip
    """torch.optim.Adafactor's steps in float64."""
    p = p.astype(np.float64)
    eps1 = 2.0**-23 if eps[0] is None else eps[0]
    row = col = variance = np.float64(0)
    for step, grad in enumerate(grads, 1):
        g = grad.astype(np.float64) * (-1 if maximize else 1)
        weight = step**beta2_decay
        alpha = max(eps[1], np.sqrt((p * p).mean())) * min(lr, step**-0.5)
        p = p * (1 - lr * weight_decay)
        if p.ndim > 1:
            row = row + weight * ((g * g).mean(-1, keepdims=True) - row)
            col = col + weight * ((g * g).mean(-2, keepdims=True) - col)
            estimate = row @ col / np.maximum(row.mean(-2, keepdims=True), eps1)
        else:
            variance = variance + weight * (g * g - variance)
            estimate = variance
        update = g / np.sqrt(np.maximum(estimate, eps1**2))
        p = p - alpha / max(1, np.sqrt((update * update).mean()) / d) * update
    return p


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("clip", [0, 0.5])
def test_bits_of_an_unsharded_model(clip: float) -> None:
    found = []
    for sharded in (False, True):
        model = holder(sharded)
        optimizer = optim.Adafactor(model.named_parameters(), **OPTIONS[1])
        run(model, optimizer, clip=clip)
        found.append(everything(model, optimizer))
    assert set(found[0]) >= {"stack row_var", "long col_var", "bias variance", "matrix step"}
    assert found[0]["stack row_var"].shape == (5, 7, 1)
    assert found[0]["kernel col_var"].shape == (6, 2, 1, 3)
    assert_bits(*found)


@pytest.mark.parametrize("options", OPTIONS)
def test_near_its_definition_and_torch(options: dict[str, Any]) -> None:
    """A step is within 1e-6 of the definition relative to the largest parameter, torch's 1e-4."""
    model = holder(False)
    start = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    optimizer = optim.Adafactor(model.named_parameters(), **options)
    run(model, optimizer)
    plain = {n: torch.nn.Parameter(torch.from_numpy(v.copy())) for n, v in start.items()}
    theirs = torch.optim.Adafactor(plain.values(), **options)
    for step in range(STEPS):
        for name, g in gradients(step).items():
            plain[name].grad = torch.from_numpy(g)
        theirs.step()
    for name, p in model.named_parameters():
        exact = definition(start[name], [gradients(s)[name] for s in range(STEPS)], **options)
        scale = np.abs(exact).max()
        assert np.abs(p.numpy() - exact).max() <= 1e-6 * scale, name
        assert np.abs(p.numpy() - plain[name].detach().numpy()).max() <= 1e-4 * scale, name
        for key, value in optimizer.state(p).items():
            want = theirs.state[plain[name]][key]
            have = torch.tensor(value if key == "step" else np.asarray(value.numpy()))
            torch.testing.assert_close(have.to(want.dtype), want, rtol=1e-5, atol=0)


@pytest.mark.ranks([2, 3])
def test_resumes_from_state_dict_and_folder(tmp_path: Path) -> None:
    model = holder(True)
    optimizer = optim.Adafactor(model.named_parameters(), **OPTIONS[1])
    run(model, optimizer, range(2))
    kept = {n: fsdpc.full_tensor(p).numpy().copy() for n, p in model.named_parameters()}
    state = optimizer.state_dict()
    checkpoint.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    run(model, optimizer, range(2, STEPS))
    for sharded in (False, True):
        again = holder(sharded)
        fresh = optim.Adafactor(again.named_parameters(), lr=0.5)
        if sharded:
            checkpoint.load(tmp_path / "saved", {"model": again, "optimizer": fresh})
        else:
            for name, p in again.named_parameters():
                with fsdpc.no_grad():
                    p.copy_(fsdpc.tensor(kept[name]))
            fresh.load_state_dict(state)
        run(again, fresh, range(2, STEPS))
        assert_bits(everything(model, optimizer), everything(again, fresh))
    alone = holder(False)
    fresh = optim.Adafactor(alone.named_parameters(), lr=0.5)
    checkpoint.load(tmp_path / "saved", {"model": alone, "optimizer": fresh})
    run(alone, fresh, range(2, STEPS))
    assert_bits(everything(model, optimizer), everything(alone, fresh))


@pytest.mark.ranks([1, 2])
def test_groups_frozen_and_reset() -> None:
    found = []
    for sharded in (False, True):
        model = holder(sharded)
        model.wide.requires_grad_(False)
        named = dict(model.named_parameters())
        first = [(n, named.pop(n)) for n in ("long", "bias")]
        optimizer = optim.Adafactor([{"params": first, "lr": 0.1}, {"params": list(named.items())}])
        run(model, optimizer, range(2))
        assert optimizer.step_count(model.wide) == 0 and optimizer.step_count(model.long) == 2
        optimizer.set_step_count(model.long, 0)
        run(model, optimizer, range(2, STEPS))
        assert optimizer.step_count(model.long) == 2
        found.append(everything(model, optimizer))
    assert "wide row_var" not in found[0]
    assert_bits(*found)


@pytest.mark.ranks([1, 2])
def test_low_precision_parameters() -> None:
    """bfloat16 masters: the epsilon is their dtype's, and bits are those of one process."""
    found = []
    for sharded in (False, True):
        model = given.Holder(SHAPES, fsdpc.bfloat16)
        if sharded:
            given.sharded(model)
        optimizer = optim.Adafactor(model.named_parameters(), lr=0.1)
        run(model, optimizer, range(2))
        found.append({
            n: fsdpc.full_tensor(p).to(fsdpc.float32).numpy().copy()
            for n, p in model.named_parameters()
        })  # fmt: skip
    assert_bits(*found)
    assert not np.array_equal(found[0]["matrix"], holder(False).matrix.numpy())


@pytest.mark.ranks([1, 2])
def test_nonfinite_gradients_reach_one_parameter() -> None:
    model = holder(True)
    optimizer = optim.Adafactor(model.named_parameters())
    for value in (np.nan, np.inf):
        held = gradients(0)
        held["wide"][3, 3] = value
        model({n: fsdpc.tensor(g) for n, g in held.items()}).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert np.isnan(fsdpc.full_tensor(model.wide).numpy()[3]).all()
    assert np.isfinite(fsdpc.full_tensor(model.matrix).numpy()).all()


@pytest.mark.ranks([1, 2])
def test_zero_gradients_leave_parameters() -> None:
    model = holder(True)
    optimizer = optim.Adafactor(model.named_parameters())
    before = {n: fsdpc.full_tensor(p).numpy().copy() for n, p in model.named_parameters()}
    zeros = {n: fsdpc.zeros(s) for n, s in SHAPES.items()}
    for _ in range(2):
        model(zeros).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert np.array_equal(before[name], fsdpc.full_tensor(p).numpy()), name


def test_bad_input_is_named() -> None:
    model = holder(False)
    for options, message in (
        (dict(beta2_decay=0.5), "beta2_decay is out of range: 0.5"),
        (dict(d=0.5), "d is out of range: 0.5"),
        (dict(eps=(-1, 1e-3)), r"eps must be .* got \(-1, 0.001\)"),
        (dict(eps=(None, -1)), "eps must be"),
        (dict(eps=(1e-3,)), "eps must be"),
        (dict(eps=1e-3), "eps must be"),
        (dict(eps=("a", 1)), "eps must be"),
        (dict(lr=-1), "lr is out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            optim.Adafactor(model.parameters(), **options)
    with pytest.raises(TypeError):
        optim.Adafactor(model.parameters(), state_dtype="int8")  # type: ignore[call-arg]
    wide = nn.Parameter(fsdpc.ones(2, 2, dtype=fsdpc.float64))
    optimizer = optim.Adafactor([wide])
    wide.sum().backward()
    with pytest.raises(TypeError, match="float64: convert it"):
        optimizer.step()


@pytest.mark.ranks(1)
def test_offloaded_states_are_refused(tmp_path: Path) -> None:
    model = holder(True, offload_policy=fsdpc.OffloadPolicy(optimizer="disk", path=tmp_path))
    optimizer = optim.Adafactor(model.named_parameters())
    before = fsdpc.full_tensor(model.matrix).numpy().copy()
    with pytest.raises(NotImplementedError, match="parameter 'matrix' of unit .* are offloaded"):
        run(model, optimizer)
    assert np.array_equal(before, fsdpc.full_tensor(model.matrix).numpy())


@pytest.mark.ranks(4, hosts=2)
def test_bits_on_several_hosts() -> None:
    test_bits_of_an_unsharded_model(0)


@pytest.mark.ranks(4)
def test_bits_of_replicated_shards() -> None:
    """HSDP: two replicas of two shards."""
    found = []
    for sharded in (False, True):
        model = holder(False)
        if sharded:
            mesh = fsdpc.init_device_mesh("cpu", (2, 2))
            fsdpc.fully_shard(model, mesh=mesh).set_gradient_divide_factor(1.0)
        optimizer = optim.Adafactor(model.named_parameters())
        run(model, optimizer)
        found.append(everything(model, optimizer))
    assert_bits(*found)


@pytest.mark.ranks(2)
def test_stacks_that_are_cut_inside_are_refused() -> None:
    """Three large slices do not divide by two ranks, so the layout cuts inside a matrix."""
    layer = nn.Linear(1, 1)
    layer.experts = nn.Parameter(fsdpc.zeros(3, 512, 256))
    layer.forward = lambda x: (layer.experts * x).sum()  # type: ignore[method-assign]
    model = fsdpc.fully_shard(layer)
    with pytest.raises(NotImplementedError, match="its 3 slices do not divide evenly"):
        fsdpc.memory_plan(model, optimizer="adafactor")
    optimizer = optim.Adafactor(model.parameters())
    model(fsdpc.ones(1)).backward()
    with pytest.raises(NotImplementedError, match="'experts' on a rank, but its 3 slices"):
        optimizer.step()


@pytest.mark.ranks([1, 2])
def test_nan_is_saved_as_nan() -> None:
    model = holder(True)
    optimizer = optim.Adafactor(model.named_parameters())
    for value in (np.inf, 1.0):  # the second step makes the NaN that x86 makes of inf - inf
        held = gradients(0)
        held["matrix"][20, 3] = value
        model({n: fsdpc.tensor(g) for n, g in held.items()}).backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = optimizer.state_dict()["state"]["matrix"]["row_var"].numpy()
    assert np.isnan(rows[20]).all() and np.isfinite(rows[:20]).all()


@pytest.mark.ranks(2)
def test_ranks_that_step_other_parameters_are_named() -> None:
    a, b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    for layer in (a, b):
        fsdpc.fully_shard(layer)
    optimizer = optim.Adafactor([a.weight, b.weight])
    for layer in (a, b):
        layer(fsdpc.ones(1, 8)).sum().backward()
    (a, b)[fsdpc.rank()].zero_grad()
    with pytest.raises((fsdpc.MismatchError, fsdpc.PeerError)):
        optimizer.step()


def test_squares_that_overflow_leave_vectors() -> None:
    p = nn.Parameter(fsdpc.ones(2))
    optimizer = optim.Adafactor([p])
    for g in (1.0, 1.0, 1e20):
        before = p.numpy().copy()
        p.grad = fsdpc.tensor(np.full(2, g, np.float32))
        optimizer.step()
    assert np.array_equal(p.numpy(), before)
    assert np.isinf(optimizer.state(p)["variance"].numpy()).all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4), (2, 0, 4)])
def test_empty_matrices(shape: tuple[int, ...]) -> None:
    p = nn.Parameter(fsdpc.zeros(*shape))
    optimizer = optim.Adafactor([("p", p)])
    p.grad = fsdpc.zeros(*shape)
    optimizer.step()
    assert optimizer.state(p) == {"step": 1}
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.ranks(1)
def test_plans_refuse_other_formats() -> None:
    model = holder(False)
    with pytest.raises(ValueError, match="state_dtype='int8': adafactor's states are float32"):
        fsdpc.memory_plan(model, optimizer="adafactor", state_dtype="int8")
