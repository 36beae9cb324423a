"""Sampling across ranks, and a loader whose threads start prefetching at the first batch.

The calling thread chooses the sequences and returns batches in order; the other threads only read
data. The order and the cursor therefore do not depend on the number of threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from fsdpc.data.arrays import ArrayDataset, Batch
from fsdpc.data.datasets import SequenceDataset


class DistributedSampler:
    """Chooses a rank's sequences and their order.

    Parameters
    ----------
    length : int
        Number of sequences in the dataset.
    rank, world : int
        This rank and the number of ranks; by default 0 and 1.
    shuffle : bool
        Use a different order in every epoch, equal on all ranks; by default True.
    seed : int
        Seed of the order; by default 0.
    drop_last : bool
        Drop the sequences left over after even division by `world`. By default the first sequences
        are repeated instead.

    Raises
    ------
    ValueError
        An argument is out of range; the message contains its value.

    Notes
    -----
    Rank r takes positions r, r + world, ... in the order. The order comes from NumPy's RandomState,
    which generates the same numbers in every NumPy version.

    Examples
    --------
    >>> from fsdpc import data
    >>> list(data.DistributedSampler(6, rank=1, world=2, shuffle=False))
    [1, 3, 5]
    """

    def __init__(
        self,
        length: int,
        rank: int = 0,
        world: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in [0, {world}), got {rank}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        if drop_last and length < world:
            raise ValueError(f"{length} sequences are fewer than {world} ranks")
        self.length: int = length
        self.rank: int = rank
        self.world: int = world
        self.shuffle: bool = shuffle
        self.seed: int = seed
        self.drop_last: bool = drop_last
        self.epoch: int = 0
        self.order: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of sequences per rank in an epoch."""
        return self.length // self.world if self.drop_last else -(-self.length // self.world)

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's sequences in the epoch."""
        return iter(self.indices().tolist())

    def indices(self, start: int = 0) -> np.ndarray:
        """Return this rank's sequences in the epoch as an int64 array.

        Parameters
        ----------
        start : int
            Number of sequences in the order that all ranks together have already taken, with any
            number of ranks; by default 0.
        """
        rest = max(0, self.length - start)
        each = rest // self.world if self.drop_last else -(-rest // self.world)
        order = np.resize(self._permutation(), start + each * self.world)
        return order[start + self.rank :: self.world]

    def _permutation(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.length)
        words = [self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, self.epoch]
        words += [self.order] if self.order else []
        return np.random.RandomState(words).permutation(self.length)


class GlobalBatchSampler(DistributedSampler):
    """Orders sequences by global batch, so that the order does not depend on the number of ranks.

    Parameters
    ----------
    length : int
        Number of sequences in the dataset.
    rank, world : int
        This rank and the number of ranks.
    batch : int
        Sequences per rank and micro-step.
    accumulate : int
        Micro-steps per step; a global batch has ``batch * accumulate * world`` sequences.
    seed : int
        Seed of the order; by default 0.

    Raises
    ------
    ValueError
        An argument is out of range, or the data are shorter than a global batch.

    Notes
    -----
    Micro-step m on rank r takes block m * world + r of a global batch. Thus 1 rank with 12
    micro-steps, 3 ranks with 4, and 12 ranks with 1 see the same blocks in the order in which
    deterministic mode sums them. Sequences that do not fill a global batch are dropped.

    Examples
    --------
    >>> from fsdpc import data
    >>> one = list(data.GlobalBatchSampler(8, rank=0, world=1, batch=4))
    >>> halves = [list(data.GlobalBatchSampler(8, rank=r, world=2, batch=2)) for r in (0, 1)]
    >>> sorted(one[:4]) == sorted(halves[0][:2] + halves[1][:2])
    True
    """

    def __init__(
        self, length: int, rank: int, world: int, batch: int, accumulate: int = 1, seed: int = 0
    ) -> None:
        super().__init__(length, rank, world, shuffle=True, seed=seed, drop_last=True)
        if batch < 1 or accumulate < 1:
            raise ValueError(f"batch {batch} and accumulate {accumulate} must be at least 1")
        together = batch * accumulate * world
        if length < together:
            raise ValueError(f"{length} sequences are fewer than a global batch of {together}")
        self.batch: int = batch
        self.accumulate: int = accumulate

    def __len__(self) -> int:
        """Return the number of sequences per rank in an epoch."""
        mine = self.batch * self.accumulate
        return self.length // (mine * self.world) * mine

    def indices(self, start: int = 0) -> np.ndarray:
        """Return this rank's sequences in the epoch after the first ``start`` across all ranks."""
        together = self.batch * self.accumulate * self.world
        steps = max(0, self.length - start) // together
        order = self._permutation()[start : start + steps * together]
        return order.reshape(-1, self.world, self.batch)[:, self.rank].ravel()


