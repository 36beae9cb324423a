"""Ranks on several hosts, which share memory inside a host alone: the bits of one host.

Hosts are pretended (fsdpc.testing), and gloo carries their bytes, as it does between machines.
"""

from __future__ import annotations

import os
import threading
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdpc
from fsdpc import _core
from fsdpc.distributed import environment, pretend
from fsdpc.torch import MixedPrecisionPolicy, _transport

from .common import batch, build, full_parameters, join_gloo, loss_of, shard

ROUTES = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"reshard_after_forward": False},
    "two": {"reshard_after_forward": 2},
    "SHARD_OPTIM": {"strategy": "SHARD_OPTIM"},
    "NO_SHARD": {"mesh": (4, 1)},
    "HYBRID_SHARD": {"mesh": (2, 2)},
    "HYBRID_SHARD_ZERO2": {"mesh": (2, 2), "strategy": "HYBRID_SHARD_ZERO2"},
}
POSTPONED = {"fp32": [False, True], "deterministic": [True]}  # else none
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = [
    *product(ROUTES, ["fp32", "bf16"]),
    *product(["FULL_SHARD", "HYBRID_SHARD"], ["fp16", "deterministic"]),
]


links: list[Any] = []  # of this rank to other hosts, while it is in a world of several


def leave() -> None:
    """Leave the world; no thread of a link stays behind."""
    fsdpc.shutdown()
    assert not [t for t in threading.enumerate() if t.name == "fsdpc carrier"]
    dist.destroy_process_group()


def join(folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str = "gloo") -> None:
    """Join the other ranks, and note the link that this makes."""
    monkeypatch.setattr("fsdpc.torch._mesh.carry", noted)
    links.clear()
    join_gloo(folder, backend)


