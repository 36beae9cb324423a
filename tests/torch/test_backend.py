"""The back end "fsdpc" of torch.distributed, against what each collective means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdpc
import fsdpc.torch
from fsdpc import PeerError

SIZES = [(), (5,), (3, 7), (70_001,)]  # the last takes several chunks


@contextmanager
def joined(
    folder: Path, seconds: float = 60, backend: str = "fsdpc"
) -> Iterator[tuple[int, int]]:
    """Yield (rank, size) of a default group of ours."""
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=fsdpc.rank(),
        world_size=fsdpc.world_size(), timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return values that every rank can compute, small enough for exact sums."""
    generator = torch.Generator().manual_seed(rank)
    made = torch.randint(1, 4, shape, generator=generator)
    return made > 1 if dtype == torch.bool else made.to(dtype)


OPS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda x: x.sum(0),
    dist.ReduceOp.AVG: lambda x: x.float().mean(0) if x.element_size() == 2 else x.mean(0),
    dist.ReduceOp.PRODUCT: lambda x: x.prod(0),
    dist.ReduceOp.MIN: lambda x: x.amin(0),
    dist.ReduceOp.MAX: lambda x: x.amax(0),
    dist.ReduceOp.BAND: lambda x: x[0] & x[1] & x[-1],
    dist.ReduceOp.BOR: lambda x: x[0] | x[1] | x[-1],
    dist.ReduceOp.BXOR: lambda x: x[0] ^ x[1] if len(x) == 2 else x[0] ^ x[1] ^ x[2],
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@pytest.mark.ranks(2, 3)
def test_reductions(tmp_path: Path) -> None:
    with joined(tmp_path) as (rank, size):
        for op, compute in OPS.items():
            bitwise = op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
            mean = op == dist.ReduceOp.AVG
            for dtype in INTEGERS if bitwise else FLOATS if mean else FLOATS + INTEGERS:
                for shape in SIZES:
                    every = torch.stack([values(r, shape, dtype) for r in range(size)])
                    want = compute(every).to(dtype)
                    mine = values(rank, shape, dtype)
                    dist.all_reduce(mine, op=op)
                    torch.testing.assert_close(mine, want, msg=f"{op} {dtype} {shape}")
                    mine = values(rank, shape, dtype)
                    dist.reduce(mine, 1, op=op)
                    if rank == 1:
                        torch.testing.assert_close(mine, want)
        mine = torch.complex(torch.ones(3), torch.full((3,), float(rank)))
        dist.all_reduce(mine)
        assert mine.tolist() == [complex(size, sum(range(size)))] * 3
        transposed = values(rank, (4, 6), torch.float32).T
        dist.all_reduce(transposed)
        want = torch.stack([values(r, (4, 6), torch.float32) for r in range(size)]).sum(0)
        assert torch.equal(transposed, want.T)


@pytest.mark.ranks(2, 3)
def test_parts(tmp_path: Path) -> None:
    """Scattered and gathered tensors, in lists and as one."""
    with joined(tmp_path) as (rank, size):
        for n in (1, 4, 90_001):
            every = [torch.arange(float(size * n)) + 1000 * r for r in range(size)]
            out = torch.empty(n)
            dist.reduce_scatter_tensor(out, every[rank])
            total = torch.stack(every).sum(0)
            assert torch.equal(out, total[rank * n : (rank + 1) * n])
            dist.reduce_scatter(out, list(every[rank].chunk(size)))
            assert torch.equal(out, total[rank * n : (rank + 1) * n])
            whole = torch.empty(size, n)
            dist.all_gather_into_tensor(whole, every[rank][:n])
            assert torch.equal(whole, torch.stack([x[:n] for x in every]))
            parts = [torch.empty(n) for _ in range(size)]
            dist.all_gather(parts, every[rank][:n])
            assert torch.equal(torch.stack(parts), whole)
            dist.gather(every[rank][:n], parts if rank == 1 else None, dst=1)
            assert torch.equal(torch.stack(parts), whole)
            dist.scatter(out, list(every[0].chunk(size)) if rank == 0 else None, src=0)
            assert torch.equal(out, every[0].chunk(size)[rank])
            copy = every[rank].clone()
            dist.broadcast(copy, 1)
            assert torch.equal(copy, every[1])
            mixed = torch.empty(size * n)
            dist.all_to_all_single(mixed, every[rank])
            assert torch.equal(mixed, torch.cat([x.chunk(size)[rank] for x in every]))
        sends = [rank + to for to in range(size)]
        mixed = torch.empty(sum(sends))
        dist.all_to_all_single(mixed, torch.full((sum(sends),), float(rank)), sends, sends)
        assert mixed.tolist() == [float(r) for r in range(size) for _ in range(r + rank)]
        lists = [torch.empty(r + 1, rank + 1) for r in range(size)]
        dist.all_to_all(lists, [torch.full((rank + 1, to + 1), 10.0 * rank + to)
                                for to in range(size)])  # fmt: skip
        assert [x[0, 0].item() for x in lists] == [10.0 * r + rank for r in range(size)]
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": r} for r in range(size)]


