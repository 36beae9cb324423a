"""Arrays on a disk: the bits of a run in memory, whatever lies there."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import fsdpc
from tests.events import event_counts
from tests.offload import (
    BF16,
    OPTIMIZERS,
    STEPS,
    Block,
    Net,
    batch,
    build,
    everything,
    on_disk,
    optimizer_of,
    train,
)

pytestmark = pytest.mark.usefixtures("no_engine_threads")  # launch() forks

ALL = ("params", "gradients", "masters", "optimizer")
#: What lies on the disk, and how much of it.
PLACES: dict[str, tuple[tuple[str, ...], float]] = {
    "optimizer": (("optimizer",), 1.0),
    "masters": (("masters",), 0.4),
    "masters, optimizer": (("masters", "optimizer"), 1.0),
    "masters, optimizer, 0.4": (("masters", "optimizer"), 0.4),
    "gradients": (("gradients",), 1.0),
    "all": (ALL, 1.0),
    "all, 0.4": (ALL, 0.4),
}


def strategies() -> list[dict[str, Any]]:
    world = fsdpc.world_size()
    found: list[dict[str, Any]] = [
        {"strategy": name} for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    ]
    if world == 4:
        mesh = fsdpc.init_device_mesh("cpu", (2, 2))
        found.append({"strategy": "HYBRID_SHARD", "mesh": mesh})
    return found


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_bits_are_those_of_memory(kind: str, disk: Path) -> None:
    """Every place under one strategy, strategies in turn; all are equal in memory."""
    turn = list(OPTIMIZERS).index(kind)
    param_dtype = BF16 if turn % 2 else None
    model = build(param_dtype)
    optimizer = optimizer_of(model, kind)
    losses, expected = train(model, optimizer), everything(model, optimizer)
    assert expected["step layers.0.layer.weight"] == STEPS
    assert expected["step layers.0.spare.weight"] == STEPS // 2
    options = strategies()
    for i, (name, (classes, fraction)) in enumerate(PLACES.items()):
        policy = on_disk(disk, *classes, fraction=fraction)
        where = options[(turn + i) % len(options)]
        model = build(param_dtype, offload_policy=policy, **where)
        optimizer = optimizer_of(model, kind)
        assert train(model, optimizer) == losses, (name, where)
        assert everything(model, optimizer) == expected, (name, where)
        assert fsdpc.memory_stats()["disk_file_bytes"] > 0


@pytest.mark.ranks([1, 2, 3], init=False)
def test_deterministic_steps_and_scaled_losses(disk: Path) -> None:
    """Micro-steps add up in a memory of their own; a step that overflows leaves files alone."""
    fsdpc.init(deterministic=True)
    expected: list[Any] = []
    for classes in ((), ALL, ("masters", "optimizer")):
        model = build(fsdpc.float16, offload_policy=on_disk(disk, *classes, fraction=0.4))
        optimizer = optimizer_of(model, "AdamW")
        scaler = fsdpc.amp.LossScaler(initial_scale_power=16, loss_scale_window=2, hysteresis=1)
        scales = []
        for step in range(8):
            for micro in range(2):
                scaler.scale(model(batch(step, micro), False)).backward()
            scaler.unscale_(optimizer)
            fsdpc.clip_grad_norm_(model, 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        found = everything(model, optimizer)
        assert 0 < found["step head.weight"] < 8, "some steps overflow, some do not"
        expected = expected or [scales, found]
        assert [scales, found] == expected, classes
    del model, optimizer
    fsdpc.shutdown()


@pytest.mark.ranks(4, hosts=2)
def test_hosts_have_files_of_their_own(disk: Path) -> None:
    model = build()
    optimizer = optimizer_of(model, "AdamW")
    losses, expected = train(model, optimizer), everything(model, optimizer)
    for classes in (ALL, ("masters", "optimizer")):
        model = build(offload_policy=on_disk(disk, *classes, fraction=0.4))
        optimizer = optimizer_of(model, "AdamW")
        assert (train(model, optimizer), everything(model, optimizer)) == (losses, expected)


class Stop(Exception):
    """Of a backward."""


@pytest.mark.ranks(2)
def test_a_backward_that_was_given_up(disk: Path) -> None:
    """Gradients on a disk are those of the next backward alone."""

    def stop(gradient: Any) -> None:
        raise Stop

    found = []
    for classes in ((), ALL, ("masters", "optimizer")):
        model = build(offload_policy=on_disk(disk, *classes, fraction=0.4))
        optimizer = optimizer_of(model, "AdamW")
        train(model, optimizer, range(2))
        loss = model(batch(5, 0), False)
        squared = loss * loss
        squared.register_hook(stop)
        with pytest.raises(Stop):
            squared.backward()
        model.zero_grad()
        train(model, optimizer, range(2, 4))
        found.append(everything(model, optimizer))
    assert found[0] == found[1] == found[2]


def stepped() -> int:
    """Steps that were called, and units that were stepped behind them."""
    return event_counts()["optim"]


def watched(model: Any) -> list[tuple[str, int]]:
    """Where each forward of a block notes how far the last step is."""
    seen: list[tuple[str, int]] = []

    def watch(block: Any, name: str) -> None:
        forward = block.forward
        block.forward = lambda *args: (seen.append((name, stepped())), forward(*args))[1]

    for i, block in enumerate(model.layers):
        watch(block, f"block {i}")
    return seen


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("classes", [("masters", "optimizer"), ("gradients",), ALL])
def test_a_step_goes_on_behind_the_next_forward(classes: tuple[str, ...], disk: Path) -> None:
    """Each unit is stepped when it is gathered, the root first; looking at gradients that are gone
    asks for nothing, looking at values or states for all."""
    policy = on_disk(disk, *classes)
    model = build(offload_policy=policy)
    optimizer = optimizer_of(model, "AdamW")
    weight = model.layers[1].layer.weight
    seen = watched(model)

    def go_on() -> int:
        train(model, optimizer, range(1))
        seen.clear()
        assert weight.grad is None and optimizer.step_count(weight) > 0
        return stepped()

    def run() -> None:
        with fsdpc.no_grad():
            model(batch(0, 0), True)

    before = go_on()
    run()
    assert seen == [("block 0", before + 2), ("block 1", before + 3)]
    run()
    assert stepped() == before + 3
    before = go_on()
    with fsdpc.no_grad():
        model.layers[0](batch(0, 0), True)  # units in front of it are stepped too
    assert stepped() == before + 2
    looks: list[Any] = [
        lambda: fsdpc.full_tensor(weight),
        lambda: optimizer.state(weight),
        lambda: optimizer.state_dict(),
        lambda: optimizer.set_step_count(weight, 7),
        lambda: fsdpc.nn.init.zeros_(weight),
        lambda: model.state_dict(),
        lambda: model.load_state_dict(model.state_dict()),
    ]
    for look in looks:
        before = go_on()
        look()
        assert stepped() == before + 3, look
    before = go_on()
    optimizer.step()
    assert stepped() == before + 4
    train(model, optimizer, range(1))
    held = optimizer.state_views(weight)  # whoever holds memory of a unit sees it stepped at once
    before = go_on()
    assert stepped() == before
    with fsdpc.no_grad():
        model.layers[0](batch(0, 0), True)
    assert stepped() == before + 2
    del held
    gc.collect()
    before = go_on()
    run()
    assert stepped() == before + 3
    _held = weight.local  # and from here on, whenever somebody may write
    before = go_on()
    run()
    assert stepped() == before + 2


@pytest.mark.ranks(2)
def test_ranks_that_step_behind_at_other_times(disk: Path) -> None:
    """One steps all at once, as somebody looks there; the other unit by unit."""
    step_at_other_times(disk)


@pytest.mark.ranks(4, hosts=2)
def test_hosts_that_step_behind_at_other_times(disk: Path) -> None:
    """Rows leave a host behind the step of their unit."""
    step_at_other_times(disk)


def step_at_other_times(disk: Path) -> None:
    found, kept = [], []
    for policy in (None, on_disk(disk, *ALL[2:])):
        model = build(offload_policy=policy)
        optimizer = optimizer_of(model, "AdamW")
        for step in range(6):
            if step % 3 == fsdpc.rank():
                optimizer.state(model.layers[0].layer.weight)
            elif step == 5 and fsdpc.rank() == 0:
                kept.append(model.layers[1].layer.weight.local)  # stepped at once, here alone
            train(model, optimizer, range(step, step + 1))
        found.append(everything(model, optimizer))
    assert found[0] == found[1]


@pytest.mark.ranks(2)
def test_a_step_that_is_refused_leaves_ranks_alike(disk: Path) -> None:
    """Also where it would have gone on behind on one of them alone."""
    model = build(offload_policy=on_disk(disk, *ALL[2:]))
    optimizer = optimizer_of(model, "AdamW")
    train(model, optimizer, range(3))
    model.set_modules_to_forward_prefetch([model.layers[1]])  # but not while its step goes on
    weight = model.layers[1].layer.weight
    model(batch(3, 0), False).backward()
    held = optimizer.state_views(weight) if fsdpc.rank() == 0 else None
    with model.hold(), pytest.raises(RuntimeError, match=r"stepped inside hold\(\)"):
        optimizer.step()
    del held
    gc.collect()
    train(model, optimizer, range(4, 6))


@pytest.mark.ranks(1)
def test_what_ends_a_step_that_goes_on(disk: Path) -> None:
    """Another optimizer's pass through the same file, and the end of the optimizer."""
    found: list[Any] = []
    for policy in (None, on_disk(disk, *ALL[2:])):
        models = [build(offload_policy=policy) for _ in range(2)]
        optimizers = [optimizer_of(model, "AdamW") for model in models]
        counts = []
        for step in range(3):
            for model in models:
                model(batch(step, 0), True).backward()
            for optimizer in optimizers:
                before = stepped()
                optimizer.step()
                optimizer.zero_grad()
                counts.append(stepped() - before)
        before = stepped()
        del optimizer, optimizers[1]
        counts.append(stepped() - before)
        named = models[1].named_parameters()
        values = {n: fsdpc.full_tensor(p).numpy().tobytes() for n, p in named}
        found.append((everything(models[0], optimizers[0]), values))
    assert found[0] == found[1]
    assert counts == [1, 4, 1, 4, 1, 4, 3]


