"""Fine-tuning over quantised weights, compared with LoRA over bf16: memory, speed, loss.

``memory``: bytes of a LLaMA of 1B parameters, whose linear layers are quantised, on two ranks: by
plan, and as held after a step.

``speed``: tokens a second of training adapters of rank 16 on all linear layers, in bf16, on one
rank. The peer is PEFT over transformers, with bitsandbytes' NF4 (its CPU build) and in bf16. Turns
are fresh processes; all read the same folder of random weights.

``loss``: a model of 10M parameters is trained on Python code first. Adapters are then trained on C
code, over bf16 and over quantised weights; the loss is that of C code held out.

    python benchmarks/bench_qlora.py [--parts memory speed loss] [--presets 10M 41M] [--rounds 3]
        [--steps 300] [--threads 2]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc import _core

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

RANK, BATCH, SEQ, STEPS = 16, 4, 256, 4
SCHEMES = _core.weight_schemes
OURS = ("fsdpc bf16", *(f"fsdpc {scheme}" for scheme in SCHEMES))
PEERS = ("PEFT bf16", "PEFT bitsandbytes nf4")


def ids_of(vocab: int) -> np.ndarray:
    """Random words, (batch, seq)."""
    return np.random.default_rng(0).integers(0, vocab, (BATCH, SEQ), dtype=np.int64)


def native(preset: Any, scheme: str | None) -> Any:
    """A sharded model with adapters, in bf16 except for codes."""
    import fsdpc
    from fsdpc import lora, models, nn

    fsdpc.manual_seed(0)
    with fsdpc.deferred_init():
        model = models.Llama(preset).bfloat16()
    if scheme in SCHEMES:
        nn.quantize_(model, scheme)
    lora.apply(model, RANK)
    for block in model.blocks():
        fsdpc.fully_shard(block)
    return fsdpc.fully_shard(model)


# ---- memory ----


def measure_memory() -> None:
    """Print bytes of each kind on both ranks, and by plan."""
    import fsdpc
    from fsdpc import lora, models, optim

    fsdpc.init()
    config = models.preset("1B")
    model = native(config, "nf4")
    elements = sum(layer.in_features * layer.out_features for _, layer in lora.adapted(model))
    coded = [p for p in model.parameters() if p._code is not None]
    codes = sum(int(np.prod(p.shape)) for p in coded)
    optimizer = optim.AdamW(lora.parameters(model), lr=1e-4)
    ids = fsdpc.tensor(ids_of(config.vocab_size)[:1, :64])
    model(ids, targets=ids).backward()
    optimizer.step()
    plan, held = fsdpc.memory_plan(model), fsdpc.memory_stats()
    rows = float(sum(p.local.numel() for p in coded))
    found = [float(held[f"{kind}_bytes"]) for kind in ("unsharded", "master")]
    totals = [fsdpc.all_reduce(value) for value in (*found, rows, float(plan.master))]
    # The ranks of a host share unsharded parameters; the plan is that of the rank that holds them.
    totals.append(float(plan.unsharded))
    common.leave_result({"elements": elements, "codes": codes, "totals": totals})


def memory_table() -> None:
    """Bytes an element of quantised layers, and of the whole model."""
    r = common.run_ranks(__file__, ["--turn", "memory", "", ""], 2, threads=1)
    unsharded, master, rows, planned_master, planned = r["totals"]
    gib = 2**30
    common.table(
        ["LLaMA 1B, NF4, 2 ranks of a host", "bytes", "an element"],
        [["codes and scales of linear layers", f"{r['codes']:,}",
          f"{r['codes'] / r['elements']:.4f}"],
         ["the same, shards of both ranks", f"{int(rows):,}", f"{rows / r['elements']:.4f}"],
         ["masters of the model (GiB): held, planned", f"{master / gib:.3f}",
          f"{planned_master / gib:.3f}"],
         ["unsharded parameters (GiB): held, planned", f"{unsharded / gib:.3f}",
          f"{planned / gib:.3f}"]],
    )  # fmt: skip


# ---- speed ----


def native_step(folder: str, scheme: str) -> Any:
    """A training step of ours."""
    import fsdpc
    from fsdpc import lora, models, optim

    config = models.pretrained.config_of(folder)
    model = native(config, scheme)
    models.load_pretrained(model, folder)
    optimizer = optim.AdamW(lora.parameters(model), lr=1e-4)
    ids = fsdpc.tensor(ids_of(config.vocab_size))

    def step() -> float:
        loss = model(ids, targets=ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def peft_step(folder: str, quantised: bool) -> Any:
    """A training step of PEFT's."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if quantised:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
        options["device_map"] = "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    adapters = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear",
                               task_type="CAUSAL_LM")  # fmt: skip
    model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.from_numpy(ids_of(model.config.vocab_size))

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def turn(engine: str, folder: str) -> None:
    """One turn: a step to warm up, then STEPS; the median counts."""
    kind = engine.split()[-1]
    step = native_step(folder, kind) if engine in OURS else peft_step(folder, kind == "nf4")
    step()
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    common.leave_result({"rate": BATCH * SEQ / statistics.median(seconds)})


