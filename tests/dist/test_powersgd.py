"""Sums over replicas in low rank: each step against the same algorithm in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import MismatchError, PowerSGD, _core, nn
from fsdpc.cli import plan, simulate
from fsdpc.distributed import pretend
from tests.faults.common import run

SHAPES = {"a": (66, 320), "b": (50, 40), "c": (4, 3)}  # the last one is too small for any factor
#: fp32 against float64: rounding, times the condition of the rows that become orthonormal
TOLERANCE = 2e-5


class Model(nn.Module):
    """Layers side by side, so that all gradients are known in advance."""

    def __init__(self) -> None:
        super().__init__()
        fsdpc.manual_seed(0)
        for name, (rows, cols) in SHAPES.items():
            setattr(self, name, nn.Linear(cols, rows))

    def forward(self, inputs: Any, grads: Any) -> Any:
        return sum((getattr(self, n)(inputs[n]) * grads[n]).sum() for n in SHAPES)


def data(rank: int, step: int, batch: int = 12) -> tuple[Any, Any]:
    """Inputs, and gradients of outputs: the gradients of weights are products of both."""
    rng = np.random.default_rng((rank, step))
    x, dy = ({n: rng.standard_normal((batch, s[dim]), np.float32) for n, s in SHAPES.items()}
             for dim in (1, 0))  # fmt: skip
    return x, dy


def gradient(name: str, rank: int, step: int, batch: int = 12) -> np.ndarray:
    x, dy = data(rank, step, batch)
    return dy[name].astype(float).T @ x[name].astype(float)


def build(replicas: PowerSGD | None, mesh: tuple[int, int] | None = None, **options: Any) -> Any:
    model = Model()
    options["compression"] = fsdpc.Compression(replicas=replicas)
    if mesh is not None:
        options["mesh"] = fsdpc.init_device_mesh("cpu", mesh)
    else:
        options["strategy"] = "NO_SHARD"
    for name in SHAPES:
        fsdpc.fully_shard(getattr(model, name), **options)
    return fsdpc.fully_shard(model, **options)


def backward(model: Any, step: int, batch: int = 12, scale: float = 1) -> None:
    x, dy = data(fsdpc.rank(), step, batch)
    tensors = [{n: fsdpc.tensor(v) for n, v in each.items()} for each in (x, dy)]
    (model(*tensors) * scale).backward()


def grads(model: Any) -> dict[str, np.ndarray]:
    return {n: fsdpc.full_grad(getattr(model, n).weight).numpy() for n in SHAPES}


# ---- the algorithm ----


def draws(rows: int, cols: int, *key: int) -> np.ndarray:
    """The engine's pseudo-random factor."""
    seed = np.uint64(_core.crc32c(0, np.array(key, np.uint64))) << np.uint64(32)
    at = (np.arange(rows, dtype=np.uint64)[:, None] << np.uint64(32)) + np.arange(
        cols, dtype=np.uint64
    )
    with np.errstate(over="ignore"):
        z = seed + at + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(float) / 2**23 - 1


def orthonormal(x: np.ndarray) -> np.ndarray:
    """The directions of columns, in their order."""
    q, r = np.linalg.qr(x)
    return q * np.sign(np.diag(r))


class Reference:
    """The sums of one matrix, of which all replicas have one."""

    def __init__(self, replicas: PowerSGD, shape: tuple[int, int], unit: int) -> None:
        self.o, self.shape, self.unit = replicas, shape, unit
        self.rank = min(replicas.rank, *shape)
        self.errors: Any = 0.0
        self.q: Any = None
        self.n_sums = 0

    def __call__(self, each: list[np.ndarray]) -> np.ndarray:
        self.n_sums += 1
        sent = self.rank * sum(self.shape) * self.o.min_compression_rate
        if self.n_sums <= self.o.start_step or sent >= np.prod(self.shape):
            return np.mean(each, 0)
        m = np.array(each) + (self.errors if self.o.error_feedback else 0)
        if self.q is None or not self.o.warm_start:
            self.q = draws(self.rank, self.shape[1], self.o.seed, self.unit, 0, self.n_sums, 1).T
        p = orthonormal((m @ orthonormal(self.q)).mean(0))
        self.q = (m.transpose(0, 2, 1) @ p).mean(0)
        found = p @ self.q.T
        self.errors = m - found
        return found


def references(replicas: PowerSGD, shapes: dict[str, tuple[int, int]]) -> dict[str, Reference]:
    return {n: Reference(replicas, s, 1 + i) for i, (n, s) in enumerate(shapes.items())}


