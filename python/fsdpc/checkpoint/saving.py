"""Saving: each rank independently plans the layout of all files and writes its own byte ranges."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc import _core, distributed
from fsdpc.checkpoint import config_json, generators, manifest
from fsdpc.checkpoint.claim import Claim, check_shared, claim_name, remove_remains
from fsdpc.checkpoint.pieces import Held, Piece, States, pieces_of, states_of
from fsdpc.checkpoint.schema import FILE_DTYPES, FLOATS, ITEM_BYTES
from fsdpc.checkpoint.values import encode
from fsdpc.distributed.agree import agree

KINDS = ("model", "optimizer", "scheduler", "scaler", "data", "extra")
_UNKNOWN = "????????"

# For tests: called at every file system call, and may raise or end the process.
_hook: Callable[[str, str], Any] | None = None


class SaveHandle:
    """A save in progress on a thread; see ``async_`` of :func:`save`.

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
        """Wait until the checkpoint is committed; raise its error, but only once."""
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
    """The save in progress, and the communicator reserved for saves on a thread."""

    handle: SaveHandle | None = None
    world: _core.Comm | None = None
    apart: _core.Comm | None = None


_flight = _Flight()


@atexit.register
def finish() -> None:
    """Wait for the save in progress, if there is one; raise its error."""
    if _flight.handle is not None:
        _flight.handle.wait()


@dataclass
class _File:
    name: str
    tensors: list[int] = field(default_factory=list)  # indices of tensors
    header: bytes = b""
    bytes: int = 0


