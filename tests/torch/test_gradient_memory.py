"""The memory of gradients: what users keep is theirs, and torch has it while there are none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, _device, clip_grad_norm_, optim
from tests.torch.common import batch, build, loss_of, shard

KEEP: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda g: g,
    "detach": lambda g: g.detach(),
    "data": lambda g: g.data,
    "view": lambda g: g.view(-1),
    "rows": lambda g: g.to_local()[:1],
    "array": lambda g: g.detach().to_local().numpy(),
}


def as_list(kept: Any) -> list[float]:
    """What is kept holds now."""
    return (kept if not isinstance(kept, torch.Tensor) else kept.detach().numpy()).tolist()


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
        assert torch.equal(p.grad, q.grad)


@pytest.mark.ranks(2)
def test_memory_lasts_as_long_as_what_is_kept() -> None:
    ours = shard(build())

    def step(i: int) -> int:
        """The bytes of gradients after it."""
        ours.zero_grad()
        loss_of(ours, batch(i, fsdpc.rank())).backward()
        gc.collect()
        return fsdpc.memory_stats()["grad_bytes"]

    one = step(0)
    places = [p.grad.data_ptr() for p in ours.parameters()]
    assert step(1) == one
    assert places == [p.grad.data_ptr() for p in ours.parameters()]  # nobody kept any
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
        return norms, [v.tolist() for v in model.state_dict().values()]

    usual = train()
    all_bytes = held[-1]
    assert held == [all_bytes] * len(held)
    held.clear()
    monkeypatch.setattr(_device, "takes_back", lambda: True)
    before = fsdpc.memory_stats()["grad_bytes"]
    assert train() == usual
    assert fsdpc.memory_stats()["grad_bytes"] == before  # the engine's count: it has none of it
    # Of five forwards, the fourth of which finds gradients to add to; then as that one's were.
    assert held == [0, 0, 0, all_bytes, 0, all_bytes, 0]
