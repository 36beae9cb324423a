"""``fsdpc generate``: generate text from a ``fsdpc train`` run or a published model's folder."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdpc import lora
from fsdpc.cli.arguments import Parser
from fsdpc.cli.text_codec import open_text, render_chat
from fsdpc.display.text import as_text
from fsdpc.models import from_pretrained

_EPILOG = """\
examples:
  fsdpc generate run/ "def main"
  fsdpc generate SmolLM2-135M-Instruct "What is a shard?" --chat \\
      --max-new-tokens 100
  cat story.txt | fsdpc generate gpt2/ - --temperature 0

The text goes to stdout as it is generated, and the tokens per second go to
stderr.
"""


def parser() -> argparse.ArgumentParser:
    """Return the argument parser for ``fsdpc generate``."""
    p = Parser(
        prog="fsdpc generate",
        description="Continue a text by a language model.",
        epilog=_EPILOG,
    )
    add = p.add_argument
    add(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a run's --checkpoint, one of its checkpoints, or a published model",
    )
    add("prompt", metavar="PROMPT", help="the text to continue; -: from stdin")
    numbers: tuple[tuple[str, Any, Any, str], ...] = (
        ("--max-new-tokens", int, 256, "tokens to add at most (default: 256)"),
        ("--temperature", float, 0.8, "0 takes the likeliest token (default: 0.8)"),
        ("--top-k", int, None, "sample among so many of the likeliest tokens"),
        ("--top-p", float, None, "sample among the likeliest of this probability together"),
        ("--seed", int, 0, "of sampling (default: 0)"),
    )
    for name, kind, default, text in numbers:
        add(name, type=kind, default=default, metavar="N" if kind is int else "X", help=text)
    add("--chat", action="store_true", help="put the prompt into the folder's chat template")
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json (default: the folder's; without one ids are bytes)",
    )
    add("--adapter", type=Path, metavar="DIR", help="of LoRA, in PEFT's format, to merge first")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of parameters (default: auto, the configuration's)",
    )
    return p


def main(argv: Sequence[str]) -> int:
    """Run ``fsdpc generate`` and return its exit code."""
    options = parser().parse_args(argv)
    try:
        run(options)
    except (ValueError, OSError, MemoryError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"fsdpc generate: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Load the model, generate, and print the speed."""
    folder = find_model(options.folder)
    model = from_pretrained(folder, dtype=options.dtype)
    if options.adapter is not None:
        lora.load(model, options.adapter)
        lora.merge(model)
    places = [folder, folder.parent] if folder != options.folder else [folder]
    text = open_text(places, options.tokenizer, model.config.vocab_size, trained_with(folder))
    prompt = sys.stdin.read() if options.prompt == "-" else as_text(options.prompt)
    if options.chat:
        prompt = render_chat(places, [{"role": "user", "content": prompt}])
    ids = text.encode(prompt, not options.chat)  # a chat template includes its own first tokens
    if not ids:
        raise ValueError("the prompt has no tokens: give at least one letter")
    room = model.config.max_seq - len(ids)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, and the model was made for {model.config.max_seq}"
        )
    ends = find_ends(folder, model.config.eos_token_id)
    text.begin(ids)
    begin = first = time.perf_counter()
    count = 0
    for (token,) in model.stream(
        [ids], min(options.max_new_tokens, room), temperature=options.temperature,
        top_k=options.top_k, top_p=options.top_p, stop=ends, seed=options.seed,
    ):  # fmt: skip
        count += 1
        if count == 1:
            first = time.perf_counter()
        if token not in ends:
            sys.stdout.write(text.add(token))
            sys.stdout.flush()
    end = time.perf_counter()
    print(text.end(), flush=True)
    rate = f", {(count - 1) / (end - first):,.1f} tokens/s" if count > 1 else ""
    print(f"{len(ids)} tokens of prompt in {first - begin:.2f} s, {count} new ones in "
          f"{end - first:.2f} s{rate}", file=sys.stderr)  # fmt: skip


def find_model(folder: Path) -> Path:
    """Return a model's folder: this one or, if it belongs to a run, its newest checkpoint's.

    Raises
    ------
    ValueError
        The folder is neither.
    """
    if (folder / "config.json").is_file() or not folder.is_dir():
        return folder  # reading it will report what is missing
    from fsdpc.checkpoint import CheckpointManager, manifest

    latest = CheckpointManager(folder).latest()
    if latest is None:
        raise ValueError(
            f"{folder} has neither config.json nor a checkpoint: name the folder of a published "
            "model, or that of fsdpc train --checkpoint"
        )
    if "base" in manifest.read(latest):
        raise ValueError(
            f"{latest} has the adapters of a run and no model: fsdpc train --resume --export DIR "
            "writes them for fsdpc generate MODEL PROMPT --adapter DIR"
        )
    return latest


def trained_with(folder: Path) -> dict[str, str] | None:
    """Return the name and hash of a run's tokenizer from its checkpoints."""
    from fsdpc.checkpoint import manifest

    if not (folder / manifest.NAME).is_file():
        return None
    extra = manifest.read(folder).get("extra")
    return extra.get("tokenizer") if isinstance(extra, dict) else None


def find_ends(folder: Path, configured: Any) -> set[int]:
    """Return the end tokens from the config and ``generation_config.json``."""
    found = [configured]
    if (folder / "generation_config.json").is_file():
        content = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        found.append(content.get("eos_token_id"))
    ends: set[int] = set()
    for each in found:
        ends |= set() if each is None else {each} if isinstance(each, int) else set(each)
    return ends
