"""Datasets, sampling over ranks, the loader and its cursor, and errors that name the file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpc.data import (
    ByteDataset,
    DistributedSampler,
    GlobalBatchSampler,
    Loader,
    PackedSequences,
    SequenceDataset,
    TokenDataset,
    default_corpus,
)
from fsdpc.data.datasets import Batch


def numbers(count: int, seq_len: int) -> SequenceDataset:
    return SequenceDataset([np.arange(count, dtype=np.uint32)], seq_len)


# ---- datasets


@given(lengths=st.lists(st.integers(0, 9), min_size=1), seq_len=st.integers(1, 12))
def test_sequences_cross_pieces(lengths: list[int], seq_len: int) -> None:
    ids = np.arange(sum(lengths), dtype=np.uint16)
    pieces = np.split(ids, np.cumsum(lengths)[:-1])
    if len(ids) < seq_len + 1:
        with pytest.raises(ValueError, match=f"{len(ids)} tokens are fewer"):
            SequenceDataset(pieces, seq_len)
        return
    data = SequenceDataset(pieces, seq_len)
    assert len(data) == (len(ids) - 1) // seq_len
    x, y = data.batch(range(len(data)))
    covered = len(data) * seq_len
    assert np.array_equal(x.ravel(), ids[:covered])
    assert np.array_equal(y.ravel(), ids[1 : covered + 1])


def test_one_item_is_a_pair_of_rows() -> None:
    x, y = numbers(10, 3)[2]
    assert x.tolist() == [6, 7, 8] and y.tolist() == [7, 8, 9]
    assert x.dtype == np.int64
    with pytest.raises(IndexError, match="no sequence 3, there are 3"):
        numbers(10, 3)[3]


def test_split_holds_out_the_end() -> None:
    train, held_out = numbers(100, 4).split(20)
    assert (train.tokens, held_out.tokens) == (80, 20)
    assert held_out[0][0].tolist() == [80, 81, 82, 83]
    again = held_out.split(8)[1]
    assert again[0][0].tolist() == [92, 93, 94, 95]
    with pytest.raises(ValueError, match=r"held out\): 3 tokens are fewer"):
        numbers(100, 4).split(3)
    with pytest.raises(ValueError, match=r"training part\): 2 tokens"):
        numbers(100, 4).split(98)


def test_bytes_of_folders_come_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/x.txt", "a.txt", ".git/y.txt", "a/.hidden", "a/skip.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(name)
    (tmp_path / "empty.txt").touch()
    data = ByteDataset(tmp_path, 1, suffixes=[".txt"])
    assert data.run(0, data.tokens).tobytes() == b"a/b/x.txta/z.txta.txtb.txt"
    both = ByteDataset([tmp_path / "b.txt", str(tmp_path / "a.txt")], 1)
    assert both.run(0, both.tokens).tobytes() == b"b.txta.txt"


def test_large_files_are_mapped_between_small_ones(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"small")
    (tmp_path / "1").write_bytes(bytes(range(256)) * 8192)
    (tmp_path / "2").write_bytes(b"end")
    data = ByteDataset(tmp_path, 1)
    assert [isinstance(piece, np.memmap) for piece in data._pieces] == [False, True, False]
    assert data.run(3, 5).tobytes() == b"ll\x00\x01\x02"
    assert data.run(data.tokens - 5, 5).tobytes() == b"\xfe\xffend"


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_token_files(tmp_path: Path, dtype: type) -> None:
    ids = np.arange(1000, 1100, dtype=dtype)
    np.save(tmp_path / "a.npy", ids[:60])
    ids[60:].tofile(tmp_path / "b.bin")
    data = TokenDataset(tmp_path, 10, dtype)
    assert data.tokens == 100 and len(data) == 9
    assert np.array_equal(data[5][0], ids[50:60]) and data[5][1][-1] == 1060


def test_packed_documents() -> None:
    documents = [[1, 2, 3], [], [4], np.array([5, 6, 7, 8])]
    plain = PackedSequences(documents, 3)
    assert plain.batch([0, 1])[0].tolist() == [[1, 2, 3], [4, 5, 6]]
    apart = PackedSequences(documents, 5, separator=0, ignore_index=-100)
    x, y = apart.batch([0, 1])
    assert x.tolist() == [[1, 2, 3, 0, 4], [0, 5, 6, 7, 8]]
    assert y.tolist() == [[2, 3, 0, -100, 0], [-100, 6, 7, 8, 0]]


def test_default_corpus_is_the_library() -> None:
    files = default_corpus()
    library = Path(os.__file__).parent
    names = [path.relative_to(library).as_posix() for path in files]
    assert files == sorted(files, key=lambda path: path.parts)
    assert "argparse.py" in names and "json/decoder.py" in names
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages"}
    assert 8e6 < sum(path.stat().st_size for path in files) < 20e6


# ---- errors in a file name it


@pytest.mark.parametrize("dataset", [ByteDataset, TokenDataset])
def test_missing_empty_short_and_strange_files(tmp_path: Path, dataset: type) -> None:
    with pytest.raises(FileNotFoundError, match="cannot read data file .*none.bin: No such file"):
        dataset(tmp_path / "none.bin", 4)
    (tmp_path / "empty.bin").touch()
    with pytest.raises(ValueError, match="data file .*empty.bin is empty"):
        dataset(tmp_path / "empty.bin", 4)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="data folder .*folder holds no"):
        dataset(tmp_path / "folder", 4)
    (tmp_path / "short.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"short.bin: \d tokens are fewer than one sequence"):
        dataset(tmp_path / "short.bin", 4)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is neither a file nor a folder"):
        dataset(tmp_path / "pipe", 4)
    with pytest.raises(ValueError, match="no data"):
        dataset([], 4)
    with pytest.raises(ValueError, match="seq_len .* got 0"):
        dataset(__file__ if dataset is ByteDataset else tmp_path / "short.bin", 0)


def test_unreadable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x" * 100)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read whatever its mode says
    with pytest.raises(PermissionError, match="data file .*secret.txt: Permission denied"):
        ByteDataset(path, 4)


def test_token_files_of_another_kind(tmp_path: Path) -> None:
    np.save(tmp_path / "floats.npy", np.zeros(100))
    np.save(tmp_path / "matrix.npy", np.zeros((10, 10), np.uint16))
    np.save(tmp_path / "none.npy", np.zeros(0, np.uint16))
    (tmp_path / "broken.npy").write_bytes(b"not numpy at all")
    (tmp_path / "odd.bin").write_bytes(b"12345")
    (tmp_path / "text.txt").write_text("words")
    for name, text in [
        ("floats.npy", r"holds float64 of shape \(100,\)"),
        ("matrix.npy", r"holds uint16 of shape \(10, 10\)"),
        ("none.npy", "holds no tokens"),
        ("broken.npy", "is not a valid .npy file"),
        ("odd.bin", "5 bytes are no whole number of uint16"),
        ("text.txt", "neither .npy nor .bin"),
    ]:
        with pytest.raises(ValueError, match=f"{name}.*{text}"):
            TokenDataset(tmp_path / name, 4)
    with pytest.raises(ValueError, match="got dtype float32"):
        TokenDataset(tmp_path / "odd.bin", 4, np.float32)


# ---- sampling


@given(
    length=st.integers(1, 60),
    world=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_ranks_share_the_sequences(
    length: int, world: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    if drop_last and length < world:
        with pytest.raises(ValueError, match=f"{length} sequences are fewer than {world} ranks"):
            DistributedSampler(length, 0, world, drop_last=True)
        return
    taken = []
    for rank in range(world):
        sampler = DistributedSampler(length, rank, world, shuffle, drop_last=drop_last)
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
        taken.append(list(sampler))
    assert len({len(own) for own in taken}) == 1
    together = [index for own in zip(*taken) for index in own]
    if drop_last:
        assert len(set(together)) == len(together) == length // world * world
    else:
        assert set(together) == set(range(length))
        assert len(together) < length + world
    if not shuffle:
        assert together[:length] == list(range(len(together)))[:length]


def test_epochs_and_seeds_change_the_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = DistributedSampler(50, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1 << 32, 0)]
    assert order(0, 0) == orders[0]
    assert len({tuple(each) for each in orders}) == 4


@pytest.mark.parametrize("arguments", [(0,), (5, 2, 2), (5, -1, 2), (5, 0, 1, True, -3)])
def test_sampler_refuses(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        DistributedSampler(*arguments)


# ---- the loader


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_loader_goes_through_epochs(prefetch: int) -> None:
    with Loader(numbers(25, 2), 5, prefetch=prefetch, epochs=3) as loader:
        batches = list(loader)
    assert len(batches) == 3 * len(loader) == 6
    for x, y in batches:
        assert x.shape == (5, 2) and x.dtype == np.int64 and np.array_equal(y, x + 1)
    epochs = [np.concatenate([x for x, _ in batches[2 * e : 2 * e + 2]]) for e in range(3)]
    assert all(len(np.unique(epoch)) == 20 for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])


def test_loader_without_an_end_and_in_int32() -> None:
    with Loader(numbers(9, 2), 3, dtype=np.int32) as loader:
        batches = [next(loader) for _ in range(7)]
    assert {x.dtype for x, _ in batches} == {np.dtype(np.int32)}
    assert loader.wait_seconds > 0


def test_the_thread_starts_late_and_ends() -> None:
    before = threading.active_count()
    loader = Loader(numbers(100, 2), 3)
    assert threading.active_count() == before
    next(loader)
    assert threading.active_count() == before + 1
    loader.stop()
    loader.stop()
    assert threading.active_count() == before
    assert next(loader)[0].shape == (3, 2)
    loader.stop()


@settings(deadline=None)
@given(done=st.integers(0, 20), prefetch=st.integers(0, 3))
def test_a_cursor_resumes_where_it_was(done: int, prefetch: int) -> None:
    data = numbers(61, 3)
    with Loader(data, 3, prefetch=prefetch) as whole, Loader(data, 3) as resumed:
        for _ in range(done):
            next(whole)
        next(resumed)
        resumed.load_state_dict(whole.state_dict())
        for _ in range(9):
            assert np.array_equal(next(whole)[0], next(resumed)[0])


def test_a_cursor_moves_to_another_number_of_ranks() -> None:
    data = numbers(121, 3)

    def loaders(world: int, batch: int) -> list[Loader]:
        samplers = [DistributedSampler(len(data), rank, world) for rank in range(world)]
        return [Loader(data, batch, sampler, prefetch=0) for sampler in samplers]

    two = loaders(2, 4)
    for _ in range(3):
        for loader in two:
            next(loader)
    four = loaders(4, 2)
    for loader in four:
        loader.load_state_dict(two[0].state_dict())
    rows_of_two = np.concatenate([next(loader)[0] for loader in two])
    rows_of_four = np.concatenate([next(loader)[0] for loader in four])
    assert np.array_equal(np.sort(rows_of_two, axis=0), np.sort(rows_of_four, axis=0))


PLACE = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))  # ranks, batch, micro


@settings(deadline=None)
@given(
    length=st.integers(60, 130),
    places=st.lists(st.tuples(PLACE, st.integers(0, 5)), min_size=2, max_size=5),
    kind=st.sampled_from(["global", "drop_last", "repeat"]),
)
def test_each_sequence_is_seen_once_at_any_numbers_of_ranks(
    length: int, places: list[tuple[tuple[int, int, int], int]], kind: str
) -> None:
    """Runs of some steps, each going on from the last one's cursor at another number of ranks."""
    data = numbers(length + 1, 1)
    seen: dict[int, list[int]] = {}
    state: dict[str, int] | None = None
    most = max(world for (world, _, _), _ in places)
    for (world, batch, micro), steps in places:
        loaders = []
        for rank in range(world):
            if kind == "global":
                sampler: DistributedSampler = GlobalBatchSampler(length, rank, world, batch, micro)
            else:
                sampler = DistributedSampler(length, rank, world, drop_last=kind == "drop_last")
            loaders.append(Loader(data, batch, sampler, prefetch=0))
            if state is not None:
                loaders[-1].load_state_dict(state)
        together = world * batch * (micro if kind == "global" else 1)
        for _ in range(steps * micro):
            epochs = {loader.state_dict()["epoch"] for loader in loaders}
            (epoch,) = epochs
            for other in set(seen) - {epoch}:
                del seen[other]
            for loader in loaders:
                seen.setdefault(epoch, []).extend(next(loader)[0].ravel().tolist())
            if loaders[0].state_dict()["epoch"] != epoch:  # its end: all but less than a batch
                assert length - len(set(seen[epoch])) < together
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states)
        state = states[0]
        for epoch, found in seen.items():
            again = len(found) - len(set(found))
            assert again == 0 or (kind == "repeat" and len(set(found)) == length and again < most)
            if epoch == state["epoch"]:
                assert len(found) == state["sequences"]


