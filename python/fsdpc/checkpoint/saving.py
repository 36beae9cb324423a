"""Saving: the contents of a checkpoint, and this rank's shards of it.

The C engine computes the same file layout on all ranks, and each rank writes its own byte ranges.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc import _core, distributed
from fsdpc.checkpoint import config_json, generators, manifest
from fsdpc.checkpoint.claim import Claim, check_shared, claim_name, remove_remains
from fsdpc.checkpoint.replicas import Replicas, check
from fsdpc.checkpoint.schema import FILE_DTYPES, FLOATS
from fsdpc.checkpoint.shards import Held, Shard, residuals_of, shards_of, states_of
from fsdpc.checkpoint.values import encode
from fsdpc.distributed.agree import agree
from fsdpc.optim.ema import Averages

KINDS = ("model", "optimizer", "ema", "outer", "scheduler", "scaler", "data", "extra")

# A test hook that is called at every file system call; it may raise or end the process.
_hook: Callable[[str, str], Any] | None = None


class SaveHandle:
    """A save in progress on a background thread; see ``async_`` of :func:`save`.

    Examples
    --------
    >>> import tempfile
    >>> from fsdpc import checkpoint, nn
    >>> model = nn.Linear(2, 1)
    >>> folder = tempfile.TemporaryDirectory()
    >>> handle = checkpoint.save(folder.name + "/step-1", {"model": model}, async_=True)
    >>> handle.wait()
    >>> handle.done
    True
    """

    def __init__(self, running: _core.Save, path: str, claim: Claim | None) -> None:
        self._running: _core.Save | None = running
        self._claim = claim
        self.path = path

    @property
    def done(self) -> bool:
        """Whether this rank has finished its part."""
        return self._running is None or self._running.done

    def wait(self) -> None:
        """Wait until the checkpoint is committed; raise the save's error, but only once."""
        if self._running is None:
            return
        try:
            self._running.wait()
        except KeyboardInterrupt:  # during a save that is still running
            raise
        except BaseException:
            self._forget()
            raise
        self._forget()

    def _forget(self) -> None:
        self._running = None
        if self._claim is not None:
            self._claim.release()
        if _flight.handle is self:
            _flight.handle = None


@dataclass
class _Flight:
    """The save in progress, and the communicator reserved for background saves."""

    handle: SaveHandle | None = None
    world: _core.Comm | None = None
    apart: _core.Comm | None = None


_flight = _Flight()


@atexit.register
def finish() -> None:
    """Wait for the save in progress, if any; raise its error."""
    if _flight.handle is not None:
        _flight.handle.wait()


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    dtype: Any = None,
    max_shard_bytes: float = 5e9,
    async_: bool = False,
    overwrite: bool = False,
) -> SaveHandle | None:
    """Write a checkpoint; collective.

    Parameters
    ----------
    path : path
        The folder to create, with its parents. It appears only when all data is on the disk.
    state : mapping
        ``"model"``: a module, native or torch's, sharded or not, or a :class:`Trained` with one.
        ``"optimizer"``: an optimizer over its parameters. ``"ema"``: an EMA of the model.
        ``"outer"``: an Outer of the model, required if it has one.
        ``"scheduler"``, ``"scaler"``, ``"data"``: anything with a ``state_dict()`` of numbers,
        text, lists, tuples and dicts. ``"extra"``: such values of your own. Any key may be omitted.
    dtype : dtype, optional
        Dtype of the model's floating point tensors in the files, except scales of quantised
        weights; by default unchanged.
    max_shard_bytes : float, default 5e9
        Largest file size, unless a single tensor is larger.
    async_ : bool, default False
        Copy this rank's shards, return, and write in the background on a thread.
    overwrite : bool, default False
        Replace an existing checkpoint with this name, which is kept until the new one is on the
        disk.

    Returns
    -------
    SaveHandle or None
        With ``async_``, the handle to wait on. Only one save runs at a time; the next save waits.

    Raises
    ------
    OSError, ValueError, TypeError
        Raised on every rank if the save failed on any rank or if hosts do not share the folder. No
        checkpoint of this name then exists, and training can continue. With ``async_``, the handle,
        the next save or the exit raises the error. A BlockingIOError names the process that is
        saving there.
    MismatchError
        Ranks have different models, or replicas hold different values of a parameter.

    Notes
    -----
    The bytes of the tensor files do not depend on the number of ranks, the mesh, the strategy or
    the frontend, except those of ``Compression(error_feedback=True)``. Each rank's global random
    number states of Python, NumPy and torch are saved.
    Memory: one chunk or, with ``async_``, a copy of this rank's shards, reused by the next save.
    The first async save touches that memory for the first time, which takes seconds on a virtual
    machine whose host supplies memory page by page.

    Examples
    --------
    >>> import tempfile
    >>> from fsdpc import checkpoint, nn
    >>> model = nn.Linear(2, 1)
    >>> folder = tempfile.TemporaryDirectory()
    >>> checkpoint.save(folder.name + "/step-1", {"model": model, "extra": {"step": 1}})
    """
    return _save(path, state, dtype, max_shard_bytes, async_, overwrite)


