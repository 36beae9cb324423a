"""``fsdpc ckpt``: inspect, verify, compare and convert checkpoints."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdpc.checkpoint.contents import TITLES, inspect
from fsdpc.checkpoint.manager import checkpoints_in
from fsdpc.checkpoint.manifest import CheckpointError
from fsdpc.checkpoint.source import checksums, damaged, open_source
from fsdpc.cli.arguments import Parser
from fsdpc.display.svg import size

_EPILOG = """\
examples:
  fsdpc ckpt ls run/step-00000100
  fsdpc ckpt verify run            all checkpoints of a folder
  fsdpc ckpt diff run/step-00000100 run/step-00000200
  fsdpc ckpt convert run/step-00000100 dcp-folder --layout dcp
  fsdpc ckpt convert dcp-folder native    from PyTorch's distributed checkpoints
"""

_ROWS = 200_000  # tensors at a time, whatever a hostile header claims


def parser() -> argparse.ArgumentParser:
    """Return the argument parser for ``fsdpc ckpt``."""
    p = Parser(
        prog="fsdpc ckpt",
        description="Look at checkpoints: ours, Hugging Face's folders, safetensors files.",
        epilog=_EPILOG,
    )
    commands = p.add_subparsers(dest="command", metavar="COMMAND", required=True)
    ls = commands.add_parser("ls", help="what it holds: tensors, sizes, checksums, who wrote it")
    ls.add_argument("path", type=Path)
    verify = commands.add_parser("verify", help="read everything and compare checksums")
    verify.add_argument("path", type=Path)
    diff = commands.add_parser("diff", help="what differs between two checkpoints")
    diff.add_argument("path", type=Path)
    diff.add_argument("other", type=Path)
    convert = commands.add_parser(
        "convert",
        help="to and from PyTorch's formats (needs torch), or of safetensors to ours",
        allow_abbrev=False,
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
        Command-line options.
    """
    options = parser().parse_args(argv)
    try:
        return _run(options)
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError, ValueError, ImportError) as error:
        _say(f"fsdpc ckpt: {error}", sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.command == "ls":
        return _ls(options.path)
    if options.command == "verify":
        return _verify(options.path)
    if options.command == "diff":
        return _diff(options.path, options.other)
    from fsdpc.checkpoint.convert import convert

    left_out = convert(options.path, options.to, options.layout)
    if left_out:
        _say(f"left out, as they are no tensors: {', '.join(left_out)}")
    return 0


def _say(text: str, file: Any = None) -> None:
    """Print a line, escaping control characters in hostile names."""
    safe = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    print("".join(safe), file=file)


def _table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        _say("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def _ls(path: Path) -> int:
    if path.is_dir() and any(path.glob("step-*")):
        rows = [("step", "state", "size")]
        for each in checkpoints_in(path):
            total = sum(f.stat().st_size for f in each.path.iterdir())
            state = each.problem or (f"valid, in {each.path.name}" if each.renamed else "valid")
            rows.append((str(each.step), state, size(total)))
        _table(rows)
        return 0
    found = inspect(path)
    _table([TITLES, *(t.cells() for t in found.tensors[:_ROWS])])
    for name, words in found.facts().items():
        _say(f"{name}: {words}")
    return 0


def _verify(path: Path) -> int:
    if path.is_dir() and any(path.glob("step-*")):
        return max([_verify_one(found.path) for found in checkpoints_in(path)], default=0)
    return _verify_one(path)


def _verify_one(path: Path) -> int:
    begin = time.perf_counter()
    try:
        source = open_source(path)
        wrong = damaged(source)
    except (CheckpointError, OSError) as error:
        _say(f"{path}: {error}")
        return 1
    for words in wrong:
        _say(f"{path}: {words} is damaged")
    if wrong:
        return 1
    seconds = time.perf_counter() - begin
    tensors = source.tensors()
    total = sum(t.nbytes for _, _, t in tensors)
    what = "verified" if source.content else "readable, without checksums to compare"
    _say(f"{path}: {len(tensors)} tensors, {size(total)} {what} in {seconds:.2f} s "
          f"({total / max(seconds, 1e-9) / 1e9:.2f} GB/s)")  # fmt: skip
    return 0


def _diff(path: Path, other: Path) -> int:
    a, b = open_source(path), open_source(other)
    ours = {(kind, name): t for kind, name, t in a.tensors()}
    theirs = {(kind, name): t for kind, name, t in b.tensors()}
    sums_a, sums_b = checksums(a), checksums(b)
    lines = [f"only in {path}: {name}" for kind, name in sorted(set(ours) - set(theirs))]
    lines += [f"only in {other}: {name}" for kind, name in sorted(set(theirs) - set(ours))]
    same = 0
    for key in sorted(set(ours) & set(theirs)):
        s, t = ours[key], theirs[key]
        if (s.dtype, s.shape) != (t.dtype, t.shape):
            lines.append(f"{key[1]}: {s.dtype} {s.shape} and {t.dtype} {t.shape}")
        elif sums_a[key] != sums_b[key]:
            lines.append(f"{key[1]}: values differ")
        else:
            same += 1
    for line in lines:
        _say(line)
    _say(f"{same} tensors are the same, {len(lines)} differ")
    return 1 if lines else 0
