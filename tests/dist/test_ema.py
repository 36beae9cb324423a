"""Averages of weights on shards: the bits of one process, swapped in and out, saved and planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint, nn, optim

from ..offload import on_disk
from .common import assert_same, batch, build, parameters, train_in_one_process
from .test_strategies import PRECISIONS, variants

pytestmark = pytest.mark.usefixtures("no_engine_threads")  # launch() forks

STEPS = 4


def lerp(a: np.ndarray, b: np.ndarray, weight: float) -> np.ndarray:
    """As torch.lerp: in fp64, whose product of two floats is exact, but for its last rounding."""
    w = np.float32(weight)
    start, share = (a, w) if w < 0.5 else (b, w - np.float32(1))
    return ((b - a).astype(np.float64) * share + start).astype(np.float32)


def train(model: Any, ema: Any, steps: range = range(STEPS), lr: float = 1e-2) -> list[Any]:
    """Parameters after each step; averages are updated."""
    optimizer = optim.AdamW(model.parameters(), lr=lr)
    found = []
    for step in steps:
        optimizer.zero_grad()
        model(*batch(step, fsdpc.rank())).backward()
        optimizer.step()
        ema.update()
        found.append(parameters(model))
    return found


def averages(ema: Any) -> dict[str, np.ndarray]:
    return {name: t.numpy().copy() for name, t in ema.state_dict()["averages"].items()}


def expected(found: list[Any], decays: list[float]) -> dict[str, np.ndarray]:
    average = found[0]
    for values, decay in zip(found[1:], decays[1:], strict=True):
        average = {n: lerp(average[n], p, 1 - decay) for n, p in values.items()}
    return average


def check_swap(model: Any, ema: Any) -> None:
    """Parameters are averages inside, and have their bits again afterwards."""
    before, inside = parameters(model), averages(ema)
    with ema.swap():
        assert_same(parameters(model), inside)
        loss = float(model(*batch(9, 0)))
    assert_same(parameters(model), before)
    assert_same(averages(ema), inside)
    assert float(model(*batch(9, 0))) != loss


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_strategy(precision: str) -> None:
    """Lerps of the masters, whatever the copy that is computed with."""
    for name, options in variants().items():
        model = build(True, *PRECISIONS[precision], **options)
        ema = fsdpc.EMA(model, 0.9)
        found = train(model, ema)
        assert_same(averages(ema), expected(found, [0.9] * STEPS))
        check_swap(model, ema)
        twin = build(True, *PRECISIONS[precision], **options)
        twin.load_state_dict({n: fsdpc.tensor(v) for n, v in averages(ema).items()})
        with ema.swap():  # the copy that is computed with follows, too
            assert float(model(*batch(8, 0))) == float(twin(*batch(8, 0))), name


@pytest.mark.ranks(4, hosts=2)
def test_on_hosts() -> None:
    for options in variants().values():
        model = build(True, *PRECISIONS["bf16-f32"], **options)
        ema = fsdpc.EMA(model, 0.9)
        found = train(model, ema)
        assert_same(averages(ema), expected(found, [0.9] * STEPS))
        check_swap(model, ema)


@pytest.mark.ranks([1, 2, 4])
def test_as_one_process() -> None:
    """Sharded averages have the bits of the unsharded model's, which has the same gradients."""
    world = fsdpc.world_size()
    model = build(True)
    ema = fsdpc.EMA(model, 0.5)
    train(model, ema, range(1))
    plain, _ = train_in_one_process(world, 1)
    again = fsdpc.EMA(plain, 0.5)
    again.update()
    plain.load_state_dict({n: fsdpc.tensor(v) for n, v in parameters(model).items()})
    again = fsdpc.EMA(plain, 0.5)
    again.update()
    with fsdpc.no_grad():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.local.copy_(p.local * 1.25)
            q.copy_(q * 1.25)
    ema.update()
    again.update()
    assert_same(averages(ema), averages(again))
    check_swap(plain, again)


