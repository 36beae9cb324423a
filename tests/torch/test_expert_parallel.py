"""Expert parallelism: experts on a mesh of their own, the rest over all ranks, under one root.

Four experts on a 2 x 2 mesh ("efsdp", "ep"): a rank has two experts, by its coordinate in "ep", and
shares their shards with the ranks of its "efsdp" group. Tokens travel to their experts and back by
all-to-all. The reference is the same layer with four experts in one process, on all ranks' batches.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import fsdpc
from fsdpc.torch import clip_grad_norm_, fully_shard, get_model_state_dict, set_model_state_dict
from tests.faults.common import die, raised, run, wait_file

from .common import assert_same_parameters, join_gloo, train_twins, twin
from .common import build as base_build

DIM, EXPERTS, RANKS, TOKENS = 8, 4, 4, 16


class Experts(nn.Module):
    """Some experts, named by their number in the whole layer."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.of = nn.ModuleDict({str(i): nn.Linear(DIM, DIM) for i in numbers})

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Each expert takes as many tokens, in the order of the experts."""
        parts = tokens.split(counts)
        return torch.cat([expert(t) for expert, t in zip(self.of.values(), parts, strict=True)])


class Layer(nn.Module):
    """x + p * gelu(expert(norm(x))), where each token goes to its most probable expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = Experts(range(EXPERTS))
        self.ep: Any = None  # the ranks that have the other experts
        self.skips = False  # experts without tokens do not run

    def forward(self, x: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        h = self.norm(x)
        p = self.router(h).softmax(-1)
        chosen = p.argmax(-1) if chosen is None else chosen
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        run = self.experts if self.ep is None else self._exchanged
        y = run(h[order], counts if self.ep is not None else counts.tolist())
        y = torch.empty_like(h).index_copy(0, order, y)
        return x + p.gather(1, chosen[:, None]) * nn.functional.gelu(y)

    def _exchanged(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ranks = dist.get_world_size(self.ep)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.ep)
        given = counts.view(ranks, -1).sum(1).tolist()
        taken = arriving.view(ranks, -1).sum(1).tolist()
        tokens = all_to_all_single_autograd(tokens, taken, given, self.ep)
        cells = torch.arange(len(counts)).view(ranks, -1)  # what a rank gives to an expert here
        by_expert = [int(k) for k in cells.T.reshape(-1)]
        parts = tokens.split(arriving.tolist())
        tokens = torch.cat([parts[k] for k in by_expert])
        if tokens.numel() or not self.skips:
            tokens = self.experts(tokens, arriving.view(ranks, -1).sum(0).tolist())
        back = dict(zip(by_expert, tokens.split(arriving[by_expert].tolist()), strict=True))
        tokens = torch.cat([back[k] for k in range(len(counts))])
        return all_to_all_single_autograd(tokens, given, taken, self.ep)


class Net(nn.Module):
    """Two layers of experts between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, DIM)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.last = nn.Linear(DIM, 5)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, chosen)
        return self.last(x)


def build() -> Net:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Net()


def shard(model: Any, mesh: DeviceMesh, how: Any = fully_shard) -> Any:
    """Keep this rank's experts; shard them over "efsdp", and the rest over all ranks."""
    ep, everyone = mesh["ep"], mesh["efsdp", "ep"]._flatten("dp")
    first = ep.get_local_rank() * (EXPERTS // ep.size())
    for layer in model.layers:
        layer.ep = ep.get_group()
        for i in range(EXPERTS):
            if i not in range(first, first + EXPERTS // ep.size()):
                del layer.experts.of[str(i)]
        how(layer.experts, mesh=mesh["efsdp"])
        layer.experts.set_force_sum_reduction_for_comms(True)  # torch's needs no other reduction
        layer.experts.set_gradient_divide_factor(RANKS)
        how(layer, mesh=everyone)
    return how(model, mesh=everyone)


def joined(folder: Path, *shape: int) -> DeviceMesh:
    join_gloo(folder, "fsdpc")
    return init_device_mesh("cpu", shape or (2, 2), mesh_dim_names=("efsdp", "ep"))


def inputs(step: int) -> torch.Tensor:
    """The batches of all ranks."""
    return torch.randn(RANKS, TOKENS, 7, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
    return model(x.view(-1, 7), chosen).square().mean()


def assert_near(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Within 1e-6 of the largest element."""
    error = float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))
    assert error <= 1e-6, f"{what}: {error}"


def assert_same_grads(ours: nn.Module, plain: nn.Module) -> None:
    for name, p in ours.named_parameters():
        grad = plain.get_parameter(name).grad
        assert p.grad is not None and grad is not None, name
        assert_near(p.grad.full_tensor(), grad, f"gradient of {name}")


def assert_same_values(ours: nn.Module, plain: nn.Module) -> None:
    for name, p in ours.named_parameters():
        assert_near(p.full_tensor(), plain.get_parameter(name), name)


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_experts_equal_the_unsharded_layer(tmp_path: Path, shape: tuple[int, int]) -> None:
    mesh = joined(tmp_path, *shape)
    plain = build()
    # torch's divides the gradients of a mesh of one rank twice
    hows = (fully_shard, fsdp2)[: 1 + (shape[0] > 1)]
    models = [shard(copy.deepcopy(plain), mesh, how) for how in hows]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (*models, plain)]
    rank = dist.get_rank()
    for step in range(5):
        x = inputs(step)
        expected = loss_of(plain, x)
        expected.backward()
        for model in models:
            loss = loss_of(model, x[rank])
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert_near(total / RANKS, expected.detach(), f"loss {step}")
            assert_same_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_values(models[0], plain)
    order = [unit for unit, _ in models[0]._fsdpc_unit.schedule()[0]]
    assert order[:5] == [0, 1, 2, 3, 4]  # layers and their experts in turn: one order
    dist.destroy_process_group()


@pytest.mark.ranks(4, init=False)
def test_micro_steps_and_the_engines_optimizer(tmp_path: Path) -> None:
    """Without synchronization, under hold(), and across saved activations."""
    mesh = joined(tmp_path)
    plain = build()
    ours = shard(copy.deepcopy(plain), mesh)
    optimizers: list[Any] = [
        fsdpc.torch.optim.AdamW(ours.parameters(), lr=1e-2, eps=1e-3),
        torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3),
    ]
    rank = dist.get_rank()
    for step in range(3):
        for micro in range(2):
            x = inputs(10 * step + micro)
            ours.set_requires_gradient_sync(micro == 1)
            (loss_of(plain, x) / 2).backward()
            (loss_of(ours, x[rank]) / 2).backward()
        assert_same_grads(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with ours.hold(), torch.no_grad():
            loss = loss_of(ours, x[rank])
        assert_near(loss, loss_of(plain, x[rank]).detach(), "loss under hold()")
        plain.zero_grad()
    assert_same_values(ours, plain)
    dist.destroy_process_group()


@pytest.mark.ranks(4, init=False)
def test_clipping_goes_by_mesh(tmp_path: Path) -> None:
    mesh = joined(tmp_path)
    plain = build()
    ours = shard(copy.deepcopy(plain), mesh)
    rank = dist.get_rank()
    for power in (2.0, 1.0):
        loss_of(plain, inputs(0)).backward()
        loss_of(ours, inputs(0)[rank]).backward()
        with pytest.raises(NotImplementedError, match=r"'Net' on .*dp=4.* and 'layers.0.experts'"):
            clip_grad_norm_(ours.parameters(), 0.1)
        with pytest.raises(RuntimeError, match=r"different|mesh"):
            torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        experts = [p for name, p in ours.named_parameters() if ".experts." in name]
        rest = [p for name, p in ours.named_parameters() if ".experts." not in name]
        norms = [get_total_norm([p.grad for p in each], power) for each in (experts, rest)]
        of_experts, of_rest = (norm.full_tensor() ** power for norm in norms)
        dist.all_reduce(of_experts, group=mesh["ep"].get_group())
        total = (of_experts + of_rest) ** (1 / power)
        for each in (experts, rest):
            clip_grads_with_norm_(each, 0.1, total)
        assert_near(total, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, power), "norm")
        assert_same_grads(ours, plain)
        assert clip_grad_norm_(rest, 1.0) <= 0.1  # units on one mesh are clipped as ever
        for model in (ours, plain):
            model.zero_grad()
    dist.destroy_process_group()


@pytest.mark.ranks(4, init=False)
def test_an_overflow_of_one_expert_skips_every_step(tmp_path: Path) -> None:
    mesh = joined(tmp_path)
    ours = shard(build(), mesh)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = {name: p.full_tensor().clone() for name, p in ours.named_parameters()}
    scaler.scale(loss_of(ours, inputs(0)[dist.get_rank()])).backward()
    if mesh.get_local_rank("ep") == 1:
        next(iter(ours.layers[0].experts.parameters())).grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2
    assert all(torch.equal(p.full_tensor(), before[n]) for n, p in ours.named_parameters())
    dist.destroy_process_group()


@pytest.mark.ranks(4)
def test_full_and_hybrid_sharding_in_one_model() -> None:
    """Meshes of the same ranks: norms and rank 0's state dicts are as on one mesh."""
    plain = base_build()
    ours: Any = twin(plain)
    mesh = fsdpc.init_device_mesh("cpu", (2, 2))
    for block in ours.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, plain)]
    train_twins(ours, plain, optimizers, 4, fn=clip_grad_norm_, max_norm=0.1)
    assert_same_parameters(ours, plain)
    state = get_model_state_dict(ours, rank0_only=True)
    assert bool(state) == (fsdpc.rank() == 0)


@pytest.mark.ranks(4, init=False)
def test_meshes_by_shard_placement_fn(tmp_path: Path) -> None:
    """Parameters on the module's mesh are taken, and others are a module's own."""
    mesh = joined(tmp_path)
    everyone, efsdp = mesh["efsdp", "ep"]._flatten("dp"), mesh["efsdp"]
    asked = {everyone: ShardPlacementResult(Shard(0), FSDPMeshInfo(everyone, 0))}
    asked[efsdp] = ShardPlacementResult(None, FSDPMeshInfo(efsdp, 0))
    with pytest.raises(NotImplementedError, match=r"efsdp=2.* for 'experts.of.0.weight'.*dp=4"):
        fully_shard(
            Layer(),
            mesh=everyone,
            shard_placement_fn=lambda p: asked[efsdp if p.shape == (DIM, DIM) else everyone],
        )
    ours = fully_shard(Layer(), mesh=everyone, shard_placement_fn=lambda p: asked[everyone])
    assert ours.router.weight.device_mesh == everyone
    dist.destroy_process_group()


@pytest.mark.ranks(4, init=False)
def test_checkpoints_hold_every_expert(tmp_path: Path) -> None:
    mesh = joined(tmp_path)
    models = [shard(build(), mesh) for _ in range(2)]
    rank = dist.get_rank()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    loss_of(models[0], inputs(0)[rank]).backward()
    optimizers[0].step()
    model_state, optim_state = theirs.get_state_dict(models[0], optimizers[0])
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path / "saved")
    model_state, optim_state = theirs.get_state_dict(models[1], optimizers[1])
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path / "saved")
    theirs.set_state_dict(
        models[1], optimizers[1], model_state_dict=model_state, optim_state_dict=optim_state
    )
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        loss_of(model, inputs(1)[rank]).backward()
        optimizer.step()
    assert_same_values(models[1], _whole(models[0]))
    if rank == 0:
        alone = {name: torch.zeros_like(p) for name, p in build().named_parameters()}
        dcp.load({"model": alone}, checkpoint_id=tmp_path / "saved", no_dist=True)
        for name in ("layers.0.experts.of.0.weight", "layers.1.experts.of.3.bias"):
            assert alone[name].any()
    dist.barrier()
    full = get_model_state_dict(models[0])  # each rank gets its own experts
    assert len([name for name in full if ".experts." in name]) == 8
    for load in (
        lambda: get_model_state_dict(models[0], rank0_only=True),
        lambda: set_model_state_dict(models[0], full, rank0_only=True),
    ):
        with pytest.raises(NotImplementedError, match=r"rank0_only.*'layers.0.experts' on"):
            load()
    with pytest.raises(NotImplementedError, match="'layers.0.experts', which 2 of all ranks"):
        fsdpc.checkpoint.save(tmp_path / "ours", {"model": models[0]})
    dist.destroy_process_group()


def _whole(model: nn.Module) -> nn.Module:
    """A plain model with the full values of what this rank has."""
    plain = build()
    state = {name: p.full_tensor() for name, p in model.named_parameters()}
    plain.load_state_dict(state, strict=False)
    return plain


@pytest.mark.ranks(4, init=False)
def test_a_rank_without_tokens_skips_its_experts(tmp_path: Path) -> None:
    """Ranks 1 and 2 have no tokens for their experts; the peers of their shards have some."""
    mesh = joined(tmp_path)
    plain = build()
    ours = shard(copy.deepcopy(plain), mesh)
    for layer in ours.layers:
        layer.experts.set_reduce_scatter_unused_params(True)
        layer.skips = True
    rank = dist.get_rank()
    for step in range(3):
        chosen = torch.tensor([0, 0, 2, 2]).repeat_interleave(TOKENS)
        if step == 1:  # as usual
            chosen = torch.randint(4, chosen.shape, generator=torch.Generator().manual_seed(1))
        x = inputs(step)
        loss_of(plain, x, chosen).backward()
        loss_of(ours, x[rank], chosen.view(RANKS, -1)[rank]).backward()
        assert_same_grads(ours, plain)
        for model in (ours, plain):
            model.zero_grad()
    dist.destroy_process_group()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("where", ["forward", "backward", "graph"])
def test_an_abandoned_step(tmp_path: Path, where: str) -> None:
    """All ranks raise in a layer's experts, or drop the graph; the next step is right."""
    mesh = joined(tmp_path)
    plain = build()
    ours = shard(copy.deepcopy(plain), mesh)
    rank = dist.get_rank()

    def fail(*_: Any) -> None:
        raise ValueError("the test's")

    for step in range(4):
        x = inputs(step)
        if step == 2:
            loss = None
            if where == "forward":
                handle = ours.layers[1].experts.register_forward_pre_hook(fail)
            else:
                handle = ours.layers[0].experts.register_full_backward_hook(fail)
            if where == "graph":
                loss = loss_of(ours, x[rank])
                del loss
            else:
                with pytest.raises(ValueError, match="the test's"):
                    loss_of(ours, x[rank]).backward()
            handle.remove()
            dist.barrier()
            continue
        loss_of(plain, x).backward()
        loss_of(ours, x[rank]).backward()
        assert_same_grads(ours, plain)
        for model in (ours, plain):
            model.zero_grad()
    dist.destroy_process_group()


@pytest.mark.ranks(1, init=False)
def test_a_death_in_a_collective_of_experts_is_named(tmp_path: Path) -> None:
    """Rank 3 dies before its experts; its peer waits for their gather, the others for tokens."""

    def rank_of(rank: int) -> tuple[str, int]:
        mesh = joined(tmp_path)
        ours = shard(build(), mesh)
        loss_of(ours, inputs(0)[rank]).backward()
        if rank == 3:
            ours.layers[1].experts.register_forward_pre_hook(lambda *_: die())
        text, _ = raised(lambda: loss_of(ours, inputs(1)[rank]).backward(), RuntimeError, OSError)
        (tmp_path / f"said{rank}").write_text(text)
        for other in range(3):  # or the end of a survivor is what another one sees
            wait_file(tmp_path / f"said{other}", 60)
        return text, os.getpid()

    *others, dead = run(rank_of, RANKS)
    assert dead is None
    for text, _ in others:
        assert "rank 3 (pid" in text, text


class Stacked(nn.Module):
    """The sum of all experts' outputs, whose weights are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 7, DIM) / 4)
        self.ep: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ep is None:
            return torch.einsum("td,edf->tf", x, self.weight)
        assert isinstance(self.weight, DTensor)
        tokens = all_gather_tensor_autograd(x, 0, self.ep)
        mine = torch.einsum("td,edf->tf", tokens, self.weight.to_local())
        return reduce_scatter_tensor_autograd(mine, "sum", 0, self.ep)


@pytest.mark.ranks(4, init=False)
def test_experts_may_be_dtensors(tmp_path: Path) -> None:
    """As torchtitan's are: then norms know that they differ over "ep", and so do checkpoints."""
    mesh = joined(tmp_path)
    torch.manual_seed(0)
    plain = nn.Sequential(Stacked(), nn.Linear(DIM, 5))
    ours: Any = copy.deepcopy(plain)
    ours[0].ep = mesh["ep"].get_group()
    ours[0].weight = nn.Parameter(distribute_tensor(plain[0].weight.data, mesh["ep"], [Shard(0)]))
    fully_shard(ours[0], mesh=mesh["efsdp"], shard_placement_fn=lambda p: Shard(1))
    ours[0].set_gradient_divide_factor(RANKS)
    fully_shard(ours, mesh=mesh["efsdp", "ep"]._flatten("dp"))
    weight = ours[0].weight
    assert weight.placements == (Shard(1), Shard(0))
    assert weight.to_local().shape == (2, 4 - mesh.get_local_rank("efsdp"), DIM)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (ours, plain)]
    for step in range(4):
        x = inputs(step)
        ours(x[dist.get_rank()]).square().mean().backward()
        plain(x.view(-1, 7)).square().mean().backward()
        assert_same_grads(ours, plain)
        clip = (clip_grad_norm_, nn.utils.clip_grad_norm_)[step % 2]
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert_near(clip(ours.parameters(), 0.1).full_tensor(), expected, "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_values(ours, plain)
    fsdpc.checkpoint.save(tmp_path / "saved", {"model": ours})
    fresh = nn.Sequential(Stacked(), nn.Linear(DIM, 5))
    fsdpc.checkpoint.load(tmp_path / "saved", {"model": fresh})
    for p, q in zip(fresh.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q.detach().full_tensor())
    dist.destroy_process_group()
