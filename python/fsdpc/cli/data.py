"""``fsdpc data``: convert text to tokens, and describe token folders."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fsdpc import _core
from fsdpc.cli.arguments import Parser
from fsdpc.data.description import NAME, TokenDescription, read_description
from fsdpc.data.files import map_tokens
from fsdpc.data.tokenize import tokenize, train_tokenizer
from fsdpc.data.tokenizer import Tokenizer
from fsdpc.data.tokens import TokenDataset

_EPILOG = """\
examples:
  fsdpc data train-tokenizer notes/ --vocab 8192 --output tokenizer.json
  fsdpc data tokenize notes/ more.jsonl --tokenizer tokenizer.json \\
      --output tokens
  fsdpc data list .
  fsdpc data show tokens --text 200
  fsdpc data show tokens --verify      reads everything
"""
_VERIFIED = 1 << 22  # ids read at a time


def parser() -> argparse.ArgumentParser:
    """Return the argument parser for ``fsdpc data``."""
    p = Parser(
        prog="fsdpc data",
        description="Turn text into tokens to train on, and look at folders of them.",
        epilog=_EPILOG,
    )
    commands = p.add_subparsers(dest="command", metavar="COMMAND", required=True)
    learn = commands.add_parser(
        "train-tokenizer", help="learn a byte-level BPE from text", allow_abbrev=False
    )
    _add_inputs(learn)
    learn.add_argument(
        "--vocab", type=int, default=8192, metavar="N", help="tokens at most (default: 8192)"
    )
    learn.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the tokenizer.json to write"
    )
    make = commands.add_parser(
        "tokenize", help="write the tokens of text as a folder", allow_abbrev=False
    )
    _add_inputs(make)
    make.add_argument(
        "--tokenizer", type=Path, required=True, metavar="FILE",
        help="tokenizer.json of the tokenizers package, or a folder that has one",
    )  # fmt: skip
    make.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="the folder to make"
    )
    make.add_argument(
        "--shard-tokens", type=int, default=100_000_000, metavar="N",
        help="tokens of a file (default: 100,000,000)",
    )  # fmt: skip
    make.add_argument(
        "--end-of-document", metavar="TOKEN",
        help="the token that ends each document (default: <|endoftext|>, </s> or the like)",
    )  # fmt: skip
    names = commands.add_parser("list", help="the folders of tokens below others, a line each")
    names.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", default=[Path(".")])
    show = commands.add_parser("show", help="what a folder of tokens holds")
    show.add_argument("folder", type=Path, metavar="FOLDER")
    show.add_argument("--text", type=int, default=0, metavar="N", help="its first N tokens as text")
    show.add_argument("--verify", action="store_true", help="read all ids, compare checksums")
    return p


def _add_inputs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="text files (a document each), JSON lines (.jsonl: a document a line), folders",
    )
    command.add_argument(
        "--field", default="text", metavar="NAME", help="the text of a JSON line (default: text)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fsdpc data`` and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Command-line options.
    """
    options = parser().parse_args(argv)
    run = {"train-tokenizer": _learn, "tokenize": _tokenize, "list": _list, "show": _show}
    try:
        run[options.command](options)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, ImportError) as error:
        print(f"fsdpc data: {error}", file=sys.stderr)
        return 2
    return 0


def _learn(options: argparse.Namespace) -> None:
    if options.output.exists():
        raise FileExistsError(f"{options.output} is there already: name another --output file")
    text = train_tokenizer(options.inputs, options.vocab, options.field)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    print(f"{options.output}: {Tokenizer(options.output).vocab_size:,} tokens")


def _tokenize(options: argparse.Namespace) -> None:
    began = shown = time.monotonic()
    live = sys.stdout.isatty()

    def progress(documents: int, tokens: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= (0.2 if live else 10.0):
            shown, rate = now, tokens / (now - began)
            line = f"{documents:,} documents, {tokens:,} tokens, {rate:,.0f} a second"
            print(line.ljust(78) if live else line, end="\r" if live else "\n", flush=True)

    tokenizer = Tokenizer(options.tokenizer)
    tokenize(
        options.inputs, tokenizer, options.output, field=options.field,
        shard_tokens=options.shard_tokens, end_of_document=options.end_of_document,
        progress=progress,
    )  # fmt: skip
    if live:
        print(" " * 78, end="\r")
    _show(argparse.Namespace(folder=options.output, text=0, verify=False))


def _described(folder: Path) -> TokenDescription:
    found = read_description(folder)
    if found is None:
        raise ValueError(f"{folder} has no {NAME}: it is no folder that fsdpc data tokenize wrote")
    return found


def _list(options: argparse.Namespace) -> None:
    rows = [("folder", "tokens", "documents", "dtype", "vocabulary", "tokenizer")]
    for top in options.folders:
        if not top.is_dir():
            raise ValueError(f"{top} is no folder")
        for folder, folders, names in os.walk(top):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if NAME in names:
                found = _described(Path(folder))
                numbers = (found.tokens, found.documents, found.dtype, found.vocab_size)
                shown = ["-" if n is None else f"{n:,}" if isinstance(n, int) else n
                         for n in numbers]  # fmt: skip
                rows.append((folder, *shown, (found.tokenizer or {}).get("name", "-")))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())


def _show(options: argparse.Namespace) -> None:
    folder, found = options.folder, _described(options.folder)
    data = TokenDataset(folder, 1)  # checks lengths
    size = sum(path.stat().st_size for path in data.files)
    files = f"{len(data.files)} file{'s' if len(data.files) > 1 else ''}"
    print(f"{folder}: {data.tokens:,} tokens of {found.dtype} in {files}, {size:,} bytes")
    if found.documents is not None and found.text_bytes is not None:
        text = data.tokens - found.documents  # without the end-of-document tokens
        plural = "" if found.documents == 1 else "s"
        print(f"{found.documents:,} document{plural}, {found.text_bytes:,} bytes of text, "
              f"{found.text_bytes / max(text, 1):.2f} a token")  # fmt: skip
    print(f"vocabulary {found.vocab_size or '-'}, documents end with id "
          f"{'-' if found.end_of_document is None else found.end_of_document}")  # fmt: skip
    if found.tokenizer:
        print(f"tokenizer {found.tokenizer.get('name')}, sha256 {found.tokenizer['sha256']}")
    if options.verify:
        _verify(data, found)
        print("checksums and ids are right")
    if options.text > 0:
        ids = data.run(0, min(options.text, data.tokens))
        decode = Tokenizer(folder).decoder()
        print("".join(decode(int(number)) for number in ids))


def _verify(data: TokenDataset, found: TokenDescription) -> None:
    sums = {shard["file"]: shard.get("crc32c") for shard in found.shards}
    for path in data.files:
        ids, crc = map_tokens(path, np.dtype(found.dtype)), 0
        for begin in range(0, len(ids), _VERIFIED):
            part = np.ascontiguousarray(ids[begin : begin + _VERIFIED])
            crc = _core.crc32c(crc, part)
            wrong = np.flatnonzero(part >= found.vocab_size) if found.vocab_size else ()
            if len(wrong):
                raise ValueError(
                    f"token file {path}: position {begin + wrong[0]:,} has the id "
                    f"{part[wrong[0]]}, beyond the vocabulary of {found.vocab_size:,}"
                )
        wanted = sums.get(path.name)
        if wanted is not None and wanted != f"{crc:08x}":
            raise ValueError(
                f"token file {path} has the CRC-32C {crc:08x}, and {NAME} says {wanted}: it was "
                "changed or damaged; tokenize the text again"
            )