@pytest.mark.ranks([1, 2, 4])
def test_plan_is_the_peak(disk: Path) -> None:
    """To the byte, in chunks of the usual size: of a model that is sharded, and of one to be."""
    for i, (classes, fraction) in enumerate(PLACES.values()):
        policy = fsdpc.OffloadPolicy(**dict.fromkeys(classes, "disk"), path=disk, fraction=fraction)
        before = fsdpc.memory_stats()
        fsdpc.reset_peak_memory_stats()
        model = build(BF16 if i % 2 else None, offload_policy=policy)
        optimizer = optimizer_of(model, "AdamW")
        for step in range(3):
            if step == 1:  # frozen masters have become pages of the parameter buffer
                fsdpc.reset_peak_memory_stats()
            model(batch(step, 0), True).backward()
            optimizer.step()
            optimizer.zero_grad()
        after = fsdpc.memory_stats()
        plan = fsdpc.memory_plan(model)
        for category in ("unsharded", "master", "grad", "state", "reduce", "staging"):
            wanted = getattr(plan, category)
            if category == "unsharded" and fsdpc.rank() > 0:
                wanted = 0
            found = after[f"{category}_peak_bytes"] - before[f"{category}_bytes"]
            assert found == wanted, (classes, category)
        assert plan.file > 0 and plan.unsharded == 0 or "params" not in classes
        unsharded = plan.file - after["disk_file_bytes"]
        assert unsharded == 0 or (fsdpc.rank() > 0 and "params" in classes), (classes, unsharded)
        with fsdpc.deferred_init():
            planned = Net()
        assert plan == fsdpc.memory_plan(
            planned,
            plan=fsdpc.wrap.by_class(Block),
            mp_policy=fsdpc.MixedPrecisionPolicy(param_dtype=BF16 if i % 2 else None),
            offload_policy=policy,
        )
        assert ("staging" in str(plan)) == (plan.staging > 0) and "file" in str(plan)
        fsdpc.barrier()
        del model, optimizer