def save_step(
    path: Path, state: Mapping[str, Any], step: int, *, async_: bool
) -> SaveHandle | None:
    """Save like :func:`save`, and record the step in the manifest."""
    return _save(path, state, None, 5e9, async_, False, step)


def _save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    dtype: Any,
    max_shard_bytes: float,
    async_: bool,
    overwrite: bool,
    step: int | None = None,
) -> SaveHandle | None:
    finish()
    folder = os.path.abspath(os.fspath(path))
    plan: _Plan | None = None
    claim: Claim | None = None
    error: BaseException | None = None
    try:
        plan = _Plan(folder, state, dtype, max_shard_bytes)
        plan.overwrite = overwrite
        if step is not None:
            plan.describe({"step": step})
        if distributed.rank() == 0:
            claim = claim_name(Path(folder))
            remove_remains(Path(folder).parent)
            _refuse_to_replace(Path(folder), overwrite)
    except Exception as caught:
        error = caught
    try:
        agree(error, plan.mark() if plan else 0, "what to save")
        assert plan is not None
        check_shared(Path(folder), claim)
        plan.compare_replicas()
        if plan.base_crc is not None:
            plan.describe({"base": {"crc32c": f"{plan.base_crc():08x}"}})
        plan.describe({"rng": {**plan.rng, "ranks": generators.gather()}})
        if async_:
            running = plan.make_save(_apart())
            running.start()
            _flight.handle, claim = SaveHandle(running, folder, claim), None
            return _flight.handle
        plan.make_save(distributed.world()).run()
        return None
    finally:
        if claim is not None:
            claim.release()


def check_kinds(state: Mapping[str, Any], doing: str) -> None:
    """Raise ValueError if a checkpoint cannot contain this combination of kinds."""
    unknown = set(state) - set(KINDS)
    if unknown:
        raise ValueError(f"a checkpoint holds {', '.join(KINDS)}, not {sorted(unknown)}")
    needs = (("optimizer", "an optimizer"), ("ema", "averages"), ("outer", "an Outer"))
    for kind, name in needs:
        if state.get(kind) is not None and state.get("model") is None:
            raise ValueError(f"{doing} {name} takes the model too: it names the parameters")
    if not isinstance(state.get("ema"), Averages | None):
        found = type(state["ema"]).__name__
        raise TypeError(f"'ema' must be an fsdpc.EMA or an fsdpc.torch.EMA, got {found}")


def _refuse_to_replace(folder: Path, overwrite: bool) -> None:
    """With ``overwrite``, refuse to replace a folder that fsdpc did not save."""
    if overwrite and os.path.lexists(folder) and not (folder / manifest.NAME).is_file():
        raise FileExistsError(
            f"{folder} is there already and is no checkpoint, so it is not written over: choose "
            "another name, or remove it first"
        )