def write_model(preset: str, folder: str) -> None:
    """Write a preset's random weights where both read them."""
    import fsdpc
    from fsdpc import models

    fsdpc.manual_seed(0)
    models.save_pretrained(models.Llama(models.preset(preset)), folder)
    common.leave_result({})


def speed_table(o: argparse.Namespace) -> None:
    """Tokens a second."""
    rows = []
    for preset in o.presets:
        with tempfile.TemporaryDirectory() as parent:
            folder = str(Path(parent) / preset)
            common.run_ranks(__file__, ["--turn", "write", preset, folder], 1)
            rates: dict[str, list[float]] = {engine: [] for engine in (*OURS, *PEERS)}
            for _, engine in itertools.product(range(o.rounds), rates):
                found = common.run_ranks(
                    __file__, ["--turn", "speed", engine, folder], 1, threads=o.threads
                )
                rates[engine].append(found["rate"])
        bf16 = statistics.median(rates[OURS[0]])
        for engine, each in rates.items():
            middle = statistics.median(each)
            rows.append([f"Llama {preset}", engine,
                         f"{middle:,.0f} ({min(each):,.0f}..{max(each):,.0f})",
                         f"{middle / bf16:.2f}"])  # fmt: skip
    common.table(["model", f"LoRA over ({o.threads} threads)", "tokens/s (range)",
                  "over fsdpc bf16"], rows)  # fmt: skip


# ---- loss ----


def text_of(folder: str, endings: tuple[str, ...], path: Path) -> Path:
    """Write the files of a folder of the repository into one, and return the one's folder."""
    path.mkdir()
    files = sorted(f for f in (common.ROOT / folder).rglob("*") if f.suffix in endings)
    (path / "all.txt").write_bytes(b"".join(f.read_bytes() for f in files))
    return path


def trained(options: list[str], metrics: Path) -> float:
    """Run ``fsdpc train`` and return its loss on the text held out."""
    command = [sys.executable, "-m", "fsdpc", "train", "--ranks", "1", "--batch", "4", "--seq",
               "128", "--sample", "0", "--eval-bytes", "100000", "--metrics", str(metrics)]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    last = json.loads(metrics.read_text().splitlines()[-1])
    return float(last["val_loss"])


def loss_table(steps: int) -> None:
    """Losses of adapters over each kind of weights."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        python = text_of("python", (".py",), place / "python")
        c = text_of("csrc", (".c", ".h"), place / "c")
        base = ["--preset", "10M", "--lr", "1e-3", "--data", str(python), "--export",
                str(place / "base"), "--steps", str(steps)]  # fmt: skip
        trained(base, place / "base.jsonl")
        plain = 0.0
        for scheme in ("", *SCHEMES):
            options = ["--init-from", str(place / "base"), "--lora", str(RANK), "--lr", "5e-4",
                       "--steps", str(steps), "--data", str(c)]  # fmt: skip
            options += ["--quantize", scheme] if scheme else []
            loss = trained(options, place / f"{scheme}.jsonl")
            plain = plain or loss
            rows.append([scheme or "bf16", f"{loss:.4f}", f"{100 * (loss / plain - 1):+.2f} %"])
    common.table([f"LoRA over, {steps} steps", "loss of text held out", "over bf16"], rows)


def parse() -> argparse.Namespace:
    """Return the options."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("memory", "speed", "loss")
    p.add_argument("--parts", nargs="+", default=list(parts), choices=parts)
    p.add_argument("--presets", nargs="+", default=["10M", "41M"])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--turn", nargs=3, metavar=("KIND", "WHAT", "FOLDER"), help=argparse.SUPPRESS)
    return p.parse_args()


def main() -> None:
    """Run the parts and print their tables."""
    o = parse()
    if o.turn:
        kind, what, folder = o.turn
        os.environ["FSDPC_THREADS"] = os.environ["OMP_NUM_THREADS"]
        turns = {"memory": measure_memory, "write": lambda: write_model(what, folder),
                 "speed": lambda: turn(what, folder)}  # fmt: skip
        turns[kind]()
        return
    common.header()
    if "memory" in o.parts:
        memory_table()
    if "speed" in o.parts:
        speed_table(o)
    if "loss" in o.parts:
        loss_table(o.steps)


if __name__ == "__main__":
    main()
