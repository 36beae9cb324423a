"""Collectives for the user's own values, and meshes of ranks."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import fsdpc
from fsdpc import _core


@pytest.mark.ranks([1, 2, 3, 4])
def test_all_reduce_of_each_kind_of_value() -> None:
    """What comes back is of the type that went in, and the value that went in is untouched."""
    rank, n = fsdpc.rank(), fsdpc.world_size()
    total = n * (n + 1) // 2
    assert fsdpc.all_reduce(rank + 1) == total
    assert type(fsdpc.all_reduce(rank + 1)) is int
    assert fsdpc.all_reduce(rank + 0.5) == n * (n - 1) / 2 + 0.5 * n
    assert fsdpc.all_reduce(float(rank), "mean") == (n - 1) / 2
    array = np.arange(5, dtype=np.float64) + rank
    before = array.copy()
    assert (fsdpc.all_reduce(array, "max") == np.arange(5) + n - 1).all()
    assert (fsdpc.all_reduce(array, "min") == np.arange(5)).all()
    assert (array == before).all()
    tensor = fsdpc.tensor(np.full((2, 3), rank + 1, np.float32))
    result = fsdpc.all_reduce(tensor)
    assert isinstance(result, fsdpc.Tensor) and (result.numpy() == total).all()
    assert (tensor.numpy() == rank + 1).all()
    scalar = fsdpc.all_reduce(np.float32(rank))
    assert type(scalar) is np.float32 and scalar == n * (n - 1) / 2


@pytest.mark.parametrize("numel", [0, 1, 3, 7, 100_003])
@pytest.mark.ranks([2, 3])
def test_sums_are_a_fixed_tree_and_the_same_everywhere(numel: int) -> None:
    parts = [
        np.random.default_rng(r).normal(size=numel).astype(np.float32)
        for r in range(fsdpc.world_size())
    ]
    got = fsdpc.all_reduce(parts[fsdpc.rank()])
    wanted = parts[0] + parts[1]
    if len(parts) == 3:
        wanted = wanted + parts[2]
    assert (got == wanted).all()
    assert len({int(crc) for crc in fsdpc.all_gather(_core.crc32c(0, got))}) == 1


@pytest.mark.ranks([1, 2, 3])
def test_all_gather_is_in_rank_order() -> None:
    rank, n = fsdpc.rank(), fsdpc.world_size()
    assert fsdpc.all_gather(rank).tolist() == list(range(n))
    assert fsdpc.all_gather(rank / 2).tolist() == [r / 2 for r in range(n)]
    rows = fsdpc.all_gather(np.full((2, 3), rank, np.int32))
    assert rows.shape == (n, 2, 3) and rows.dtype == np.int32
    assert (rows == np.arange(n)[:, None, None]).all()
    rows = fsdpc.all_gather(fsdpc.tensor([float(rank)]))
    assert isinstance(rows, fsdpc.Tensor) and rows.shape == (n, 1)


@pytest.mark.ranks([1, 2, 3])
def test_broadcast_comes_from_any_root() -> None:
    rank = fsdpc.rank()
    for root in range(fsdpc.world_size()):
        assert fsdpc.broadcast(10 * rank, root) == 10 * root
        assert (fsdpc.broadcast(np.full(4, rank), root) == root).all()
        tensor = fsdpc.tensor(np.full((1, 2), rank, np.float32))
        assert (fsdpc.broadcast(tensor, root).numpy() == root).all()
        assert (tensor.numpy() == rank).all()


@pytest.mark.ranks(2)
def test_a_barrier_keeps_the_first_until_the_last_has_come(tmp_path: Path) -> None:
    come = tmp_path / "come"
    if fsdpc.rank() == 1:
        come.touch()
    fsdpc.barrier()
    assert come.exists()


@pytest.mark.ranks(4)
def test_meshes_and_their_parts() -> None:
    mesh = fsdpc.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    rank = fsdpc.rank()
    assert (mesh.get_local_rank("dp"), mesh.get_local_rank("fsdp")) == divmod(rank, 2)
    assert (mesh.ndim, mesh.size(), mesh.size(1)) == (2, 4, 2)
    assert str(mesh) == "DeviceMesh(dp 2 x fsdp 2)"
    part = mesh["fsdp"]
    assert (part.ndim, part.size(), part.mesh_dim_names) == (1, 2, ("fsdp",))
    assert mesh["dp", "fsdp"].shape == (2, 2)
    for names in ("tp", ("fsdp", "dp"), ("dp", "dp")):
        with pytest.raises(KeyError, match="dp"):
            mesh[names]
    # A part is a mesh to shard over: consecutive ranks hold the halves, twice.
    layer = fsdpc.fully_shard(fsdpc.nn.Linear(4, 4, bias=False), mesh=part)
    assert layer.weight.local.shape == (2, 4)
    whole = fsdpc.full_tensor(layer.weight).numpy()
    assert (whole[2 * (rank % 2) :][:2] == layer.weight.local.numpy()).all()


@pytest.mark.ranks(2)
def test_meshes_that_cannot_be() -> None:
    for shape, names, text in (
        ((3,), None, "has 3 ranks; the world has 2"),
        ((1, 1, 2), None, "one or two dimensions"),
        ((2,), ("a", "b"), r"2 names \('a', 'b'\) for 1 dimensions"),
    ):
        with pytest.raises(ValueError, match=text):
            fsdpc.init_device_mesh("cpu", shape, mesh_dim_names=names)
    with pytest.raises(RuntimeError, match="no device 'cuda'|tensors live on device 'cpu'"):
        fsdpc.init_device_mesh("cuda", (2,))


@pytest.mark.ranks(2, init=False)
def test_rank_and_world_size_given_by_hand() -> None:
    rank = int(os.environ.pop("RANK"))
    size = int(os.environ.pop("WORLD_SIZE"))
    assert not fsdpc.is_initialized()
    fsdpc.init(rank, size)
    assert (fsdpc.rank(), fsdpc.world_size(), fsdpc.local_rank()) == (rank, 2, rank)
    assert fsdpc.all_reduce(1) == 2
    fsdpc.shutdown()
    assert not fsdpc.is_initialized()


@pytest.mark.ranks(2)
def test_what_show_config_says() -> None:
    config = fsdpc.show_config(print_=False)
    assert (config["rank"], config["world_size"]) == (fsdpc.rank(), 2)
    assert config["fsdpc"] == fsdpc.__version__ and config["isa"]


@pytest.mark.parametrize(("hosts", "transport"), [(1, "null"), (2, "hosts"), (4, "hosts")])
def test_one_process_plays_a_world(hosts: int, transport: str) -> None:
    """Peers hold what this rank holds; several hosts take the path over links."""
    comm = _core.Comm(3, 8, None, hosts=hosts)
    values = fsdpc.tensor(np.arange(1, 4, dtype=np.float32))
    comm.all_reduce(values)
    comm.barrier()
    assert (comm.transport, comm.hosts) == (transport, hosts)
    assert values.numpy().tolist() == [8, 16, 24]
    with pytest.raises(ValueError, match="8 ranks on 3 hosts: every host must have as many"):
        _core.Comm(0, 8, None, hosts=3)