def test_loader_refuses() -> None:
    data = numbers(21, 2)
    for arguments, text in [
        ((data, 0), "batch_size .* got 0"),
        ((data, 11), "10 sequences of rank 0 are fewer than a batch of 11"),
        ((data, 2, DistributedSampler(9)), "sampler is for 9 sequences, the dataset has 10"),
        ((data, 2, None, np.float32), "got dtype float32"),
        ((data, 2, None, np.int64, -1), "prefetch .* got -1"),
        ((data, 2, None, np.int64, 1, None, -1), "workers .* got -1"),
    ]:
        with pytest.raises(ValueError, match=text):
            Loader(*arguments)
    loader = Loader(data, 2)
    state = loader.state_dict()
    with pytest.raises(ValueError, match="data with length 7, not 10"):
        loader.load_state_dict({**state, "length": 7})
    with pytest.raises(ValueError, match="seed 5, not 0"):
        loader.load_state_dict({**state, "seed": 5})


def test_errors_of_the_thread_reach_the_caller() -> None:
    class Broken(SequenceDataset):
        def batch(self, *_: object) -> None:
            raise OSError("the disk is gone")

    with Loader(Broken([np.arange(9)], 2), 2) as loader, pytest.raises(OSError, match="is gone"):
        next(loader)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_belongs_to_its_batch_and_leaves_no_thread(workers: int) -> None:
    class Broken(SequenceDataset):
        broken = True

        def batch(self, indices: list[int], dtype: object = np.int64) -> Batch:
            if self.broken and 6 in indices:
                raise OSError("the disk is gone")
            return super().batch(indices, dtype)

    before = threading.active_count()
    data = Broken([np.arange(21)], 2)
    loader = Loader(data, 2, DistributedSampler(10, shuffle=False), epochs=1, workers=workers)
    for first in (0, 4, 8):
        assert next(loader)[0][0, 0] == first
    for _ in range(2):
        with pytest.raises(OSError, match="is gone"):
            next(loader)
        assert threading.active_count() == before
        assert loader.state_dict()["sequences"] == 6
    data.broken = False
    assert [x[0, 0] for x, _ in loader] == [12, 16]
    assert threading.active_count() == before  # the last epoch's end


