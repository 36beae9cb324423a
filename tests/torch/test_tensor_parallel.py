"""Parameters that ``parallelize_module`` has cut, sharded further over another dimension."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fsdpc import checkpoint
from fsdpc.torch import (
    clip_grad_norm_,
    full_grad,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    optim,
    set_model_state_dict,
    set_optimizer_state_dict,
    summon_full_params,
)

from .common import join_gloo

DIM, WORDS, STEPS = 12, 16, 5
CLIP = 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.wide = nn.Linear(DIM, 3 * DIM)
        self.back = nn.Linear(3 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.relu(self.wide(self.norm(x))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made() -> Words:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    return Words()


def parallel(model: Words, tp: DeviceMesh, local_output: bool = True) -> Words:
    """Cut the model as torch's tutorial of tensor parallelism does."""
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "wide": ColwiseParallel(input_layouts=Shard(1)),
            "back": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, tp, plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Replicate() if local_output else Shard(-1),
            use_local_output=local_output,
        ),
    }
    return parallelize_module(model, tp, ends)


def sharded(model: Words, mesh: DeviceMesh, shard: Any = fully_shard, **options: Any) -> Any:
    for block in model.blocks:
        shard(block, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def pair(folder: Path) -> tuple[DeviceMesh, Words, Any]:
    """A 2 x 2 mesh, a plain model, and the same model on the mesh."""
    join_gloo(folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = made()
    return mesh, plain, sharded(parallel(copy.deepcopy(plain), mesh["tp"]), mesh["dp"])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    words, targets = torch.randint(0, WORDS, (2, 4, 8), generator=generator)
    return words, targets


def loss_of(model: Any, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())


def step_of(model: Any, dp: DeviceMesh | None, step: int) -> torch.Tensor:
    """A backward for this rank's sequences of a batch."""
    words, targets = batch(step)
    if dp is not None:
        size, rank = dist.get_world_size(dp.get_group()), dp.get_local_rank()
        words, targets = words.chunk(size)[rank], targets.chunk(size)[rank]
    loss = loss_of(model, words, targets)
    loss.backward()
    return loss.detach()


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def assert_near(found: Any, expected: torch.Tensor) -> None:
    """Within 1e-6 of the largest element."""
    scale = expected.abs().max().item() or 1.0
    torch.testing.assert_close(whole(found), expected, rtol=0, atol=1e-6 * scale)


OPTIMIZERS = {
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-3, eps=1e-5, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, eps=1e-5, fused=True),
    "ours": lambda ps: optim.AdamW(ps, lr=1e-3, eps=1e-5),
}


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (2, 1, 2)], ids=str)
def test_training_equals_one_process(shape: tuple[int, ...], tmp_path: Path) -> None:
    join_gloo(tmp_path)
    names = ("replicate", "shard", "tp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    own = mesh[names[:-1]] if len(shape) == 3 else mesh["shard"]
    data = own._flatten("data") if len(shape) == 3 else own
    plain = made()
    ours = sharded(parallel(copy.deepcopy(plain), mesh["tp"]), own)
    optimizers = [OPTIMIZERS["foreach"](m.parameters()) for m in (plain, ours)]
    for step in range(STEPS):
        step_of(plain, None, step)
        loss = step_of(ours, data, step)
        assert torch.isfinite(loss)
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert_near(q.grad, p.grad)
            assert_near(full_grad(q), p.grad)
        clip = (clip_grad_norm_, nn.utils.clip_grad_norm_)[step % 2]
        expected = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        assert_near(clip(ours.parameters(), CLIP), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert_near(q, p.detach())


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("kind", ["foreach", "fused", "ours"])
def test_it_is_what_torchs_fully_shard_is(kind: str, tmp_path: Path) -> None:
    """Placements, rows and steps; states are compared whole."""
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = made()
    models = [
        sharded(parallel(copy.deepcopy(plain), mesh["tp"]), mesh["dp"], shard)
        for shard in (fully_shard, torch_fully_shard)
    ]
    makers = [OPTIMIZERS[kind], OPTIMIZERS["foreach" if kind == "ours" else kind]]
    optimizers = [make(m.parameters()) for make, m in zip(makers, models, strict=True)]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            step_of(model, mesh["dp"], step)
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert p.placements == q.placements and p.device_mesh == q.device_mesh
            assert p.shape == q.shape and p.to_local().shape == q.to_local().shape
            assert_near(p.to_local(), q.detach().to_local())
            assert p.grad.placements == q.grad.placements
            assert_near(p.grad, whole(q.grad))
    assert torch.isfinite(whole(norm))


@pytest.mark.ranks(4, init=False)
def test_muon_reads_whole_matrices(tmp_path: Path) -> None:
    """It multiplies in bfloat16, of whose products torch's DTensor adds the parts."""
    mesh, plain, ours = pair(tmp_path)
    optimizers = [
        torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=1e-2)
        for m in (plain, ours)
    ]
    for step in range(2):
        step_of(ours, mesh["dp"], step)
        before = [p.detach().clone() for p in plain.parameters()]
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            p.grad = whole(q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for old, p, q in zip(before, plain.parameters(), ours.parameters(), strict=True):
            taken, expected = whole(q.detach()) - old, p.detach() - old
            assert (taken - expected).norm() <= 0.03 * expected.norm() + 1e-9
            with torch.no_grad():
                p.copy_(whole(q))


@pytest.mark.ranks(4, init=False)
def test_losses_over_cut_classes(tmp_path: Path) -> None:
    """Within ``loss_parallel``, logits stay cut."""
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = made()
    cut = parallel(copy.deepcopy(plain), mesh["tp"], local_output=False)
    ours = sharded(cut, mesh["dp"])
    step_of(plain, None, 0)
    with loss_parallel():
        step_of(ours, mesh["dp"], 0)
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert_near(q.grad, p.grad)


class Odd(nn.Module):
    """Parts over "tp" that "dp" does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 6)
        self.back = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.relu(self.wide(x)))


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_may_be_uneven(dim: int, tmp_path: Path) -> None:
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    plain = Odd()
    plan = {"wide": ColwiseParallel(), "back": RowwiseParallel()}
    ours: Any = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan)
    placed = (lambda p: Shard(1) if p.dim() == 2 else None) if dim else None
    fully_shard(ours, mesh=mesh["dp"], shard_placement_fn=placed)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (plain, ours)]
    for _ in range(3):
        plain(x).square().mean().backward()
        ours(x.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert_near(q.grad, p.grad)
            assert_near(q.grad.norm(), p.grad.norm())
            assert_near((q.grad * 2).sum(), (p.grad * 2).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert_near(q, p.detach())
        assert_near(q.detach().t().contiguous() if q.dim() == 2 else q, p.detach().t())


@pytest.mark.ranks(4, init=False)
def test_checkpoints_load_at_other_shapes(tmp_path: Path) -> None:
    """DCP's folders of 2 x 2 load at 4 x 1, at 1 x 4, into torch's own, and into a plain model."""
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = sharded(parallel(made(), mesh["tp"]), mesh["dp"])
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    step_of(ours, mesh["dp"], 0)
    optimizer.step()
    folder = tmp_path / "saved"
    dcp.save({"model": ours.state_dict()}, checkpoint_id=folder)
    weights = get_model_state_dict(ours)
    states = get_optimizer_state_dict(ours, optimizer)
    for shape, shard in (((4, 1), fully_shard), ((1, 4), fully_shard), ((2, 2), torch_fully_shard)):
        other = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        fresh = sharded(parallel(made(), other["tp"]), other["dp"], shard)
        state = {"model": fresh.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        fresh.load_state_dict(state["model"])
        for name, p in fresh.named_parameters():
            assert torch.equal(whole(p.detach()), weights[name]), name
        if shard is torch_fully_shard:
            continue
        set_model_state_dict(fresh, {k: torch.zeros_like(v) for k, v in weights.items()})
        set_model_state_dict(fresh, weights)
        adam = torch.optim.AdamW(fresh.parameters(), lr=1.0)
        set_optimizer_state_dict(fresh, adam, states)
        found = get_optimizer_state_dict(fresh, adam)
        for name, values in states["state"].items():
            for key, value in values.items():
                assert torch.equal(found["state"][name][key], value), (name, key)
        step_of(ours, mesh["dp"], 1)
        step_of(fresh, other["dp"], 1)
        ours.zero_grad()
    plain = made()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    assert all(torch.equal(state["model"][name], value) for name, value in weights.items())


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("kind", ["foreach", "ours"])
def test_folders_of_fsdpc_load_at_other_shapes(kind: str, tmp_path: Path) -> None:
    """Weights and states saved at 2 x 2, loaded at 4 x 1 and 1 x 4, and by a plain model."""
    join_gloo(tmp_path)
    runs = []
    for shape in ((2, 2), (4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        ours = sharded(parallel(made(), mesh["tp"]), mesh["dp"])
        runs.append((mesh, ours, OPTIMIZERS[kind](ours.parameters())))
    mesh, ours, optimizer = runs[0]
    step_of(ours, mesh["dp"], 0)
    optimizer.step()
    checkpoint.save(tmp_path / "saved", {"model": ours, "optimizer": optimizer})
    weights = get_model_state_dict(ours)
    states = get_optimizer_state_dict(ours, optimizer)["state"]
    for _, other, theirs in runs[1:]:
        checkpoint.load(tmp_path / "saved", {"model": other, "optimizer": theirs})
        found = get_optimizer_state_dict(other, theirs)["state"]
        for name, value in get_model_state_dict(other).items():
            assert torch.equal(value, weights[name]), name
            for key, state in states[name].items():
                assert torch.equal(found[name][key], state), (name, key)
    plain = made()
    checkpoint.load(tmp_path / "saved", {"model": plain})
    for name, value in plain.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.ranks(4, init=False)
def test_full_values_are_those_of_the_whole(tmp_path: Path) -> None:
    """Initialisation, summoned copies, random numbers and conversions see logical parameters."""
    mesh, plain, ours = pair(tmp_path)
    for model in (plain, ours):
        torch.manual_seed(7)
        model.blocks[0].wide.reset_parameters()
        with torch.no_grad():
            model.head.weight.normal_()
    with summon_full_params(ours), torch.no_grad():
        assert ours.blocks[0].wide.weight.shape == (3 * DIM, DIM)
        for m in (ours, plain):
            m.blocks[1].back.weight.mul_(torch.arange(3.0 * DIM))
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(whole(q.detach()), p.detach())
    ours.to(torch.float64)
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(whole(q.detach()), p.detach().double())
    at = mesh.get_coordinate()
    weight = ours.blocks[0].wide.weight
    begin = 18 * at[1] + 9 * at[0]
    assert f"rows {begin}:{begin + 9} of" in repr(weight.fsdpc)
    part = f"rows {6 * at[0]}:{6 * at[0] + 6}, {18 * at[1]}:{18 * at[1] + 18} of dimension 1 of"
    assert part in repr(ours.blocks[0].back.weight.fsdpc)
    with torch.no_grad():
        weight.data = torch.ones(3 * DIM, DIM, dtype=torch.float64)
    assert torch.equal(whole(weight.detach()), torch.ones(3 * DIM, DIM, dtype=torch.float64))


@pytest.mark.ranks(4, init=False)
def test_a_meta_model_is_initialised_as_a_whole(tmp_path: Path) -> None:
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = made()
    with torch.device("meta"):
        empty = Words()
    ours = sharded(parallel(empty, mesh["tp"]), mesh["dp"])
    assert ours.head.weight.is_meta
    ours.to_empty(device="cpu")
    ours.load_state_dict(plain.state_dict())
    step_of(plain, None, 0)
    step_of(ours, mesh["dp"], 0)
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert_near(q.grad, p.grad)


@pytest.mark.ranks(4, init=False)
def test_some_parameters_may_be_plain(tmp_path: Path) -> None:
    """The head is not parallel: each rank of "tp" has a copy, of which norms count one."""
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    plain = nn.Sequential(Odd(), nn.Linear(3, 2))
    ours: Any = copy.deepcopy(plain)
    parallelize_module(ours[0], mesh["tp"], {"wide": ColwiseParallel(), "back": RowwiseParallel()})
    fully_shard(ours, mesh=mesh["dp"])
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    plain(x).square().mean().backward()
    ours(x.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        for order in (2.0, 1.0, float("inf")):
            wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
            assert_near(clip(ours.parameters(), float("inf"), order), wanted)
    with torch.no_grad():  # as if its ranks had computed with different inputs
        if mesh.get_local_rank("tp"):
            ours[1].weight.grad.mul_(2)
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        with pytest.raises(RuntimeError, match=r"norm of .*1\.weight.* on the 2 ranks"):
            clip(ours.parameters(), float("inf"))
    assert torch.isfinite(expected)


@pytest.mark.ranks(4, init=False)
def test_what_cannot_be_sharded_further_is_refused(tmp_path: Path) -> None:
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize_module(Odd(), mesh["tp"], {"wide": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"'wide.weight' is a DTensor over .*mesh\[\"dp\"\]"):
        fully_shard(model)
    with pytest.raises(ValueError, match="data parallel dimensions of the same mesh"):
        fully_shard(model, mesh=mesh["tp"])
    partial: Any = nn.Linear(2, 2)
    partial.weight = nn.Parameter(
        DTensor.from_local(torch.ones(2, 2), mesh["tp"], [Partial()], run_check=False)
    )
    with pytest.raises(NotImplementedError, match="'weight' is a DTensor placed as .*Partial"):
        fully_shard(partial, mesh=mesh["dp"])


def on_full_mesh(model: Odd, mesh: DeviceMesh, dims: DataParallelMeshDims) -> Odd:
    """Place parameters on all dimensions, cut over those that are not data parallel."""
    data = (*dims.replicate_names, *dims.shard_names)
    for m, dim in ((model.wide, 0), (model.back, 1)):
        for name, p in list(m.named_parameters()):
            cut = Shard(dim) if p.dim() > dim else Replicate()
            placed = [Replicate() if n in data else cut for n in mesh.mesh_dim_names or ()]
            setattr(m, name, nn.Parameter(distribute_tensor(p.detach(), mesh, placed)))
    return model


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize(
    ("names", "dims"),
    [
        (("dp", "tp"), DataParallelMeshDims(shard="dp")),
        (("dp", "cp"), DataParallelMeshDims(shard=("dp", "cp"))),
        (("dp", "tp"), DataParallelMeshDims(replicate="dp")),
        (("replicate", "dp", "cp", "tp"), DataParallelMeshDims(("dp", "cp"), "replicate")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_parameters_on_the_whole_mesh(
    names: tuple[str, ...], dims: DataParallelMeshDims, tmp_path: Path
) -> None:
    """``dp_mesh_dims``, in both; inputs and gradients are on the whole mesh, too."""
    join_gloo(tmp_path)
    shape = (2, 2) if len(names) == 2 else (1, 2, 1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(1)
    plain = Odd()
    models: list[Any] = [
        shard(on_full_mesh(copy.deepcopy(plain), mesh, dims), mesh=mesh, dp_mesh_dims=dims)
        for shard in (fully_shard, torch_fully_shard)
    ]
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    given = distribute_tensor(x, mesh, [Replicate() if n == "tp" else Shard(0) for n in names])
    size = 4 if "tp" not in names else 2
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (plain, *models)]
    for _ in range(3):
        (plain(x).square().sum() / size).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        for model in models:
            model(given).square().sum().backward()
            assert_near(nn.utils.clip_grad_norm_(model.parameters(), CLIP), expected)
        for p, q, theirs in zip(*(m.parameters() for m in (plain, *models)), strict=True):
            assert q.placements == theirs.placements and q.device_mesh == theirs.device_mesh
            assert q.grad.placements == theirs.grad.placements
            torch.testing.assert_close(q.grad.to_local(), theirs.grad.to_local())
            assert_near(q.grad, p.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), models[0].parameters(), strict=True):
        assert_near(q, p.detach())


@pytest.mark.ranks(4, init=False)
def test_plain_parameters_of_a_data_parallel_mesh(tmp_path: Path) -> None:
    """Torch 2.14 accepts them for ``dp_mesh_dims`` if they have spmd_types annotations."""
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tp"))
    dims = DataParallelMeshDims(shard="shard", replicate="replicate")
    torch.manual_seed(1)
    plain = Odd()
    named: Any = fully_shard(copy.deepcopy(plain), mesh=mesh, dp_mesh_dims=dims)
    picked: Any = fully_shard(copy.deepcopy(plain), mesh=mesh["replicate", "shard"])
    for model in (named, picked):
        model(torch.full((2, 5), float(dist.get_rank()))).sum().backward()
    for p, q in zip(named.parameters(), picked.parameters(), strict=True):
        assert p.placements == q.placements and p.device_mesh == q.device_mesh
        assert torch.equal(p.grad.to_local(), q.grad.to_local())

    def refused(message: str, model: nn.Module = plain, **given: Any) -> None:
        with pytest.raises(ValueError, match=message):
            fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**given))

    refused(r"'wide.weight' is plain, and dp_mesh_dims leaves \['replicate'\]", shard="shard")
    refused("'dp' not found in mesh.mesh_dim_names", shard="dp")
    refused("DTensor over .*, not over", parallel_odd(mesh["tp"]), shard="shard", replicate="tp")
    cut = on_full_mesh(copy.deepcopy(plain), mesh, dims=DataParallelMeshDims(shard="replicate"))
    refused(r"Replicate\(\) on the dimensions of dp_mesh_dims", cut, shard="shard")


def parallel_odd(tp: DeviceMesh) -> nn.Module:
    return parallelize_module(Odd(), tp, {"wide": ColwiseParallel(), "back": RowwiseParallel()})
