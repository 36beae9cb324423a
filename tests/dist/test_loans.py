"""Reduce buffers that lend a head the memory of its weight's gradient, from forward to backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import functional as F
from fsdpc import nn

pytestmark = pytest.mark.usefixtures("no_engine_threads")  # launch() forks

WORDS, WIDTH, TOKENS, CHUNK = 256, 16, 24, 8
LENT = WORDS * WIDTH * 4
BF16 = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WORDS, bias=False).weight

    def forward(self, x: Any, y: Any) -> Any:
        return F.linear_cross_entropy(x, self.weight, y, chunk_rows=CHUNK)


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 64 * WIDTH) for _ in range(2))
        self.head = Loss()
        self.fails = False
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Any, y: Any, uses: str = "head") -> Any:
        x = self.embedding(ids)
        if self.fails:
            x.register_hook(fail)
        for layer in self.layers:
            x = layer(x)[:, :WIDTH]
        if uses == "none":
            return (x * x).mean()
        loss = self.head(x, y)
        return loss + (self.embedding.weight ** 2).mean() if uses == "weight too" else loss


def fail(gradient: Any) -> None:
    raise ArithmeticError("in backward")


def batch(step: int) -> tuple[Any, Any]:
    rng = np.random.default_rng([step, fsdpc.rank()])
    x, y = rng.integers(0, WORDS, (2, TOKENS))
    return fsdpc.tensor(x), fsdpc.tensor(y)


def build(where: str, **options: Any) -> Any:
    """With the head in the root, tied to its embedding, or in a unit of its own."""
    fsdpc.manual_seed(5)
    model = Model(tied=where == "tied")
    policy = options.pop("mp_policy", fsdpc.MixedPrecisionPolicy())
    for module in [*model.layers, *([model.head] if where == "unit" else [])]:
        fsdpc.fully_shard(module, mp_policy=policy, **options)
    return fsdpc.fully_shard(model, mp_policy=policy, **options)


def held() -> int:
    return fsdpc.memory_stats()["activation_bytes"]


def gradients(model: Any) -> dict[str, np.ndarray | None]:
    """The full gradients by name."""
    full = {name: fsdpc.full_grad(p) for name, p in model.named_parameters()}
    return {name: None if g is None else g.numpy().copy() for name, g in full.items()}


# ---- What may happen between a forward and its backward -----------------------------------------


def plain(model: Any) -> None:
    model(*batch(0)).backward()


def accumulated(model: Any) -> None:
    for step in range(3):
        model(*batch(step)).backward()


def retained(model: Any) -> None:
    loss = model(*batch(0))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def two_in_order(model: Any) -> None:
    losses = [model(*batch(step)) for step in range(2)]
    for loss in losses:
        loss.backward()


def two_reversed(model: Any) -> None:
    losses = [model(*batch(step)) for step in range(2)]
    for loss in reversed(losses):
        loss.backward()


def two_at_once(model: Any) -> None:
    (model(*batch(0)) + 2.0 * model(*batch(1))).backward()


def dropped_on_one_rank(model: Any) -> None:
    loss = model(*batch(0))
    if fsdpc.rank() == 0:
        del loss
    model(*batch(1)).backward()
    model(*batch(2)).backward()


def another_model(model: Any) -> None:
    other = build("unit")
    loss, others = model(*batch(0)), other(*batch(1))
    others.backward()
    loss.backward()


def no_sync(model: Any) -> None:
    with model.no_sync():
        for step in range(2):
            model(*batch(step)).backward()
    model(*batch(2)).backward()


def left_open(model: Any) -> None:
    """Another backward leaves the buffer open around the loan, and it is posted later."""
    loss = model(*batch(0))
    with model.no_sync():
        model(*batch(1), "none").backward()
    loss.backward()


def others_first(model: Any) -> None:
    """Units without the head's fill the lent buffer, and reduce it."""
    loss = model(*batch(0))
    for step in range(1, 4):
        model(*batch(step), "none").backward()
    loss.backward()


def failed(model: Any) -> None:
    model.fails = True
    kept = model(*batch(0))
    with pytest.raises(ArithmeticError):
        model(*batch(1)).backward()
    with pytest.raises(ArithmeticError):
        kept.backward()
    model.fails = False
    model.zero_grad()
    model(*batch(2)).backward()


def zeroed_between(model: Any) -> None:
    model(*batch(0)).backward()
    loss = model(*batch(1))
    model.zero_grad()
    loss.backward()


def zeroed_while_open(model: Any) -> None:
    loss = model(*batch(0))
    with model.no_sync():
        model(*batch(1), "none").backward()
    model.zero_grad()
    loss.backward()


def hooked_since(model: Any) -> None:
    loss, kept = model(*batch(0)), []
    hook = model.head.weight.register_hook(kept.append)
    loss.backward()
    hook.remove()
    model(*batch(1)).backward()
    assert np.isfinite(kept[0].numpy()).all()


def frozen_since(model: Any) -> None:
    loss = model(*batch(0))
    model.head.weight.requires_grad = False
    loss.backward()
    model.head.weight.requires_grad = True


def evaluated_between(model: Any) -> None:
    loss = model(*batch(0))
    with fsdpc.no_grad():
        model(*batch(1))
    loss.backward()


def used_elsewhere(model: Any) -> None:
    for step in range(2):
        model(*batch(step), "weight too").backward()


def reductions_left(model: Any) -> None:
    """They may read the buffer still."""
    model.set_is_last_backward(False)
    model(*batch(0)).backward()
    model.set_is_last_backward(True)
    model(*batch(1)).backward()


CASES = [
    plain, accumulated, retained, two_in_order, two_reversed, two_at_once, dropped_on_one_rank,
    another_model, no_sync, left_open, others_first, failed, zeroed_between, zeroed_while_open,
    hooked_since, frozen_since, evaluated_between, used_elsewhere, reductions_left,
]  # fmt: skip


def compare(case: Callable[[Any], None], where: str, **options: Any) -> None:
    """With loans, and without: rank-dependent units have none. Gradients have the same bits.

    Except that such a unit reduces once in a backward that uses it twice.
    """
    found = []
    before = held()
    for borrows in (True, False):
        model = build(where, **options)
        if not borrows:
            model.head.weight._unit.rank_dependent = True
        case(model)
        found.append(gradients(model))
        model.zero_grad()
        model(*batch(9)).backward()  # the engine is as before
        found[-1].update({f"{name} after": g for name, g in gradients(model).items()})
        del model
    tolerance = 1e-5 if case is two_at_once else 0
    for name, gradient in found[0].items():
        expected = found[1][name]
        if gradient is None:
            assert expected is None, (case.__name__, where, name)
            continue
        np.testing.assert_allclose(gradient, expected, tolerance, tolerance, err_msg=name)
    assert held() == before


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_bits_are_those_of_private_memory(case: Callable[[Any], None]) -> None:
    for where in ("root", "tied", "unit"):
        compare(case, where)


@pytest.mark.ranks([2, 4])
def test_bits_with_each_strategy() -> None:
    options: list[dict[str, Any]] = [
        {"strategy": name} for name in ("SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD")
    ]
    options += [{"mp_policy": BF16}]
    if fsdpc.world_size() == 4:
        mesh = fsdpc.init_device_mesh("cpu", (2, 2))
        options += [{"mesh": mesh, "strategy": "HYBRID_SHARD"}]
    for each in options:
        for where in ("root", "unit"):
            for case in (plain, accumulated, two_in_order, no_sync, others_first):
                compare(case, where, **each)
