"""Matrix rules: Muon and OrthogonalSGD against torch's and on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import given
from tests.given import assert_bits, everything
from tests.needs import need_torch

import fsdpc
from fsdpc import nn, optim

torch = need_torch()

SHAPES = {"matrix": (24, 10), "wide": (9, 64), "stack": (3, 7, 5), "bias": (30,), "row": (1, 8)}
MATRICES = ("matrix", "wide", "row")
STEPS = 4


def holder(is_sharded: bool, **options: Any) -> given.Holder:
    model = given.Holder(SHAPES)
    return given.sharded(model, **options) if is_sharded else model


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}


def run(model: Any, optimizer: Any, steps: range = range(STEPS), clip: float = 0) -> None:
    given.run(model, optimizer, gradients, steps, clip)


def newton_schulz_in_float32(x: Any, coefficients: Any, steps: int, eps: float) -> Any:
    """torch's iterations without its rounding to bf16."""
    a, b, c = coefficients
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], **options},
        {"params": [(n, p) for n, p in named if p.ndim == 1], "use_muon": False, "lr": 1e-3},
    ]


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["Muon", "Muon bfloat16", "OrthogonalSGD"])
@pytest.mark.parametrize("clip", [0, 0.5])
def test_bits_of_an_unsharded_model(kind: str, clip: float) -> None:
    found = []
    kind, _, dtype = kind.partition(" ")
    for sharded in (False, True):
        model = holder(sharded)
        options = {"ns_dtype": dtype} if dtype else {}
        optimizer = getattr(optim, kind)(groups(model, **options), lr=0.02)
        run(model, optimizer, clip=clip)
        found.append(everything(model, optimizer))
    assert set(found[0]) >= {"stack momentum_buffer", "bias exp_avg_sq", "matrix step"}
    assert "matrix exp_avg_sq" not in found[0]
    assert_bits(*found)


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "both bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(nesterov=False, momentum=0.8, weight_decay=0.0, ns_steps=6),
        dict(adjust_lr_fn="match_rms_adamw", ns_coefficients=(2.0, -1.5, 0.5), eps=1e-3),
    ],
)
def test_as_torch(options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch iterates in bf16: each update differs by a few units of 2^-8 of its largest element.

    If both iterate in bf16, they round at the same places, nearly always to the same values.
    """
    lr = 0.02
    if dtype == "float32":
        patched = "torch.optim._muon._zeropower_via_newtonschulz"
        monkeypatch.setattr(patched, newton_schulz_in_float32)
    model = holder(True)
    both = dtype == "both bfloat16"
    ours = optim.Muon(groups(model, **options), lr=lr, ns_dtype="bfloat16" if both else "float32")
    named = {
        n: torch.nn.Parameter(torch.from_numpy(getattr(holder(False), n).detach().numpy().copy()))
        for n in SHAPES
    }
    theirs = torch.optim.Muon([named[n] for n in MATRICES], lr=lr, **options)
    slices = [torch.nn.Parameter(named["stack"].detach()[i].clone()) for i in range(3)]
    theirs.add_param_group({"params": slices})
    for step in range(STEPS):
        for name, g in gradients(step).items():
            named[name].grad = torch.from_numpy(g)
        for i, p in enumerate(slices):
            p.grad = named["stack"].grad[i]
        theirs.step()
    run(model, ours)
    found = everything(model, ours)
    adamw = options.get("adjust_lr_fn") == "match_rms_adamw"
    for name in (*MATRICES, "stack"):
        stack = name == "stack"
        want = torch.stack(slices) if stack else named[name]
        scale = (0.2 * max(want.shape[-2:]) ** 0.5) if adamw else 1.6
        error = np.abs(found[name] - want.detach().numpy()).max()
        near = {"float32": 2e-5, "bfloat16": 8 / 256, "both bfloat16": 1 / 512}[dtype]
        assert error <= lr * scale * STEPS * near, (name, error)
        states = [theirs.state[p]["momentum_buffer"] for p in (slices if stack else [want])]
        want = torch.stack(states) if stack else states[0]
        assert np.allclose(found[f"{name} momentum_buffer"], want.numpy(), 1e-6, 1e-7), name


@pytest.mark.ranks([2, 3])
def test_two_optimizers_step_as_one() -> None:
    model, other = holder(True), holder(True)
    one = optim.Muon(groups(model), lr=0.02)
    matrices, rest = groups(other)
    muon = optim.Muon(matrices["params"], lr=0.02)
    adamw = optim.AdamW(rest["params"], lr=1e-3)

    class Both:
        def step(self) -> None:
            muon.step()
            adamw.step()

        def zero_grad(self) -> None:
            muon.zero_grad()

    run(model, one)
    run(other, Both())
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert np.array_equal(fsdpc.full_tensor(p).numpy(), fsdpc.full_tensor(q).numpy()), name


@pytest.mark.ranks([1, 3])
def test_resumes_from_a_state_dict() -> None:
    model = holder(True)
    optimizer = optim.Muon(groups(model, momentum=0.9), lr=0.02)
    run(model, optimizer, range(2))
    kept = {n: fsdpc.full_tensor(p).numpy().copy() for n, p in model.named_parameters()}
    state = optimizer.state_dict()
    again = holder(False)
    for name, p in again.named_parameters():
        with fsdpc.no_grad():
            p.copy_(fsdpc.tensor(kept[name]))
    fresh = optim.Muon(groups(again), lr=0.5)
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["momentum"] == 0.9
    run(again, fresh, range(2, STEPS))
    run(model, optimizer, range(2, STEPS))
    assert_bits(everything(model, optimizer), everything(again, fresh))


@pytest.mark.ranks([1, 3])
def test_parameters_that_are_added_later() -> None:
    """States get longer and keep what they held, unless tensors are on them."""
    found = []
    for sharded in (False, True):
        model = holder(sharded)
        optimizer = optim.Muon([model.matrix, model.stack], lr=0.02)
        run(model, optimizer, range(2))
        if not sharded:
            model.zero_grad()  # of those that the optimizer has not yet; a unit drops all at once
        view = optimizer.state_views(model.stack)
        optimizer.add_param_group({"params": [model.wide, model.row]})
        optimizer.add_param_group({"params": [model.bias], "use_muon": False})
        if sharded:
            with pytest.raises(RuntimeError, match="'wide' of unit .* tensors on the optimizer's"):
                run(model, optimizer, range(2, 3))
            optimizer.zero_grad()
        del view
        run(model, optimizer, range(2, STEPS))
        found.append(everything(model, optimizer))
    assert_bits(*found)


@pytest.mark.ranks([1, 2])
def test_frozen_parameters_keep_still() -> None:
    model = holder(True)
    model.wide.requires_grad_(False)
    optimizer = optim.Muon(groups(model), lr=0.02)
    before = fsdpc.full_tensor(model.wide).numpy().copy()
    run(model, optimizer)
    assert np.array_equal(before, fsdpc.full_tensor(model.wide).numpy())
    assert optimizer.step_count(model.wide) == 0 and optimizer.step_count(model.matrix) == STEPS


@pytest.mark.ranks(2)
def test_nonfinite_gradients_reach_one_matrix() -> None:
    model = holder(True)
    optimizer = optim.Muon(groups(model), lr=0.02)
    held = gradients(0)
    held["wide"][3, 3] = np.nan
    model({n: fsdpc.tensor(g) for n, g in held.items()}).backward()
    optimizer.step()
    assert np.isnan(fsdpc.full_tensor(model.wide).numpy()).all()
    assert np.isfinite(fsdpc.full_tensor(model.matrix).numpy()).all()


def test_bad_input_is_named() -> None:
    model = holder(False)
    with pytest.raises(ValueError, match=r"group 0 has 'bias' \(30,\): give those in a group with"):
        optim.Muon(model.named_parameters())
    with pytest.raises(ValueError, match=r"group 0 has number 3 of group 0 \(30,\)"):
        optim.Muon(model.parameters())
    with pytest.raises(ValueError, match="group 1 has unknown options .'momentum'"):
        first, second = groups(model)
        optim.Muon([first, {**second, "momentum": 0.5}])
    for options, message in (
        (dict(ns_steps=2.5), "ns_steps is a whole number"),
        (dict(ns_steps=0), "ns_steps is out of range: 0"),
        (dict(ns_coefficients=(1.0, 2.0)), "three numbers"),
        (dict(adjust_lr_fn="other"), "adjust_lr_fn is one of"),
        (dict(ns_dtype="float16"), r"ns_dtype is one of .*got 'float16'"),
        (dict(momentum=-1), "momentum is out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            optim.Muon([model.matrix], **options)
    with pytest.raises(TypeError, match=r"Holder has no blocks\(\)"):
        optim.muon_groups(model)


@pytest.mark.ranks(1)
def test_offloaded_states_are_refused(tmp_path: Path) -> None:
    model = holder(True, offload_policy=fsdpc.OffloadPolicy(optimizer="disk", path=tmp_path))
    optimizer = optim.Muon(groups(model), lr=0.02)
    before = fsdpc.full_tensor(model.matrix).numpy().copy()
    with pytest.raises(NotImplementedError, match="parameter 'matrix' of unit .* are offloaded"):
        run(model, optimizer)
    assert np.array_equal(before, fsdpc.full_tensor(model.matrix).numpy())


@pytest.mark.ranks(4, hosts=2)
def test_bits_on_several_hosts() -> None:
    test_bits_of_an_unsharded_model("Muon", 0)