@pytest.mark.ranks(3)
def test_messages(tmp_path: Path) -> None:
    with joined(tmp_path) as (rank, size):
        after, before = (rank + 1) % size, (rank - 1) % size
        for n in (1, 1000, 1_000_000):
            got = torch.empty(n)
            sent = dist.isend(torch.full((n,), float(rank)), after)
            dist.recv(got, before)
            sent.wait()
            assert torch.equal(got, torch.full((n,), float(before)))
        pairs = [torch.empty(3), torch.empty(3)]
        works = [dist.irecv(pair, before, tag=tag) for tag, pair in enumerate(pairs)]
        for tag in (1, 0):
            dist.send(torch.full((3,), float(10 * rank + tag)), after, tag=tag)
        for work in works:
            work.wait()
        assert [pair[0].item() for pair in pairs] == [10.0 * before, 10.0 * before + 1]
        if rank == 0:
            one = torch.empty(1)
            assert {dist.recv(one) for _ in range(size - 1)} == {1, 2}
        else:
            dist.send(torch.tensor([1.0]), 0)
        dist.barrier()
        operations = [dist.P2POp(dist.isend, torch.full((2,), float(rank)), after),
                      dist.P2POp(dist.irecv, pairs[0][:2], before)]  # fmt: skip
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert pairs[0][:2].tolist() == [float(before)] * 2


@pytest.mark.ranks(2, 3)
def test_uneven_blocks_do_not_wait_for_peers(tmp_path: Path) -> None:
    """Ranks learn the sizes of the blocks while an all_to_all advances, not in its post."""
    with joined(tmp_path, seconds=20) as (rank, size):
        token = torch.zeros(1)
        counts = [rank + to for to in range(size)]
        for kind in ("single", "lists"):
            if rank > 0:
                dist.recv(token, 0)  # rank 0 has posted its all_to_all
            blocks = [torch.full((n,), float(rank)) for n in counts]
            got = [torch.empty(n) for n in counts]
            whole = torch.empty(sum(counts))
            work: Any = (
                dist.all_to_all(got, blocks, async_op=True) if kind == "lists"
                else dist.all_to_all_single(whole, torch.cat(blocks), counts, counts, async_op=True)
            )  # fmt: skip
            for to in range(1, size) if rank == 0 else ():
                dist.send(token, to)
            after = torch.ones(3)
            dist.all_reduce(after)
            work.wait()
            want = [float(r) for r in range(size) for _ in range(r + rank)]
            assert (torch.cat(got) if kind == "lists" else whole).tolist() == want
            assert after.tolist() == [size] * 3


@pytest.mark.ranks(3)
def test_groups_wait_in_any_order(tmp_path: Path) -> None:
    """Works of two groups, posted and awaited in different orders; nobody keeps some of them."""
    with joined(tmp_path) as (rank, size):
        first, second = dist.new_group([0, 1]), dist.new_group([2, 1, 0])
        assert dist.get_rank(second) == dist.get_group_rank(second, rank)
        x, y = torch.full((200_000,), 1.0), torch.full((200_000,), 2.0)
        if rank < 2:
            order = [(x, first), (y, second)]
            works = [dist.all_reduce(t, group=g, async_op=True)
                     for t, g in (order if rank else order[::-1])]  # fmt: skip
            for work in works[::-1] if rank else works:
                assert work is not None
                work.wait()
                assert work.is_completed() and work.result()[0][0] in (2, 6)
            assert x[0] == 2
        else:
            dist.all_reduce(y, group=second)
        assert torch.equal(y, torch.full_like(y, 6))
        z = torch.ones(3)
        dist.all_reduce(z, async_op=True)
        dist.barrier()
        assert z.tolist() == [3] * 3
        future = dist.all_reduce(z, async_op=True).get_future()
        assert future.wait()[0].tolist() == [9] * 3


