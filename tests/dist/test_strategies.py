"""Strategies, meshes, precisions: the same bits at a fixed world size, and exact counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import _core, nn
from fsdpc.distributed import pretend
from fsdpc.launching.forked import Report, run_forked

from .common import CLIP, CONFIG, LR, assert_same, batch, build, parameters, train

pytestmark = pytest.mark.usefixtures("no_engine_threads")  # launch() forks

UNITS = CONFIG.layers + 1
BF16, F32 = fsdpc.bfloat16, fsdpc.float32
PRECISIONS = {"f32": (None, None), "bf16-f32": (BF16, F32), "bf16-bf16": (BF16, BF16)}


def meshes() -> list[tuple[int, int]]:
    """All r x s of this world."""
    n = fsdpc.world_size()
    return [(r, n // r) for r in range(1, n + 1) if n % r == 0]


def variants() -> dict[str, dict[str, Any]]:
    """Options of fully_shard by name, for every strategy and mesh of this world."""
    found: dict[str, dict[str, Any]] = {
        "FULL_SHARD": {"strategy": "FULL_SHARD"},
        "FULL_SHARD True": {"reshard_after_forward": True},
        "FULL_SHARD int": {"reshard_after_forward": fsdpc.world_size()},
        "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
        "SHARD_OPTIM": {"strategy": "SHARD_OPTIM"},
        "NO_SHARD": {"strategy": "NO_SHARD"},
    }
    for r, s in meshes():
        mesh = fsdpc.init_device_mesh("cpu", (r, s))
        if s & (s - 1) == 0:  # its two stages are then the tree over all ranks
            found[f"HYBRID_SHARD {r}x{s}"] = {"mesh": mesh, "strategy": "HYBRID_SHARD"}
            found[f"HYBRID_SHARD_ZERO2 {r}x{s}"] = {"mesh": mesh, "strategy": "HYBRID_SHARD_ZERO2"}
    return found


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_strategies_have_the_same_bits(precision: str) -> None:
    param, reduce = PRECISIONS[precision]
    expected = None
    for name, options in variants().items():
        model = build(True, param, reduce, **options)
        result = train(model, 3, accumulate=2)
        if expected is None:
            expected, values = result, parameters(model)
        assert result == expected, name
        assert_same(parameters(model), values)


class Tied(nn.Module):
    """A weight that is an embedding's and a head's, or is not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(37, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 37, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Any) -> Any:
        return fsdpc.functional.silu(self.head(self.inner(self.embedding(ids)))).mean()


def gradients(tied: bool, synced: str, sharded: bool) -> dict[str, bytes]:
    """What micro-steps add up to; those marked 's' reduce."""
    fsdpc.manual_seed(3)
    model: Any = fsdpc.fully_shard(Tied(tied)) if sharded else Tied(tied)
    for k, mark in enumerate(synced):
        if sharded:
            model.set_requires_gradient_sync(mark == "s")
        ids = np.random.default_rng(k).integers(0, 37, (4, 9))
        model(fsdpc.tensor(ids)).backward()
    return {n: fsdpc.full_grad(p).numpy().tobytes() for n, p in model.named_parameters()}


@pytest.mark.ranks(1)
def test_micro_steps_add_up_as_in_an_unsharded_model() -> None:
    """As docs/design/engine.md says: only the last reduces, or all do and each is used once."""
    for tied, synced in ((0, "s"), (0, "ns"), (0, "nns"), (0, "sss"), (1, "s"), (1, "nns")):
        both = [gradients(bool(tied), synced, sharded) for sharded in (False, True)]
        assert both[0] == both[1], (tied, synced)


def counts() -> Counter[tuple[str, bool]]:
    return Counter((kind, in_backward) for kind, *_, in_backward in _core.trace_events())


