"""What codecs leave out: measured by the definition, fed back, limited by a budget, and saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn
from fsdpc.distributed import pretend

from .test_compression import FORMS, gradient, rounded, sent, weight_in_use

SHAPE = (66, 320)
ROWS = 17  # of the padded matrix, on each of four ranks


def build(strategy: str = "FULL_SHARD", lr: float = 0.0, **options: Any) -> Any:
    fsdpc.manual_seed(0)
    mesh = fsdpc.init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
    model = fsdpc.fully_shard(
        nn.Linear(320, 66, bias=False), strategy=strategy, mesh=mesh,
        compression=fsdpc.Compression(**options),
    )  # fmt: skip
    return model, fsdpc.optim.SGD(model.parameters(), lr=lr)


def pair(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    x, dy = gradient(rank)
    return x, np.float32(1 + step) * np.roll(dy, step)


def backward(model: Any, step: int, spoil: float | None = None) -> np.ndarray:
    """The reduced gradient of one backward, which is then zeroed."""
    x, dy = pair(fsdpc.rank(), step)
    if spoil is not None:
        x = np.full_like(x, spoil)
    (model(fsdpc.tensor(x)) * fsdpc.tensor(dy)).sum().backward()
    found: np.ndarray = fsdpc.full_grad(model.weight).numpy().copy()
    return found


def of_hosts(step: int, hosts: int) -> list[np.ndarray]:
    """Each host's exact sums, with the rows that the layout adds."""
    pairs = [pair(rank, step) for rank in range(4)]
    each = [np.pad(dy.T @ x, ((0, 2), (0, 0))) for x, dy in pairs]
    return [sum(part) for part in np.array_split(np.array(each), hosts)]


def relative(missed: list[np.ndarray], meant: list[np.ndarray]) -> float:
    squares = [sum(float((a.astype(np.float64) ** 2).sum()) for a in s) for s in (missed, meant)]
    return float((squares[0] / squares[1]) ** 0.5)


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("feedback", [False, True])
def test_shards_get_what_the_definition_says(hosts: int, form: str, feedback: bool) -> None:
    pretend.on_hosts(hosts)
    fsdpc.init()
    model, optimizer = build(reduce=form, error_feedback=feedback, every=1)
    left = np.zeros((hosts, 4, ROWS, 320), np.float32)  # by sender and receiver
    for step in range(4):
        sums, want = of_hosts(step, hosts), np.empty((68, 320), np.float32)
        missed, meant = [], []
        for rank in range(4):
            own, rows = rank * hosts // 4, slice(rank * ROWS, (rank + 1) * ROWS)
            parts = []
            for host, of_host in enumerate(sums):
                part = of_host[rows]
                if host != own:
                    part = part + left[host, rank]
                    meant.append(part)
                    missed.append(part - sent(part, form))
                    left[host, rank] = missed[-1] if feedback else 0
                    part = sent(part, form)
                parts.append(part)
            want[rows] = sum(parts)
        got = backward(model, step)
        np.testing.assert_allclose(got, want[:66] / 4, rtol=1e-5, atol=2e-5)
        (row,) = fsdpc.compression_report(model).operations
        assert row.operation == "reduce" and row.backwards == step and not row.exact
        assert row.error == pytest.approx(relative(missed, meant), rel=2e-4)
        optimizer.step()
        optimizer.zero_grad()
    fsdpc.shutdown()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_what_is_left_out_comes_later(hosts: int, strategy: str) -> None:
    """Over many steps, sums with feedback drift no further from exact ones than one step's error,
    and all replicas get the same bits."""
    pretend.on_hosts(hosts)
    fsdpc.init()
    drift = {}
    for feedback in (False, True):
        model, _ = build(strategy, reduce="int4", error_feedback=feedback)
        exact, _ = build(strategy)
        total = np.zeros(SHAPE)
        for _ in range(24):
            got = backward(model, 0)
            total += got - backward(exact, 0)
            of_ranks = fsdpc.all_gather(got.reshape(1, -1)).reshape(4, -1)
            assert (of_ranks == of_ranks[0]).all()
            model.zero_grad()
            exact.zero_grad()
        drift[feedback] = np.linalg.norm(total)
    assert drift[True] < 0.15 * drift[False]
    fsdpc.shutdown()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_what_is_not_finite_leaves_residuals_alone(strategy: str) -> None:
    pretend.on_hosts(2)
    fsdpc.init()
    for form in FORMS:
        for spoil in (np.inf, np.nan, 1e38):
            model, _ = build(strategy, reduce=form, error_feedback=True)
            backward(model, 0)
            model.zero_grad()
            before = [r.numpy().copy() for r in model._fsdpc_unit.residuals if r is not None]
            assert before and any(r.any() for r in before)
            found = backward(model, 1, spoil)
            if spoil != 1e38 or form == "fp16":
                assert not np.isfinite(found).all(), (form, spoil)
                after = [r.numpy() for r in model._fsdpc_unit.residuals if r is not None]
                for a, b in zip(before, after, strict=True):
                    np.testing.assert_array_equal(a, b, f"{form} {spoil}")
    fsdpc.shutdown()


