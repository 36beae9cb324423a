"""Fine-tune a published model with LoRA, and compare its output before and after.

    fsdpc run --ranks 2 examples/08_finetune_lora.py
    fsdpc run --ranks 2 examples/08_finetune_lora.py --model FOLDER --data FILE --prompt TEXT

Without --model the script first trains a small byte model that lists the days of the week, and
saves it in transformers' format. Fine-tuning reverses their order. FOLDER is any model listed in
docs/models.md; if it has a tokenizer.json, pip install tokenizers.
"""

import argparse
import math
from pathlib import Path

import numpy as np

import fsdpc
from fsdpc import data, lora, optim
from fsdpc.data.tokenizer import Tokenizer
from fsdpc.models import Llama, ModelConfig, from_config, load_pretrained, save_pretrained

DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()


def days(direction: int) -> str:
    """Return a thousand weeks, forwards (1) or backwards (-1)."""
    return ", ".join(DAYS[direction * i % len(DAYS)] for i in range(7000))


class Text:
    """Converts text to ids and back: with a folder's tokenizer.json, or as bytes."""

    def __init__(self, folder: Path) -> None:
        found = (folder / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer(folder) if found else None

    def encode(self, text: str) -> np.ndarray:
        if self.tokenizer is None:
            return np.frombuffer(text.encode(), np.uint8)
        return self.tokenizer.encode([text])[0]

    def decode(self, ids: np.ndarray) -> str:
        if self.tokenizer is None:
            return bytes(ids.astype(np.uint8)).decode("utf-8", "replace")
        add = self.tokenizer.decoder()
        return "".join(add(int(number)) for number in ids)


def shard(model: fsdpc.nn.Module) -> None:
    """Make each block a unit, and the rest of the model another one."""
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)


def train(model: fsdpc.nn.Module, optimizer: optim.AdamW, ids: np.ndarray, steps: int) -> None:
    """Take steps on batches of 16 sequences, different ones on each rank."""
    sequences = data.SequenceDataset([ids], seq_len=60)  # a week has 64 bytes: no two begin alike
    sampler = data.DistributedSampler(len(sequences), fsdpc.rank(), fsdpc.world_size())
    model.train()
    with data.Loader(sequences, 16, sampler) as batches:
        for step in range(steps):
            loss = model(*next(batches))
            loss.backward()
            fsdpc.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if fsdpc.rank() == 0 and (step % 20 == 0 or step == steps - 1):
                print(f"step {step}: loss {float(loss):.3f}")


def publish(folder: Path) -> None:
    """Train all parameters of a small LLaMA on bytes, and write its folder."""
    model = Llama(ModelConfig(vocab_size=256, dim=64, layers=2, heads=4, inner=128, max_seq=256))
    shard(model)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    train(model, optimizer, np.frombuffer(days(1).encode(), np.uint8), 100)
    save_pretrained(model, folder)


def adapted(folder: Path) -> fsdpc.nn.Module:
    """Return the folder's model with adapters that have no effect yet.

    No rank ever holds the whole model: each reads only its own rows into its shards.
    """
    with fsdpc.deferred_init():
        model = from_config(folder)
        lora.apply(model, rank=8, alpha=16)  # freezes all other parameters
    shard(model)
    load_pretrained(model, folder)
    return model


parser = argparse.ArgumentParser()
parser.add_argument("--model", type=Path, help="a folder with config.json and safetensors")
parser.add_argument("--data", type=Path, help="a text file (default: the days, backwards)")
parser.add_argument("--prompt", default="friday,", help="what to continue")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--lr", type=float, help="default: 1e-2, with --model 2e-4")
parser.add_argument("--out", type=Path, default=Path("finetuned"), help="a folder for the results")
options = parser.parse_args()

fsdpc.init()
rank = fsdpc.rank()
fsdpc.manual_seed(0)
folder = options.model or options.out / "base"
if options.model is None and not folder.is_dir():
    publish(folder)

model, text = adapted(folder), Text(folder)
prompt = text.encode(options.prompt)


def reply(model: fsdpc.nn.Module) -> str:
    """Return the prompt and the 40 most likely ids after it; collective, as forwards gather."""
    return text.decode(model.generate(prompt, 40))


before = reply(model)
trained = lora.parameters(model)
if rank == 0:
    count, total = sum(math.prod(p.shape) for p in trained), model.num_parameters()
    print(f"before: {before}\ntraining {count:,} of {total:,} elements")
optimizer = optim.AdamW(trained, lr=options.lr or (2e-4 if options.model else 1e-2))
lines = options.data.read_text(encoding="utf-8") if options.data else days(-1)
train(model, optimizer, text.encode(lines), options.steps)
after = reply(model)

# In PEFT's format: transformers can load it, and so can a fresh model here.
adapter = options.out / "adapter"
lora.save(model, adapter, base=str(folder))
fresh = adapted(folder)
lora.load(fresh, adapter)
again = reply(fresh)
if rank == 0:
    print(f"after: {after}\nread back: {again}")
    print(f"talk to it: fsdpc generate {folder} '{options.prompt}' --adapter {adapter}")
fsdpc.shutdown()
