"""Convert checkpoints between formats, in one process, without loading them into memory.

Files are mapped, not read: tensors are byte ranges that are copied from the page cache to their
destination. PyTorch's formats do not always allow mapping; data that cannot be mapped are written
to a scratch folder next to the target, on the same disk.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc import _core
from fsdpc.checkpoint import config_json, saving
from fsdpc.checkpoint.manifest import CheckpointError
from fsdpc.checkpoint.schema import FILE_DTYPES
from fsdpc.checkpoint.shards import Shard
from fsdpc.checkpoint.source import Source, damaged, open_source

_KEPT = ("optimizer", "ema", "outer", "scheduler", "scaler", "data", "rng", "aliases", "extra",
         "world", "meshes", "strategies", "units", "model_class", "codes", "base")  # fmt: skip
_BY_FILE = {file: name for name, file in FILE_DTYPES.items()}
_NORESERVE = 0x4000  # in mmap since Python 3.13: allows a mapping to exceed the memory


@dataclass(frozen=True)
class _Bytes:
    """A tensor's raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    array: Any


_Tensors = dict[str, _Bytes]


def convert(
    path: Path,
    to: Path,
    layout: str = "full",
) -> list[str]:
    """Convert a checkpoint to another format.

    Parameters
    ----------
    path : Path
        An fsdpc or Hugging Face checkpoint, or a safetensors file; with torch installed, also a DCP
        folder or a ``torch.save`` file with a flat dict of tensors.
    to : Path
        The path to create, which must not exist.
    layout : "full", "dcp" or "torch"
        Full safetensors with a manifest; a PyTorch distributed checkpoint folder; a ``torch.save``
        file.

    Returns
    -------
    list of str
        Entries of a DCP folder that were left out because they are not tensors.

    Raises
    ------
    CheckpointError
        The source is damaged, or its format is unknown; or it has quantised weights, whose schemes
        are lost in "dcp" and "torch".
    ImportError
        torch is required but not installed.

    Notes
    -----
    Mapped files (fsdpc checkpoints, safetensors and ``torch.save`` files) need almost no memory,
    whatever their size. An fsdpc checkpoint with checksums is read twice, first to compare them. A
    DCP folder is read shard by shard into a scratch folder as large as the checkpoint.
    ``torch.save`` files from before PyTorch 1.6, and tensors in them that are not contiguous, are
    held in memory.
    """
    if to.exists():
        raise CheckpointError(f"{to} is there already and is not written over")
    with contextlib.ExitStack() as stack:
        model, optimizer, content, left_out = _read(path, to, stack)
        if layout in ("dcp", "torch"):
            if codes := content.get("codes"):
                raise CheckpointError(
                    f"{path} has quantised weights, such as '{next(iter(codes))}' "
                    f"({next(iter(codes.values()))[0]}); '{layout}' has no place for their scheme"
                )
            _write_torch(to, model | {f"optimizer.{n}": t for n, t in optimizer.items()}, layout)
        else:
            shards = {"model": _shards(model), "optimizer": _shards(optimizer)}
            config = path / config_json.NAME
            own = config.read_bytes().decode() if config.is_file() else None
            saving.save_pieces(to, shards, content, own)
    return left_out


@contextlib.contextmanager
def _scratch(to: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.absolute().parent) as folder:
        yield Path(folder)


def _shards(tensors: _Tensors) -> list[Shard]:
    return [
        Shard(name, t.shape, 0, prod(t.shape), _core.from_dlpack(t.array), 0, t.dtype)
        for name, t in tensors.items()
    ]


# ---- reading ----


