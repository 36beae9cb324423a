"""Pipelines of torch over stages that are sharded: the schedules see FSDP2's modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, fully_shard
from tests.events import event_counts

from .common import Block, full, join_gloo, twin

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B"]
SPLIT = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
STEPS, MICRO, ROWS, DIM = 5, 4, 8, 12


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Compare as one vector, relative to its length."""
    a, b = (torch.cat([t.flatten().double() for t in each]) for each in (ours, theirs))
    assert (a - b).norm() <= 1e-6 * b.norm()


def places(name: str, rank: int) -> list[int]:
    """Return the stages of a rank of two: one, two in turns, or two in the shape of a V."""
    if name in ("GPipe", "1F1B"):
        return [rank]
    return [rank, rank + 2] if "Interleaved" in name else [rank, 3 - rank]


def stage(dim: int = DIM) -> nn.Module:
    return nn.Sequential(Block(dim), nn.Linear(dim, dim), Block(dim))


def sharded(module: Any, how: Any, mesh: Any, **options: Any) -> Any:
    """Make each block a unit, and the rest one."""
    how(module[0], mesh=mesh, **options)
    how(module[2], mesh=mesh, **options)
    return how(module, mesh=mesh, **options)


class Pipeline:
    """A schedule over the stages of one rank, with their optimizer."""

    def __init__(self, name: str, stages: list[Any], where: list[int], group: Any) -> None:
        self.stages, self.where, n = stages, where, 2 * len(stages)
        made = [
            PipelineStage(m, k, n, torch.device("cpu"), group=group)
            for m, k in zip(stages, where, strict=True)
        ]
        kind = getattr(schedules, f"Schedule{name}")
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        self.schedule = kind(made[0] if single else made, MICRO, loss_fn=nn.functional.mse_loss)
        self.is_first, self.is_last = 0 in where, n - 1 in where
        params = [p for m in stages for p in m.parameters()]
        self.optimizer = torch.optim.AdamW(params, lr=1e-3)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, or 1 on the rank that has no last stage."""
        losses: list[torch.Tensor] = []
        inputs = (x,) if self.is_first else ()
        last = {"target": y, "losses": losses} if self.is_last else {}
        self.schedule.step(*inputs, **last)
        return torch.stack(losses).mean().detach() if losses else torch.ones(())


def data(step: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dp)
    return torch.randn(ROWS, DIM, generator=generator), torch.randn(ROWS, DIM, generator=generator)


def train(name: str, how: Any, made: list[nn.Module], mesh: Any, **options: Any) -> list[Any]:
    """Return the losses, and the gradients and parameters of this rank's stages at the end."""
    where = places(name, mesh.get_local_rank("pp"))
    stages = [sharded(twin(made[k]), how, mesh["dp"], **options) for k in where]
    pipeline = Pipeline(name, stages, where, mesh["pp"].get_group())
    losses, counts = [], []
    for step in range(STEPS):
        pipeline.optimizer.zero_grad()
        fsdpc._core.trace_reset()
        losses.append(pipeline.step(*data(step, mesh.get_local_rank("dp"))))
        counts.append(event_counts()["reduce"])
        grads = [full(p.grad) for m in stages for p in m.parameters()]
        pipeline.optimizer.step()
    if how is fully_shard:
        units = 3 * len(stages)
        assert counts[1:] == [units] * (STEPS - 1), "the first step also asks for shapes"
    return [losses, grads, [full(p) for m in stages for p in m.parameters()]]


def alone(name: str, made: list[nn.Module], mesh: Any) -> list[Any]:
    """Train the whole model in one process, on the batches of both ranks of "dp"."""
    stages, where = [twin(m) for m in made], places(name, mesh.get_local_rank("pp"))
    whole = nn.Sequential(*stages)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        both = [nn.functional.mse_loss(whole(x), y) for x, y in (data(step, 0), data(step, 1))]
        (sum(both) / 2).backward()  # type: ignore[union-attr]
        mine = both[mesh.get_local_rank("dp")].detach()
        losses.append(mine if len(made) - 1 in where else torch.ones(()))
        grads = [[p.grad.clone() for p in m.parameters()] for m in stages]  # type: ignore[union-attr]
        optimizer.step()
    own = [p.detach() for k in where for p in stages[k].parameters()]
    return [losses, [g for k in where for g in grads[k]], own]


