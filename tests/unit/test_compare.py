"""compare(): what it lets pass, what it finds first, and where it says that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import fsdpc
from fsdpc.testing import Side, Tolerance, compare
from fsdpc.testing.compare import _ordered

RNG = np.random.default_rng(5)
BATCHES = [tuple(RNG.normal(size=(6, n)).astype(np.float32) for n in (5, 3)) for _ in range(2)]


class Net(fsdpc.nn.Module):
    """Two layers and an element each of what a model can be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fsdpc.nn.Linear(5, 7)
        self.second = fsdpc.nn.Linear(7, 3)

    def forward(self, x: Any, y: Any) -> Any:
        error = self.second(self.first(x).tanh()) - y
        return (error * error).mean()


class TorchNet(torch.nn.Module):
    def __init__(self, source: Net) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
        state = {k: torch.tensor(v.numpy()) for k, v in source.state_dict().items()}
        self.load_state_dict(state)

    def forward(self, x: Any, y: Any) -> Any:
        return ((self.second(self.first(x).tanh()) - y) ** 2).mean()


def native(sharded: bool = False, **policy: Any) -> Net:
    fsdpc.manual_seed(3)
    net = Net()
    if sharded:
        policy_object = fsdpc.MixedPrecisionPolicy(**policy)
        fsdpc.fully_shard(net.first, mp_policy=policy_object)
        fsdpc.fully_shard(net, mp_policy=policy_object)
    return net


def with_optimizer(model: Any, **options: Any) -> Side:
    kind = torch.optim.AdamW if isinstance(model, torch.nn.Module) else fsdpc.optim.AdamW
    return Side(model=model, optimizer=kind(model.parameters(), lr=1e-2, **options))


NEAR = Tolerance(rtol=1e-5, scale=1e-6)


def test_equal_models_have_no_difference() -> None:
    assert compare(with_optimizer(native()), with_optimizer(native()), BATCHES, 5) is None
    assert compare(native(), native(), BATCHES, 2, max_norm=0.1) is None


@pytest.mark.ranks([1, 2, 4])
def test_sharded_beside_unsharded_and_torch() -> None:
    """All ranks have the same batch: the mean of powers of two of equal gradients is exact."""
    sharded, plain = with_optimizer(native(sharded=True)), with_optimizer(native())
    assert compare(sharded, plain, BATCHES, 4, max_norm=0.1) is None
    theirs = with_optimizer(TorchNet(native()))
    ours = with_optimizer(native(sharded=True))
    assert compare(ours, theirs, BATCHES, 4, tolerance=NEAR, max_norm=0.1) is None


def test_torch_beside_torch() -> None:
    pair = [with_optimizer(TorchNet(native())) for _ in range(2)]
    assert compare(*pair, BATCHES, 3, max_norm=0.1) is None


def change(net: Net, name: str, index: tuple[int, ...]) -> float:
    """Move one element to the next number; returns it."""
    p = dict(net.named_parameters())[name]
    values = p.detach().numpy()
    values[index] = np.nextafter(values[index], np.float32(9))
    return float(values[index])


def test_the_first_parameter_that_differs_is_named() -> None:
    a, b = native(), native()
    before = float(a.second.weight.numpy()[1, 4])
    after = change(b, "second.weight", (1, 4))
    change(b, "second.weight", (2, 0))
    found = compare(a, b, BATCHES)
    assert found is not None
    assert (found.step, found.what, found.name) == (0, "parameter", "second.weight")
    assert (found.index, found.a, found.b, found.ulp) == ((1, 4), before, after, 1)
    assert (found.count, found.numel, found.dtype) == (2, 21, "float32")
    shown = repr(found)
    for part in ("step 0", "parameter second.weight[1, 4]", repr(after), "1 ulp of float32"):
        assert part in shown
    assert compare(a, b, BATCHES, 0, tolerance=Tolerance(ulp=1)) is None
    assert compare(a, b, BATCHES, 0, tolerance=Tolerance(ulp=0, rtol=1e-9)) is not None


def test_kinds_are_compared_in_the_order_they_come_to_be() -> None:
    def seen(tolerance: dict[str, Tolerance], **options: Any) -> str:
        a = with_optimizer(native())
        b = with_optimizer(native(), **options)
        change(b.model, "first.bias", (0,))
        found = compare(a, b, BATCHES, 2, tolerance=tolerance, max_norm=0.1)
        return "nothing" if found is None else f"{found.step} {found.what} {found.name}".strip()

    exact = Tolerance()
    assert seen({kind: exact for kind in ("parameter", "state")}) == "0 parameter first.bias"
    assert seen({"loss": Tolerance(rtol=1), "gradient": exact}) == "1 gradient first.weight"
    assert seen({"norm": exact}) == "1 norm"
    assert seen({"state": exact}) == "1 state exp_avg first.weight"
    assert seen({"parameter": Tolerance(rtol=1e-3)}, weight_decay=0.5).startswith("1 parameter")
    assert seen({}) == "nothing"


def test_a_wrong_optimizer_is_found_at_its_first_step() -> None:
    found = compare(
        with_optimizer(native(), betas=(0.8, 0.999)),
        with_optimizer(TorchNet(native())),
        BATCHES,
        3,
        tolerance=dict.fromkeys(("loss", "gradient", "state"), NEAR),
    )
    assert found is not None and (found.step, found.what) == (1, "state exp_avg")