@pytest.mark.ranks(2)
def test_threads_have_groups_of_their_own(tmp_path: Path) -> None:
    with joined(tmp_path) as (rank, size):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        found: list[list[float]] = [[], []]

        def work(index: int) -> None:
            for i in range(200):
                x = torch.full((index * 40_000 + 1,), float(i + rank))
                dist.all_reduce(x, group=groups[index])
                found[index].append(x[-1].item())

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[2.0 * i + 1 for i in range(200)]] * 2


@pytest.mark.ranks(2)
def test_torch_builds_on_it(tmp_path: Path) -> None:
    """DTensor, DDP, functional collectives, DCP and FSDP2 itself."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed._functional_collectives import all_gather_tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with joined(tmp_path) as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.arange(35.0).view(7, 5)
        cut = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(cut.full_tensor(), whole)
        assert torch.equal((cut @ cut.T).full_tensor(), whole @ whole.T)
        turned = cut.redistribute(mesh, [Shard(1)])
        assert torch.equal(turned.redistribute(mesh, [Replicate()]).to_local(), whole)
        assert all_gather_tensor(torch.tensor([rank]), 0, mesh).tolist() == list(range(size))
        state = {"x": cut}
        dcp.save(state, checkpoint_id=tmp_path / "dcp")
        state = {"x": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)])}
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
        assert torch.equal(state["x"].full_tensor(), whole)
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 2))
        batches = torch.randn(size, 4, 5)
        plain(batches.view(-1, 5)).square().mean().backward()
        want = [p.grad for p in plain.parameters()]
        for wrap in (torch.nn.parallel.DistributedDataParallel,
                     lambda model: fully_shard(model, mesh=mesh)):  # fmt: skip
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 2))
            model = wrap(model)
            model(batches[rank]).square().mean().backward()
            for p, grad in zip(model.parameters(), want, strict=True):
                own = getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
                torch.testing.assert_close(own, grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["cpu:fsdpc,meta:fake", "meta:fake,cpu:fsdpc"])
def test_other_devices_have_other_back_ends(tmp_path: Path, backend: str) -> None:
    """Tensors of "meta" and torch's "fake" back end stand for tensors of GPUs and NCCL."""
    import torch.testing._internal.distributed.fake_pg  # registers it

    assert torch.testing
    with joined(tmp_path, backend=backend) as (rank, size):
        part = dist.new_group([0, 1])
        for group in (dist.group.WORLD, part):
            x, far = torch.ones(3), torch.ones(6, device="meta")
            dist.all_reduce(far, group=group)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [size] * 3
            work: Any = dist.all_gather_into_tensor(far, far[:3].clone(), group, async_op=True)
            work.wait()
            dist.all_gather(list(far.chunk(2)), far[:3].clone(), group)
            dist.reduce_scatter_tensor(far[:3].clone(), far, group=group)
            dist.broadcast(far, 0, group)
            dist.all_to_all_single(far, far.clone(), group=group)
            (dist.send if rank else dist.recv)(far, 1 - rank, group)
            dist.barrier(group)
            assert group is not None
            assert group._get_backend(torch.device("meta")).name() == "fake"
            assert {device.type for device in group._device_types} == {"cpu", "meta"}
            with pytest.raises(RuntimeError, match="No backend"):
                group._get_backend(torch.device("cuda"))
        dist.destroy_process_group(part)
        dist.all_reduce(far)


@pytest.mark.ranks(2)
def test_profilers_show_operations(tmp_path: Path) -> None:
    with joined(tmp_path) as (rank, size):
        x, whole = torch.ones(4), torch.ones(4 * size)
        with torch.profiler.profile() as profile:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
            dist.broadcast(x, 0)
            dist.all_gather_into_tensor(whole, x)
            dist.reduce_scatter_tensor(x, whole)
            dist.all_to_all_single(whole, whole.clone())
            (dist.send if rank else dist.recv)(x, 1 - rank)
            dist.barrier()
        dist.all_reduce(x)
        shown = {event.key: event.count for event in profile.key_averages() if "fsdpc" in event.key}
        names = ("broadcast", "all_gather", "reduce_scatter", "all_to_all",
                 "send" if rank else "recv", "barrier")  # fmt: skip
        assert shown == {"fsdpc:all_reduce": 2, **{f"fsdpc:{name}": 1 for name in names}}


@pytest.mark.ranks(2)
def test_the_engine_is_beside_it(tmp_path: Path) -> None:
    """One model sharded by the engine over a mesh of our groups."""
    from torch.distributed.device_mesh import init_device_mesh

    with joined(tmp_path) as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4)
        plain = torch.nn.Linear(6, 4)
        plain.load_state_dict(model.state_dict())
        fsdpc.torch.fully_shard(model, mesh=mesh)
        batches = torch.randn(size, 3, 6)
        model(batches[rank]).square().mean().backward()
        plain(batches.view(-1, 6)).square().mean().backward()
        torch.testing.assert_close(fsdpc.torch.full_grad(model.weight), plain.weight.grad)