def test_threads_read_together_and_batches_come_in_order() -> None:
    class Meeting(SequenceDataset):
        together = threading.Barrier(3)

        def batch(self, indices: list[int], dtype: object = np.int64) -> Batch:
            self.together.wait(30)  # no batch is made before three are under way
            return super().batch(indices, dtype)

    data = Meeting([np.arange(25)], 1)
    order = DistributedSampler(24, shuffle=False)
    with Loader(data, 2, order, prefetch=1, epochs=1, workers=3) as loader:
        assert [int(x[0, 0]) for x, _ in loader] == list(range(0, 24, 2))


def test_a_deleted_loader_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    loader = Loader(numbers(100, 2), 3, workers=2)
    next(loader)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del loader
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_process_ends_though_its_loader_was_not_stopped() -> None:
    program = (
        "import numpy as np\n"
        "from fsdpc.data import ByteDataset, Loader\n"
        "loader = Loader(ByteDataset(__import__('os').__file__, 8), 2, workers=3)\n"
        "next(loader)\n"
        "raise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=300)
    assert done.returncode == 3


def test_a_part_of_packed_documents_keeps_their_borders() -> None:
    documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    apart = PackedSequences(documents, 3, separator=0, ignore_index=-100)
    whole, part = apart.batch([0, 1, 2])[1], apart.split(8)[1].batch([0, 1])[1]
    assert whole.ravel().tolist() == [2, 3, 0, -100, 5, 0, -100, 7, 8]
    assert part.ravel().tolist() == [5, 0, -100, 7, 8, 9]
