"""A folder of checkpoints: when to save, which to keep, and which to resume from."""

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
    """One checkpoint in a folder.

    Parameters
    ----------
    step : int
        The step in its manifest, whatever the folder is called. If the manifest is unreadable or
        has no step, the step in the folder's name.
    path : Path
    problem : str, optional
        Why the checkpoint cannot be used; None if its manifest, sizes and headers are valid.
    """

    step: int
    path: Path
    problem: str | None = None

    @property
    def renamed(self) -> bool:
        """Whether the folder's name and its step differ."""
        return self.path.name != _name_of(self.step)


class CheckpointManager:
    """One run's checkpoints in one folder, named ``step-00000100`` and so on.

    Parameters
    ----------
    folder : path
        Created if it does not exist.
    max_to_keep : int, optional
        Number of checkpoints to keep; older ones are deleted after a save. By default all are kept.
    every_steps : int, optional
        :meth:`step` saves at multiples of this number.
    every_seconds : float, optional
        :meth:`step` also saves if this much time has passed since the last save (by rank 0's
        clock).
    keep_every : int, optional
        Checkpoints at multiples of this number are never deleted.
    async_ : bool, default False
        Whether to write on a thread; see :func:`fsdpc.checkpoint.save`.

    Attributes
    ----------
    stopped : bool
        True after :meth:`step` has saved because of a signal, so the run should end; equal on all
        ranks. See :meth:`stop_at_signals`.

    Notes
    -----
    All methods except :meth:`list` are collective. A folder belongs to the run that saves to it:
    see :meth:`claim`. A manager with ``every_steps`` or ``every_seconds`` claims it on creation,
    any other manager before its first save. Until then nothing is removed, so other processes may
    list and load the checkpoints of an active run.

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
        self._last: int | None = None  # the step of this manager's newest save
        self._damaged: set[Path] = set()  # checkpoints whose damage only a load detected
        self.restored: Path | None = None  # the path that restore() loaded last
        self._claim: Claim | None = None  # held by rank 0
        self.stopped: bool = False
        self._signals: StopSignals | None = None
        self._on_rank_0(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        if every_steps is not None or every_seconds is not None:
            self.claim()

    def claim(self) -> None:
        """Claim the folder for this run until the manager or the process ends.

        Removes files left behind by killed saves. Raises early if the folder is not writable.

        Raises
        ------
        BlockingIOError
            Another process is saving there; the message names the process and its host.
        """
        finish()  # another save in this process holds a separate claim
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
        """Return the result of ``work`` on rank 0 and None elsewhere; raise its error on all
        ranks."""
        return agreed(work if distributed.rank() == 0 else lambda: None)

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint, whether or not it exists."""
        return self.folder / _name_of(step)

    # ---- saving ----

    def stop_at_signals(self) -> None:
        """Make :meth:`step` save and set ``stopped`` after SIGTERM or SIGUSR1.

        If any rank receives a signal, all ranks save at the same step. The loop should end when
        ``stopped`` is True. Batch schedulers send such signals shortly before a time limit. The
        handlers stay installed.

        Raises
        ------
        ValueError
            The caller is not the main thread.
        """
        self._signals = self._signals or StopSignals()

    def step(self, step: int, state: Mapping[str, Any]) -> bool:
        """Save if a save is due; call it after every optimizer step.

        Parameters
        ----------
        step : int
            Number of optimizer steps taken.
        state : mapping
            As for :func:`fsdpc.checkpoint.save`.

        Returns
        -------
        bool
            Whether a save took place.
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
        """Save now, and delete checkpoints that are no longer needed.

        Parameters
        ----------
        step : int
        state : mapping
            As for :func:`fsdpc.checkpoint.save`; the step is added to ``"extra"`` if that is a dict
            or missing.

        Raises
        ------
        OSError
            For example, a valid checkpoint for this step already exists.
        """
        self.wait()
        finish()  # another save in this process
        self._on_rank_0(lambda: self._make_room(step))
        extra = state.get("extra")
        if extra is None or isinstance(extra, dict):
            state = {**state, "extra": {**(extra or {}), "step": step}}
        self._handle = save_step(self.path(step), state, step, async_=self.async_)
        self._saved_at, self._last = time.monotonic(), step
        if self._handle is None:
            self._on_rank_0(self._delete_old)

    def wait(self) -> None:
        """Wait for the save in progress, if any; raise its error."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
            self._on_rank_0(self._delete_old)

    def _make_room(self, step: int) -> None:
        """Claim the folder; remove or rename a checkpoint that wrongly uses this step's name."""
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
                continue  # a run may have gone back some steps; few kept checkpoints are read
            found = _look_at(path)
            if found is None or found.problem is not None or found.renamed:
                continue
            newer += 1
            if newer > self.max_to_keep:
                _remove(path)

    # ---- finding ----

    def list(self) -> list[Found]:
        """Return the folder's checkpoints in ascending order of step, with any problems found."""
        return checkpoints_in(self.folder)

    def latest(self) -> Path | None:
        """Return the newest checkpoint with a valid manifest, sizes and headers, or None.

        Rank 0 reports newer broken checkpoints on stderr. Only the manifests of the newest folders
        are read, so older checkpoints cost no time. A folder that was renamed to an earlier step
        may therefore be missed; :meth:`list` reads all manifests.
        """
        found = self._newest(0)
        return None if found is None else found.path

    def _newest(self, skip: int) -> Found | None:
        """Return the newest usable checkpoint after skipping `skip` of them; all ranks use rank 0's
        result."""

        def newest() -> tuple[int, int]:
            left = skip
            for found in newest_first(self.folder):
                if left > 0:  # reported before
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
        """Load the newest valid checkpoint and return its step, or None if there is none.

        Parameters
        ----------
        state : mapping
            As for :func:`fsdpc.checkpoint.load`.
        **options
            Options of :func:`fsdpc.checkpoint.load`.

        Raises
        ------
        CheckpointError
            Checkpoints exist but none is usable, or one does not match the model.
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
    """Return a folder's checkpoints in ascending order of step, with any problems found.

    The folder is only read, because a run may be saving to it.
    """
    found = [_look_at(path) for _, path in _folders_in(folder)]
    # If two checkpoints have the same step, the one with that step in its name counts as newer.
    return sorted((f for f in found if f), key=_age)


def newest_first(folder: Path) -> Iterator[Found]:
    """Yield a folder's checkpoints, newest first, reading a manifest only if it may be next.

    A folder whose step is earlier than its name says is deferred; one whose step is later is
    ordered by its name.
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
    """Do the same as :meth:`CheckpointManager.latest`, in one process without communication."""
    return next((f.path for f in newest_first(folder) if f.problem is None), None)


def _age(found: Found) -> tuple[int, bool, str]:
    return found.step, not found.renamed, found.path.name


def _folders_in(folder: Path) -> list[tuple[int, Path]]:
    """Return possible checkpoints, sorted by the steps in their names, without opening them."""
    return sorted((named, path) for path in folder.iterdir() if (named := _named(path)) >= 0)


def _misnamed(folder: Path) -> list[Found]:
    """Return the checkpoints whose names contain a later step than that of the newest one."""
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
    """Return a new path for a misnamed checkpoint: its step's name, or a name the manager skips."""
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
    return step if path.name == _name_of(step) else -1  # otherwise it has additional zeros


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
    """Rename a checkpoint, then remove it, so that an interruption leaves no partial one."""
    hidden = path.with_name(f".{path.name}.removing")
    if hidden.exists():
        shutil.rmtree(hidden)
    path.rename(hidden)
    shutil.rmtree(hidden)