def assert_near(got: np.ndarray, want: np.ndarray, what: Any, tolerance: float = TOLERANCE) -> None:
    ratio = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert ratio < tolerance, (what, ratio)


def assert_same_on_all_ranks(values: np.ndarray) -> None:
    of_ranks = fsdpc.all_gather(fsdpc.tensor(values.reshape(1, -1))).numpy()
    assert (of_ranks.reshape(fsdpc.world_size(), -1) == values.reshape(1, -1)).all()


OPTIONS = [
    PowerSGD(rank=2, start_step=0),
    PowerSGD(rank=1, start_step=2, seed=5),
    PowerSGD(rank=4, start_step=0, warm_start=False),
    PowerSGD(rank=5, start_step=1, error_feedback=False, min_compression_rate=1),
    PowerSGD(rank=3, start_step=0, error_feedback=False, warm_start=False, seed=2**40),
]


@pytest.mark.ranks([2, 3, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ddp(options: PowerSGD) -> None:
    model = build(options)
    optimizer = fsdpc.optim.SGD(model.parameters(), lr=0.0)
    wanted = references(options, SHAPES)
    for step in range(6):
        backward(model, step)
        for name, got in grads(model).items():
            want = wanted[name]([gradient(name, r, step) for r in range(fsdpc.world_size())])
            assert_near(got, want, (name, step))
            assert_same_on_all_ranks(got)
            bias = fsdpc.full_grad(getattr(model, name).bias).numpy()
            mean = np.mean([data(r, step)[1][name].sum(0) for r in range(fsdpc.world_size())], 0)
            np.testing.assert_allclose(bias, mean, rtol=1e-5, atol=1e-5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hybrid(hosts: int, options: PowerSGD) -> None:
    """Each rank's rows are a matrix, of which replicas have the sums of their shard group."""
    pretend.on_hosts(hosts)
    fsdpc.init()
    model = build(options, (2, 2))
    optimizer = fsdpc.optim.SGD(model.parameters(), lr=0.0)
    cuts = {n: [(s[0] + 1) // 2, s[0] // 2] for n, s in SHAPES.items()}
    wanted = [references(options, {n: (cuts[n][shard], s[1]) for n, s in SHAPES.items()})
              for shard in range(2)]  # fmt: skip
    for step in range(4):
        backward(model, step)
        for name, got in grads(model).items():
            sums = [gradient(name, r, step) + gradient(name, r + 1, step) for r in (0, 2)]
            parts = [np.split(each, [cuts[name][0]]) for each in sums]
            want = np.concatenate([wanted[s][name]([p[s] for p in parts]) for s in range(2)]) / 2
            assert_near(got, want, (name, step))
            assert_same_on_all_ranks(got)
        optimizer.step()
        optimizer.zero_grad()
    fsdpc.shutdown()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
def test_gradients_of_low_rank_are_exact(mesh: tuple[int, int]) -> None:
    """Also if factors have columns to spare, and if the rank returns after a step without any."""
    model = build(PowerSGD(rank=6, start_step=0, min_compression_rate=0.5), mesh)
    for step in range(3):
        for scale in (0.0, 1.0):
            model.zero_grad()
            backward(model, step, batch=1, scale=scale)  # four ranks: at most rank 4
            for name, got in grads(model).items():
                mean = np.mean([gradient(name, r, step, 1) for r in range(4)], 0)
                ratio = np.linalg.norm(got - scale * mean) / np.linalg.norm(mean)
                assert ratio < TOLERANCE, (name, step, scale, ratio)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
def test_all_sums_begin_exactly(mesh: tuple[int, int]) -> None:
    exact, model = build(None, mesh), build(PowerSGD(rank=1, start_step=3), mesh)
    for step in range(4):
        for each in (exact, model):
            each.zero_grad()
            backward(each, step)
        for want, got in zip(grads(exact).values(), grads(model).values(), strict=True):
            assert (want == got).all() == (step < 3 or got.size < 100)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
@pytest.mark.parametrize("way", ["every", "no_sync", "no_all_reduce"])
def test_micro_steps(way: str, mesh: tuple[int, int]) -> None:
    """Every sum over replicas is one of the algorithm's, and adds to the gradient. If only replicas
    are left out, what shard groups have summed waits for them; DDP has no such sums."""
    options = PowerSGD(rank=3, start_step=0)
    model = build(options, mesh)
    wanted = Reference(options, SHAPES["a"], 1)
    for step in range(3):
        total: Any = 0.0
        for micro in range(2):
            if way == "no_sync":
                model.set_requires_gradient_sync(micro == 1)
            elif way == "no_all_reduce":
                model.set_requires_all_reduce(micro == 1)
            backward(model, 2 * step + micro)
            if mesh != (4, 1):
                continue
            each = [gradient("a", r, 2 * step + micro) for r in range(4)]
            if way == "every":
                total = total + wanted(each)
            elif micro == 1:
                total = wanted([m + gradient("a", r, 2 * step) for r, m in enumerate(each)])
        got = grads(model)
        assert_same_on_all_ranks(got["a"])
        if mesh == (4, 1):
            assert_near(got["a"], total, step)
        model.zero_grad()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_stays_and_passes(bad: float, mesh: tuple[int, int]) -> None:
    """Loss scalers see it, and skip one step only."""
    model = build(PowerSGD(rank=2, start_step=0), mesh)
    for step in range(4):
        model.zero_grad()
        x, dy = data(fsdpc.rank(), step)
        if step == 1 and fsdpc.rank() == 3:
            x["a"][0, 7] = bad
        tensors = [{n: fsdpc.tensor(v) for n, v in each.items()} for each in (x, dy)]
        model(*tensors).backward()
        if step == 1:
            with pytest.raises(FloatingPointError, match="global gradient norm is"):
                fsdpc.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        found = grads(model)
        assert np.isfinite(found["b"]).all()
        assert np.isfinite(found["a"]).all() == (step != 1)
        if step == 1:
            assert not np.isfinite(found["a"][:, 7]).any()
        assert np.isfinite(found["c"]).all()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [fsdpc.float32, fsdpc.bfloat16])
def test_training(dtype: Any) -> None:
    """Errors that are fed back cost less than those that are lost; replicas stay equal."""
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=dtype)
    x = np.random.default_rng(fsdpc.rank()).standard_normal((64, 32)).astype(np.float32)
    w = np.random.default_rng(9).standard_normal((32, 32)).astype(np.float32)
    losses = []
    for options in (None, PowerSGD(rank=4, start_step=5), PowerSGD(rank=1, start_step=5),
                    PowerSGD(rank=1, start_step=5, error_feedback=False)):  # fmt: skip
        fsdpc.manual_seed(0)
        model = fsdpc.fully_shard(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), strategy="NO_SHARD",
            compression=fsdpc.Compression(replicas=options), mp_policy=policy,
        )  # fmt: skip
        optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(100):
            y = model(fsdpc.tensor(x)).to(fsdpc.float32)
            loss = ((y - fsdpc.tensor(x @ w / 6)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(fsdpc.all_reduce(loss.detach()).item()) / 4)
        for p in model.parameters():
            assert_same_on_all_ranks(fsdpc.full_tensor(p).numpy())
    assert losses[0] < losses[1] < 3.5 * losses[0]
    assert losses[1] < losses[2] < 0.7 * losses[3], losses


def all_reduced(model: Any, step: int) -> int:
    """Bytes that sums over replicas cover in a backward, of units with matrices."""
    _core.trace_reset()
    backward(model, step)
    return sum(e[3] for e in _core.trace_events() if e[0] == "all_reduce" and e[1] in (1, 2))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
@pytest.mark.parametrize("rank", [1, 3])
def test_bytes(rank: int, mesh: tuple[int, int]) -> None:
    model = build(PowerSGD(rank=rank, start_step=2), mesh)
    all_reduced(model, 0)
    shapes = [(s[0] // mesh[1], s[1]) for s in (SHAPES["a"], SHAPES["b"])]
    assert all_reduced(model, 1) >= sum(rows * (cols + 1) for rows, cols in shapes) * 4
    for step in (2, 3):
        want = sum(rank * (rows + cols) + rows for rows, cols in shapes) * 4
        assert all_reduced(model, step) == want


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_memory_is_planned(hosts: int, mesh: tuple[int, int]) -> None:
    pretend.on_hosts(hosts)
    fsdpc.init()
    for options in (None, PowerSGD(rank=2, start_step=1)):
        fsdpc.reset_peak_memory_stats()
        before = fsdpc.memory_stats()["reduce_bytes"]
        model = fsdpc.fully_shard(
            nn.Linear(320, 66), mesh=fsdpc.init_device_mesh("cpu", mesh),
            compression=fsdpc.Compression(replicas=options),
        )  # fmt: skip
        for _ in range(3):
            model(fsdpc.ones(2, 320)).sum().backward()
            model.zero_grad()
        peak = fsdpc.memory_stats()["reduce_peak_bytes"] - before
        assert peak == fsdpc.memory_plan(model, mesh).reduce, options
        del model
    fsdpc.shutdown()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
def test_other_sums_have_their_codec(mesh: tuple[int, int]) -> None:
    pretend.on_hosts(2)
    fsdpc.init()
    options = PowerSGD(rank=2, start_step=0)
    for name, param in (("a", "weight"), ("b", "bias"), ("c", "weight")):
        found = []
        for form in (None, "int8"):
            model = fsdpc.fully_shard(
                Model(), mesh=fsdpc.init_device_mesh("cpu", mesh),
                compression=fsdpc.Compression(reduce=form, replicas=options),
            )  # fmt: skip
            backward(model, 0)
            found.append(fsdpc.full_grad(getattr(getattr(model, name), param)).numpy())
            assert_same_on_all_ranks(found[-1])
        error = np.abs(found[1] - found[0]).max() / np.abs(found[0]).max()
        assert (error == 0) == (name == "a")
        assert error < 0.02
    fsdpc.shutdown()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
@pytest.mark.parametrize("place", ["device", "disk"])
def test_flat_groups(place: str, mesh: tuple[int, int], tmp_path: Any) -> None:
    """Several dtypes in a unit, one of which has only a matrix; another matrix is frozen first."""

    def build_with(replicas: PowerSGD | None) -> Any:
        model = Model()
        model.b.weight = nn.Parameter(model.b.weight.detach().to(fsdpc.bfloat16))
        model.c.weight.requires_grad = False
        disk = {} if place == "device" else {"path": tmp_path}
        return fsdpc.fully_shard(
            model, mesh=fsdpc.init_device_mesh("cpu", mesh),
            mp_policy=fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.float32),
            compression=fsdpc.Compression(replicas=replicas),
            offload_policy=fsdpc.OffloadPolicy(gradients=place, **disk),
        )  # fmt: skip

    exact, model = build_with(None), build_with(PowerSGD(rank=8, start_step=0))
    for step in range(4):
        for each in (exact, model):
            each.c.weight.requires_grad = step >= 2
            each.zero_grad()
            for micro in range(2):
                backward(each, 2 * step + micro, batch=1)
        for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
            if p.requires_grad:
                want = fsdpc.full_grad(q).numpy()
                assert_near(fsdpc.full_grad(p).numpy(), want, (name, step), 1e-4)


# ---- checkpoints ----


def trained(options: PowerSGD | None, mesh: tuple[int, int]) -> dict[str, Any]:
    model = build(options, mesh)
    return {"model": model, "optimizer": fsdpc.optim.AdamW(model.parameters(), lr=1e-2)}


def steps(state: dict[str, Any], first: int, last: int) -> np.ndarray:
    for step in range(first, last):
        backward(state["model"], step)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    params = state["model"].parameters()
    return np.concatenate([fsdpc.full_tensor(p).numpy().ravel() for p in params])


def loaded(path: Any, state: dict[str, Any]) -> tuple[list[str], list[int], list[Any]]:
    """What begins at zero, and each unit's count of sums, and its state."""
    report = fsdpc.checkpoint.load(path, state)
    units = [getattr(state["model"], name)._fsdpc_unit for name in SHAPES]
    sums = [int(unit.low_rank_sums.numpy()[0]) for unit in units]
    return report.zeroed, sums, [unit.low_rank_state for unit in units]


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (2, 2)])
def test_resumed_runs_have_the_same_bits(mesh: tuple[int, int], tmp_path: Any) -> None:
    """Including those that begin low rank after the resume."""

    def both(rank: int) -> None:
        fsdpc.init()
        for i, options in enumerate((*OPTIONS, PowerSGD(rank=2, start_step=5))):
            state, again = trained(options, mesh), trained(options, mesh)
            steps(state, 0, 3)
            fsdpc.checkpoint.save(tmp_path / str(i), state, async_=i % 2 == 1)
            want = steps(state, 3, 7)
            steps(again, 7, 7 + i % 2)  # which the load undoes
            assert loaded(tmp_path / str(i), again)[:2] == ([], [3] * 3)
            np.testing.assert_array_equal(steps(again, 3, 7), want, str(options))

    run(both, mesh[0] * mesh[1])


TWO, THREE = PowerSGD(rank=2, start_step=1), PowerSGD(rank=3, start_step=1)


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize(("options", "mesh"), [(TWO, (4, 1)), (TWO, (2, 1)), (THREE, (2, 2))])
@pytest.mark.parametrize("saved", [TWO, None], ids=str)  # None: as before these were saved
def test_other_runs_begin_at_zero(saved: Any, options: Any, mesh: Any, tmp_path: Any) -> None:
    """On another mesh or in another rank; only the count goes on."""

    def save(rank: int) -> None:
        fsdpc.init()
        state = trained(saved, (2, 2))
        steps(state, 0, 3)
        fsdpc.checkpoint.save(tmp_path / "saved", state)

    def load(rank: int) -> None:
        fsdpc.init()
        state = trained(options, mesh)
        steps(state, 0, 2)
        zeroed, sums, states = loaded(tmp_path / "saved", state)
        assert sums == [3 if saved else 0] * 3
        assert {f"{u}.powersgd{options.rank}.residual" for u in (1, 2)} <= set(zeroed)
        assert ("1.sums.residual" in zeroed) is (saved is None)
        assert not any(each.numpy().any() for each in states if each is not None)
        assert np.isfinite(steps(state, 3, 5)).all()

    run(save, 4)
    run(load, mesh[0] * mesh[1])


@pytest.mark.ranks(2)
def test_refused() -> None:
    compression = fsdpc.Compression(replicas=PowerSGD())
    with pytest.raises(NotImplementedError, match="low rank, because its mesh has no replicas"):
        fsdpc.fully_shard(nn.Linear(64, 64), compression=compression)
    with pytest.raises(NotImplementedError, match="because its gradients are float64"):
        wide = nn.Linear(64, 64).to(fsdpc.float64)
        fsdpc.fully_shard(wide, strategy="NO_SHARD", compression=compression)
    model = fsdpc.fully_shard(nn.Linear(64, 64), strategy="NO_SHARD", compression=compression)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(NotImplementedError, match="PowerSGD keeps what its sums leave out"):
        optimizer.step_in_backward()
    model(fsdpc.ones(1, 64)).sum().backward()
    with pytest.raises(RuntimeError, match="has a root: its modules, buffers and sums are"):
        model._fsdpc_unit.low_rank = None
    ranks = fsdpc.Compression(replicas=PowerSGD(rank=1 + fsdpc.rank()))
    with pytest.raises(MismatchError, match=r"replicas=powersgd1.*replicas=powersgd2"):
        fsdpc.fully_shard(nn.Linear(64, 64), strategy="NO_SHARD", compression=ranks)


@pytest.mark.ranks(1)
def test_one_rank_has_no_replicas() -> None:
    model = fsdpc.fully_shard(
        nn.Linear(64, 64), compression=fsdpc.Compression(replicas=PowerSGD(start_step=0))
    )
    model(fsdpc.ones(1, 64)).sum().backward()
    assert (fsdpc.full_grad(model.weight).numpy() == 1).all()


def test_simulate_refuses() -> None:
    cluster = {"hosts": 2, "ranks_per_host": 1, "bandwidth": 1e9, "latency": 0, "flops": 1e9}
    compression = fsdpc.Compression(replicas=PowerSGD())
    with pytest.raises(NotImplementedError, match="no model of what replicas compute for it"):
        fsdpc.simulate(nn.Linear(64, 64), (8, 64), **cluster, compression=compression)
    given = ["--preset", "2M", "--compress", "replicas=powersgd8"]
    assert simulate.main(given) == plan.main([*given, "--memory", "4"]) == 2


def test_bad_input() -> None:
    for wrong in ({"rank": 0}, {"rank": 1.5}, {"start_step": -1}, {"seed": -1},
                  {"min_compression_rate": 0}):  # fmt: skip
        with pytest.raises(ValueError, match=f"PowerSGD\\({next(iter(wrong))}="):
            PowerSGD(**wrong)
    with pytest.raises(ValueError, match="error_feedback=True of codecs keeps"):
        fsdpc.Compression(reduce="int8", error_feedback=True, replicas=PowerSGD())
    with pytest.raises(TypeError, match="replicas must be a PowerSGD, got 'powersgd8'"):
        fsdpc.Compression(replicas="powersgd8")
    for options in OPTIONS:
        compression = fsdpc.Compression(gather="int8", replicas=options)
        assert fsdpc.Compression.parse(str(compression)) == compression
    for text in ("powersgd", "8", "powersgd8:x=1", "powersgd8:warm_start=1", "powersgd8:seed=a"):
        with pytest.raises(ValueError, match=f"replicas='{text}': "):
            fsdpc.Compression.parse(f"replicas={text}")
