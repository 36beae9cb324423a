"""``fsdpc ckpt``: look at checkpoints, check them, compare and convert them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fsdpc import _core
from fsdpc.checkpoint import saving
from fsdpc.checkpoint.manager import checkpoints_in
from fsdpc.checkpoint.manifest import CheckpointError
from fsdpc.checkpoint.source import Source, SourceTensor, open_source

_EPILOG = """\
examples:
  fsdpc ckpt ls run/step-00000100
  fsdpc ckpt verify run            all checkpoints of a folder
  fsdpc ckpt diff run/step-00000100 run/step-00000200
  fsdpc ckpt convert run/step-00000100 flat --layout full
  fsdpc ckpt convert dcp-folder native      from PyTorch's distributed checkpoints
"""

_ROWS = 200_000  # of tensors at a time, whatever a hostile header says


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``fsdpc ckpt``."""
    p = argparse.ArgumentParser(
        prog="fsdpc ckpt",
        description="Look at checkpoints: ours, Hugging Face's folders, safetensors files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="command", metavar="COMMAND", required=True)
    ls = commands.add_parser("ls", help="a table of tensors, sizes and checksums")
    ls.add_argument("path", type=Path)
    verify = commands.add_parser("verify", help="read everything and compare checksums")
    verify.add_argument("path", type=Path)
    diff = commands.add_parser("diff", help="what differs between two checkpoints")
    diff.add_argument("path", type=Path)
    diff.add_argument("other", type=Path)
    convert = commands.add_parser(
        "convert", help="to another layout, or from and to PyTorch's formats (needs torch)"
    )
    convert.add_argument("path", type=Path)
    convert.add_argument("to", type=Path)
    convert.add_argument(
        "--layout",
        choices=("full", "dcp", "torch"),
        default="full",
        help="full safetensors (the default), a DCP folder, or a torch.save file",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fsdpc ckpt`` and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Options, as on the command line.
    """
    options = parser().parse_args(argv)
    try:
        code = _run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CheckpointError, OSError, ValueError, ImportError) as error:
        print(f"fsdpc ckpt: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.command == "ls":
        return _ls(options.path)
    if options.command == "verify":
        return _verify(options.path)
    if options.command == "diff":
        return _diff(options.path, options.other)
    from fsdpc.checkpoint.convert import convert

    convert(options.path, options.to, options.layout)
    return 0


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _tensors(source: Source) -> list[tuple[str, str, SourceTensor]]:
    """(kind, name, tensor) of all."""
    return [("model", n, t) for n, t in sorted(source.model.items())] + [
        ("optimizer", n, t) for n, t in sorted(source.optimizer.items())
    ]


def _bytes(tensor: SourceTensor) -> int:
    return sum(part.end - part.begin for part in tensor.parts)


def _table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def _ls(path: Path) -> int:
    if path.is_dir() and any(path.glob("step-*")):
        rows = [("step", "state", "size")]
        for found in checkpoints_in(path):
            size = sum(f.stat().st_size for f in found.path.iterdir())
            rows.append((str(found.step), found.problem or "valid", _size(size)))
        _table(rows)
        return 0
    source = open_source(path)
    rows = [("tensor", "dtype", "shape", "size", "crc32c", "file")]
    for kind, name, t in _tensors(source)[:_ROWS]:
        crcs = ",".join("-" if p.crc is None else f"{p.crc:08x}" for p in t.parts)
        files = ",".join(p.file for p in t.parts)
        shown = name if kind == "model" else f"[optimizer] {name}"
        shape = " x ".join(map(str, t.shape)) or "scalar"
        rows.append((shown, t.dtype, shape, _size(_bytes(t)), crcs, files))
    _table(rows)
    total = sum(_bytes(t) for _, _, t in _tensors(source))
    print(f"{len(rows) - 1} tensors, {_size(total)}")
    if source.content:
        c = source.content
        meshes = [f"{m['replicate']} x {m['shard']}" for m in c.get("meshes", [])]
        names = ", ".join(c.get("strategies", ["?"]))  # which older ones do not say
        how = f" ({names}; replicas x shards {', '.join(meshes)})" if meshes else ""
        print(f"written by {c['world']} ranks{how}, layout {c['layout']}, extra {c['extra']}")
    return 0


def checksums(source: Source) -> dict[tuple[str, str], tuple[int, ...]]:
    """Read all of a checkpoint and return the checksums of each tensor's parts.

    Parameters
    ----------
    source : Source
        As :func:`fsdpc.checkpoint.source.open_source` returns it.
    """
    paths = source.paths()
    number = {name: i for i, name in enumerate(paths)}
    runs, keys = [], []
    for kind, name, t in _tensors(source):
        for part in t.parts:
            runs.append((number[part.file], len(keys), part.begin, part.end - part.begin, 0))
            keys.append((kind, name))
    files = [str(source.folder / name) for name in paths]
    crcs = _core.sum_runs(files, runs, len(keys), saving._hook)
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for key, crc in zip(keys, crcs, strict=True):
        found[key] = (*found.get(key, ()), crc)
    return found


def _verify(path: Path) -> int:
    if path.is_dir() and any(path.glob("step-*")):
        return max([_verify_one(found.path) for found in checkpoints_in(path)], default=0)
    return _verify_one(path)


def _verify_one(path: Path) -> int:
    begin = time.perf_counter()
    try:
        source = open_source(path)
        found = checksums(source)
    except (CheckpointError, OSError) as error:
        print(f"{path}: {error}")
        return 1
    wrong = []
    for kind, name, t in _tensors(source):
        want = tuple(part.crc for part in t.parts)
        if None not in want and found[kind, name] != want:
            wrong.append(f"{path}: '{name}' in {t.parts[0].file} is damaged")
    for line in wrong:
        print(line)
    if wrong:
        return 1
    seconds = time.perf_counter() - begin
    total = sum(_bytes(t) for _, _, t in _tensors(source))
    what = "verified" if source.content else "readable, without checksums to compare"
    print(f"{path}: {len(found)} tensors, {_size(total)} {what} in {seconds:.2f} s "
          f"({total / max(seconds, 1e-9) / 1e9:.2f} GB/s)")  # fmt: skip
    return 0


def _diff(path: Path, other: Path) -> int:
    a, b = open_source(path), open_source(other)
    ours = {(kind, name): t for kind, name, t in _tensors(a)}
    theirs = {(kind, name): t for kind, name, t in _tensors(b)}
    sums_a, sums_b = checksums(a), checksums(b)
    lines = [f"only in {path}: {name}" for kind, name in sorted(set(ours) - set(theirs))]
    lines += [f"only in {other}: {name}" for kind, name in sorted(set(theirs) - set(ours))]
    for key in sorted(set(ours) & set(theirs)):
        s, t = ours[key], theirs[key]
        if (s.dtype, s.shape) != (t.dtype, t.shape):
            lines.append(f"{key[1]}: {s.dtype} {s.shape} and {t.dtype} {t.shape}")
        elif _whole(s, sums_a[key]) != _whole(t, sums_b[key]):
            lines.append(f"{key[1]}: values differ")
    for line in lines:
        print(line)
    same = len(set(ours) & set(theirs)) - sum(": " in line and "only in" not in line
                                              for line in lines)  # fmt: skip
    print(f"{same} tensors are the same, {len(lines)} differ")
    return 1 if lines else 0


def _whole(tensor: SourceTensor, crcs: tuple[int, ...]) -> int:
    """The checksum of a tensor in parts, whose parts' are known."""
    whole = 0
    for part, crc in sorted(zip(tensor.parts, crcs, strict=True), key=lambda pair: pair[0].first):
        whole = _core.crc32c_combine(whole, crc, part.end - part.begin)
    return whole
