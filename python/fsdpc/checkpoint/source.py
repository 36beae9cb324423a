"""The tensors of an fsdpc or Hugging Face checkpoint: their names and byte ranges."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpc import _core
from fsdpc.checkpoint import manifest
from fsdpc.checkpoint.manifest import CheckpointError, plain_name, strict_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class SourceTensor:
    """One tensor in a checkpoint: the bytes ``[begin, end)`` of a file."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    crc: int | None = None

    @property
    def nbytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return self.end - self.begin


@dataclass
class Source:
    """An open checkpoint, whose headers have been read and checked but whose data have not."""

    folder: Path
    content: dict[str, Any]
    model: dict[str, SourceTensor]
    optimizer: dict[str, SourceTensor]

    def paths(self) -> list[str]:
        """Return the names of the files that contain tensors."""
        return list(dict.fromkeys(t.file for _, _, t in self.tensors()))

    def tensors(self) -> list[tuple[str, str, SourceTensor]]:
        """Return (kind, name, tensor) for every tensor, sorted by kind and name."""
        tables = (("model", self.model), ("optimizer", self.optimizer))
        return [(kind, name, t) for kind, table in tables for name, t in sorted(table.items())]


def open_source(path: Path) -> Source:
    """Open a checkpoint's folder, or one safetensors file.

    Raises
    ------
    CheckpointError
        The path is not a checkpoint, or its files are inconsistent.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file():
        return Source(path.parent, {}, read_headers(path.parent, [path.name]), {})
    if (path / manifest.NAME).is_file():
        return _open_ours(path)
    if (path / INDEX).is_file():
        return Source(path, {}, _open_sharded(path), {})
    if (path / SINGLE).is_file():
        return Source(path, {}, read_headers(path, [SINGLE]), {})
    raise CheckpointError(
        f"{path} has no {manifest.NAME}, {INDEX} or {SINGLE}: it is no checkpoint, or was never "
        "committed"
    )


def checksums(source: Source) -> dict[tuple[str, str], int]:
    """Read a whole checkpoint; return each tensor's checksum by kind and name."""
    paths, tensors = source.paths(), source.tensors()
    number = {name: i for i, name in enumerate(paths)}
    runs = [(number[t.file], t.begin, t.nbytes) for _, _, t in tensors]
    crcs = _core.sum_runs([os.fsencode(source.folder / name) for name in paths], runs)
    return {(kind, name): crc for (kind, name, _), crc in zip(tensors, crcs, strict=True)}


def damaged(source: Source) -> list[str]:
    """Read a whole checkpoint; return the tensors whose checksums are wrong, and their files."""
    found = checksums(source)
    return [
        f"'{name}' in {t.file}"
        for kind, name, t in source.tensors()
        if t.crc not in (None, found[kind, name])
    ]


def read_headers(folder: Path, files: list[str]) -> dict[str, SourceTensor]:
    """Read the headers of safetensors files; raise if a tensor name occurs in two of them."""
    found: dict[str, SourceTensor] = {}
    for file in files:
        try:
            tensors = _core.safetensors_header(folder / file)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise CheckpointError(str(error)) from None
        for name, dtype, shape, begin, end in tensors:
            if name in found:
                raise CheckpointError(f"tensor '{name}' is in {found[name].file} and in {file}")
            found[name] = SourceTensor(dtype, shape, file, begin, end)
    return found


def read_index(path: Path) -> dict[str, str]:
    """Read the index of sharded files, which maps each tensor name to a file name.

    Raises
    ------
    CheckpointError
        The file is not an index, or names files outside the folder.
    """
    if path.stat().st_size > manifest.MAX_BYTES:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes are too many for an index")
    content = strict_json(path.read_bytes(), str(path))
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError(f"{path}: an index has a 'weight_map' from tensors to files")
    for file in weights.values():
        plain_name(file, str(path))
    return weights


def _open_sharded(folder: Path) -> dict[str, SourceTensor]:
    weights = read_index(folder / INDEX)
    files = sorted(set(weights.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise CheckpointError(f"{folder}: files are missing that {INDEX} names: {absent}")
    found = read_headers(folder, files)
    elsewhere = sorted(n for n in weights if n not in found or found[n].file != weights[n])
    unlisted = sorted(set(found) - set(weights))
    if elsewhere or unlisted:
        raise CheckpointError(
            f"{folder / INDEX} does not fit its files: not where it says {elsewhere}, not in it "
            f"{unlisted}"
        )
    return found


def _open_ours(folder: Path) -> Source:
    content = manifest.read(folder)
    manifest.check_files(folder, content)
    tables = {kind: _table(content, kind) for kind in ("model", "optimizer")}
    source = Source(folder, content, tables["model"], tables["optimizer"])
    _check_against_headers(source)
    return source


def _table(content: dict[str, Any], kind: str) -> dict[str, SourceTensor]:
    return {
        name: SourceTensor(t["dtype"], tuple(t["shape"]), t["file"], *t["offsets"],
                           int(t["crc32c"], 16))
        for name, t in content["tensors"][kind].items()
    }  # fmt: skip


def _check_against_headers(source: Source) -> None:
    """Raise if the manifest and the files' own headers disagree."""
    told: dict[str, dict[str, tuple[str, tuple[int, ...], int, int]]] = {}
    for _, name, t in source.tensors():
        told.setdefault(t.file, {})[name] = (t.dtype, t.shape, t.begin, t.end)
    for file, entries in told.items():
        plain_name(file, manifest.NAME)
        tensors = _core.safetensors_header(source.folder / file)
        there = {name: (dtype, shape, begin, end) for name, dtype, shape, begin, end in tensors}
        if there != entries:
            names = sorted(n for n in {*there, *entries} if there.get(n) != entries.get(n))
            raise CheckpointError(
                f"{source.folder / file} holds other tensors than {manifest.NAME} says: {names}"
            )