def _read(
    path: Path, to: Path, stack: contextlib.ExitStack
) -> tuple[_Tensors, _Tensors, dict[str, Any], list[str]]:
    """Return the model and optimizer tensors, other manifest contents, and omitted entries."""
    if path.is_dir() and (path / ".metadata").exists():
        tensors, left_out = _read_dcp(path, stack.enter_context(_scratch(to)))
        return (*_split(tensors), {}, left_out)
    if path.is_file() and path.suffix != ".safetensors":
        return (*_split(_read_torch(path)), {}, [])
    source = open_source(path)
    tables = _map(source)
    if source.content:
        wrong = damaged(source)
        if wrong:
            raise CheckpointError(f"{source.folder}: damaged: {', '.join(wrong)}")
    content = {key: source.content[key] for key in _KEPT if key in source.content}
    return tables["model"], tables["optimizer"], content, []


def _split(tensors: _Tensors) -> tuple[_Tensors, _Tensors]:
    own = {n: t for n, t in tensors.items() if not n.startswith("optimizer.")}
    states = {n.removeprefix("optimizer."): t for n, t in tensors.items() if n not in own}
    return own, states


def _map(source: Source) -> dict[str, _Tensors]:
    tables: dict[str, _Tensors] = {"model": {}, "optimizer": {}}
    files = {name: _mapped(source.folder / name) for name in source.paths()}
    for kind, name, t in source.tensors():
        if t.dtype not in _BY_FILE:
            raise CheckpointError(f"'{name}' is {t.dtype}, which fsdpc has no tensors of")
        tables[kind][name] = _Bytes(t.dtype, t.shape, files[t.file][t.begin : t.end])
    return tables


def _mapped(path: Path) -> Any:
    """Return a file's bytes as an array, which is writable only because DLPack requires it."""
    flags = mmap.MAP_PRIVATE | _NORESERVE
    with path.open("rb") as file:
        bytes_ = os.fstat(file.fileno()).st_size
        held = mmap.mmap(file.fileno(), bytes_, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(held, np.uint8)


def _read_torch(path: Path) -> _Tensors:
    torch = importlib.import_module("torch")
    options = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            state = torch.load(path, mmap=True, **options)
        except RuntimeError:  # from before PyTorch 1.6
            state = torch.load(path, **options)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than tensors: {error}") from None
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{path} is no file of torch.save, or damaged: {error}") from None
    if not isinstance(state, dict) or not all(torch.is_tensor(t) for t in state.values()):
        raise CheckpointError(f"{path} is not a flat dict of tensors")
    return {name: _from_torch(name, t) for name, t in state.items()}


def _read_dcp(path: Path, scratch: Path) -> tuple[_Tensors, list[str]]:
    torch = importlib.import_module("torch")
    dcp = importlib.import_module("torch.distributed.checkpoint")
    metadata = dcp.FileSystemReader(str(path)).read_metadata()
    state, left_out = {}, []
    for i, (name, entry) in enumerate(metadata.state_dict_metadata.items()):
        if not hasattr(entry, "size"):
            left_out.append(name)
            continue
        dtype, numel = entry.properties.dtype, prod(entry.size)
        flat = torch.empty(0, dtype=dtype)
        if numel:
            flat = torch.from_file(str(scratch / str(i)), shared=True, size=numel, dtype=dtype)
        state[name] = flat.reshape(entry.size)
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return {name: _from_torch(name, t) for name, t in state.items()}, left_out


def _from_torch(name: str, t: Any) -> _Bytes:
    torch = importlib.import_module("torch")
    dtype = FILE_DTYPES.get(str(t.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"'{name}' is {t.dtype}, which fsdpc has no tensors of")
    own = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _Bytes(dtype, tuple(t.shape), own)


# ---- writing PyTorch's formats ----


def _write_torch(to: Path, tensors: _Tensors, layout: str) -> None:
    torch = importlib.import_module("torch")
    states = {
        name: torch.from_numpy(t.array).view(getattr(torch, _BY_FILE[t.dtype])).reshape(t.shape)
        for name, t in tensors.items()
    }
    with _scratch(to) as scratch:  # so that `to` appears only when it is complete
        made = scratch / "made"
        if layout == "torch":
            torch.save(states, made)
        else:
            dcp = importlib.import_module("torch.distributed.checkpoint")
            dcp.save(states, checkpoint_id=str(made), no_dist=True)
        made.rename(to)
