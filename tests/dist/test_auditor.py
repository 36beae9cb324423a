"""audit(): right gradients pass in every dtype and mesh; a wrong one, and a replica, are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import MismatchError, _core, nn
from tests.events import event_counts

MESHES = {"FULL_SHARD": (1, 4), "NO_SHARD": (4, 1), "HYBRID_SHARD": (2, 2)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return x + fsdpc.functional.gelu(self.linear(x))


class Net(nn.Module):
    """Two blocks, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied = Block(), Block(), nn.Linear(6, 6, bias=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.tied(self.second(self.first(self.tied(x))))


def build(strategy: str = "FULL_SHARD", **options: Any) -> Net:
    fsdpc.manual_seed(1)
    model, shape = Net(), MESHES[strategy]
    options["mesh"] = fsdpc.init_device_mesh("cpu", shape) if strategy[0] == "H" else None
    for part in (model.first, model.second, model):
        fsdpc.fully_shard(part, strategy=strategy, **options)
    return model


def backward(model: Net, step: int, micro: int = 1) -> None:
    for m in range(micro):
        rng = np.random.default_rng([step, m, fsdpc.rank()])
        x = fsdpc.tensor(rng.normal(size=(5, 6)).astype(np.float32))
        (model(x) ** 2).mean().backward()


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list of what is called of fsdpc.distributed, which the trace does not count."""
    calls: list[str] = []

    def counted(name: str, call: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(name), call(*args, **kwargs))[1]

    for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
        call = getattr(fsdpc.distributed, name)
        monkeypatch.setattr(fsdpc.distributed, name, counted(name, call))
    return calls


@pytest.mark.ranks(4)
def test_right_gradients_pass_in_all_units() -> None:
    half = fsdpc.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="bfloat16")
    for strategy in MESHES:
        for policy, least in ((None, 1e-3), (half, 1e-3)):
            model = build(strategy, mp_policy=policy or fsdpc.MixedPrecisionPolicy())
            if strategy == "NO_SHARD":
                model.set_gradient_divide_factor(3.0)
            auditor, seen = fsdpc.audit(model, every=2), {}
            for step in range(8):
                backward(model, step, micro=2)
                found = auditor.step()
                assert (found is None) == (step % 2 == 0)
                if found is not None:
                    assert found.text == "" and least < found.largest < 1, (strategy, found)
                    seen[found.unit] = found
                model.zero_grad()
            assert len(seen) == 3 and auditor.checks == 4


@pytest.mark.ranks(2)
def test_a_wrong_gradient_is_named() -> None:
    model = build()
    auditor = fsdpc.audit(model, every=1)
    quiet, found = fsdpc.audit(model, every=1, raises=False), []
    for step in range(4):
        backward(model, step)
        if fsdpc.rank() == 1:
            # The first of its three rows, which is row 3.
            model.second.linear.weight.grad.numpy()[0, 2] *= 1.001
        found.append(quiet.step())
        if step == 1:  # the first step checks the first unit
            with pytest.raises(MismatchError) as caught:
                auditor.step()
        else:
            auditor.step()
        model.zero_grad()
    text = str(caught.value)
    assert "unit 'second'" in text and "'second.linear.weight'" in text
    assert "first at [3, 2]" in text and "in 1 of 36 elements; held by rank 1" in text
    assert [each.text for each in found] == ["", text, "", ""]


@pytest.mark.ranks(2)
def test_replicas_that_drifted_are_named() -> None:
    model = build("NO_SHARD")
    auditor = fsdpc.audit(model, every=1, raises=False)
    for step in range(3):
        backward(model, step)
        if step == 2 and fsdpc.rank() == 1:
            rows, *_ = _core.master_shard(
                model.first.linear.bias._unit, model.first.linear.bias._index, True
            )
            rows.numpy()[1] += 1e-6
        found = auditor.step()
        model.zero_grad()
    assert found is not None
    assert "the weights of 'first.linear.bias' differ between replicas, first on ranks 0 and 1" in (
        found.text
    )


@pytest.mark.ranks(2)
def test_between_checks_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts, calls = build(), [], count_calls(monkeypatch)
    auditor = fsdpc.audit(model, every=4)
    for step in range(8):
        _core.trace_reset()
        backward(model, step)
        auditor.step()
        model.zero_grad()
        counts.append((event_counts(), len(calls)))
        calls.clear()
    assert counts[4] == counts[5] == counts[6]
    assert counts[7][1] > 0 == counts[6][1] == counts[6][0]["collective"]


@pytest.mark.ranks(1)
def test_what_cannot_be_audited() -> None:
    with pytest.raises(ValueError, match="Net is not sharded"):
        fsdpc.audit(Net())
    with pytest.raises(ValueError, match="every must be at least 1"):
        fsdpc.audit(build("FULL_SHARD"), every=0)