SCHEDULES: dict[str, Callable[[int], float]] = {
    "warm": lambda n: min(0.999, (1 + n) / (10 + n)),
    "equal": lambda n: n / (n + 1),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_decay_of_the_number_of_updates(name: str) -> None:
    model = build(True)
    ema = fsdpc.EMA(model, SCHEDULES[name])
    found = train(model, ema, range(6))
    result = averages(ema)
    assert_same(result, expected(found, [SCHEDULES[name](n) for n in range(6)]))
    if name == "equal":
        for key, value in result.items():
            mean = np.mean([each[key] for each in found], axis=0)
            np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_every_third_call() -> None:
    model = build(True)
    ema = fsdpc.EMA(model, 0.75, every=3)
    found = train(model, ema, range(7))
    assert ema.num_updates == 2
    assert_same(averages(ema), expected([found[2], found[5]], [0.75] * 2))
    again = fsdpc.EMA(model, 0.75, every=3)
    again.load_state_dict(ema.state_dict())
    again.update()
    assert again.num_updates == 2  # call 8
    again.update()
    assert again.num_updates == 3


@pytest.mark.ranks([1, 3])
def test_in_files(disk: Path) -> None:
    """Masters, states and gradients on a disk, whose steps are pending when an update comes."""
    want: Any = None
    for classes in ((), ("masters",), ("optimizer",), ("masters", "optimizer", "gradients")):
        for fraction in (1.0, 0.4):
            policy = on_disk(disk, *classes, fraction=fraction)
            model = build(True, offload_policy=policy)
            ema = fsdpc.EMA(model, 0.9)
            train(model, ema)
            want = want or averages(ema)
            assert_same(averages(ema), want)
            check_swap(model, ema)
            train(model, ema, range(STEPS, STEPS + 1))


class Mixed(nn.Module):
    """Frozen, wide, and shared parameters, and one that a later phase trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5)
        self.base.requires_grad_(False)
        self.late, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.wide = nn.Parameter(fsdpc.tensor(np.linspace(-1, 1, 7)))
        self.narrow = nn.Parameter(fsdpc.ones(4, dtype=fsdpc.bfloat16), requires_grad=False)

    def forward(self, x: Any) -> Any:
        y = self.head(self.late(self.base(x)).tanh())
        return (y**2).mean() + (self.wide**2).sum().to(fsdpc.float32) * self.narrow.float().mean()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("sharded", [True, False])
def test_frozen_and_wide(sharded: bool) -> None:
    fsdpc.manual_seed(3)
    model: Any = Mixed()
    model.late.requires_grad_(False)
    model = fsdpc.fully_shard(model) if sharded else model
    ema = fsdpc.EMA(model, 0.5)
    optimizer = optim.SGD([p for p in model.parameters() if p.dtype is not fsdpc.bfloat16], lr=0.1)
    x = fsdpc.tensor(np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32))
    found: list[dict[str, np.ndarray]] = []
    for step in range(5):
        model.late.requires_grad_(step in (2, 3))
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        ema.update()
        found.append({n: fsdpc.full_tensor(p).numpy().copy() for n, p in model.named_parameters()})
    result = averages(ema)
    assert set(result) == {"late.weight", "late.bias", "head.weight", "head.bias", "wide"}
    wide = found[0]["wide"]
    for values in found[1:]:
        wide = (values["wide"] - wide) * (0.5 - 1) + values["wide"]
    np.testing.assert_array_equal(result["wide"], wide)
    late = expected([{"w": f["late.weight"]} for f in found[2:]], [0.5] * 3)["w"]
    np.testing.assert_array_equal(result["late.weight"], late)
    with ema.swap():
        inside = {n: fsdpc.full_tensor(p).numpy().copy() for n, p in model.named_parameters()}
    for name, values in inside.items():
        np.testing.assert_array_equal(values, result.get(name, found[-1][name]), name)
    for name, p in model.named_parameters():
        np.testing.assert_array_equal(fsdpc.full_tensor(p).numpy(), found[-1][name], name)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("sharded", [True, False])
def test_what_is_refused(sharded: bool) -> None:
    model = build(sharded)
    for decay in (1.0, -0.1, float("nan"), "0.9"):
        with pytest.raises(ValueError, match=rf"decay must be a number in \[0, 1\), got .?{decay}"):
            fsdpc.EMA(model, decay)
    with pytest.raises(ValueError, match="every=0"):
        fsdpc.EMA(model, every=0)
    narrow = nn.Linear(2, 2).to(fsdpc.bfloat16)
    with pytest.raises(ValueError, match=r"'weight' \(bfloat16\).*MixedPrecisionPolicy"):
        fsdpc.EMA(narrow)
    with pytest.raises(ValueError, match="no trainable parameters"):
        fsdpc.EMA(nn.Linear(2, 2).requires_grad_(False))
    late = fsdpc.EMA(model, lambda n: 2.0 if n else 0.0)
    with pytest.raises(RuntimeError, match="before the first update"), late.swap():
        pass
    late.update()
    with pytest.raises(ValueError, match=r"decay\(1\) must be a number in \[0, 1\), got 2.0"):
        late.update()
    assert late.num_updates == 1
    ema, optimizer = fsdpc.EMA(model, 0.9), optim.AdamW(model.parameters(), lr=1.0)
    train(model, ema, range(2))
    before = parameters(model)
    with pytest.raises(KeyError, match="of the user"), ema.swap():
        for call in (ema.update, ema.state_dict, ema.swap().__enter__):
            with pytest.raises(RuntimeError, match=r"inside swap\(\)"):
                call()
        model(*batch(0, fsdpc.rank())).backward()
        with pytest.raises(RuntimeError, match=r"leave the EMA's swap\(\) before an optimizer"):
            optimizer.step()
        if sharded:
            with pytest.raises(RuntimeError, match="before another"), late.swap():
                pass
        with pytest.raises(RuntimeError, match="a checkpoint of the EMA inside"):
            checkpoint.save("never", {"model": model, "ema": ema})
        raise KeyError("of the user")
    assert_same(parameters(model), before)
    ema.update()
    state = ema.state_dict()
    name = next(iter(state["averages"]))
    for change, text in (
        ({"averages": {**state["averages"], "x": state["averages"][name]}}, r"unexpected \['x'\]"),
        ({"averages": {}}, "missing .*" + name),
        ({"averages": {**state["averages"], name: fsdpc.zeros(2, 2)}}, f"'{name}': .2, 2. given"),
    ):
        with pytest.raises((KeyError, ValueError), match=text):
            ema.load_state_dict({**state, **change})
    with pytest.raises(KeyError, match="lacks .*calls"):
        ema.load_state_dict({})


def _save(folder: Path) -> Any:
    fsdpc.init()
    model = build(True)
    ema = fsdpc.EMA(model, 0.9, every=2)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        model(*batch(step, 0)).backward()  # the same on every rank
        optimizer.step()
        ema.update()
    checkpoint.save(folder, {"model": model, "optimizer": optimizer, "ema": ema})
    return averages(ema)


def _load(folder: Path, other: Path) -> Any:
    fsdpc.init()
    model = build(True)
    ema = fsdpc.EMA(model, 0.9, every=2)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "ema": ema}
    checkpoint.load(folder, state)
    counts = ema.num_updates, ema._calls
    checkpoint.save(other, state)
    fresh = build(True)
    checkpoint.load(folder, {"model": fresh, "optimizer": optim.AdamW(fresh.parameters(), lr=1e-2)})
    checkpoint.load(folder, {"model": fresh, "ema": (again := fsdpc.EMA(fresh))})
    assert_same(averages(again), averages(ema))
    check_swap(model, ema)
    return counts, averages(ema)


def test_saved_on_two_ranks_and_loaded_on_three(tmp_path: Path) -> None:
    saved: Any = fsdpc.launch(_save, 2, tmp_path / "two")[0]
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        results: Any = fsdpc.launch(_load, ranks, tmp_path / "two", folder)
        for counts, loaded in results:
            assert counts == (2, 5)
            assert_same(loaded, saved)
        for file in (tmp_path / "two").glob("*.safetensors"):
            assert file.read_bytes() == (folder / file.name).read_bytes()
    assert "ema" in checkpoint.inspect(tmp_path / "two").states


@pytest.mark.ranks(1)
def test_checkpoints_without(tmp_path: Path) -> None:
    model = build(False)
    checkpoint.save(tmp_path / "a", {"model": model})
    ema = fsdpc.EMA(model)
    with pytest.raises(checkpoint.CheckpointError, match="it has no ema"):
        checkpoint.load(tmp_path / "a", {"model": model, "ema": ema})
    checkpoint.load(tmp_path / "a", {"model": model, "ema": ema}, optional=("ema",))
    with pytest.raises(TypeError, match="'ema' must be an fsdpc.EMA"):
        checkpoint.save(tmp_path / "b", {"model": model, "ema": model})
    with pytest.raises(ValueError, match="averages takes the model too"):
        checkpoint.save(tmp_path / "b", {"ema": ema})


@pytest.mark.ranks([1, 2, 3])
def test_plan_is_exact() -> None:
    for name, options in variants().items():
        before = fsdpc.memory_stats()
        model = build(True, **options)
        optimizer = optim.AdamW(model.parameters(), state_dtype="int8")
        ema = fsdpc.EMA(model)
        for step in range(2):
            model(*batch(step, fsdpc.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
        with ema.swap():
            pass
        after = fsdpc.memory_stats()
        strategy = options.get("strategy")
        plan = fsdpc.memory_plan(
            model, options.get("mesh"), strategy=strategy, state_dtype="int8", ema=True
        )
        for category in ("master", "grad", "state", "staging"):
            used = after[f"{category}_bytes"] - before[f"{category}_bytes"]
            assert used == getattr(plan, category), (name, category)
        del model, optimizer, ema