@pytest.mark.ranks(2)
def test_what_one_rank_finds_all_ranks_return() -> None:
    """A loss is each rank's own: rank 1 alone differs, and nobody waits for it in vain."""

    def loss(model: Any, x: Any, y: Any) -> Any:
        return model(x, y) * (2.0 if fsdpc.rank() == 1 else 1.0)

    a, b = native(sharded=True), native()
    found = compare(Side(model=a, loss=loss), b, BATCHES)
    assert found is not None and (found.rank, found.step, found.what) == (1, 1, "loss")
    assert found.a == 2 * found.b


@pytest.mark.ranks(2)
def test_bf16_states_are_counted_in_its_steps() -> None:
    ours = native(sharded=True, param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)
    found = compare(ours, native(), BATCHES, 1, tolerance={"gradient": Tolerance()})
    assert found is not None and found.dtype == "float32" and found.ulp and found.ulp > 1
    loose = Tolerance(scale=0.05)  # 8 bits, sums of a few terms
    assert compare(ours, native(), BATCHES, 2, tolerance={"gradient": loose}) is None


def test_other_names_and_layouts() -> None:
    class Other(fsdpc.nn.Module):
        def __init__(self, source: Net) -> None:
            super().__init__()
            self.w1 = fsdpc.nn.Parameter(source.first.weight.numpy().T.copy())
            self.b1 = fsdpc.nn.Parameter(source.first.bias.numpy().copy())
            self.two = fsdpc.nn.Linear(7, 3)
            self.two.load_state_dict(source.second.state_dict())

        def forward(self, x: Any, y: Any) -> Any:
            error = self.two((x @ self.w1 + self.b1).tanh()) - y
            return (error * error).mean()

    names = {"w1": "first.weight", "b1": "first.bias", "two.weight": "second.weight",
             "two.bias": "second.bias"}  # fmt: skip
    model = Other(native())
    side = Side(
        model=model,
        optimizer=fsdpc.optim.AdamW(model.parameters(), lr=1e-2),
        rename=names.__getitem__,
        arrange=lambda name, array: array.T if name == "first.weight" else array,
    )
    assert compare(side, with_optimizer(native()), BATCHES, 3, tolerance=NEAR) is None


class Frozen(Net):
    def forward(self, x: Any, y: Any) -> Any:
        return self.first(x).mean() * 1.0


def test_missing_gradients_and_states_are_zeros() -> None:
    a, b = Frozen(), Frozen()
    b.load_state_dict(a.state_dict())
    b.second.weight.grad = fsdpc.tensor(np.zeros((3, 7), np.float32))

    def leave(model: Any, x: Any, y: Any) -> Any:
        loss = model(x, y)
        model.second.weight.grad = fsdpc.tensor(np.zeros((3, 7), np.float32))
        return loss

    assert compare(a, Side(model=b, loss=leave), BATCHES) is None


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match=r"only a has \['0.weight'\], only b has \['first.bias'"):
        compare(fsdpc.nn.Sequential(fsdpc.nn.Linear(5, 7, bias=False)), native(), BATCHES)
    with pytest.raises(ValueError, match="one side has an optimizer"):
        compare(with_optimizer(native()), native(), BATCHES)
    with pytest.raises(ValueError, match="ended before step 3 of 4"):
        compare(native(), native(), iter(BATCHES), 4)
    with pytest.raises(ValueError, match="ended before step 1"):
        compare(native(), native(), [])
    with pytest.raises(ValueError, match=r"unknown kinds \['losses'\]"):
        compare(native(), native(), BATCHES, tolerance={"losses": Tolerance()})
    with pytest.raises(TypeError, match="got dict"):
        compare({}, native(), BATCHES)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_steps_count_representable_numbers(dtype: str) -> None:
    def steps(*values: float) -> Sequence[int]:
        return _ordered(np.array(values, np.float64), dtype).tolist()

    bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[dtype]
    step = 2.0**-bits
    assert steps(0.0, -0.0) == [0, 0]
    one, above, below, minus = steps(1.0, 1 + step, 1 - step / 2, -1.0)
    assert (above - one, one - below, minus) == (1, 1, -one)
    assert steps(2.0)[0] - one == 2**bits
    top, infinity = steps(np.inf, 0.0)[0], steps(-np.inf, 0.0)[0]
    assert top == -infinity > one


def test_numbers_that_are_not_finite() -> None:
    def grads(a: float, b: float, **allowed: Any) -> Any:
        nets = [native(), native()]
        for net, value in zip(nets, (a, b), strict=True):
            net.first.bias.detach().numpy()[2] = value
        return compare(*nets, BATCHES, 0, tolerance=Tolerance(**allowed))

    assert grads(math.nan, math.nan) is None
    assert grads(math.inf, math.inf) is None
    found = grads(math.nan, 1.0, ulp=2**60, atol=1e30)
    assert found is not None and found.ulp is None and math.isnan(found.a)
    assert grads(math.inf, 3.4028234e38, ulp=2) is not None