@dataclass
class _Tensor:
    """One tensor in a file."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int = 0
    begin: int = 0
    end: int = 0

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


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
        ``"model"``: a module, native or torch's, sharded or not. ``"optimizer"``: an optimizer over
        its parameters. ``"scheduler"``, ``"scaler"``, ``"data"``: anything with a ``state_dict()``
        of numbers, text, lists, tuples and dicts. ``"extra"``: such values of your own. Any key may
        be omitted.
    dtype : dtype, optional
        Dtype of the model's floating point tensors in the files; by default unchanged.
    max_shard_bytes : float, default 5e9
        Largest file size, unless a single tensor is larger.
    async_ : bool, default False
        Copy this rank's pieces, return, and write in the background on a thread.
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
    the frontend. Each rank's global random number states of Python, NumPy and torch are saved.
    Memory: one chunk or, with ``async_``, a copy of this rank's pieces, reused by the next save.
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
    """Save as :func:`save` does, with the step in the manifest."""
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
            plan.content["step"] = step
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
        plan.content["rng"]["ranks"] = generators.gather()
        plan.lay_out()
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
    """Raise ValueError if a checkpoint cannot contain these kinds together."""
    unknown = set(state) - set(KINDS)
    if unknown:
        raise ValueError(f"a checkpoint holds {', '.join(KINDS)}, not {sorted(unknown)}")
    if state.get("optimizer") is not None and state.get("model") is None:
        raise ValueError(f"{doing} an optimizer takes the model too: it names the parameters")


def _refuse_to_replace(folder: Path, overwrite: bool) -> None:
    """With ``overwrite``, refuse to replace a folder that fsdpc did not save."""
    if overwrite and os.path.lexists(folder) and not (folder / manifest.NAME).is_file():
        raise FileExistsError(
            f"{folder} is there already and is no checkpoint, so it is not written over: choose "
            "another name, or remove it first"
        )


def save_pieces(
    path: str | os.PathLike[str],
    pieces: Mapping[str, list[Piece]],
    content: Mapping[str, Any],
    config: bytes | None = None,
) -> None:
    """Write tensors that belong to no module or optimizer, with other manifest contents.

    Parameters
    ----------
    path : path
    pieces : mapping of "model" and "optimizer" to lists of Piece
        In a world of one rank, the pieces are whole tensors.
    content : mapping
        Parts of another checkpoint's manifest to copy.
    config : bytes, optional
        The model's config, in transformers' format.
    """
    plan = _Plan(os.path.abspath(path), {}, None, 5e9)
    plan.config = config
    for kind, own in pieces.items():
        plan._add(kind, own, None)
    plan.content |= content
    plan.lay_out()
    claim = claim_name(Path(plan.folder))
    try:
        plan.make_save(distributed.world()).run()
    finally:
        claim.release()


def _apart() -> _core.Comm:
    """Return a communicator for the writing threads of all ranks."""
    world = distributed.world()
    if _flight.world is not world or _flight.apart is None:
        _flight.world, _flight.apart = world, world.split(0, world.rank)
    return _flight.apart


class _Plan:
    """Where to write each tensor, equal on all ranks, and this rank's pieces."""

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
        self.config: bytes | None = None
        self.files: list[_File] = []
        self.tensors: list[_Tensor] = []
        self.pieces: list[tuple[int, Piece]] = []  # each with its tensor's index
        self.aliases: dict[str, str] = {}
        self.states: States | None = None
        self.description: dict[str, Any] = {}
        if state.get("model") is not None:
            self.config = config_json.of_model(state["model"])
            held = pieces_of(state["model"], False)
            self.aliases = held.aliases
            self.description = _describe(state["model"], held)
            self._add("model", held.pieces, _float_dtype(dtype))
        if state.get("optimizer") is not None:
            self.states = states_of(state["optimizer"], state["model"])
            self._add("optimizer", self.states.pieces, None)
        self.content = self._content(state)
        manifest.render({**self.content, "tensors": {}}, 0)  # raises if JSON cannot encode it

    def _add(self, kind: str, pieces: list[Piece], dtype: str | None) -> None:
        for piece in pieces:
            if kind == "model" and "\0" in piece.name:
                raise ValueError(f"the name {piece.name!r} has a NUL in it")
            last = self.tensors[-1] if self.tensors else None
            if last is None or (last.kind, last.name) != (kind, piece.name):
                own = dtype if dtype and piece.dtype in FLOATS else piece.dtype
                self.tensors.append(_Tensor(kind, piece.name, own, piece.shape))
            self.pieces.append((len(self.tensors) - 1, piece))

    def _content(self, state: Mapping[str, Any]) -> dict[str, Any]:
        seed, stream = _core.rng_state()
        content: dict[str, Any] = {
            "format": "fsdpc",
            "version": manifest.VERSION,
            "layout": "full",
            "aliases": self.aliases,
            "rng": {"seed": seed, "next_stream": stream},
            "extra": encode(state.get("extra")),
        }
        for kind in ("scheduler", "scaler", "data"):
            if state.get(kind) is not None:
                content[kind] = encode(_state_dict(kind, state[kind]))
        if self.states is not None:
            content["optimizer"] = {
                "class": self.states.access.kind,
                "param_groups": self.states.groups,
                "steps": self.states.steps,
            }
        return content

    def mark(self) -> int:
        """Return a checksum of everything that must be equal on all ranks."""
        lines = [f"{t.kind} {t.name} {t.dtype} {t.shape}" for t in self.tensors]
        lines += [self.folder, f"{self.max_shard_bytes} {self.overwrite}"]
        return _core.crc32c(0, "\n".join(lines).encode("utf-8", "surrogatepass"))

    def compare_replicas(self) -> None:
        """Raise if replicas of a unit have diverged; collective."""
        if all(mesh["replicate"] == 1 for mesh in self.description.get("meshes", [])):
            return
        own = [piece for _, piece in self.pieces if piece.unit]
        crcs = [_core.crc32c(0, p.memory.numpy().view(np.uint8)) if p.numel else 0 for p in own]
        mine = [(p.first, p.numel, crc) for p, crc in zip(own, crcs, strict=True)]
        world = distributed.world()
        every = world.all_gather(_core.tensor(np.array(mine, np.int64).reshape(-1, 3))).numpy()
        for piece, rows in zip(own, every.reshape(world.size, -1, 3).swapaxes(0, 1), strict=True):
            known: dict[tuple[int, int], tuple[int, int]] = {}
            found = []
            for rank, (first, numel, crc) in enumerate(rows.tolist()):
                other, want = known.setdefault((first, numel), (rank, crc))
                if crc != want:
                    found.append(f"rank {rank} and its replica, rank {other}")
            if found:
                raise _core.MismatchError(
                    f"replicas drifted apart: '{piece.name}' of unit '{piece.unit}' has other "
                    f"values on {', '.join(found)}: its values or the optimizer's options were "
                    "changed on one rank alone; change them on every rank, and load the last "
                    "checkpoint"
                )

    # ---- files ----

    def lay_out(self) -> None:
        """Decide on files and each tensor's place in them."""
        self._choose_files()
        for number, file in enumerate(self.files):
            own = [self.tensors[i] for i in file.tensors]
            entries = [(t.name, t.dtype, t.shape) for t in own]
            file.header, places = _core.safetensors_layout(entries, {"format": "pt"})
            file.bytes = max([len(file.header), *(end for _, end in places)])
            for t, (begin, end) in zip(own, places, strict=True):
                t.file, t.begin, t.end = number, begin, end
        self._add_index()
        if self.config is not None:
            self.files.append(_File(config_json.NAME, [], self.config, len(self.config)))

    def _choose_files(self) -> None:
        for kind in ("model", "optimizer"):
            numbers = [i for i, t in enumerate(self.tensors) if t.kind == kind]
            shards = self._shards(numbers)
            if not numbers:
                continue
            for k, shard in enumerate(shards):
                number = f"-{k + 1:05}-of-{len(shards):05}"
                name = kind + ("" if kind == "model" and len(shards) == 1 else number)
                self.files.append(_File(f"{name}.safetensors", shard))

    def _shards(self, numbers: list[int]) -> list[list[int]]:
        shards: list[list[int]] = [[]]
        filled = 0
        for i in numbers:
            own = self.tensors[i].bytes
            if shards[-1] and filled + own > self.max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(i)
            filled += own
        return shards

    def _add_index(self) -> None:
        shards = [f for f in self.files if f.name.startswith("model-")]
        if not shards:
            return
        weights = {self.tensors[i].name: f.name for f in shards for i in f.tensors}
        total = sum(self.tensors[i].bytes for f in shards for i in f.tensors)
        content = {"metadata": {"total_size": total}, "weight_map": weights}
        header = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
        self.files.append(_File("model.safetensors.index.json", [], header, len(header)))

    # ---- the save ----

    def make_save(self, comm: _core.Comm) -> _core.Save:
        """Return the plan in the form that the C engine runs."""
        content = {"world": comm.size, **self.content, **self.description}
        content["files"] = {
            f.name: {
                "bytes": f.bytes,
                "header_bytes": len(f.header),
                "header_crc32c": f"{_core.crc32c(0, f.header):08x}",
            }
            for f in self.files
        }
        content["tensors"] = self._table()
        text, crc_at, own = manifest.render(content, len(self.tensors))
        parent, name = os.path.split(self.folder)
        temp = os.path.join(parent, f".{name}.saving")
        return _core.Save(
            comm,
            (parent, temp, self.folder),
            [(os.path.join(temp, f.name), f.bytes, f.header) for f in self.files],
            list(self._own_pieces()),
            os.path.join(temp, manifest.NAME),
            text,
            crc_at,
            own,
            _hook,
            self.overwrite,
        )

    def _own_pieces(self) -> Any:
        for i, piece in self.pieces:
            if piece.replica != 0 or piece.numel == 0:
                continue
            t = self.tensors[i]
            dtype = "U8" if piece.raw else t.dtype
            item = ITEM_BYTES[t.dtype]
            offset = t.begin + piece.first * item
            yield t.file, i, piece.memory, dtype, offset, t.end - offset - piece.numel * item

    def _table(self) -> dict[str, Any]:
        """Return the manifest's tensors, ordered by index."""
        table: dict[str, Any] = {"model": {}, "optimizer": {}}
        for t in self.tensors:
            table[t.kind][t.name] = {
                "dtype": t.dtype,
                "shape": t.shape,
                "file": self.files[t.file].name,
                "offsets": [t.begin, t.end],
                "crc32c": _UNKNOWN,
            }
        return table


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


def _describe(model: Any, held: Held) -> dict[str, Any]:
    """Return the manifest's informational parts."""
    world = distributed.world_size()
    replicas = {_core.master_piece(unit, 0, False)[3] for unit, _ in held.units if unit.params}
    return {
        "model_class": type(model).__name__,
        "units": len(held.units),
        "meshes": [{"replicate": n, "shard": world // n} for n in sorted(replicas)],
        "strategies": sorted({strategy for _, strategy in held.units}),
    }
