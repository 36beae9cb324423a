"""Saved tensors of torch modules on a disk: the bits of memory, through every kind of hook."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fsdpc
from fsdpc.torch import OffloadPolicy, fully_shard, optim

WIDTH, BLOCKS = 48, 5
ONE = 4 * 16 * WIDTH * 4  # bytes of a block's input


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def plain(block: Any, x: Any) -> Any:
    return block(x)


def products_stay(*_: Any) -> Any:
    """Save products, recompute the rest."""

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        saves = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


class Net(nn.Module):
    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head, self.call = nn.Linear(WIDTH, 3), call

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x).square().mean()


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": plain,
    "checkpoint": lambda b, x: checkpoint(b, x, use_reentrant=False),
    "reentrant": lambda b, x: checkpoint(b, x, use_reentrant=True),
    "selective": lambda b, x: checkpoint(
        b, x, use_reentrant=False, context_fn=products_stay
    ),
    "wrapper": plain,
    "inside": plain,
    "offload_wrapper": plain,
    "compile": plain,
}


def build(policy: Any, how: str = "plain") -> Any:
    torch.manual_seed(3)
    model = Net(CALLS[how])
    for i, block in enumerate(model.blocks):
        if how == "compile":
            block.compile(backend="aot_eager")
        if how == "inside":
            block.up = checkpoint_wrapper(block.up, CheckpointImpl.NO_REENTRANT)
        fully_shard(block, offload_policy=policy)
        if how == "wrapper":
            model.blocks[i] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
        if how == "offload_wrapper" and i == 1:
            model.blocks[i] = offload_wrapper(block)
    return fully_shard(model, offload_policy=policy)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + fsdpc.rank())
    return torch.randn(4, 16, WIDTH, generator=generator).requires_grad_()


def train(model: Any, steps: int = 2) -> list[Any]:
    """Losses and weights; the last step runs two forwards before the backwards."""
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(4)
    seen = []
    for step in range(steps):
        losses = [model(batch(step + 100 * k)) for k in range(1 + (step == steps - 1))]
        for loss in losses:
            loss.backward()
            seen.append(float(loss.detach()))
        del loss, losses
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.full_tensor().detach().numpy().tobytes() for p in model.parameters())]


def moved() -> int:
    """Bytes read so far; writing may be cancelled."""
    return fsdpc.memory_stats()["disk_read_bytes"]


def on_disk(folder: Path, fraction: float = 1.0) -> OffloadPolicy:
    return fsdpc.OffloadPolicy(activations="disk", path=folder, fraction=fraction)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("how", list(CALLS))
def test_bits_are_those_of_memory(how: str, disk: Path) -> None:
    expected = train(build(None, how))
    before = moved()
    assert train(build(on_disk(disk), how)) == expected
    read = moved() - before
    # Blocks 1 to 4 have inputs of their own; after a graph's forward, those of the last two are
    # in memory. A reentrant checkpoint saves them when the block has ended, so one later. What a
    # selective policy keeps is not saved by autograd, and stays.
    expected_reads = dict.fromkeys(("checkpoint", "wrapper", "selective"), 2 + 4 + 2)
    expected_reads["reentrant"] = 1 + 3 + 1
    assert read == ONE * expected_reads[how] if how in expected_reads else read > 20 * ONE
    assert train(build(on_disk(disk, 0.4), how)) == expected


@pytest.mark.ranks(1)
def test_tensors_that_others_hold_stay(disk: Path) -> None:
    """Parameters, the batch, and an output that the caller keeps are not written."""
    model = build(on_disk(disk))
    x = batch(0)
    kept = []
    handles = [b.norm.register_forward_hook(lambda m, a, y: kept.append(y)) for b in model.blocks]
    reads = []
    for _ in range(2):
        before = moved()
        model(x).backward()
        reads.append(moved() - before)
        for handle in handles:
            handle.remove()
        kept.clear()
    assert reads[1] - reads[0] == 3 * ONE  # the norms' outputs, of the blocks that are away
    assert reads[1] < 3 * 16 * ONE  # inputs and outputs, 13 of them; and the norms' moments


@pytest.mark.ranks(1)
@pytest.mark.parametrize("features", [4 * WIDTH, 1], ids=["leaves", "is too small to leave"])
def test_changes_in_place_are_noticed(features: int, disk: Path) -> None:
    """As autograd does without hooks; a tensor that has left cannot be changed any more."""

    class Changed(Block):
        def forward(self, x: Any) -> Any:
            y = torch.exp(self.up(self.norm(x))[..., :features].contiguous())
            z = y.square()
            y.add_(1)
            return x + self.down(z.expand(*x.shape[:-1], 4 * WIDTH))

    for policy in (None, on_disk(disk)):
        torch.manual_seed(3)
        model = Net(plain)
        model.blocks[1] = Changed()
        for block in model.blocks:
            fully_shard(block, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(batch(0)).backward()


@pytest.mark.ranks(1)
def test_graphs_that_are_kept_or_dropped(disk: Path) -> None:
    model = build(on_disk(disk))
    loss = model(batch(0))
    loss.backward(retain_graph=True)
    first = [p.grad.full_tensor().clone() for p in model.parameters()]
    loss.backward()
    for p, grad in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), 2 * grad, rtol=0, atol=0)
    del loss
    size = fsdpc.memory_stats()["disk_file_bytes"]
    for _ in range(3):
        model(batch(0))
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.zeros(4, 16, WIDTH + 1))
    assert fsdpc.memory_stats()["disk_file_bytes"] == size
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with torch.no_grad():
        model(batch(0))


class Conjugates(Block):
    """Saves views that have only a flag of their own."""

    def forward(self, x: Any) -> Any:
        z = torch.complex(self.up(x), self.up(self.norm(x)))
        return x + self.down((z.conj() * torch.fft.fft(z.detach())).real.tanh())


@pytest.mark.ranks(1)
def test_conjugate_views(disk: Path) -> None:
    found = []
    for policy in (None, on_disk(disk)):
        torch.manual_seed(3)
        model = Net(plain)
        model.blocks = nn.ModuleList(Conjugates() for _ in range(BLOCKS))
        for block in model.blocks:
            fully_shard(block, offload_policy=policy)
        found.append(train(fully_shard(model, offload_policy=policy)))
    assert found[0] == found[1]


@pytest.mark.ranks(1)
def test_graphs_that_another_thread_drops(disk: Path) -> None:
    """While forwards and backwards go on, and by the garbage collector in the middle of them."""
    model, losses = build(on_disk(disk)), queue.SimpleQueue[Any]()

    def drop() -> None:
        while losses.get() is not None:
            pass

    thread = threading.Thread(target=drop)
    thread.start()
    threshold = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        for step in range(60):
            cycle: list[Any] = [model(batch(step))]
            cycle.append(cycle)
            losses.put(model(batch(step)))
            model(batch(step)).backward()
    finally:
        gc.set_threshold(*threshold)
        losses.put(None)
        thread.join()


@pytest.mark.ranks(1)
def test_a_model_inside_the_forward_of_another(disk: Path) -> None:
    class Outer(Net):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + hidden[0](x)

    found = []
    for policy in (None, on_disk(disk)):
        hidden = [build(policy)]
        torch.manual_seed(5)
        model = Outer(plain)
        for unit in (*model.blocks, model):
            fully_shard(unit, offload_policy=policy)
        model(batch(0)).backward()
        found.append([p.grad.full_tensor().numpy().tobytes() for p in hidden[0].parameters()])
    assert found[0] == found[1]


@pytest.mark.ranks(1)
def test_a_folder_that_is_missing_can_be_made(disk: Path) -> None:
    layer, folder = nn.Linear(4, 4), disk / "later"
    with pytest.raises(OSError, match="cannot offload to the folder"):
        fully_shard(layer, offload_policy=on_disk(folder))
    folder.mkdir()
    fully_shard(layer, offload_policy=on_disk(folder))


@pytest.mark.ranks(1)
def test_what_cannot_leave_is_refused(disk: Path) -> None:
    whole = fully_shard(nn.Linear(4, 4), offload_policy=on_disk(disk))
    with pytest.raises(ValueError, match=r"activations of unit .* cannot leave: they do when"):
        whole(torch.ones(1, 4))
    model = build(on_disk(disk))
    with pytest.raises(RuntimeError, match="its forward runs inside other hooks for saved tensors"):
        checkpoint(model, batch(0), use_reentrant=False)
    other = Net(plain)
    for i, block in enumerate(other.blocks):
        fully_shard(block, offload_policy=on_disk(disk, 0.5 if i else 1.0))
    fully_shard(other)
    with pytest.raises(ValueError, match="give all units of a model one offload_policy"):
        other(batch(0))