class Loader:
    """Iterates over a dataset in batches, epoch after epoch, prefetching with threads.

    Parameters
    ----------
    dataset : SequenceDataset or ArrayDataset
        Or any object with ``batch(indices, dtype)``, which threads may call, and ``len()``.
    batch_size : int
        Sequences per batch on this rank.
    sampler : DistributedSampler, optional
        Chooses the sequences; by default all of them, shuffled.
    dtype : numpy dtype
        int32 or int64 (the default).
    prefetch : int
        Batches that each thread prefetches; by default 2. 0 reads each on demand, without threads.
    epochs : int, optional
        Number of epochs after which to stop; by default never.
    workers : int
        Number of threads; by default 1. Use more if the disk or `dataset` is slow; 0 reads each
        batch on demand.

    Attributes
    ----------
    wait_seconds : float
        Total seconds that ``next()`` has waited for batches.

    Raises
    ------
    ValueError
        An argument is out of range, or this rank's epoch is shorter than a batch.

    Notes
    -----
    Sequences at the end of an epoch are dropped if they do not fill a batch.

    If `dataset` raises for a batch, ``next()`` first returns all earlier batches and then raises
    the exception. The cursor does not advance: the next call tries the same batch again.

    The threads stop on ``stop()``, at the end of a ``with`` block, on an exception, after the last
    epoch, or when the loader is deleted.

    Examples
    --------
    >>> data = SequenceDataset([np.arange(9, dtype=np.uint8)], seq_len=2)
    >>> with Loader(data, 2, DistributedSampler(4, shuffle=False), epochs=1) as loader:
    ...     [x.tolist() for x, y in loader]
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    """

    def __init__(
        self,
        dataset: SequenceDataset | ArrayDataset,
        batch_size: int,
        sampler: DistributedSampler | None = None,
        dtype: npt.DTypeLike = np.int64,
        prefetch: int = 2,
        epochs: int | None = None,
        workers: int = 1,
    ) -> None:
        sampler = sampler or DistributedSampler(len(dataset))
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if prefetch < 0:
            raise ValueError(f"prefetch must be at least 0, got {prefetch}")
        if workers < 0:
            raise ValueError(f"workers must be at least 0, got {workers}")
        if np.dtype(dtype) not in (np.int32, np.int64):
            raise ValueError(f"ids are int32 or int64, got dtype {np.dtype(dtype)}")
        if sampler.length != len(dataset):
            raise ValueError(
                f"the sampler is for {sampler.length} sequences, the dataset has {len(dataset)}"
            )
        if len(sampler) < batch_size:
            raise ValueError(
                f"{len(sampler)} sequences of rank {sampler.rank} are fewer than a batch of "
                f"{batch_size}"
            )
        self.dataset: SequenceDataset | ArrayDataset = dataset
        self.batch_size: int = batch_size
        self.sampler: DistributedSampler = sampler
        self.epochs: int | None = epochs
        self.wait_seconds: float = 0.0
        self._dtype, self._workers = np.dtype(dtype), workers
        self._most_ahead = prefetch * workers
        self._next = (0, 0)  # epoch and batch that next() returns
        self._begun = (0, 0, 0)  # an epoch, its sequences taken earlier, and its batches since
        self._ahead: deque[Future[Batch]] = deque()
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        """Iterate from the cursor."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch, either (x, y) of shape (batch_size, seq_len) or rows of arrays."""
        if self._ended(self._next):
            self.stop()
            raise StopIteration
        began = time.perf_counter()
        try:
            if self._most_ahead == 0:
                result = self._make(self._indices(self._next))
            else:
                self._fill()
                result = self._ahead.popleft().result()
            self._next = self._advance(self._next, 1)
            if self._most_ahead:
                self._fill()
        except BaseException:
            self.stop()
            raise
        self.wait_seconds += time.perf_counter() - began
        return result

    def state_dict(self) -> dict[str, int]:
        """Return the cursor: the epoch, and the number of its sequences returned by all ranks.

        The cursor can be loaded with a different batch size or number of ranks. The ranks then
        continue after the sequences that were already read, regardless of which rank read them.
        """
        epoch, batch = self._next
        taken = self._taken(epoch) + batch * self.batch_size * self.sampler.world
        return {
            "epoch": epoch,
            "sequences": taken,
            "length": self.sampler.length,
            "seed": self.sampler.seed,
            **({"order": self.sampler.order} if self.sampler.order else {}),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore a cursor returned by :meth:`state_dict`.

        Raises
        ------
        ValueError
            The cursor belongs to different data or a different order.
        """
        for what, own in (("length", self.sampler.length), ("seed", self.sampler.seed)):
            if state[what] != own:
                raise ValueError(f"the cursor is of data with {what} {state[what]}, not {own}")
        self._drop_ahead()
        self.sampler.order = state.get("order", 0)
        batch, inside = divmod(state["sequences"], self.batch_size * self.sampler.world)
        batch = 0 if inside else min(batch, len(self))  # beyond its end: the next epoch's beginning
        taken = min(state["sequences"], self.sampler.length) if inside else 0
        self._begun, self._order = (state["epoch"], taken, 0), (-1, np.empty(0, np.int64))
        if inside:  # these ranks divide the remaining epoch anew
            left = len(self._indices_of(state["epoch"])) // self.batch_size
            self._begun = (state["epoch"], taken, left)
        self._next = self._advance((state["epoch"], 0), batch)

    def reorder(self, order: int) -> None:
        """Continue with the same data in a new order; loading a cursor restores its own order.

        Parameters
        ----------
        order : int
            Index of the order, equal on all ranks; 0 is the first. Some sequences in the epoch may
            be repeated, others skipped.
        """
        if order < 0:
            raise ValueError(f"order must be at least 0, got {order}")
        self._drop_ahead()
        self.sampler.order, self._order = order, (-1, np.empty(0, np.int64))

    def stop(self) -> None:
        """Stop the threads; requesting another batch starts new ones. Stopping twice is allowed."""
        self._drop_ahead()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def __enter__(self) -> Loader:
        """Return the loader; leaving the block stops its threads."""
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ended(self, position: tuple[int, int]) -> bool:
        return self.epochs is not None and position[0] >= self.epochs

    def _taken(self, epoch: int) -> int:
        """Return the number of the epoch's sequences that precede this loader's first batch."""
        return self._begun[1] if epoch == self._begun[0] else 0

    def _advance(self, position: tuple[int, int], batches: int) -> tuple[int, int]:
        epoch, batch = position[0], position[1] + batches
        if self._taken(epoch):
            if batch < self._begun[2]:
                return epoch, batch
            epoch, batch = epoch + 1, batch - self._begun[2]
        more, batch = divmod(batch, len(self))
        return epoch + more, batch

    def _indices(self, position: tuple[int, int]) -> np.ndarray:
        epoch, batch = position
        own = self._indices_of(epoch)
        return own[batch * self.batch_size : (batch + 1) * self.batch_size]

    def _indices_of(self, epoch: int) -> np.ndarray:
        """Return this rank's sequences in an epoch, starting with this loader's first batch."""
        if self._order[0] != epoch:
            self.sampler.set_epoch(epoch)
            start = self._taken(epoch)
            self._order = (epoch, self.sampler.indices(start) if start else self.sampler.indices())
        return self._order[1]

    def _make(self, indices: np.ndarray) -> Batch:
        return self.dataset.batch(indices.tolist(), self._dtype)

    def _fill(self) -> None:
        """Submit batches to the threads until enough are in progress."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, "fsdpc-loader")
        while len(self._ahead) < self._most_ahead:
            position = self._advance(self._next, len(self._ahead))
            if self._ended(position):
                break
            own = self._indices(position).tolist()
            # The task refers to the dataset, not the loader, so that deleting the loader ends the
            # threads.
            self._ahead.append(self._pool.submit(self.dataset.batch, own, self._dtype))

    def _drop_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