@pytest.mark.ranks(3)
def test_forms_that_torch_accepts(tmp_path: Path) -> None:
    """Sparse tensors, several tensors of a rank, coalesced gathers, a root instead of options."""
    with joined(tmp_path) as (rank, size):
        group: Any = dist.group.WORLD
        at = torch.tensor([[rank, rank + 1], [0, 1]])
        sparse = torch.sparse_coo_tensor(at, torch.tensor([1.0, 2.0]), (size + 1, 2))
        want = sum(
            torch.sparse_coo_tensor(
                torch.tensor([[r, r + 1], [0, 1]]), torch.tensor([1.0, 2.0]), (size + 1, 2)
            ).to_dense()
            for r in range(size)
        )
        dist.all_reduce(sparse)
        assert torch.equal(sparse.to_dense(), want)
        pair = [torch.full((3,), rank + 1.0), torch.full((3,), 10.0)]
        group.allreduce(pair, dist.AllreduceOptions()).wait()
        assert [x.tolist() for x in pair] == [[6 + 10.0 * size] * 3] * 2
        outputs = [[torch.empty(2), torch.empty(5)] for _ in range(size)]
        mine = [torch.full((2,), float(rank)), torch.full((5,), 10.0 * rank)]
        group.allgather_coalesced(outputs, mine).wait()
        assert [x[1][4].item() for x in outputs] == [10.0 * r for r in range(size)]
        one = torch.full((2,), float(rank))
        group.broadcast(one, root=2).wait()
        assert one.tolist() == [2.0, 2.0]
        works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(3000)]
        works[-1].wait()
        assert works[0].is_completed()


@pytest.mark.ranks(3)
def test_a_monitored_barrier_names_late_ranks(tmp_path: Path) -> None:
    with joined(tmp_path) as (rank, size):
        group: Any = dist.group.WORLD
        group.monitored_barrier(timedelta(seconds=30))
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"^Ranks 1, 2 failed to pass .* in 100 ms$"):
                group.monitored_barrier(timedelta(seconds=0.1), wait_all_ranks=True)
        else:
            with pytest.raises(fsdpc.PeerError, match=r"Ranks 1, 2 failed to pass"):
                dist.barrier()


@pytest.mark.ranks(2, 3)
def test_refusals(tmp_path: Path) -> None:
    with joined(tmp_path) as (rank, size):
        with pytest.raises(ValueError, match=r"tensor on meta; it carries tensors of CPUs only"):
            dist.all_reduce(torch.empty(3, device="meta"))
        with pytest.raises(ValueError, match=r"does not reduce torch.uint8 by avg"):
            dist.all_reduce(torch.ones(3, dtype=torch.uint8), op=dist.ReduceOp.AVG)
        with pytest.raises(ValueError, match=r"bitwise operations are of integers"):
            dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)
        splits = [1] * size if rank else [2] + [1] * (size - 1)
        with pytest.raises(ValueError, match=r"rank 0 sends 8 bytes to rank 0, which expects 4"):
            dist.all_to_all_single(torch.empty(size), torch.empty(sum(splits)), [1] * size, splits)
        with pytest.raises(RuntimeError, match=rf"all_gather: {size} tensors of 3 .* one of 4"):
            dist.all_gather_into_tensor(torch.empty(4), torch.empty(3))


CALLS: dict[str, Callable[[int], Any]] = {
    "all_reduce.*broadcast": lambda rank: (
        dist.broadcast(torch.ones(5), 0) if rank else dist.all_reduce(torch.ones(5))),
    "avg.*sum": lambda rank: dist.all_reduce(
        torch.ones(5), op=dist.ReduceOp.SUM if rank else dist.ReduceOp.AVG),
    "to 0.*to 1": lambda rank: dist.reduce(torch.ones(5), rank),
    "reduce_scatter.*all_reduce": lambda rank: (
        dist.all_reduce(torch.ones(4)) if rank
        else dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))),
    "float32.*int32": lambda rank: dist.all_gather_into_tensor(
        torch.empty(4, dtype=torch.int32 if rank else torch.float32),
        torch.empty(2, dtype=torch.int32 if rank else torch.float32)),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", CALLS)
