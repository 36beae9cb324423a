"""Reduce buffers that lend a head the memory of its weight's gradient, from forward to backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
NARROW = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16)  # and sums in bf16


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
        self.fails = self.goes_on = False
        if tied:
            self.head.weight = self.embedding.weight

    def blocks(self) -> list[Any]:
        return list(self.layers)

    def forward(self, ids: Any, y: Any, uses: str = "head") -> Any:
        x, y = self.embedding(fsdpc.tensor(ids)), fsdpc.tensor(y)
        if self.fails:
            x.register_hook(fail)
        for layer in self.layers:
            x = layer(x)[:, :WIDTH]
        if uses == "none":
            return (x * x).mean()
        loss = self.head(x, y)
        if self.goes_on:
            return loss + self.layers[0](x).mean()
        return loss + (self.embedding.weight ** 2).mean() if uses == "weight too" else loss


def fail(gradient: Any) -> None:
    raise ArithmeticError("in backward")


def batch(step: int) -> tuple[Any, Any]:
    rng = np.random.default_rng([step, fsdpc.rank()])
    return tuple(rng.integers(0, WORDS, (2, TOKENS)))


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


# ---- Counts -------------------------------------------------------------------------------------


def borrows(model: Any, **kwargs: Any) -> bool:
    """Whether the weight's gradient is in a reduce buffer, once forwards have run."""
    before = held()
    loss = model(*batch(0))
    alive = held() - before
    model.zero_grad()
    del loss
    assert held() == before, "nothing is left once the graph is gone"
    return alive < LENT


@pytest.mark.ranks([1, 2])
def test_which_buffers_lend() -> None:
    shared = fsdpc.world_size() > 1  # a single rank's kernels write into the shard
    for where in ("root", "tied", "unit"):
        model = build(where)
        assert [borrows(model) for _ in range(3)] == [shared] * 3
        first = model(*batch(0))
        assert not borrows(model), "one loan at a time"
        first.backward()
        assert borrows(model) == shared
        hook = model.head.weight.register_hook(lambda gradient: None)
        assert not borrows(model)
        hook.remove()
        with model.no_sync():
            model(*batch(0)).backward()
            assert not borrows(model), "the buffer holds a sum"
        assert not borrows(build(where, mp_policy=NARROW))
        assert borrows(build(where, mp_policy=BF16)) == shared


@pytest.mark.ranks(2)
def test_a_gradient_that_moves_is_private_from_then_on() -> None:
    model = build("root")
    before = held()
    loss = model(*batch(0))
    alive = held() - before
    model(*batch(1)).backward()
    assert held() - before == alive + LENT
    loss.backward()
    del loss
    assert held() == before


def steps(where: str, policies: dict[str, Any], borrows: bool) -> tuple[int, int]:
    """The peak of a model's steps, which the plan knows, and the bytes of its head's gradient."""
    before = held()
    config = fsdpc.models.ModelConfig(vocab_size=30000, dim=16, layers=1, heads=2, inner=16)
    model = fsdpc.models.GPT2(config) if where == "tied" else fsdpc.models.Llama(config)
    for module in [*model.blocks(), *([model.lm_head] if where == "unit" else [])]:
        fsdpc.fully_shard(module, **policies)
    fsdpc.fully_shard(model, **policies)
    if not borrows:
        for p in model.parameters():
            p._unit.rank_dependent = True
    words = np.zeros((1, 500), np.int64)
    planned = fsdpc.memory_plan(model, batch_shape=words.shape).activation
    fsdpc.reset_peak_memory_stats()
    for _ in range(2):
        model(words, words).backward()
        model.zero_grad()
        peak = fsdpc.memory_stats()["activation_peak_bytes"] - before
        assert peak == planned
    return peak, 4 * config.vocab_size * config.dim


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["root", "tied", "unit"])
@pytest.mark.parametrize("name", ["f32", "bf16-f32", "bf16-bf16"])
def test_plans_are_what_steps_use(name: str, where: str) -> None:
    policy = {"mp_policy": {"f32": None, "bf16-f32": BF16, "bf16-bf16": NARROW}[name]}
    without, gradient = steps(where, policy, borrows=False)
    fewer = 0 if name == "bf16-bf16" else gradient
    assert without - steps(where, policy, borrows=True)[0] == fewer


@pytest.mark.ranks(2)
def test_stores_leave_loans_where_they_are(disk: Path) -> None:
    """Saved tensors on a disk: the plan is the run, and a lent gradient is not among them."""
    policy = fsdpc.OffloadPolicy(activations="disk", path=disk)
    files, bits = [], []
    for borrows in (True, False):
        before = fsdpc.memory_stats()
        fsdpc.manual_seed(5)
        model = Model(tied=False)
        model.config = SimpleNamespace(vocab_size=WORDS)
        model.goes_on = True  # a store keeps nothing of the unit that runs last
        for module in (*model.layers, model.head):
            strategy = "FULL_SHARD" if module is model.head else "SHARD_OPTIM"
            fsdpc.fully_shard(module, offload_policy=policy, strategy=strategy)
        fsdpc.fully_shard(model)
        model.head._fsdpc_unit.rank_dependent = not borrows
        plan = fsdpc.memory_plan(model, batch_shape=(TOKENS,))
        fsdpc.reset_peak_memory_stats()
        model(*batch(0)).backward()
        after = fsdpc.memory_stats()
        peak = after["activation_peak_bytes"] - before["activation_bytes"]
        assert (peak, after["disk_file_bytes"]) == (plan.activation, plan.file)
        files.append(plan.file)
        bits.append([g.tobytes() for g in gradients(model).values()])
        del model
    assert files[1] - files[0] == LENT and bits[0] == bits[1]


@pytest.mark.ranks(2)
def test_optimizers_that_use_idle_buffers() -> None:
    """Muon's rows meet in reduce buffers: what they lend moves first."""
    found = []
    for keeps in (True, False):
        model = build("root")
        optimizer = fsdpc.optim.Muon(fsdpc.optim.muon_groups(model), lr=1e-2)
        for step in range(3):
            model(*batch(step)).backward()
            loss = model(*batch(9)) if keeps else None
            optimizer.step()
            optimizer.zero_grad()
            if loss is not None:
                with pytest.raises(RuntimeError, match="changed between forward and backward"):
                    loss.backward()
            del loss
        found.append([fsdpc.full_tensor(p).numpy().tobytes() for p in model.parameters()])
    assert found[0] == found[1]
