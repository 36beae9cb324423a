"""Branches that depend on data: experts, outputs and modules that some ranks do not use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdpc
from fsdpc.torch import fully_shard

from .common import ATOL, RTOL, Block, assert_same_parameters, average_grads, batch, twin


class Experts(nn.Module):
    """A linear layer, then the experts that the rank's data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 8)
        self.experts = nn.ModuleList([Block(8) for _ in range(4)])

    def forward(self, x: torch.Tensor, chosen: list[int], run: list[int] | None = None) -> Any:
        x = self.first(x)
        out = torch.zeros_like(x)
        for i in range(len(self.experts)) if run is None else run:
            y = self.experts[i](x)
            if i in chosen:
                out = out + y
        return out


def zeros_for_none(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("opt_in", [False, True])
def test_experts_inside_one_unit(opt_in: bool) -> None:
    torch.manual_seed(0)
    plain = Experts()
    ours = fully_shard(twin(plain))
    ours.set_reduce_scatter_unused_params(opt_in)
    for step in range(4):
        mine = [(fsdpc.rank() + step) % 4]
        x = batch(step, fsdpc.rank())
        for m in (ours, plain):
            m(x, mine, mine).square().mean().backward()
        zeros_for_none(plain)
        average_grads(plain)
        used = {(r + step) % 4 for r in range(fsdpc.world_size())}
        for i, expert in enumerate(ours.experts):
            assert (expert.linear.weight.grad is not None) == (i in used)
        for name, p in ours.named_parameters():
            if p.grad is not None:
                full = fsdpc.torch.full_grad(p)
                torch.testing.assert_close(
                    full, plain.get_parameter(name).grad, rtol=RTOL, atol=ATOL
                )
        ours.zero_grad()
        plain.zero_grad()


def experts_of(model: Any, opt_in: bool) -> Any:
    """Every expert a unit."""
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)
    for expert in model.experts:
        expert.set_reduce_scatter_unused_params(opt_in)
    return model


def assert_same_training(ours: Any, plain: Any, choose: Any, steps: int) -> None:
    """Steps of AdamW, where the plain model counts a missing gradient as zero if a rank has one."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, plain)]
    for step in range(steps):
        micro_steps = 1 + step % 2
        for micro in range(micro_steps):
            x = batch(step, fsdpc.rank(), micro)
            chosen, run = choose(step + micro)
            for m in (ours, plain):
                m(x, chosen, run).square().mean().backward()
        used = [float(p.grad is not None) for p in plain.parameters()]
        anywhere = fsdpc.all_reduce(fsdpc.tensor(used), "max").numpy()
        for p, any_rank in zip(plain.parameters(), anywhere, strict=True):
            if any_rank and p.grad is None:
                p.grad = torch.zeros_like(p)
        average_grads(plain)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            full = fsdpc.torch.full_grad(p)
            assert (full is None) == (q.grad is None), p.fsdpc
            if full is not None:
                torch.testing.assert_close(full, q.grad, rtol=RTOL, atol=ATOL)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            x = batch(9, fsdpc.rank())
            torch.testing.assert_close(ours(x, *choose(step)), plain(x, *choose(step)))
    assert_same_parameters(ours, plain)


@pytest.mark.ranks([1, 2, 4])
def test_units_that_some_ranks_do_not_run() -> None:
    torch.manual_seed(0)
    plain = Experts()
    ours = experts_of(twin(plain), True)

    def choose(step: int) -> Any:
        mine = [(fsdpc.rank() * (step % 3) + step) % 4]
        return mine, mine

    assert_same_training(ours, plain, choose, 6)


@pytest.mark.ranks(2)
def test_units_whose_outputs_some_ranks_do_not_use() -> None:
    torch.manual_seed(0)
    plain = Experts()
    ours = experts_of(twin(plain), True)
    assert_same_training(ours, plain, lambda step: ([fsdpc.rank() + step % 2, 3], None), 4)


@pytest.mark.ranks(4)
def test_experts_over_replicas() -> None:
    torch.manual_seed(0)
    plain = Experts()
    ours: Any = twin(plain)
    mesh = fsdpc.init_device_mesh("cpu", (2, 2))
    for expert in ours.experts:
        fully_shard(expert, mesh=mesh)
    fully_shard(ours, mesh=mesh).set_reduce_scatter_unused_params(True)
    mine = [fsdpc.rank()]
    assert_same_training(ours, plain, lambda step: (mine, mine), 3)


@pytest.mark.ranks(2)
def test_experts_under_no_sync_and_checkpoints() -> None:
    torch.manual_seed(0)
    plain = Experts()
    ours = experts_of(twin(plain), True)
    for step in range(3):
        for micro in range(3):
            ours.set_requires_gradient_sync(micro == 2)
            x = batch(step, fsdpc.rank(), micro)
            mine = [(fsdpc.rank() + micro) % 4]
            for m in (ours, plain):
                y = checkpoint(m, x, mine, mine, use_reentrant=False)
                y.square().mean().backward()
        for p in plain.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        average_grads(plain)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            full = fsdpc.torch.full_grad(p)
            assert full is not None or not q.grad.any()
            if full is not None:
                torch.testing.assert_close(full, q.grad, rtol=RTOL, atol=ATOL)
        ours.zero_grad()
        plain.zero_grad()


@pytest.mark.ranks(2)
def test_without_the_opt_in_it_is_named() -> None:
    torch.manual_seed(0)
    ours = experts_of(Experts(), False)
    mine = [fsdpc.rank()]
    with pytest.raises(fsdpc.MismatchError, match=r"gather of 'experts.\d'.*the same units"):
        for step in range(2):
            ours(batch(step, fsdpc.rank()), mine, mine).square().mean().backward()


@pytest.mark.ranks(1)
def test_the_opt_in_comes_before_the_first_forward() -> None:
    ours = experts_of(Experts(), True)
    ours(batch(0, 0), [0], [0]).sum().backward()
    ours.experts[0].set_reduce_scatter_unused_params(True)
    with pytest.raises(RuntimeError, match="'experts.0' may run on some ranks only is said before"):
        ours.experts[0].set_reduce_scatter_unused_params(False)
