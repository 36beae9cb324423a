"""The memory of gradients: what users keep is theirs, and torch has it while there are none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, _device, clip_grad_norm_, fully_shard, optim
from fsdpc.torch._unit import states_of
from tests.torch.common import batch, build, full, loss_of, shard

KEEP: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda g: g,
    "detach": lambda g: g.detach(),
    "data": lambda g: g.data,
    "alias": lambda g: g.view_as(g),
    "view": lambda g: g.to_local().view(-1),
    "rows": lambda g: g.to_local()[:1],
    "array": lambda g: g.detach().to_local().numpy(),
}


def as_list(kept: Any) -> list[float]:
    """What is kept holds now, of this rank's rows."""
    return (kept.detach().to_local() if isinstance(kept, DTensor) else kept).tolist()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("between", ["before forward", "before backward"])
@pytest.mark.parametrize("how", KEEP)
def test_a_gradient_that_is_kept_stays(how: str, between: str) -> None:
    """As in torch, where the next backward makes other gradients."""
    ours, again = shard(build()), shard(build())
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    kept = [KEEP[how](p.grad) for p in ours.parameters() if p.grad is not None]
    before = [as_list(k) for k in kept]
    assert any(any(map(bool, k)) if k and not isinstance(k[0], list) else k for k in before)
    if between == "before forward":
        ours.zero_grad()
    loss = loss_of(ours, batch(1, fsdpc.rank()))
    ours.zero_grad()
    loss.backward()
    assert [as_list(k) for k in kept] == before
    loss_of(again, batch(1, fsdpc.rank())).backward()
    for p, q in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(full(p.grad), full(q.grad))


def fails(model: Any, x: torch.Tensor) -> None:
    """A backward that ends in the middle."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            raise ValueError("on purpose")

    hook = model.blocks[1].register_forward_hook(lambda m, args, y: Fails.apply(y))
    loss = loss_of(model, x)
    hook.remove()
    model.zero_grad()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()


def accumulates(model: Any, x: torch.Tensor) -> None:
    """A backward that is not reduced, dropped before it is."""
    model.set_requires_gradient_sync(False)
    loss_of(model, x).backward()
    model.set_requires_gradient_sync(True)
    model.zero_grad()


def clips(model: Any, x: torch.Tensor) -> None:
    """Clipping, whose factor the optimizer's step takes."""
    clip_grad_norm_(model.parameters(), 1e-3)
    optim.SGD(model.parameters(), lr=0.0).step()
    model.zero_grad()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("takes_back", [False, True])
@pytest.mark.parametrize("between", [fails, accumulates, clips], ids=lambda f: f.__name__)
def test_what_happens_between_leaves_kept_gradients(
    monkeypatch: pytest.MonkeyPatch, between: Callable[..., None], takes_back: bool
) -> None:
    monkeypatch.setattr(_device, "takes_back", lambda: takes_back)
    model = shard(build())
    loss_of(model, batch(0, fsdpc.rank())).backward()
    kept = [p.grad for p in model.parameters()]
    before = [as_list(k.to_local()) for k in kept]
    between(model, batch(1, fsdpc.rank()))
    loss_of(model, batch(2, fsdpc.rank())).backward()
    after = [as_list(k.to_local()) for k in kept]
    if between is clips:
        rows = [(a, b) for a, b in zip(after, before, strict=True) if torch.tensor(b).any()]
        for a, b in rows:
            ratio = torch.tensor(a).norm() / torch.tensor(b).norm()
            assert 0 < ratio < 0.1  # as clipped, and not what the last backward left
            torch.testing.assert_close(torch.tensor(a), ratio * torch.tensor(b))
    else:
        assert after == before