def save_pieces(
    path: str | os.PathLike[str],
    shards: Mapping[str, list[Shard]],
    content: Mapping[str, Any],
    config: str | None = None,
) -> None:
    """Write tensors that do not belong to a module or optimizer, and other manifest contents.

    Parameters
    ----------
    path : path
    shards : mapping of "model" and "optimizer" to lists of Shard
        In a world of one rank, the shards are whole tensors.
    content : mapping
        Parts of another checkpoint's manifest to copy.
    config : str, optional
        The model's config, in transformers' format.
    """
    plan = _Plan(os.path.abspath(path), {}, None, 5e9)
    if config is not None:
        plan.files[config_json.NAME] = config
    for kind, own in shards.items():
        plan._add(kind, own, None)
    plan.describe(content)
    claim = claim_name(Path(plan.folder))
    try:
        plan.make_save(distributed.world()).run()
    finally:
        claim.release()


def _apart() -> _core.Comm:
    """Return the communicator for the background threads that write on each rank."""
    world = distributed.world()
    if _flight.world is not world or _flight.apart is None:
        _flight.world, _flight.apart = world, world.split(0, world.rank)
    return _flight.apart


class _Plan:
    """The tensors and the manifest of a checkpoint, and this rank's shards."""

    def __init__(
        self,
        folder: str,
        state: Mapping[str, Any],
        dtype: Any,
        max_shard_bytes: float,
    ) -> None:
        check_kinds(state, "saving")
        if not max_shard_bytes >= 1:
            raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
        self.folder, self.max_shard_bytes = folder, max_shard_bytes
        self.overwrite = False
        # Names, dtypes and shapes of the tensors in the files; the same on all ranks.
        self.tensors: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
            "model": [],
            "optimizer": [],
        }
        self.shards: list[tuple[int, Shard]] = []  # each with its tensor's index
        self.files: dict[str, str] = {}  # besides those of tensors
        self.members: dict[str, str] = {}  # of the manifest, as JSON
        self.meshes: list[dict[str, int]] = []
        self.base_crc: Callable[[], int] | None = None
        self.replicas: Replicas | None = None  # that train apart
        seed, stream = _core.rng_state()
        self.rng = {"seed": seed, "next_stream": stream}
        aliases: dict[str, str] = {}
        if state.get("model") is not None:
            config = config_json.of_model(state["model"])
            if config is not None:
                self.files[config_json.NAME] = config
            held = shards_of(state["model"], False)
            aliases, self.base_crc = held.aliases, held.base_crc
            check(state, (unit for unit, _ in held.units), "saving")
            self._describe_model(state["model"], held)
            if state.get("outer") is not None:
                self._add_replicas(state, held, _float_dtype(dtype))
            else:
                self._add("model", held.shards, _float_dtype(dtype))
        if state.get("optimizer") is not None:
            states = states_of(state["optimizer"], state["model"])
            self._add("optimizer", self._of_all(states.shards), None)
            self._add("optimizer", residuals_of(held), None)
            self.describe({"optimizer": {
                "class": states.access.kind,
                "param_groups": states.groups,
                "steps": states.steps,
            }})  # fmt: skip
        if state.get("ema") is not None:
            counts = state["ema"].counts()
            states = states_of(state["ema"].optimizer, state["model"])
            self._add("optimizer", self._of_all(states.shards), None)  # "<parameter>.average"
            self.describe({"ema": {**counts, "steps": states.steps}})
        self.describe({
            "format": "fsdpc",
            "version": manifest.VERSION,
            "layout": "full",
            "world": distributed.world_size(),
            "aliases": aliases,
            "rng": self.rng,
            "extra": encode(state.get("extra")),
        })  # fmt: skip
        for kind in ("scheduler", "scaler", "data"):
            if state.get(kind) is not None:
                self.describe({kind: encode(_state_dict(kind, state[kind]))})

    def _add_replicas(self, state: Mapping[str, Any], held: Held, dtype: str | None) -> None:
        """Add the anchors as the model, each replica's masters, and the outer momentum."""
        self.replicas = replicas = Replicas(state["outer"], state["model"])
        shared, own = replicas.split(held)
        self._add("model", shared, dtype)
        self._add("optimizer", own + replicas.momentum, None)
        self.describe({"outer": {
            "calls": replicas.rounds.calls,
            "replicas": replicas.count,
            "steps": replicas.states.steps,
        }})  # fmt: skip

    def _of_all(self, shards: list[Shard]) -> list[Shard]:
        return shards if self.replicas is None else self.replicas.of_all(shards)

    def _add(self, kind: str, shards: list[Shard], dtype: str | None) -> None:
        own = self.tensors[kind]
        for shard in shards:
            if "\0" in shard.name:
                raise ValueError(f"the name {shard.name!r} has a NUL in it")
            if not own or own[-1][0] != shard.name:
                casts = dtype and shard.dtype in FLOATS and not shard.exact
                chosen = dtype if dtype and casts else shard.dtype
                own.append((shard.name, chosen, shard.shape))
            self.shards.append((sum(map(len, self.tensors.values())) - 1, shard))

    def _describe_model(self, model: Any, held: Held) -> None:
        """Add the manifest's informational parts."""
        world = distributed.world_size()
        replicas = {_core.master_shard(unit, 0, False)[3] for unit, _ in held.units if unit.params}
        self.meshes = [{"replicate": n, "shard": world // n} for n in sorted(replicas)]
        self.describe({
            "model_class": type(model).__name__,
            "units": len(held.units),
            "meshes": self.meshes,
            "codes": {p.name: list(p.code) for p in held.shards if p.code},
            "strategies": sorted({strategy for _, strategy in held.units}),
        })  # fmt: skip

    def describe(self, members: Mapping[str, Any]) -> None:
        """Add members to the manifest; raise ValueError if JSON cannot encode one."""
        self.members |= {key: manifest.encoded(key, value) for key, value in members.items()}

    def mark(self) -> int:
        """Return a checksum of everything that must be the same on all ranks."""
        equal = [self.tensors, self.folder, self.max_shard_bytes, self.overwrite]
        if self.replicas is not None:  # the steps of one are those of all
            equal += [self.members.get(kind) for kind in ("optimizer", "ema", "outer")]
        return _core.crc32c(0, repr(equal).encode("utf-8", "surrogatepass"))

    def compare_replicas(self) -> None:
        """Raise if the replicas of a unit have diverged; collective."""
        if all(mesh["replicate"] == 1 for mesh in self.meshes):
            return
        own = [shard for _, shard in self.shards if shard.unit]
        crcs = [_core.crc32c(0, p.memory.numpy().view(np.uint8)) if p.numel else 0 for p in own]
        mine = [(p.first, p.numel, crc) for p, crc in zip(own, crcs, strict=True)]
        world = distributed.world()
        every = world.all_gather(_core.tensor(np.array(mine, np.int64).reshape(-1, 3))).numpy()
        for shard, rows in zip(own, every.reshape(world.size, -1, 3).swapaxes(0, 1), strict=True):
            known: dict[tuple[int, int], tuple[int, int]] = {}
            found = []
            for rank, (first, numel, crc) in enumerate(rows.tolist()):
                other, want = known.setdefault((first, numel), (rank, crc))
                if crc != want:
                    found.append(f"rank {rank} and its replica, rank {other}")
            if found:
                raise _core.MismatchError(
                    f"replicas drifted apart: '{shard.name}' of unit '{shard.unit}' has other "
                    f"values on {', '.join(found)}: its values or the optimizer's options were "
                    "changed on only one rank; change them on every rank, and load the last "
                    "checkpoint"
                )

    def make_save(self, comm: _core.Comm) -> _core.Save:
        """Create the save and lay out its files."""
        parent, name = os.path.split(self.folder)
        temp = os.path.join(parent, f".{name}.saving")
        return _core.Save(
            comm,
            (parent, temp, self.folder, os.path.join(temp, manifest.NAME)),
            self.tensors["model"],
            self.tensors["optimizer"],
            [(i, p.first, p.memory) for i, p in self.shards if p.replica == 0 and p.numel > 0],
            dict(sorted(self.members.items())),
            self.files,
            self.max_shard_bytes,
            _hook,
            self.overwrite,
        )


def _float_dtype(dtype: Any) -> str | None:
    if dtype is None:
        return None
    known = _core.as_dtype(dtype)
    if not known.is_floating_point:
        raise TypeError(f"dtype must be a floating point one, got {known.name}")
    return FILE_DTYPES[known.name]


def _state_dict(kind: str, holder: Any) -> Any:
    if not hasattr(holder, "state_dict"):
        raise TypeError(f"'{kind}' must have a state_dict(), got {type(holder).__name__}")
    return holder.state_dict()