def start(tmp_path: Any, name: str) -> tuple[Any, list[nn.Module]]:
    join_gloo(tmp_path)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return mesh, [stage() for _ in range(2 if name in ("GPipe", "1F1B") else 4)]


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("name", SCHEDULES)
def test_sharded_stages_train_as_one_process(name: str, tmp_path: Any) -> None:
    """Losses, gradients and parameters, as FSDP2's too; each step reduces a unit once."""
    mesh, made = start(tmp_path, name)
    ours = train(name, fully_shard, made, mesh)
    for other in (alone(name, made, mesh), train(name, fsdp.fully_shard, made, mesh)):
        for mine, its in zip(ours, other, strict=True):
            close(mine, its)
    dist.destroy_process_group()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("name", SPLIT)
def test_schedules_that_split_backward(name: str, tmp_path: Any) -> None:
    """They need weights that stay gathered, as under FSDP2; otherwise they are refused."""
    mesh, made = start(tmp_path, name)
    ours = train(name, fully_shard, made, mesh, reshard_after_forward=False)
    for mine, its in zip(ours, alone(name, made, mesh), strict=True):
        close(mine, its)
    where = places(name, mesh.get_local_rank("pp"))
    stages = [sharded(twin(made[k]), fully_shard, mesh["dp"]) for k in where]
    pipeline = Pipeline(name, stages, where, mesh["pp"].get_group())
    # A peer waits for the rank that is refused, until that one leaves.
    with pytest.raises((NotImplementedError, RuntimeError)) as caught:
        pipeline.step(*data(0, mesh.get_local_rank("dp")))
    if isinstance(caught.value, NotImplementedError):
        assert "reshard_after_forward=False" in str(caught.value)
    assert all(p.grad is None for m in stages for p in m.parameters())


@pytest.mark.ranks(2)
def test_a_split_backward_is_refused() -> None:
    from torch.distributed.pipelining import _backward

    model = fully_shard(nn.Linear(3, 3), reshard_after_forward=True)
    assert model.weight.view_as(model.weight).shape == (3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    loss = model(x).sum()
    with pytest.raises(NotImplementedError, match=r"splits backward, with rows .* of '.*weight'"):
        _backward.stage_backward_input([loss], None, [x], model.parameters())
    with pytest.raises(NotImplementedError, match="reshard_after_forward=False"):
        _backward.stage_backward_weight(model.parameters(), [])
    loss.backward()
    assert model.weight.grad is not None


def reduce_as_pipelines(model: Any) -> None:
    """What a schedule does after its last backward."""
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = fsdp.fully_shard.state(model)
    assert state is fully_shard.state(model)
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            assert group is each._fsdp_param_group  # as older versions name it
            group.post_backward()
    state._root_post_backward_final_callback()


@pytest.mark.ranks([1, 2], init=False)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "deterministic", "replicas"])
def test_what_backwards_left_is_reduced(kind: str) -> None:
    """A reduction outside a backward hands out the sum, onto gradients that were there before."""
    fsdpc.init(deterministic=kind == "deterministic")
    torch.manual_seed(0)
    plain = stage()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "bf16" else None
    shape = (fsdpc.world_size(), 1) if kind == "replicas" else (fsdpc.world_size(),)
    mesh = fsdpc.init_device_mesh("cpu", shape)
    model = sharded(twin(plain), fully_shard, mesh, mp_policy=policy)
    tolerance = {"rtol": 2e-2, "atol": 2e-1} if policy else {}
    for _ in range(2):
        before = [p.grad is not None for p in model.parameters()]
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        for _ in range(3):
            for m in (model, plain):
                m(torch.ones(2, DIM)).sum().backward()
        assert [p.grad is not None for p in model.parameters()] == before
        reduce_as_pipelines(model)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, **tolerance)  # type: ignore[arg-type]
    model.zero_grad()
    model.unshard()
    weight = model[1].weight
    weight.grad = torch.ones_like(weight)  # as split backwards leave it, and then fail
    model.reshard()
    model.reset_iter_state()
    reduce_as_pipelines(model)  # of nothing
    assert all(p.grad is None for p in model.parameters())