@pytest.mark.ranks(4)
def test_counts_of_communication() -> None:
    hsdp = fsdpc.init_device_mesh("cpu", (2, 2))
    expected = {  # gathers forward, backward, reductions, all-reduces
        "FULL_SHARD": ({"strategy": "FULL_SHARD"}, (UNITS, UNITS - 1, UNITS, 0)),
        "True": ({"reshard_after_forward": True}, (UNITS, UNITS - 1, UNITS, 0)),
        "int": ({"reshard_after_forward": 2}, (UNITS, UNITS - 1, UNITS, 0)),
        "all": ({"reshard_after_forward": 4}, (UNITS, UNITS - 1, UNITS, 0)),
        "one": ({"reshard_after_forward": 1}, (UNITS, 0, UNITS, 0)),
        "SHARD_GRAD_OP": ({"strategy": "SHARD_GRAD_OP"}, (UNITS, 0, UNITS, 0)),
        "SHARD_OPTIM": ({"strategy": "SHARD_OPTIM"}, (UNITS, 0, UNITS, 0)),
        "NO_SHARD": ({"strategy": "NO_SHARD"}, (0, 0, UNITS, UNITS)),
        "HYBRID_SHARD": ({"mesh": hsdp}, (UNITS, UNITS - 1, UNITS, UNITS)),
    }
    for name, (options, numbers) in expected.items():
        model = build(True, **options)
        optimizer = fsdpc.optim.AdamW(model.parameters())
        model(*batch(0, fsdpc.rank())).backward()  # recorded
        optimizer.zero_grad()
        for _ in range(3):
            _core.trace_reset()
            model(*batch(0, fsdpc.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen = counts()
            got = tuple(
                seen[key]
                for key in (
                    ("gather", False), ("gather", True), ("reduce", True), ("all_reduce", True)
                )
            )  # fmt: skip
            assert got == numbers, name


@pytest.mark.ranks([2, 4])
def test_unsynchronised_micro_batches_reduce_once() -> None:
    """k backwards under no_sync and one outside: one reduction, of the sum of all."""
    for options in ({}, {"strategy": "SHARD_OPTIM"}, {"strategy": "NO_SHARD"}):
        model = build(True, **options)
        model(*batch(0, fsdpc.rank())).backward()
        model.zero_grad()
        _core.trace_reset()
        with model.no_sync():
            for micro in range(3):
                model(*batch(0, fsdpc.rank(), micro)).backward()
        assert counts()["reduce", True] == 0
        assert all(p.grad is None for p in model.parameters())
        model(*batch(0, fsdpc.rank(), 3)).backward()
        assert counts()["reduce", True] == UNITS
        twin = build(sharded=False)
        for rank in range(fsdpc.world_size()):
            for micro in range(4):
                twin(*batch(0, rank, micro)).backward()
        grads = dict(twin.named_parameters())
        for name, p in model.named_parameters():
            wanted = grads[name].grad.numpy() / fsdpc.world_size()
            np.testing.assert_allclose(
                fsdpc.full_grad(p).numpy(), wanted, rtol=1e-4, atol=1e-6, err_msg=name
            )


@pytest.mark.ranks(4)
def test_postponed_all_reduce() -> None:
    """Reduce-scatters at every micro-step, one all-reduce at the last: the same sum."""
    mesh = fsdpc.init_device_mesh("cpu", (2, 2))
    model, plain = build(True, mesh=mesh), build(True, mesh=mesh)
    for m, postpone in ((model, True), (plain, False)):
        _core.trace_reset()
        for micro in range(3):
            m.set_requires_all_reduce(not postpone or micro == 2)
            m.set_is_last_backward(micro == 2)
            m(*batch(0, fsdpc.rank(), micro)).backward()
        seen = counts()
        assert seen["reduce", True] == 3 * UNITS
        assert seen["all_reduce", True] == (UNITS if postpone else 3 * UNITS)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        np.testing.assert_allclose(
            fsdpc.full_grad(p).numpy(), fsdpc.full_grad(q).numpy(), rtol=1e-5, atol=1e-7,
            err_msg=name,
        )  # fmt: skip


@pytest.mark.ranks([2, 4])
def test_replicas_hold_the_same() -> None:
    for r, s in meshes():
        model = build(True, mesh=fsdpc.init_device_mesh("cpu", (r, s)))
        train(model, 2)
        for name, value in parameters(model).items():
            everyones = fsdpc.all_gather(value)
            assert (everyones == everyones[0]).all(), name


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: fsdpc.optim.AdamW(p, lr=LR),
    "Adam": lambda p: fsdpc.optim.Adam(p, lr=LR, amsgrad=True),
    "SGD": lambda p: fsdpc.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True),
    "Lion": lambda p: fsdpc.optim.Lion(p, lr=LR / 10),
    "bf16 states": lambda p: fsdpc.optim.AdamW(p, lr=LR, state_dtype=fsdpc.bfloat16),
}