def join_again(hosts: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Join the other ranks, now on so many hosts."""
    if dist.is_initialized():
        leave()
    pretend.on_hosts(hosts)
    folder = folder / str(hosts)
    folder.mkdir(exist_ok=True)
    join(folder, monkeypatch)


def noted(group: Any, hosts: int) -> Any:
    links.append(_transport.carry(group, hosts))
    return links[-1]


def prepared(options: dict[str, Any], **policy: Any) -> Any:
    if "mesh" in options:
        mesh = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))
        options = options | {"mesh": mesh}
    return shard(build(), **options, mp_policy=MixedPrecisionPolicy(**policy))


def train(model: Any, steps: int = 3, postponed: bool = False, scaled: bool = False) -> None:
    """Two micro-steps a step, clipping, AdamW.

    ``postponed``: the first micro-step is not reduced. ``scaled``: by a loss scaler, and one rank
    overflows in the second step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    for step in range(steps):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1 or not postponed)
            loss = loss_of(model, batch(step, dist.get_rank(), micro))
            if scaled and step == 1 and dist.get_rank() == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert not scaled or scaler.get_scale() == 2.0**9


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize(("route", "mode"), CASES)
def test_bits_are_those_of_one_host(
    route: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[tuple[int, bool], dict[str, torch.Tensor]] = {}
    for hosts in (1, 2, 4):
        join_again(hosts, tmp_path, monkeypatch)
        if mode == "deterministic":
            fsdpc.init(deterministic=True)
        for postponed in POSTPONED.get(mode, [False]):
            model = prepared(ROUTES[route], param_dtype=DTYPES.get(mode))
            train(model, postponed=postponed, scaled=mode == "fp16")
            values[hosts, postponed] = full_parameters(model)
        assert len(links) == (hosts > 1)
    for (hosts, postponed), found in values.items():
        for name, value in values[1, postponed].items():
            assert torch.equal(found[name], value), (hosts, postponed, name)
    leave()


@pytest.mark.ranks(4, hosts=2, init=False)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_hybrids_replicate_between_hosts(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mesh they have that mesh."""
    join(tmp_path, monkeypatch)
    found = []
    for options in ({"mesh": (2, 2)}, {}):
        model = prepared({**options, "strategy": strategy})
        train(model)
        found.append(full_parameters(model))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    leave()


def sent_by(model: Any, steps: int = 3) -> list[int]:
    """Bytes that this rank sends to other hosts, step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent = []
    for step in range(steps):
        before = links[0].sent_bytes
        loss_of(model, batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(links[0].sent_bytes - before)
    return sent


@pytest.mark.ranks(4, hosts=2, init=False)
@pytest.mark.parametrize(
    ("dtype", "bytes_of_element"), [(None, 4), (torch.bfloat16, 2)], ids=["fp32", "bf16"]
)
def test_what_leaves_a_host_leaves_it_once(
    dtype: Any, bytes_of_element: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step sends this host's half of the weights, and fp32 sums of the other half's gradients."""
    join(tmp_path, monkeypatch)
    model = shard(build(dim=200), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    numel = sum(p.numel() for p in build(dim=200).parameters())
    of_ranks = fsdpc.all_gather(np.array(sent_by(model))).reshape(4, 3)
    least = numel // 2 * (bytes_of_element + 4)
    for of_host in (of_ranks[:2].sum(axis=0), of_ranks[2:].sum(axis=0)):
        assert all(least < n < 1.03 * least for n in of_host[1:]), (of_host, least)
    leave()


@pytest.mark.ranks(4, init=False)
def test_each_peer_host_has_its_message_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hosts in (2, 4):
        join_again(hosts, tmp_path, monkeypatch)
        shard(build())
        assert links[0].buffers == 4 * (hosts - 1)
    leave()
    for peers in (-1, 0, 4):
        with pytest.raises(ValueError, match=f"{peers} peers on a transport of 4"):
            _core.Transport(0, 4, peers=peers)


@pytest.mark.ranks(4, hosts=2, init=False)
def test_a_group_that_keeps_parameters_sends_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host keeps what forward brought, whether it is told to (its two ranks) or not."""
    join(tmp_path, monkeypatch)
    sent = [sent_by(prepared({"reshard_after_forward": ranks})) for ranks in (True, 2)]
    assert sent[0] == sent[1]
    leave()


@pytest.mark.ranks(4, hosts=2, init=False)
def test_values_and_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join(tmp_path, monkeypatch)
    fsdpc.torch._mesh.join()
    rank = fsdpc.rank()
    x = np.arange(1000, dtype=np.float32) + rank
    np.testing.assert_array_equal(fsdpc.all_reduce(x), 4 * np.arange(1000.0) + 6)
    np.testing.assert_array_equal(fsdpc.all_gather(np.full(3, rank)).reshape(4, 3)[:, 0], range(4))
    for root in range(4):
        value = fsdpc.broadcast(np.full(5, float(rank)), root=root)
        np.testing.assert_array_equal(value, np.full(5, float(root)))
    fsdpc.barrier()
    leave()


@pytest.mark.ranks(4, hosts=2, init=False)
def test_checkpoints_go_between_numbers_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    join(tmp_path, monkeypatch)
    model = prepared({})
    train(model)
    fsdpc.checkpoint.save(folder, {"model": model})
    before = full_parameters(model)
    for hosts in (1, 4):
        join_again(hosts, tmp_path, monkeypatch)
        model = prepared({})
        fsdpc.checkpoint.load(folder, {"model": model})
        after = full_parameters(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
    leave()


class StoreGroup(dist.ProcessGroup):
    """A process group of another back end than gloo, which gathers through the store alone."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store, self._calls = store, 0

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> None:
        self._calls += 1
        self._store.set(f"{self._calls} of {self.rank()}", inputs[0].numpy().tobytes())
        for rank, output in enumerate(outputs[0]):
            found = bytearray(self._store.get(f"{self._calls} of {rank}"))
            output.copy_(torch.frombuffer(found, dtype=output.dtype))


@pytest.mark.ranks(4, hosts=2, init=False)
def test_the_default_group_may_have_another_back_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(store: Any, rank: int, size: int, timeout: Any) -> StoreGroup:
        return StoreGroup(store, rank, size)

    dist.Backend.register_backend("store", create, devices=["cpu"])
    found = []
    for backend in ("gloo", "store"):
        (folder := tmp_path / backend).mkdir(exist_ok=True)
        join(folder, monkeypatch, backend)
        assert dist.get_backend() == backend
        model = prepared({})
        train(model)
        assert len(links) == 1
        found.append(full_parameters(model))
        leave()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.ranks(4, hosts=2, init=False)
def test_an_exception_on_another_host_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(tmp_path, monkeypatch)
    model = prepared({})
    if fsdpc.rank() == 3:
        train(model, steps=1)
        fsdpc.torch._mesh.join().abort("out of disk")
        return leave()
    with pytest.raises(fsdpc.PeerError, match="rank 3: out of disk"):
        train(model)  # rank 3 may have aborted before others end their first step
    leave()


@pytest.mark.ranks(4, hosts=2, init=False, timeout=30)
def test_a_fork_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that shuts down neither waits for its parent's threads nor takes its parent along."""
    join(tmp_path, monkeypatch)
    model = prepared({})
    train(model, steps=1)
    if (child := os.fork()) == 0:
        fsdpc.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    train(model, steps=1)
    leave()


@pytest.mark.ranks(3, init=False)
def test_hosts_of_different_numbers_of_ranks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "pretended_host", int(os.environ["RANK"]) // 2)
    join(tmp_path, monkeypatch)
    with pytest.raises(NotImplementedError, match="2 on node0, 1 on node1"):
        prepared({})
    assert not fsdpc.is_initialized()
    leave()
