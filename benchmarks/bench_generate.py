"""Tokens a second of generation: model.generate beside transformers' generate on the same CPU.

    python benchmarks/bench_generate.py [--presets 10M 41M] [--dtypes fp32 bf16] [--batches 1 8]
        [--prompt 64] [--new 128] [--rounds 3] [--threads 1]

Greedy, with a cache of keys and values, on one rank. Both engines read the same folder of random
weights and get the same random prompts. Nothing ends a sequence, so each has all its new tokens.
Engines take turns; a turn is a fresh process, which generates a few tokens first, then REPEATS
times for each batch, and whose medians count.

Prefill is the time to the first new token: the forward of the prompts and the first choice.
Decoding is the rate of the others, of all sequences together. "over transformers" is the ratio of
rates: above 1, fsdpc is faster. A decoding step reads each weight of a product once: "GB/s" is
their bytes over its time. Below the table stand the rate at which as many threads read memory (a
dot product), and how many new tokens of both engines are the same.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

ENGINES = ("fsdpc", "transformers")
WARM_TOKENS, REPEATS = 4, 2
READ_BYTES = 2**28


def prompts(batch: int, tokens: int, vocab: int) -> np.ndarray:
    """Random words, (batch, tokens), the same for both engines."""
    return np.random.default_rng(batch).integers(0, vocab, (batch, tokens), dtype=np.int64)


def write_model(preset: str, folder: str) -> None:
    """Write a preset's random weights where both engines read them."""
    import fsdpc
    from fsdpc import models

    fsdpc.manual_seed(0)
    models.save_pretrained(models.Llama(models.preset(preset)), folder)
    common.leave_result({})


def fsdpc_tokens(folder: str, dtype: str) -> tuple[Any, int]:
    """What yields our tokens as they are made, and the vocabulary."""
    import fsdpc
    from fsdpc import models

    model = models.from_pretrained(folder, dtype=fsdpc.bfloat16 if dtype == "bf16" else None)
    model.eval()

    def stream(ids: np.ndarray, new: int) -> Iterator[Any]:
        yield from model.stream(list(ids), new, stop=())

    return stream, model.config.vocab_size


def transformers_tokens(folder: str, dtype: str) -> tuple[Any, int]:
    """What yields transformers' tokens, each with the time at which its streamer had it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    class Clock(BaseStreamer):
        """Keeps tokens and the time; the prompt comes first."""

        def __init__(self) -> None:
            self.found: list[tuple[float, list[int]]] = []

        def put(self, value: torch.Tensor) -> None:
            self.found.append((time.perf_counter(), value.reshape(-1).tolist()))

        def end(self) -> None:
            pass

    def timed(ids: np.ndarray, new: int) -> list[tuple[float, list[int]]]:
        clock, given = Clock(), torch.from_numpy(ids)
        with torch.no_grad():
            model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new,
                           do_sample=False, use_cache=True, streamer=clock)  # fmt: skip
        return clock.found[1:]

    return timed, model.config.vocab_size


def generate(make: Any, ids: np.ndarray, new: int) -> dict[str, Any]:
    """Seconds to the first token and from there to the last, and the tokens (new, batch)."""
    begin = time.perf_counter()
    found = make(ids, new)
    if not isinstance(found, list):
        found = [(time.perf_counter(), words) for words in found]
    times, words = zip(*found, strict=True)
    if len(words) != new:
        raise RuntimeError(f"{len(words)} tokens were made in the place of {new}")
    return {"prefill": times[0] - begin, "decode": times[-1] - times[0], "words": words}


def memory_rate() -> float:
    """Bytes a second that a dot product reads."""
    x = np.ones(READ_BYTES // 4, np.float32)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        np.dot(x, x)
        seconds.append(time.perf_counter() - begin)
    return x.nbytes / min(seconds)


def turn(engine: str, folder: str, dtype: str, o: argparse.Namespace) -> dict[str, Any]:
    """One turn: all batches in this process."""
    os.environ["FSDPC_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(o.threads)
    load = fsdpc_tokens if engine == "fsdpc" else transformers_tokens
    make, vocab = load(folder, dtype)
    results: dict[str, Any] = {"memory": memory_rate()}
    for batch in o.batches:
        ids = prompts(batch, o.prompt, vocab)
        generate(make, ids, WARM_TOKENS)
        runs = [generate(make, ids, o.new) for _ in range(REPEATS)]
        results[str(batch)] = {
            "prefill": statistics.median(run["prefill"] for run in runs),
            "decode": statistics.median(run["decode"] for run in runs),
            "words": runs[0]["words"],
        }
    return results


def same(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """How many tokens agree: those before each sequence's first difference."""
    equal = np.array(ours) == np.array(theirs)
    before = np.logical_and.accumulate(equal, axis=0)
    return f"{before.sum()} of {equal.size} new tokens are the same"