def deterministic_run(
    options: dict[str, Any], total: int, precision: str, whole: bool = False
) -> Any:
    """Two steps over the same `total` micro-batches a step, however ranks share them.

    The loss is divided by micro-steps, or left `whole` and the engine divides.
    """
    param, reduce = PRECISIONS[precision]
    options = dict(options)
    make = OPTIMIZERS[options.pop("optimizer", "AdamW")]
    model = build(True, param, reduce, **options)
    optimizer = make(model.parameters())
    ranks = fsdpc.world_size()
    for m in (*model.blocks(), model) if whole else ():
        m.set_gradient_divide_factor(total)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(total // ranks):
            leaf = micro * ranks + fsdpc.rank()
            loss = model(*batch(step, leaf))
            (loss if whole else loss / (total // ranks)).backward()
        norms.append(float(fsdpc.clip_grad_norm_(model, CLIP)))
        optimizer.step()
    crc = 0
    for value in parameters(model).values():
        crc = _core.crc32c(crc, value)
    return tuple(norms), crc


def _run_all(precision: str) -> dict[str, Any]:
    fsdpc.init(deterministic=True)
    options: dict[str, dict[str, Any]] = {
        "FULL_SHARD": {},
        "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
        "SHARD_OPTIM": {"strategy": "SHARD_OPTIM"},
        "NO_SHARD": {"strategy": "NO_SHARD"},
    }
    if fsdpc.world_size() > 1:
        mesh = fsdpc.init_device_mesh("cpu", (fsdpc.world_size() // 2, 2))
        options["HYBRID_SHARD"] = {"mesh": mesh}
    options |= {name: {"optimizer": name} for name in OPTIMIZERS}
    results = {name: deterministic_run(o, 8, precision) for name, o in options.items()}
    fsdpc.shutdown()
    return results


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_deterministic_mode_does_not_see_the_split(precision: str) -> None:
    """1 rank x 8 micro-steps = 2 x 4 = 4 x 2, bitwise, for every strategy."""
    results = [r for n in (1, 2, 4) for r in fsdpc.launch(_run_all, n, precision)]
    first = results[0]
    for per_rank in results:
        for name, result in per_rank.items():
            wanted = first[name] if name in OPTIMIZERS else first["FULL_SHARD"]
            assert result == wanted, name
    assert len({first[name] for name in OPTIMIZERS}) == len(OPTIMIZERS)


def _run_twelve(precision: str) -> dict[str, Any]:
    fsdpc.init(deterministic=True)
    ranks = fsdpc.world_size()
    options: dict[str, dict[str, Any]] = {"FULL_SHARD": {}}
    for name in ("SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD"):
        options[name] = {"strategy": name}
    if ranks % 2 == 0:
        options["HYBRID_SHARD"] = {"mesh": fsdpc.init_device_mesh("cpu", (ranks // 2, 2))}
    results = {name: deterministic_run(o, 12, precision, True) for name, o in options.items()}
    fsdpc.shutdown()
    return results


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_deterministic_mode_does_not_see_splits_other_than_powers_of_two(precision: str) -> None:
    """1 rank x 12 micro-steps = 2 x 6 = 3 x 4 = 4 x 3 = 6 x 2 = 12 x 1, bitwise."""
    worlds = (1, 2, 3, 4, 6, 12) if precision == "bf16-f32" else (1, 2, 3, 4, 6)
    found = {
        result
        for n in worlds
        for per_rank in fsdpc.launch(_run_twelve, n, precision)
        for result in per_rank.values()
    }
    assert len(found) == 1


def _warned(whole: bool, hosts: int, mesh: tuple[int, int] | None) -> int:
    pretend.on_hosts(hosts)
    fsdpc.init(deterministic=True)
    options = {} if mesh is None else {"mesh": fsdpc.init_device_mesh("cpu", mesh)}
    deterministic_run(options, 12, "f32", whole)
    fsdpc.shutdown()
    return 0


DIVIDED = ("are divided by ranks, not by ranks x micro-steps", "leave the loss whole")
APART = ("are summed over shard groups or hosts", "take powers of two")


@pytest.mark.parametrize(
    ("ranks", "whole", "hosts", "mesh", "words"),
    [
        (2, False, 1, None, DIVIDED),
        (2, True, 1, None, ()),
        (3, False, 1, None, ()),  # four micro-steps each, by which dividing is exact
        (6, True, 1, (2, 3), APART),
        (6, True, 1, (3, 2), ()),
        (6, True, 2, None, APART),
        (4, True, 2, None, ()),
    ],
)
def test_rank_0_warns_of_splits_that_show(
    ranks: int, whole: bool, hosts: int, mesh: tuple[int, int] | None, words: tuple[str, ...]
) -> None:
    lines: list[str] = []
    outcome = run_forked(
        lambda: Report("ok", _warned(whole, hosts, mesh)), ranks, lines.append, timeout=300
    )
    assert not outcome.failures, outcome.describe()
    text = "".join(lines)
    warned = "fsdpc rank 0: warning: deterministic mode: gradients of '"
    assert text.count("warning: deterministic mode") == text.count(warned) == bool(words), text
    assert all(each in text for each in words)


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.layer(self.layer(x).tanh()).mean()


def _used_twice(own_unit: bool) -> int:
    fsdpc.init(deterministic=True)
    fsdpc.manual_seed(0)
    model: Any = Twice()
    if own_unit:
        fsdpc.fully_shard(model.layer)
    fsdpc.fully_shard(model)
    for micro in range(4 // fsdpc.world_size()):
        rng = np.random.default_rng(micro * fsdpc.world_size() + fsdpc.rank())
        model(fsdpc.tensor(rng.standard_normal((4, 8)).astype(np.float32))).backward()
    crc = _core.crc32c(0, fsdpc.full_grad(model.layer.weight).numpy() * fsdpc.world_size())
    fsdpc.shutdown()
    return crc


@pytest.mark.parametrize("own_unit", [False, True])
def test_a_unit_that_is_used_twice_is_named(own_unit: bool) -> None:
    lines: list[str] = []
    found = set()
    for ranks in (1, 2, 4):
        outcome = run_forked(lambda: Report("ok", _used_twice(own_unit)), ranks, lines.append)
        assert not outcome.failures, outcome.describe()
        found |= {report.value for report in outcome.reports if report}
    named = "gradients of 'layer' are reduced twice in a backward"
    assert "".join(lines).count(named) == (3 if own_unit else 0), lines
    assert own_unit or len(found) == 1


@pytest.mark.ranks(3, init=False)
def test_what_was_read_between_micro_steps_is_divided_once() -> None:
    """By a factor that is no power of two; and it is added to what was read before."""
    fsdpc.init(deterministic=True)
    found = []
    for looks in (False, True):
        model = build(True)
        for m in (*model.blocks(), model):
            m.set_gradient_divide_factor(12)
        for micro in range(4):
            model(*batch(0, fsdpc.rank(), micro)).backward()
            if looks and micro in (0, 2):
                fsdpc.clip_grad_norm_(model, 1e9)
        found.append([fsdpc.full_grad(p).numpy().copy() for p in model.parameters()])
    for plain, looked in zip(*found, strict=True):
        np.testing.assert_allclose(looked, plain, rtol=1e-5, atol=1e-7)
    fsdpc.shutdown()


@pytest.mark.ranks(2)
def test_bad_strategies_are_refused() -> None:
    layer = fsdpc.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="no strategy 'ZERO9'; there are NO_SHARD"):
        fsdpc.fully_shard(layer, strategy="ZERO9")
    with pytest.raises(ValueError, match="HYBRID_SHARD needs a mesh of two dimensions"):
        fsdpc.fully_shard(layer, strategy="HYBRID_SHARD")
    with pytest.raises(ValueError, match="SHARD_GRAD_OP keeps parameters after forward"):
        fsdpc.fully_shard(layer, strategy="SHARD_GRAD_OP", reshard_after_forward=True)
    with pytest.raises(ValueError, match=r"divides the shard group's 2"):
        fsdpc.fully_shard(layer, reshard_after_forward=3)
    mesh = fsdpc.init_device_mesh("cpu", (2, 1))
    with pytest.raises(ValueError, match="has replicas: use HYBRID_SHARD"):
        fsdpc.fully_shard(layer, strategy="FULL_SHARD", mesh=mesh)


def _leave_early() -> float:
    """Rows of a 2 x 2 mesh part at different times; the split groups outlive shutdown()."""
    fsdpc.init()
    mesh = fsdpc.init_device_mesh("cpu", (2, 2))
    model = build(True, mesh=mesh)
    total = float(model(*batch(0, fsdpc.rank())))
    if fsdpc.rank() < 2:  # the other row ends meanwhile
        for _ in range(200):
            parameters(model)
    fsdpc.shutdown()
    return total


def test_a_rank_that_left_in_order_is_no_death() -> None:
    assert len(fsdpc.launch(_leave_early, 4)) == 4
