"""A folder of checkpoints: which to make, which to keep, which to go on from."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc import distributed
from fsdpc.checkpoint import manifest
from fsdpc.checkpoint.claim import Claim, claim_folder
from fsdpc.checkpoint.loading import LoadReport, load
from fsdpc.checkpoint.manifest import CheckpointError
from fsdpc.checkpoint.saving import SaveHandle, finish, save_step
from fsdpc.checkpoint.stops import StopSignals
from fsdpc.display.text import say
from fsdpc.distributed.agree import agreed

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Found:
    """One checkpoint of a folder.

    Parameters
    ----------
    step : int
        As its manifest says, whatever the folder is called; by its name if the manifest cannot be
        read or does not say.
    path : Path
    problem : str, optional
        Why it cannot be used; None where its manifest, sizes and headers are right.
    """

    step: int
    path: Path
    problem: str | None = None

    @property
    def renamed(self) -> bool:
        """Whether the folder is named for another step."""
        return self.path.name != _name_of(self.step)


class CheckpointManager:
    """Checkpoints of one run in one folder, ``step-00000100`` and so on.

    Parameters
    ----------
    folder : path
        Made where it is not there.
    max_to_keep : int, optional
        Older ones are deleted once a newer one is committed; all are kept where not given.
    every_steps : int, optional
        :meth:`step` saves at multiples of it.
    every_seconds : float, optional
        :meth:`step` also saves when so much time has gone by since the last one (rank 0's clock).
    keep_every : int, optional
        Those at multiples of it are never deleted.
    async_ : bool, default False
        Write on a thread; see :func:`fsdpc.checkpoint.save`.

    Attributes
    ----------
    stopped : bool
        Whether :meth:`step` has saved because of a signal, and the run is to end; the same on all
        ranks. See :meth:`stop_at_signals`.

    Notes
    -----
    All methods are collective but :meth:`list`. A folder belongs to the run that saves to it: see
    :meth:`claim`. A manager with ``every_steps`` or ``every_seconds`` calls it when it is made, any
    other before its first save. Until then nothing is removed, so that other processes may list and
    load from the folder of a run that goes on.

    Examples
    --------
    >>> manager = CheckpointManager("run", max_to_keep=3, every_steps=100)   # doctest: +SKIP
    >>> manager.stop_at_signals()                                            # doctest: +SKIP
    >>> begin = manager.restore(state) or 0                                  # doctest: +SKIP
    >>> for step in range(begin + 1, 1001):                                  # doctest: +SKIP
    ...     train_one_step()
    ...     manager.step(step, state)
    ...     if manager.stopped:
    ...         break
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_to_keep: int | None = None,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep_every: int | None = None,
        *,
        async_: bool = False,
    ) -> None:
        for name, value in (
            ("max_to_keep", max_to_keep),
            ("every_steps", every_steps),
            ("keep_every", keep_every),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if every_seconds is not None and not every_seconds > 0:
            raise ValueError(f"every_seconds must be above 0, got {every_seconds}")
        self.folder: Path = Path(os.path.abspath(os.fspath(folder)))
        self.max_to_keep: int | None = max_to_keep
        self.keep_every: int | None = keep_every
        self.every_steps: int | None = every_steps
        self.every_seconds: float | None = every_seconds
        self.async_: bool = async_
        self._saved_at = time.monotonic()
        self._handle: SaveHandle | None = None
        self._last: int | None = None  # the step of the newest save of ours
        self._damaged: set[Path] = set()  # which only loading has shown
        self.restored: Path | None = None  # what restore() has loaded last
        self._claim: Claim | None = None  # of rank 0
        self.stopped: bool = False
        self._signals: StopSignals | None = None
        self._on_rank_0(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        if every_steps is not None or every_seconds is not None:
            self.claim()

    def claim(self) -> None:
        """Take the folder for this run until the manager or the process ends.

        What killed saves left behind is removed. A folder that cannot be written to shows here.

        Raises
        ------
        BlockingIOError
            Another process saves there; the message names it, and its host.
        """
        finish()  # of whoever saves in this process: that has a claim of its own
        self._on_rank_0(self._claim_here)

    def _claim_here(self) -> None:
        first = self._claim is None
        self._claim = claim_folder(self.folder)
        for found in _misnamed(self.folder) if first else ():
            say(
                f"{found.path} is not named for its step, {found.step}: a save of step "
                f"{_named(found.path)} would rename it; to do so now: {_rename_command(found)}"
            )

    def _on_rank_0(self, work: Any) -> Any:
        """Return what ``work`` returns on rank 0, and None elsewhere; its error is everybody's."""
        return agreed(work if distributed.rank() == 0 else lambda: None)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be."""
        return self.folder / _name_of(step)

    # ---- saving ----

    def stop_at_signals(self) -> None:
        """From now on SIGTERM and SIGUSR1 have :meth:`step` save, and set ``stopped``.

        A signal to one rank counts for all, which save the same step; the loop ends where
        ``stopped`` is set. Schedulers send one before a time limit. The handlers stay.

        Raises
        ------
        ValueError
            This is not the main thread.
        """
        self._signals = self._signals or StopSignals()

    def step(self, step: int, state: Mapping[str, Any]) -> bool:
        """Save if it is time to; call it after every optimizer step.

        Parameters
        ----------
        step : int
            Optimizer steps taken.
        state : mapping
            As :func:`fsdpc.checkpoint.save` takes it.

        Returns
        -------
        bool
            Whether it saved.
        """
        asked = self._signals is not None and self._signals.agree() and not self.stopped
        due = asked or (self.every_steps is not None and step % self.every_steps == 0)
        if self.every_seconds is not None and not due:
            late = time.monotonic() - self._saved_at >= self.every_seconds
            due = bool(distributed.broadcast(float(late)))
        if due:
            self.save(step, state)
        if asked:
            self.wait()
            self.stopped = True
        return due

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save now, and delete what need not be kept any more.

        Parameters
        ----------
        step : int
        state : mapping
            As :func:`fsdpc.checkpoint.save` takes it; the step is added to its ``"extra"`` if that
            is a dict or not given.

        Raises
        ------
        OSError
            Among others, if a valid checkpoint of this step is there already.
        """
        self.wait()
        finish()  # of whoever saves in this process
        self._on_rank_0(lambda: self._make_room(step))
        extra = state.get("extra")
        if extra is None or isinstance(extra, dict):
            state = {**state, "extra": {**(extra or {}), "step": step}}
        self._handle = save_step(self.path(step), state, step, async_=self.async_)
        self._saved_at, self._last = time.monotonic(), step
        if self._handle is None:
            self._on_rank_0(self._delete_old)

    def wait(self) -> None:
        """Wait for the save under way, if there is one; raises what went wrong with it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
            self._on_rank_0(self._delete_old)

    def _make_room(self, step: int) -> None:
        """Claim the folder; a damaged or misnamed checkpoint does not keep its step taken."""
        self._claim_here()
        found = _look_at(self.path(step))
        if found is not None and (found.problem is not None or found.path in self._damaged):
            _remove(found.path)
        elif found is not None and found.renamed:
            free = _free_path(found)
            found.path.rename(free)
            say(f"{found.path} held step {found.step} and is {free} now: step {step} is saved")

    def _delete_old(self) -> None:
        if self.max_to_keep is None:
            return
        newer = 0
        for named, path in reversed(_folders_in(self.folder)):
            kept = self.keep_every and named % self.keep_every == 0
            if newer >= self.max_to_keep and (kept or named == self._last):
                continue  # a run may have gone back some steps; most of those kept are not read
            found = _look_at(path)
            if found is None or found.problem is not None or found.renamed:
                continue
            newer += 1
            if newer > self.max_to_keep:
                _remove(path)

    # ---- finding ----

    def list(self) -> list[Found]:
        """Return the checkpoints of the folder by ascending step, broken ones with the reason."""
        return checkpoints_in(self.folder)

    def latest(self) -> Path | None:
        """Return the newest checkpoint whose manifest, sizes and headers are right, or None.

        Broken ones that are newer are named on stderr, on rank 0. Only the manifests of folders
        with the newest names are read, and older checkpoints cost no time. A folder that was
        renamed to an earlier step than its own may therefore not be found; :meth:`list` reads all.
        """
        found = self._newest(0)
        return None if found is None else found.path

    def _newest(self, skip: int) -> Found | None:
        """The newest usable checkpoint after so many others; what rank 0 sees counts."""

        def newest() -> tuple[int, int]:
            left = skip
            for found in newest_first(self.folder):
                if left > 0:  # said before
                    left -= found.problem is None
                elif found.problem is None:
                    return found.step, _named(found.path)
                else:
                    say(f"skipping {found.path}: {found.problem}")
            return -1, -1

        told = self._on_rank_0(newest) or (-1, -1)
        step, named = distributed.broadcast(np.array(told, np.int64)).tolist()
        return None if step < 0 else Found(step, self.path(named))

    def restore(self, state: Mapping[str, Any], **options: Any) -> int | None:
        """Load the newest valid checkpoint; return its step, or None where there is none.

        Parameters
        ----------
        state : mapping
            As :func:`fsdpc.checkpoint.load` takes it.
        **options
            Of the same.

        Raises
        ------
        CheckpointError
            There are checkpoints and none is usable, or one does not fit the model.
        """
        self.wait()
        damaged = 0
        last: CheckpointError | None = None
        while (found := self._newest(damaged)) is not None:
            try:
                self.report: LoadReport = load(found.path, state, **options)
            except CheckpointError as error:
                if not str(error).partition("damaged: ")[1]:
                    raise
                if distributed.rank() == 0:
                    say(f"skipping {found.path}: {error}")
                self._damaged.add(found.path)
                damaged, last = damaged + 1, error
                continue
            self.restored = found.path
            if found.renamed and distributed.rank() == 0:
                say(f"{found.path} holds step {found.step}, whatever its name says")
            return found.step
        if last is not None:
            raise last
        broken = distributed.broadcast(self._on_rank_0(lambda: len(self.list())) or 0)
        if broken:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} can be used: move them elsewhere to "
                "begin anew"
            )
        return None


def checkpoints_in(folder: Path) -> list[Found]:
    """Return the checkpoints of a folder by ascending step, broken ones with the reason.

    The folder is read and not touched: a run may be saving to it.
    """
    found = [_look_at(path) for _, path in _folders_in(folder)]
    # Of two that hold the same step, the one that is named for it counts as newer.
    return sorted((f for f in found if f), key=_age)


def newest_first(folder: Path) -> Iterator[Found]:
    """Yield the checkpoints of a folder from the newest; a manifest is read when it may be next.

    Names are bounds: a folder that holds an earlier step than its name waits for its turn, and one
    that holds a later step comes when its name does.
    """
    waiting: list[Found] = []
    for named, path in reversed(_folders_in(folder)):
        while waiting and waiting[-1].step > named:
            yield waiting.pop()
        found = _look_at(path)
        if found is not None and found.step < named:
            waiting = sorted([*waiting, found], key=_age)
        elif found is not None:
            yield found
    yield from reversed(waiting)


def newest_in(folder: Path) -> Path | None:
    """Return what :meth:`CheckpointManager.latest` does, for one process alone."""
    return next((f.path for f in newest_first(folder) if f.problem is None), None)


def _age(found: Found) -> tuple[int, bool, str]:
    return found.step, not found.renamed, found.path.name


def _folders_in(folder: Path) -> list[tuple[int, Path]]:
    """Return what may be a checkpoint by the step in its name, without opening anything."""
    return sorted((named, path) for path in folder.iterdir() if (named := _named(path)) >= 0)


def _misnamed(folder: Path) -> list[Found]:
    """Return the checkpoints whose names are of later steps than the newest one's."""
    found = []
    for named, path in reversed(_folders_in(folder)):
        each = _look_at(path)
        if each is not None and each.problem is None:
            if not each.renamed:
                break
            if each.step < named:
                found.append(each)
    return found


def _free_path(found: Found) -> Path:
    """Return where a misnamed checkpoint can go: its step's name, or one that the manager skips."""
    path, copies = found.path.with_name(_name_of(found.step)), 0
    while path.exists():
        copies += 1
        path = path.with_name(f"{_name_of(found.step)}-copy{copies}")
    return path


def _rename_command(found: Found) -> str:
    return f"mv {shlex.quote(str(found.path))} {shlex.quote(str(_free_path(found)))}"


def _name_of(step: int) -> str:
    return f"step-{step:08}"


def _named(path: Path) -> int:
    """Return the step in a folder's name, or -1 if the manager did not choose the name."""
    match = _NAME.fullmatch(path.name)
    step = int(match.group(1)) if match else -1
    return step if path.name == _name_of(step) else -1  # else it has more zeros than ours


def _look_at(path: Path) -> Found | None:
    named = _named(path)
    if named < 0 or not path.is_dir():
        return None
    try:
        content = manifest.read(path)
        step = manifest.step_of(content)
        manifest.check_files(path, content)
    except (CheckpointError, OSError) as error:
        return Found(named, path, str(error))
    return Found(named if step is None else step, path)


def _remove(path: Path) -> None:
    """The name goes first, so that an interrupted removal leaves no half of a checkpoint."""
    hidden = path.with_name(f".{path.name}.removing")
    if hidden.exists():
        shutil.rmtree(hidden)
    path.rename(hidden)
    shutil.rmtree(hidden)