def whole(values: list[float]) -> str:
    """Median and range without digits behind the point."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}..{max(values):,.0f})"


def rows_of(
    preset: str, dtype: str, turns: dict[str, list[Any]], o: argparse.Namespace
) -> tuple[list[list[str]], list[str]]:
    """Rows of the table, and lines on the tokens."""
    from fsdpc.models.config import preset as config_of

    weights = config_of(preset).matmul_parameters() * {"fp32": 4, "bf16": 2}[dtype]
    rows, lines = [], []
    for batch in map(str, o.batches):
        first = {e: [t[batch]["prefill"] * 1e3 for t in each] for e, each in turns.items()}
        step = {
            e: [t[batch]["decode"] / (o.new - 1) for t in each] for e, each in turns.items()
        }
        for engine in o.engines:
            over = [
                f"{statistics.median(each[ENGINES[1]]) / statistics.median(each[engine]):.2f}"
                if ENGINES[1] in each else "-"
                for each in (first, step)
            ]  # fmt: skip
            rate = whole([int(batch) / s for s in step[engine]])
            read = f"{weights / statistics.median(step[engine]) / 1e9:.1f}"
            rows.append([f"Llama {preset} {dtype}", batch, engine, common.spread(first[engine]),
                         over[0], rate, over[1], read])  # fmt: skip
        if set(ENGINES) == set(turns):
            words = (turns[e][0][batch]["words"] for e in ENGINES)
            lines.append(f"{preset} {dtype}, batch {batch}: {same(*words)}")
    return rows, lines


def parse() -> argparse.Namespace:
    """Return the options."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--presets", nargs="+", default=["10M", "41M"])
    p.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    p.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    p.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    p.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    p.add_argument("--new", type=int, default=128, help="new tokens, at least 2")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--turn", nargs=3, metavar=("ENGINE", "FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    p.add_argument("--write", nargs=2, metavar=("PRESET", "FOLDER"), help=argparse.SUPPRESS)
    return p.parse_args()


def main() -> None:
    """Run all turns and print the rows."""
    o = parse()
    if o.write:
        write_model(*o.write)
        return
    if o.turn:
        common.leave_result(turn(*o.turn, o))
        return
    common.header()
    sizes = ["--prompt", str(o.prompt), "--new", str(o.new), "--threads", str(o.threads),
             "--batches", *map(str, o.batches)]  # fmt: skip
    rows, lines, rates = [], [], []
    for preset in o.presets:
        with tempfile.TemporaryDirectory() as parent:
            folder = str(Path(parent) / preset)
            common.run_ranks(__file__, ["--write", preset, folder], 1)
            for dtype in o.dtypes:
                turns: dict[str, list[Any]] = {engine: [] for engine in o.engines}
                for _, engine in itertools.product(range(o.rounds), o.engines):
                    arguments = ["--turn", engine, folder, dtype, *sizes]
                    turns[engine].append(
                        common.run_ranks(__file__, arguments, 1, threads=o.threads)
                    )
                rates += [each["memory"] for found in turns.values() for each in found]
                more, words = rows_of(preset, dtype, turns, o)
                rows += more
                lines += words
    print(f"prompts of {o.prompt} tokens, {o.new} new ones, {o.threads} thread(s)\n")
    common.table(["model", "batch", "engine", "prefill ms (range)", "over transformers",
                  "decoding tokens/s (range)", "over transformers", "GB/s"], rows)  # fmt: skip
    print(f"\nmemory is read at {max(rates) / 1e9:.1f} GB/s; load {os.getloadavg()[0]:.1f}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