@pytest.mark.ranks([1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_gathers_are_measured(form: str) -> None:
    model, optimizer = build(lr=0.1, gather=form, every=2)
    errors = []
    for step in range(5):
        master = fsdpc.full_tensor(model.weight).numpy()
        backward(model, step)
        (row,) = fsdpc.compression_report(model).operations
        errors.append(row.error)
        assert row.operation == "gather" and row.backwards == step // 2 * 2
        if step % 2 == 0:
            missed = master - rounded(master, form)
            assert row.error == pytest.approx(relative([missed], [master]), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert errors[0] == errors[1] != errors[2] == errors[3] != errors[4]
    assert fsdpc.compression_report(model).metrics() == {"compression_error/gather": errors[4]}


@pytest.mark.ranks(4, init=False)
def test_every_0_measures_nothing() -> None:
    pretend.on_hosts(2)
    fsdpc.init()
    model, _ = build(gather="int8", reduce="int8", every=0)
    backward(model, 0)
    assert [row.error for row in fsdpc.compression_report(model).operations] == [None, None]
    fsdpc.shutdown()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_above_the_budget_sums_are_exact(strategy: str, tmp_path: Path) -> None:
    log = tmp_path / f"log{os.getpid()}"
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    pretend.on_hosts(2)
    fsdpc.init()
    model, optimizer = build(strategy, reduce="int4", budget=0.05, every=3, error_feedback=True)
    exact, _ = build(strategy)
    modest, _ = build(strategy, reduce="int8", budget=0.05, every=3)
    pending = 0.0
    for step in range(7):
        want, got = backward(exact, step), backward(model, step)
        if step % 3 == 0:  # measured with the codec
            assert (got != want).any()
            pending = want - got
        elif step % 3 == 1:  # exact, and with what the codec has left out before
            np.testing.assert_allclose(got, want + pending, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert (backward(modest, step) != want).any()
        (row,) = fsdpc.compression_report(model).operations
        assert row.exact and row.error > 0.05 and row.backwards == step // 3 * 3
        assert not fsdpc.compression_report(modest).operations[0].exact
        optimizer.step()
        for m in (model, exact, modest):
            m.zero_grad()
            if m is not model:
                fsdpc.optim.SGD(m.parameters(), lr=0.0).step()
    said = log.read_text().count("have a relative error of")
    assert said == (fsdpc.rank() == 0)
    fsdpc.shutdown()


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("reshard", [False, True])
def test_above_the_budget_parameters_are_exact(reshard: bool) -> None:
    fsdpc.manual_seed(0)
    model = fsdpc.fully_shard(
        nn.Linear(320, 66, bias=False), reshard_after_forward=reshard,
        compression=fsdpc.Compression(gather="int4", budget=0.02, every=3),
    )  # fmt: skip
    optimizer = fsdpc.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        x, dy = pair(fsdpc.rank(), step)
        master = fsdpc.full_tensor(model.weight).numpy()
        measured = step % 3 == 0
        want = rounded(master, "int4") if measured else master
        np.testing.assert_array_equal(weight_in_use(model), want, str(step))
        (model(fsdpc.tensor(x)) * fsdpc.tensor(dy)).sum().backward()
        assert fsdpc.compression_report(model).operations[0].exact
        again = rounded(master, "int4") if (step + 1) % 3 == 0 else master
        np.testing.assert_array_equal(weight_in_use(model), again, str(step))
        if step % 2:
            optimizer.step()
        else:  # frozen masters: the codec of the next step changes nevertheless
            fsdpc.optim.SGD(model.parameters(), lr=0.0).step()
        optimizer.zero_grad()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_residuals_are_planned(hosts: int, strategy: str) -> None:
    pretend.on_hosts(hosts)
    fsdpc.init()
    for feedback in (False, True):
        fsdpc.reset_peak_memory_stats()
        before = fsdpc.memory_stats()["state_bytes"]
        model, _ = build(strategy, reduce="int8", error_feedback=feedback)
        backward(model, 0)
        held = fsdpc.memory_stats()["state_peak_bytes"] - before
        assert held == fsdpc.memory_plan(model, optimizer="sgd", strategy=strategy).state
        assert (held > 0) is feedback
        del model
    fsdpc.shutdown()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_resumed_runs_go_on_with_residuals(strategy: str, tmp_path: Path) -> None:
    pretend.on_hosts(2)
    fsdpc.init()
    options: dict[str, Any] = {"reduce": "int4", "error_feedback": True}
    model, optimizer = build(strategy, lr=0.1, **options)

    def steps(model: Any, optimizer: Any, first: int) -> np.ndarray:
        for step in range(first, first + 2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        found: np.ndarray = fsdpc.full_tensor(model.weight).numpy().copy()
        return found

    steps(model, optimizer, 0)
    fsdpc.checkpoint.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    fsdpc.checkpoint.save(tmp_path / "weights", {"model": model})
    want = steps(model, optimizer, 2)
    again, other = build(strategy, lr=0.1, **options)
    fsdpc.checkpoint.load(tmp_path / "saved", {"model": again, "optimizer": other})
    np.testing.assert_array_equal(steps(again, other, 2), want)
    fsdpc.checkpoint.load(tmp_path / "weights", {"model": again})
    zeroed, other = build(strategy, lr=0.1)
    fsdpc.checkpoint.load(tmp_path / "saved", {"model": zeroed, "optimizer": other})
    assert (steps(zeroed, other, 2) != want).any()
    fsdpc.shutdown()
    pretend.on_hosts(4)  # other hosts begin with zeros
    fsdpc.init()
    fresh, other = build(strategy, lr=0.1, **options)
    report = fsdpc.checkpoint.load(tmp_path / "saved", {"model": fresh, "optimizer": other})
    assert report.zeroed
    assert not any(r.numpy().any() for r in fresh._fsdpc_unit.residuals if r is not None)
    fsdpc.shutdown()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="error_feedback=True keeps what reductions lose"):
        fsdpc.Compression(gather="int8", error_feedback=True)
    with pytest.raises(ValueError, match=r"budget=1.5 with every=50: a budget is a relative error"):
        fsdpc.Compression(gather="int8", budget=1.5)
    with pytest.raises(ValueError, match="budget=0.1 with every=0"):
        fsdpc.Compression(gather="int8", budget=0.1, every=0)
    with pytest.raises(ValueError, match="every=-1 must be a number of backwards, or 0"):
        fsdpc.Compression(gather="int8", every=-1)
    whole = fsdpc.Compression(reduce="int4", error_feedback=True, budget=0.2, every=100)
    assert str(whole) == "reduce=int4,error_feedback=yes,budget=0.2,every=100"
    assert fsdpc.Compression.parse(str(whole)) == whole
    for text in ("reduce=int4,error_feedback=maybe", "reduce=int4,budget=x"):
        with pytest.raises(ValueError, match="error_feedback=yes, budget=NUMBER or every=B"):
            fsdpc.Compression.parse(text)
    assert str(fsdpc.compression_report(nn.Linear(2, 2))) == "no unit is compressed"
