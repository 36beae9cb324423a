"""What a checkpoint offers: tensors by name and where their bytes are, ours or Hugging Face's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fsdpc import _core
from fsdpc.checkpoint import manifest
from fsdpc.checkpoint.manifest import CheckpointError, plain_name, strict_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Part:
    """Elements ``[first, first + numel)`` of a tensor, one after the other in a file."""

    file: str
    first: int
    numel: int
    begin: int
    end: int
    crc: int | None


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Part]

    def overlap(self, k: int, first: int, numel: int) -> tuple[int, int, int, int] | None:
        """Where part ``k`` has elements of ``[first, first + numel)``.

        Returns
        -------
        begin, numel, offset, behind
            Counted from ``first``; in elements; bytes into the file and of the part behind them.
            None where there are no such elements.
        """
        part = self.parts[k]
        low, high = max(first, part.first), min(first + numel, part.first + part.numel)
        if low >= high:
            return None
        item = (part.end - part.begin) // part.numel
        offset = part.begin + (low - part.first) * item
        behind = (part.first + part.numel - high) * item
        return low - first, high - low, offset, behind


@dataclass
class Source:
    """A checkpoint that was opened: its headers are read and checked, its data are not."""

    folder: Path
    content: dict[str, Any]
    model: dict[str, SourceTensor]
    optimizer: dict[str, SourceTensor]

    def paths(self) -> list[str]:
        """Names of the files with tensors."""
        return list(dict.fromkeys(part.file for _, _, t in self.tensors() for part in t.parts))

    def tensors(self) -> list[tuple[str, str, SourceTensor]]:
        """Kind, name and tensor of all, by kind and name."""
        tables = (("model", self.model), ("optimizer", self.optimizer))
        return [(kind, name, t) for kind, table in tables for name, t in sorted(table.items())]


def open_source(path: Path) -> Source:
    """Open a checkpoint's folder, or one safetensors file.

    Raises
    ------
    CheckpointError
        It is none, or its files do not fit together.
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


def checksums(source: Source) -> dict[tuple[str, str], tuple[int, ...]]:
    """Read all of a checkpoint; return the checksums of each tensor's parts, by kind and name."""
    paths = source.paths()
    number = {name: i for i, name in enumerate(paths)}
    runs, keys = [], []
    for kind, name, t in source.tensors():
        for part in t.parts:
            runs.append((number[part.file], len(keys), part.begin, part.end - part.begin, 0))
            keys.append((kind, name))
    files = [os.fsencode(source.folder / name) for name in paths]
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for key, crc in zip(keys, _core.sum_runs(files, runs, len(keys)), strict=True):
        found[key] = (*found.get(key, ()), crc)
    return found


def damaged(source: Source) -> list[str]:
    """Read all of a checkpoint; return the tensors with wrong checksums, and their files."""
    found = checksums(source)
    return [
        f"'{name}' in {part.file}"
        for kind, name, t in source.tensors()
        for part, crc in zip(t.parts, found[kind, name], strict=True)
        if part.crc not in (None, crc)
    ]


def read_headers(folder: Path, files: list[str]) -> dict[str, SourceTensor]:
    """Read the tensors of some safetensors files; a name that stands in two is an error."""
    found: dict[str, SourceTensor] = {}
    for file in files:
        try:
            tensors, _, _, _ = _core.safetensors_header(folder / file)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise CheckpointError(str(error)) from None
        for name, dtype, shape, begin, end in tensors:
            if name in found:
                raise CheckpointError(
                    f"tensor '{name}' stands in {found[name].parts[0].file} and in {file}"
                )
            part = Part(file, 0, prod(shape), begin, end, None)
            found[name] = SourceTensor(dtype, shape, [part])
    return found


def read_index(path: Path) -> dict[str, str]:
    """Read an index of sharded files: name of each tensor to name of its file.

    Raises
    ------
    CheckpointError
        It is no index, or names files elsewhere.
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
    elsewhere = sorted(n for n in weights if n not in found or found[n].parts[0].file != weights[n])
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
    found = {}
    for name, entry in content["tensors"][kind].items():
        shape = tuple(entry["shape"])
        whole = {"first": 0, "numel": prod(shape)}
        parts = [
            Part(p["file"], p["first"], p["numel"], *p["offsets"], int(p["crc32c"], 16))
            for p in entry.get("pieces", [{**entry, **whole}])
        ]
        found[name] = SourceTensor(entry["dtype"], shape, parts)
    return found


def _check_against_headers(source: Source) -> None:
    """The manifest and the files' own headers say the same."""
    per_rank = source.content["layout"] == "per_rank"
    told: dict[str, dict[str, tuple[str, tuple[int, ...], int, int]]] = {}
    for kind, table in (("model", source.model), ("optimizer", source.optimizer)):
        for name, t in table.items():
            key = f"{kind}/{name}" if per_rank else name
            for part in t.parts:
                shape = (part.numel,) if per_rank else t.shape
                told.setdefault(part.file, {})[key] = (t.dtype, shape, part.begin, part.end)
    for file, entries in told.items():
        plain_name(file, manifest.NAME)
        tensors, _, _, _ = _core.safetensors_header(source.folder / file)
        there = {name: (dtype, shape, begin, end) for name, dtype, shape, begin, end in tensors}
        if there != entries:
            names = sorted(n for n in {*there, *entries} if there.get(n) != entries.get(n))
            raise CheckpointError(
                f"{source.folder / file} holds other tensors than {manifest.NAME} says: {names}"
            )