@pytest.mark.ranks(2)
def test_memory_lasts_as_long_as_what_is_kept() -> None:
    ours = shard(build())

    def step(i: int) -> int:
        """The bytes of gradients after it."""
        ours.zero_grad()
        loss_of(ours, batch(i, fsdpc.rank())).backward()
        gc.collect()
        return fsdpc.memory_stats()["grad_bytes"]

    gc.collect()  # models of tests before this one
    one = step(0)
    places = [p.grad.to_local().data_ptr() for p in ours.parameters()]
    assert all(places) and step(1) == one
    assert places == [p.grad.to_local().data_ptr() for p in ours.parameters()]  # none was kept
    kept = ours.last.weight.grad
    assert one < step(2) < 2 * one  # that of one unit
    del kept
    assert step(3) == one


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("narrow", [False, True])
def test_torch_has_the_memory_while_there_are_no_gradients(
    monkeypatch: pytest.MonkeyPatch, narrow: bool
) -> None:
    """As on a GPU, by torch's allocator of the CPU."""
    held: list[int] = []
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if narrow else None

    def lent(model: Any) -> int:
        states = [m._fsdpc_state for m in (model, *model.blocks)]
        return sum(one.storage.nbytes() for state in states for one in state.lent)

    def train() -> tuple[list[float], list[Any]]:
        model = shard(build(), **({"mp_policy": policy} if policy else {}))
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        model.blocks[1].register_forward_hook(lambda *_: held.append(lent(model)))
        norms, kept = [], None
        for step in range(5):
            if step != 3:  # whose gradients are added to those before
                optimizer.zero_grad()
            loss_of(model, batch(step, fsdpc.rank())).backward()
            norms.append(float(clip_grad_norm_(model.parameters(), 1e-2)))
            if step == 1:
                kept = model.last.weight.grad, model.last.weight.grad.clone()
            optimizer.step()
        held.append(lent(model))
        assert kept is not None and torch.equal(*kept)
        with torch.no_grad():
            optimizer.zero_grad()
            model(batch(0, 0))
        model.first.bias.grad = torch.ones_like(model.first.bias)  # by hand, before any backward
        norms.append(float(clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        return norms, [full(v).tolist() for v in model.state_dict().values()]

    usual = train()
    all_bytes = held[-1]
    assert held == [all_bytes] * len(held)
    held.clear()
    monkeypatch.setattr(_device, "takes_back", lambda: True)
    gc.collect()  # the first model
    before = fsdpc.memory_stats()["grad_bytes"]
    assert train() == usual
    assert fsdpc.memory_stats()["grad_bytes"] == before  # the engine's count: it has none of it
    # Of five forwards, the fourth of which finds gradients to add to; then as that one's were.
    assert held == [0, 0, 0, all_bytes, 0, all_bytes, 0]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_rank_alone_takes_parameters_from_torch(
    monkeypatch: pytest.MonkeyPatch, reshard: bool
) -> None:
    """As on a GPU: they are cast where a unit is used, and torch has the memory otherwise."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def train() -> list[Any]:
        model = shard(build(), mp_policy=policy, reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, seen = batch(0, 0), []

        def step(loss: torch.Tensor) -> None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())

        step(loss_of(model, x))
        model.last.weight.data.mul_(2)  # between steps: no version says so
        step(loss_of(model, x) + loss_of(model, batch(1, 0)))  # two forwards, one backward
        with model.hold(), torch.no_grad():
            seen.append(loss_of(model, x).item())
        model.unshard()
        seen.append(model.last.weight.float().norm().item())
        model.reshard()
        with fsdpc.torch.summon_full_params(model), torch.no_grad():
            model.first.bias.fill_(0.5)
        loss = loss_of(model, x)
        with torch.no_grad():
            model.last.weight.mul_(0.5)
        loss_of(model, x)
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            loss.backward()
        step(loss_of(model, x))
        return [*seen, *(full(v).tolist() for v in model.state_dict().values())]

    usual = train()
    monkeypatch.setattr(_device, "takes_back", lambda: True)
    gc.collect()  # the first model
    before = fsdpc.memory_stats()["unsharded_bytes"]
    assert train() == usual
    model = shard(build(), mp_policy=policy, reshard_after_forward=reshard)
    loss = loss_of(model, batch(0, 0))
    with torch.no_grad():
        model.last.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss.backward()  # would cast what is there now
    inside: list[int] = []

    def full_bytes() -> int:
        return sum(f.untyped_storage().nbytes() for f in firsts)

    model(batch(0, 0))
    firsts = [s.unsharded[0] for s in model._fsdpc_state.root.states]  # of each one flat group
    assert model._fsdpc_state.torch_unit.lends_unsharded
    assert fsdpc.memory_stats()["unsharded_bytes"] == before
    for block in model.blocks:
        block.register_forward_hook(lambda *_: inside.append(full_bytes()))
    loss = loss_of(model, batch(0, 0))
    kept = full_bytes()
    loss.backward()
    assert full_bytes() == 0
    if reshard:  # the outermost unit, and one block at a time
        assert max(inside) < sum(2 * p.numel() for p in model.parameters()) and kept < max(inside)
    else:
        assert kept > max(inside[:-1])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("what", ["parameters", "gradients", "hold"])
def test_no_memory_is_an_error_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(_device, "takes_back", lambda: True)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, x = shard(build(), mp_policy=policy), batch(0, 0)
    loss_of(model, x).backward()
    wanted = model.last.weight.grad.clone()
    model.zero_grad()
    take = _device.Lent.take

    def full(lent: _device.Lent) -> int:
        raise torch.OutOfMemoryError("out of memory")

    if what == "hold":
        left = [None, None]

        def third_is_full(lent: _device.Lent) -> int:
            return take(lent) if left and left.pop() is None else full(lent)

        monkeypatch.setattr(_device.Lent, "take", third_is_full)
        with pytest.raises(torch.OutOfMemoryError), model.hold():
            pass
    elif what == "parameters":
        monkeypatch.setattr(_device.Lent, "take", full)
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
    else:
        loss = loss_of(model, x)
        monkeypatch.setattr(_device.Lent, "take", full)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
    monkeypatch.setattr(_device.Lent, "take", take)
    optim.SGD(model.parameters(), lr=0.0).step()  # weights may change: nothing is held
    loss_of(model, x).backward()
    assert torch.equal(model.last.weight.grad, wanted)
    assert sum(f.untyped_storage().nbytes() for s in states_of(model) for f in s.unsharded) == 0


@pytest.mark.ranks(1)
def test_a_rank_alone_computes_with_its_masters_where_no_cast_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU. Units that cast, and those that do not, are of one model here."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)

    def train() -> tuple[Any, list[Any]]:
        model: Any = build()
        fully_shard(model.blocks[0], mp_policy=policy)
        fully_shard(model.blocks[1])
        fully_shard(model)
        optimizer, seen = optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(4):
            loss = loss_of(model, batch(step, 0))
            loss.backward()
            seen.append(loss.item())
            seen.append(float(clip_grad_norm_(model.parameters(), 1e-2)))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.last.weight.mul_(1.5)
                seen.append(model(batch(9, 0)).sum().item())
        model.last.weight.data.mul_(2.0)  # no version says so
        with model.hold(), torch.no_grad():
            seen.append(model(batch(9, 0)).sum().item())
        return model, [*seen, *(full(v).tolist() for v in model.state_dict().values())]

    _, usual = train()
    monkeypatch.setattr(_device, "takes_back", lambda: True)
    model, ours = train()
    assert ours == usual
    for module, is_cast in ((model, False), (model.blocks[0], True), (model.blocks[1], False)):
        state = module._fsdpc_state
        assert state.torch_unit.lends_unsharded == is_cast
        same = [f.data_ptr() == p.data_ptr() for f, p in zip(state.unsharded, state.rows)]
        assert same == [not is_cast] * len(same)
    before = model.last.weight.clone()
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss = loss_of(model, batch(0, 0))
        with torch.no_grad():
            model.last.weight.mul_(0.5)
        loss.backward()
    assert torch.equal(model.last.weight, before * 0.5)
    model.unshard()
    with torch.no_grad():
        model.last.weight.mul_(2.0)  # of what forward sees: an error, as where it would be lost
    with pytest.raises(RuntimeError, match="of unit 'Net' was written in place.*the write stays"):
        model.reshard()
    assert torch.equal(model.last.weight, before)


class Tied(torch.nn.Module):
    """As language models are: an embedding, layers, a norm and a head."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(48, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 48, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# Whether the root has memory at the backward of each layer, from the last to the first.
WAITING = {
    "tied": (True, True, None, False),
    "in half precision": (False, True, None, False),
    "as wide as the shard": (False, False, None, True),
    "of a frozen embedding": (True, True, "embed", False),
    "of a frozen norm": (True, True, "norm", False),
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("case", WAITING)
def test_early_gradients_wait_for_memory(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Those of a root whose last gradient ends the backward, as on a GPU; with the same bits."""
    tie, narrow, frozen, takes = WAITING[case]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if narrow else {}
    held: list[int] = []

    def train() -> list[Any]:
        torch.manual_seed(0)
        model: Any = Tied(tie)
        if frozen:
            getattr(model, frozen).requires_grad_(False)
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        root = model._fsdpc_state
        fails: list[bool] = []

        def look(layer: Any, _: Any) -> None:
            held.append(sum(one.storage.nbytes() for one in root.lent))
            if fails and layer is model.layers[0]:
                raise ValueError("on purpose")

        for layer in model.layers:
            layer.register_full_backward_pre_hook(look)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            ids = (torch.arange(40) * (3 + step + fsdpc.rank()) % 48).view(4, 10)
            loss = model(ids).square().mean()
            if step == 1:
                fails.append(True)
                with pytest.raises(ValueError, match="on purpose"):
                    loss.backward()
                fails.clear()
                loss = model(ids).square().mean()
            loss.backward()
            seen += [loss.item(), [as_list(p.grad) for p in model.parameters() if p.requires_grad]]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    usual = train()
    held.clear()
    monkeypatch.setattr(_device, "takes_back", lambda: True)
    assert train() == usual
    if fsdpc.world_size() == 1:
        assert len(held) == 12 and [n > 0 for n in held] == [takes] * 12