def test_ranks_that_disagree(tmp_path: Path, words: str) -> None:
    first, second = words.split(".*")
    with joined(tmp_path) as (rank, _):
        with pytest.raises(fsdpc.MismatchError, match=f"{words}|{second}.*{first}"):
            CALLS[words](rank)


@pytest.mark.ranks(2)
def test_an_error_stays_with_its_operation(tmp_path: Path) -> None:
    with joined(tmp_path) as (rank, _):
        if rank == 1:
            dist.send(torch.ones(3), 0)
        else:
            bad: Any = dist.irecv(torch.empty(2), 1)
            with pytest.raises(fsdpc.MismatchError, match=r"receives 8 bytes .* was sent 12"):
                bad.wait()
        x = torch.ones(2)
        dist.all_reduce(x, async_op=True).wait()
        assert x.tolist() == [2, 2]
        if rank == 0:
            with pytest.raises(fsdpc.MismatchError):
                bad.wait()


@pytest.mark.ranks(2)
def test_a_dropped_receive_does_not_fail_groups(tmp_path: Path) -> None:
    with joined(tmp_path) as (rank, _):
        part: Any = dist.new_group([0, 1])
        late, last = torch.zeros(3), torch.zeros(1)
        never = dist.irecv(torch.empty(4), 1 - rank, group=part)  # its message is never sent
        dist.irecv(late, 1 - rank, group=part, tag=1)  # completes, although its work is dropped
        del never
        for tag, sent in ((1, torch.ones(3)), (2, torch.ones(1))):
            dist.send(sent, 1 - rank, group=part, tag=tag)
        dist.recv(last, 1 - rank, group=part, tag=2)
        assert late.tolist() == [1] * 3
        dist.destroy_process_group(part)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [2, 2]


@pytest.mark.ranks(2)
def test_a_group_closed_under_a_thread(tmp_path: Path) -> None:
    found: list[str] = []

    def receive() -> None:
        try:
            dist.recv(torch.empty(1), 1 - rank)
        except (RuntimeError, PeerError) as error:
            found.append(str(error))

    with joined(tmp_path) as (rank, _):
        thread = threading.Thread(target=receive)
        group: Any = dist.group.WORLD
        thread.start()
        while thread.is_alive() and not group._unfinished:
            time.sleep(0.001)  # until it has posted its receive
    thread.join()
    assert "was destroyed" in found[0] or "left" in found[0], found


@pytest.mark.ranks(2)
def test_a_store_serves_several_default_groups(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    for _ in range(3):
        dist.init_process_group("fsdpc", store=store, rank=fsdpc.rank(), world_size=2)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x == 2
        dist.destroy_process_group()


@pytest.mark.ranks(3)
def test_departures_are_noticed(tmp_path: Path) -> None:
    with joined(tmp_path) as (rank, _):
        if rank == 0:
            with pytest.raises(PeerError, match="all others have left"):
                dist.recv(torch.empty(1))


@pytest.mark.ranks(2)
def test_threads_share_a_group(tmp_path: Path) -> None:
    """Messages with a tag for each thread, and works that other threads advance."""
    with joined(tmp_path) as (rank, _):
        failed: list[BaseException] = []

        def work(tag: int) -> None:
            try:
                for i in range(100):
                    got = torch.empty(1)
                    sent = dist.isend(torch.full((1,), float(i)), 1 - rank, tag=tag)
                    dist.recv(got, 1 - rank, tag=tag)
                    sent.wait()  # type: ignore[union-attr]
                    assert got == i
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(tag,)) for tag in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        dist.barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    """One of the two notices first, and the other learns of it. Callers may catch RuntimeError."""
    with joined(tmp_path, seconds=1) as (rank, size):
        words = r"waiting for 1 s in (barrier|recv) .*(waiting in|for rank).*the group's timeout"
        with pytest.raises(RuntimeError, match=words) as caught:
            if rank == 0:
                dist.barrier()
            else:
                dist.recv(torch.empty(1), 0)
        assert isinstance(caught.value, (TimeoutError, PeerError))


@pytest.mark.ranks(2)
def test_deadlines_are_errors_of_torch_and_python(tmp_path: Path) -> None:
    with joined(tmp_path) as (rank, _):
        if rank == 0:
            work: Any = dist.irecv(torch.empty(1), 1)
            for kind in (RuntimeError, dist.DistBackendError, TimeoutError):
                with pytest.raises(kind, match="not done after"):
                    work.wait(timedelta(seconds=0.01))
        dist.barrier()
        if rank == 1:
            dist.send(torch.ones(1), 0)
        else:
            work.wait()