@pytest.mark.ranks(2)
def test_files_go_with_models(disk: Path) -> None:
    """Two folders, an optimizer over both; what is dropped gives its bytes back."""
    other = disk / "other"
    if fsdpc.rank() == 0:
        other.mkdir()
    fsdpc.barrier()
    model = build()
    optimizer = optimizer_of(model, "AdamW")
    losses, expected = train(model, optimizer), everything(model, optimizer)
    fsdpc.manual_seed(11)
    model = Net()
    policies = [on_disk(disk, "masters", fraction=0.7), on_disk(other, "masters", "optimizer")]
    for block, policy in zip(model.layers, policies, strict=True):
        fsdpc.fully_shard(block, offload_policy=policy)
    fsdpc.fully_shard(model)
    optimizer = optimizer_of(model, "AdamW")
    assert train(model, optimizer) == losses
    assert everything(model, optimizer) == expected
    stats = fsdpc.memory_stats()
    assert stats["disk_file_bytes"] > 0 and stats["disk_written_bytes"] > 0
    del model, optimizer, block
    gc.collect()
    assert fsdpc.memory_stats()["disk_file_bytes"] == 0


@pytest.mark.ranks(2)
def test_two_optimizers_share_a_unit(disk: Path) -> None:
    """Each passes over masters that hold the other's parameters too."""
    found = []
    for policy in (None, on_disk(disk, "masters", "optimizer"), on_disk(disk, "optimizer")):
        model = build(offload_policy=policy)
        named = list(model.named_parameters())
        optimizers = [
            fsdpc.optim.AdamW(named[::2], lr=1e-2),
            fsdpc.optim.SGD(named[1::2], lr=1e-2, momentum=0.9),
        ]
        for step in range(3):
            model(batch(step, 0), True).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        found.append([everything(model, each) for each in optimizers])
    assert found[0] == found[1] == found[2]


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("classes", [("masters",), ("masters", "optimizer")])
def test_rows_that_are_written_between_steps(classes: tuple[str, ...], disk: Path) -> None:
    """Values and states by every way to reach them, then steps on."""

    def run(policy: Any) -> list[Any]:
        model = build(offload_policy=policy)
        optimizer = optimizer_of(model, "AdamW")
        train(model, optimizer, range(2))
        named = dict(model.named_parameters())
        first, second = named["layers.0.layer.weight"], named["layers.1.layer.weight"]
        seen: list[Any] = [{k: v if k == "step" else v.numpy().tobytes()
                            for k, v in optimizer.state(first).items()}]  # fmt: skip
        held = optimizer.state_views(first)
        held["exp_avg"].numpy()[:] *= 0.5
        train(model, optimizer, range(2, 3))
        optimizer.set_step_count(second, 0)
        assert not optimizer.state_views(second, write=False)["exp_avg_sq"].numpy().any()
        train(model, optimizer, range(3, 4))
        first.local.numpy()[:] *= 0.5  # and held from here on
        local = second.local
        for step in range(4, 6):
            train(model, optimizer, range(step, step + 1))
            local.numpy()[:] += 0.25
        seen.append(everything(model, optimizer))
        state = optimizer.state_dict()
        values = model.state_dict()
        train(model, optimizer, range(6, 8))
        model.load_state_dict(values)
        optimizer.load_state_dict(state)
        seen.append(everything(model, optimizer))
        train(model, optimizer, range(6, 8))
        seen.append(everything(model, optimizer))
        return seen

    expected = run(None)
    assert expected[1] == expected[2] != expected[3]
    for fraction in (1.0, 0.5):
        assert run(on_disk(disk, *classes, fraction=fraction)) == expected, fraction
