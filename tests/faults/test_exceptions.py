"""Exceptions in user code: the next step is right, and no rank waits for one that raised."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

import fsdpc
from fsdpc import PeerError
from fsdpc.launching.launcher import LaunchError, launch

from .common import SOON_S, Net, batch, build, full_bytes, quiet, step


class Oops(Exception):
    pass


def stop_at(place: str) -> Callable[[str], None]:
    def say(where: str) -> None:
        if where == place:
            raise Oops(place)

    return say


def trained(interrupted: str | None, **options: object) -> list[bytes]:
    """Parameters after four steps; ``interrupted``: the third is tried twice."""
    model = build(**options)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    for seed in range(4):
        if seed == 2 and interrupted:
            with pytest.raises(Oops, match=interrupted):
                step(model, optimizer, stop_at(interrupted), seed=seed)
            optimizer.zero_grad()
        step(model, optimizer, seed=seed)
    return full_bytes(model)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("place", ["in forward", "backward", "in backward", "clip"])
@pytest.mark.ranks([1, 2])
def test_the_next_step_is_as_if_nothing_had_been(place: str, reshard: bool) -> None:
    usual = trained(None, reshard_after_forward=reshard)
    assert trained(place, reshard_after_forward=reshard) == usual


@pytest.mark.ranks(2)
def test_an_exception_that_forward_catches_itself() -> None:
    class Careful(Net):
        def forward(self, x: object) -> object:
            try:
                self.blocks[0](fsdpc.tensor(np.ones((1, 3), np.float32)))
            except ValueError:
                pass
            return super().forward(x)

    fsdpc.manual_seed(1)
    model = Careful()
    for block in model.blocks:
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    for seed in range(4):
        step(model, optimizer, seed=seed)
    assert full_bytes(model) == trained(None)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "place",
    ["forward", "evaluation", "in forward", "reset", "before backward", "in backward"],
)
@pytest.mark.ranks([1, 2])
def test_what_micro_steps_have_is_there_after_it(place: str, reshard: bool) -> None:
    """A forward that fails leaves sums that wait to be reduced; a backward drops them."""

    def fails(model: Net) -> None:
        with pytest.raises(ValueError if place in ("forward", "evaluation") else Oops):
            if place == "evaluation":
                with fsdpc.no_grad():
                    model(fsdpc.ones(1, 3))
            if place == "forward":
                model(fsdpc.ones(1, 3))
            model.say = stop_at(place)
            y = model(batch(9))
            if place == "before backward":
                y.register_hook(lambda _: stop_at(place)(place))
            if place != "reset":
                y.backward()
            model.reset_iter_state()
            raise Oops

    def gradients(exceptions: bool, micro_steps: list[int]) -> list[bytes]:
        model = build(reshard_after_forward=reshard)
        step(model, fsdpc.optim.AdamW(model.parameters(), lr=0.1))
        for number in micro_steps:
            model.set_requires_gradient_sync(number == 3)
            if exceptions:
                fails(model)
                model.say = quiet
            model(batch(number)).backward()
        return [fsdpc.full_grad(p).numpy().tobytes() for p in model.parameters()]

    kept = [3] if place == "in backward" else [1, 2, 3]
    assert gradients(True, [1, 2, 3]) == gradients(False, kept)


@pytest.mark.ranks(2)
def test_reset_iter_state_begins_anew() -> None:
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    model(batch(7))  # a forward whose backward never comes
    model.reset_iter_state()
    for seed in range(4):
        step(model, optimizer, seed=seed)
    assert full_bytes(model) == trained(None)


@pytest.mark.parametrize("place", ["in forward", "in backward"])
@pytest.mark.ranks(2)
def test_one_rank_alone_goes_back(place: str) -> None:
    """It begins the next step while the other waits in this one: both say so."""
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    step(model, optimizer)
    began = time.monotonic()
    with pytest.raises((PeerError, fsdpc.MismatchError), match="rank 0.*rank 1|rank 1.*rank 0"):
        if fsdpc.rank() == 1:
            with pytest.raises(Oops):
                step(model, optimizer, stop_at(place))
        step(model, optimizer)
        step(model, optimizer)
    assert time.monotonic() - began < SOON_S


@pytest.mark.ranks(1, init=False)
def test_the_rank_that_raised_is_named_first() -> None:
    def body() -> None:
        fsdpc.init()
        model = build()
        optimizer = fsdpc.optim.AdamW(model.parameters())
        say = stop_at("in forward") if fsdpc.rank() == 1 else lambda where: None
        step(model, optimizer)
        step(model, optimizer, say)

    began = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(body, 3)
    assert time.monotonic() - began < 4  # well before the launcher's 5 s of patience
    assert caught.value.rank == 1
    assert "Oops: in forward" in caught.value.tracebacks[1]
    for rank in (0, 2):
        assert "PeerError" in caught.value.tracebacks[rank]
        assert "rank 1" in caught.value.tracebacks[rank]


@pytest.mark.ranks([1, 2])
def test_a_graph_older_than_the_weights_is_refused() -> None:
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    step(model, optimizer)
    old = model(batch())
    model(batch()).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="weights of unit 'Net' changed between forward and"):
        old.backward()
    optimizer.zero_grad()
    step(model, optimizer)


@pytest.mark.ranks([1, 2])
def test_a_graph_that_was_used_is_refused() -> None:
    model = build()
    loss = model(batch())
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    step(model, fsdpc.optim.AdamW(model.parameters()))


def checkpointed_gradients(how: str) -> bytes:
    model = build()
    unit = model.blocks[0] if how.endswith("child") else model
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    x = batch()
    x.requires_grad = "leaf" in how
    y = fsdpc.sharding.activation.checkpoint(unit, x) if how.startswith("checkpoint") else unit(x)
    (y * y).sum().backward()
    grads = [fsdpc.full_grad(p) for p in unit.parameters()]
    optimizer.step()
    return b"".join(g.numpy().tobytes() for g in grads) + b"".join(full_bytes(model))


@pytest.mark.parametrize("how", ["", "leaf", "child", "leaf child"])
@pytest.mark.ranks([1, 2])
def test_a_checkpoint_around_a_unit_called_by_itself(how: str) -> None:
    """Recomputation then comes before any boundary: no epoch may begin inside backward."""
    assert checkpointed_gradients(f"checkpoint {how}") == checkpointed_gradients(f"plain {how}")


@pytest.mark.ranks([1, 2])
def test_weights_that_changed_before_a_recomputation_are_refused() -> None:
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    step(model, optimizer)
    old = fsdpc.sharding.activation.checkpoint(model, batch())
    model(batch()).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        old.backward()
    step(model, optimizer)


@pytest.mark.parametrize(
    "how", ["alone", "beside a newer graph", "inside another checkpoint", "with a teacher"]
)
@pytest.mark.ranks([1, 2])
def test_the_older_of_two_checkpointed_forwards_is_refused(how: str) -> None:
    """The newer one has seen today's weights; that must not speak for the older one."""
    model = build()
    checkpoint = fsdpc.sharding.activation.checkpoint
    run: Callable[[object], object] = model
    if how == "inside another checkpoint":
        run = lambda x: checkpoint(model, x)  # noqa: E731
    if how == "with a teacher":

        def run(x: object) -> object:
            with fsdpc.no_grad():
                wanted = model(x)
            return model(x) - wanted.detach() * 0.5

    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    old = checkpoint(run, batch())
    model(batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    new = checkpoint(run, batch())
    loss = old + model(batch()) if how == "beside a newer graph" else old
    with pytest.raises(RuntimeError, match="weights of unit 'Net' changed between forward and"):
        loss.backward()
    model.zero_grad()  # what the newer graph gave before the older one's turn came
    new.backward()
    ours = [fsdpc.full_grad(p).numpy().copy() for p in model.parameters()]
    model.zero_grad()
    model(batch()).backward()
    for got, p in zip(ours, model.parameters(), strict=True):
        assert (got == fsdpc.full_grad(p).numpy()).all()
    optimizer.step()
