"""Ranks that do different things: every rank says so within a second, and says what."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

import fsdpc
from fsdpc import MismatchError, PeerError, nn

from .common import SOON_S, Net, batch, build, step

Errors = (MismatchError, PeerError)


def fails_soon(fn: Callable[[], object], *words: str, kinds: tuple[type, ...] = Errors) -> None:
    began = time.monotonic()
    with pytest.raises(kinds) as caught:
        fn()
    assert time.monotonic() - began < SOON_S
    for word in words:
        assert word in str(caught.value), str(caught.value)


def other_name() -> Net:
    model = Net()
    model.last = model.head
    del model.head
    return model


def other_dtype() -> Net:
    model = Net()
    for name in ("weight", "bias"):  # both, so that their order stays
        value = getattr(model.head, name).detach()
        setattr(model.head, name, nn.Parameter(value.to(fsdpc.bfloat16)))
    return model


def other_value() -> Net:
    model = Net()
    model.head.weight.detach().numpy()[:] *= 2
    return model


def frozen() -> Net:
    model = Net()
    model.head.bias.requires_grad = False
    return model


MODELS = {
    "shape": (Net, lambda: Net(9), ["blocks.0.weight (8, 8)", "blocks.0.weight (9, 9)"]),
    "number": (Net, lambda: Net(blocks=3), ["head.weight", "blocks.2.weight"]),
    "name": (Net, other_name, ["head.weight", "last.weight"]),
    "dtype": (Net, other_dtype, ["head.weight (1, 8) float32", "head.weight (1, 8) bfloat16"]),
    "value": (Net, other_value, ["head.weight", "crc32c"]),
    "frozen": (Net, frozen, ["head.bias", "requires_grad=False"]),
    "class": (Net, lambda: nn.Sequential(nn.Linear(8, 8)), ["[Net]", "[Sequential]"]),
}


@pytest.mark.parametrize("what", MODELS)
@pytest.mark.ranks(3)
def test_models(what: str) -> None:
    usual, other, words = MODELS[what]
    fsdpc.manual_seed(1)
    model = other() if fsdpc.rank() == 1 else usual()
    fails_soon(lambda: fsdpc.fully_shard(model), "rank 0", "rank 1", *words, kinds=(MismatchError,))


@pytest.mark.ranks(2)
def test_deferred_models_by_seed_and_recipe() -> None:
    fsdpc.manual_seed(fsdpc.rank())
    with fsdpc.deferred_init():
        model = nn.Linear(4, 4)
    fails_soon(lambda: fsdpc.fully_shard(model), "weight (4, 4)", "deferred")


@pytest.mark.parametrize("option", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.ranks(2)
def test_policies(option: str) -> None:
    policy = fsdpc.MixedPrecisionPolicy(**{option: fsdpc.bfloat16} if fsdpc.rank() else {})
    fails_soon(lambda: build(mp_policy=policy), option, "bfloat16", "rank 1")


@pytest.mark.ranks(2)
def test_resharding() -> None:
    fails_soon(lambda: build(reshard_after_forward=bool(fsdpc.rank())), "reshard_after_forward")


@pytest.mark.ranks(2)
def test_nothing_is_changed_by_a_refusal() -> None:
    """After MismatchError in fully_shard ranks may agree on another model and go on."""
    fsdpc.manual_seed(fsdpc.rank())
    with pytest.raises(MismatchError):
        fsdpc.fully_shard(Net())
    model = build()
    model(batch()).backward()
    assert fsdpc.all_reduce(1) == 2


ones = np.ones(3, np.float32)

# What rank 0 calls, what rank 1 calls, what every rank must read.
CALLS = {
    "kind": (lambda: fsdpc.all_reduce(1.0), fsdpc.barrier, ["all_reduce", "barrier"]),
    "shape": (
        lambda: fsdpc.all_reduce(ones), lambda: fsdpc.all_reduce(np.ones(4, np.float32)),
        ["12 bytes", "16 bytes"],
    ),
    "length": (
        lambda: fsdpc.all_reduce(np.ones(1 << 20)), lambda: fsdpc.all_reduce(np.ones(1 << 10)),
        ["8388608 bytes", "8192 bytes"],
    ),
    "dtype": (
        lambda: fsdpc.all_reduce(ones), lambda: fsdpc.all_reduce(ones.astype(np.float64)),
        ["float32", "float64"],
    ),
    "op": (lambda: fsdpc.all_reduce(1.0), lambda: fsdpc.all_reduce(1.0, "max"), ["all_reduce"]),
    "root": (lambda: fsdpc.broadcast(1.0, 0), lambda: fsdpc.broadcast(1.0, 1), ["root differ"]),
    "empty": (lambda: fsdpc.all_gather(ones[:0]), lambda: fsdpc.all_gather(ones), ["0 bytes"]),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.ranks(2)
def test_calls(what: str) -> None:
    *calls, words = CALLS[what]
    fails_soon(calls[fsdpc.rank()], "rank 0", "rank 1", *words, kinds=(MismatchError,))


def skip_forward(model: nn.Module, optimizer: object) -> None:
    if fsdpc.rank() == 0:
        model(batch())
    fsdpc.clip_grad_norm_(model, 1.0)


def skip_forward_then_barrier(model: nn.Module, optimizer: object) -> None:
    if fsdpc.rank() == 0:
        model(batch())
    fsdpc.barrier()


def skip_backward(model: nn.Module, optimizer: object) -> None:
    loss = model(batch())
    if fsdpc.rank() == 0:
        loss.backward()
    fsdpc.barrier()


def skip_backward_and_step(model: nn.Module, optimizer: fsdpc.optim.AdamW) -> None:
    loss = model(batch())
    if fsdpc.rank() == 0:
        loss.backward()
    optimizer.step()


def skip_step(model: nn.Module, optimizer: fsdpc.optim.AdamW) -> None:
    if fsdpc.rank() == 0:
        optimizer.step()
    model(batch())


def skip_clipping(model: nn.Module, optimizer: fsdpc.optim.AdamW) -> None:
    if fsdpc.rank() == 0:
        fsdpc.clip_grad_norm_(model, 1.0)
    optimizer.step()


def other_unit(model: nn.Module, optimizer: object) -> None:
    (model if fsdpc.rank() else model.blocks[0])(batch())


def no_gradients(model: nn.Module, optimizer: object) -> None:
    with fsdpc.no_grad() if fsdpc.rank() else fsdpc.enable_grad():
        loss = model(batch())
    if fsdpc.rank() == 0:
        loss.backward()
    fsdpc.barrier()


def other_branch(model: nn.Module, optimizer: object) -> None:
    if fsdpc.rank():
        model.blocks._modules.pop("1")
    model(batch()).backward()
    fsdpc.barrier()


def other_order(model: nn.Module, optimizer: object) -> None:
    if fsdpc.rank():
        blocks = model.blocks._modules
        blocks["0"], blocks["1"] = blocks["1"], blocks["0"]
    model(batch()).backward()
    fsdpc.barrier()


ORDERS = [
    skip_forward, skip_forward_then_barrier, skip_backward, skip_backward_and_step, skip_step,
    skip_clipping, other_unit, no_gradients, other_branch, other_order,
]  # fmt: skip


@pytest.mark.parametrize("program", ORDERS, ids=lambda program: program.__name__)
@pytest.mark.ranks(2, timeout=20)
def test_orders(program: Callable[[nn.Module, object], None]) -> None:
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    for _ in range(2):
        model(batch()).backward()
        optimizer.step()
    fsdpc.barrier()
    fails_soon(lambda: program(model, optimizer), "rank 0", "rank 1")


@pytest.mark.ranks(2, timeout=20)
def test_epochs_are_named_by_what_began_them() -> None:
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    model(batch()).backward()
    calls = [optimizer.step, lambda: model(batch())]
    fails_soon(calls[fsdpc.rank()], "rank 0 begins one by an optimizer's step", "by a forward")


@pytest.mark.ranks(2, timeout=20)
def test_two_models_in_another_order() -> None:
    class Teacher(Net):
        pass

    student, teacher = build(), fsdpc.fully_shard(Teacher())
    for model in (student, teacher):
        model(batch())
    order = [student, teacher] if fsdpc.rank() else [teacher, student]
    fails_soon(lambda: [model(batch()) for model in order], "'Net'", "'Teacher'", "same order")


# What each rank sets between two steps, and what the error says on both.
TRAINED = {
    "one rank thaws": (
        (lambda m: None, lambda m: m.blocks[1].requires_grad_(True)),
        ("rank 1 posted", "blocks.1.weight.requires_grad=True"),
    ),
    "one rank freezes": (
        (lambda m: m.blocks[0].weight.requires_grad_(False), lambda m: None),
        ("rank 0 posted", "blocks.0.weight.requires_grad=False"),
    ),
    "both freeze, another one each": (
        (lambda m: m.blocks[0].requires_grad_(False), lambda m: m.head.requires_grad_(False)),
        ("blocks.0.weight.requires_grad=False", "head.weight.requires_grad=False"),
    ),
    "both freeze, one of them more": (
        (
            lambda m: m.blocks[0].weight.requires_grad_(False),
            lambda m: m.blocks[0].requires_grad_(False),
        ),
        ("blocks.0.weight.requires_grad=False", "names, slices, requires_grad"),
    ),
}


@pytest.mark.parametrize("what", TRAINED)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.ranks(2, timeout=20)
def test_what_is_trained(early: bool, what: str) -> None:
    """What was frozen before it was sharded has no place for gradients until it is thawed."""
    fsdpc.manual_seed(1)
    model = Net()
    if early:
        model.blocks[1].requires_grad_(False)
    for block in model.blocks:
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    if not early:
        model.blocks[1].requires_grad_(False)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    changes, words = TRAINED[what]
    step(model, optimizer)
    changes[fsdpc.rank()](model)
    fails_soon(
        lambda: step(model, optimizer), *words, "same requires_grad", kinds=(MismatchError,)
    )


@pytest.mark.ranks(2, timeout=20)
def test_all_ranks_may_change_what_is_trained() -> None:
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    for wanted in (False, True, True, False):
        step(model, optimizer)
        model.blocks[0].requires_grad_(wanted)
    step(model, optimizer)
