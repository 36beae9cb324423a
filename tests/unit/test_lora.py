"""LoRA: PEFT's files both ways, merging, ranks, training from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint, lora, optim
from fsdpc.cli import main
from fsdpc.cli.train_options import check, parser
from fsdpc.models import (
    GPT2,
    Llama,
    ModelConfig,
    from_config,
    from_pretrained,
    load_pretrained,
    save_pretrained,
)

SIZES = {"vocab_size": 300, "dim": 32, "layers": 2, "heads": 2, "inner": 48, "max_seq": 64}
WORDS = np.arange(24, dtype=np.int64).reshape(2, 12) * 11 % 300


def base(folder: Path, kind: Any = Llama) -> Path:
    fsdpc.manual_seed(6)
    save_pretrained(kind(ModelConfig(**SIZES)), folder)
    return folder


def stir(model: Any) -> None:
    """Values of lora_B that are not 0, so that adapters say something."""
    rng = np.random.default_rng(5)
    with fsdpc.no_grad():
        for _, layer in lora.adapted(model):
            shape = layer.lora_B.shape
            layer.lora_B.copy_(fsdpc.tensor(rng.normal(0, 0.3, shape).astype(np.float32)))


def logits(model: Any) -> np.ndarray:
    with fsdpc.no_grad():
        return model.eval()(WORDS).numpy()


@pytest.mark.ranks(1, timeout=240)
def test_files_of_peft_both_ways(tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

    def theirs(folder: Path, adapter: Path) -> np.ndarray:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
        with torch.no_grad():
            return model(torch.from_numpy(WORDS)).logits.numpy()

    for kind, targets in ((Llama, ["q_proj", "down_proj"]), (GPT2, ["c_attn", "c_fc"])):
        folder = base(tmp_path / kind.__name__, kind)
        model = from_pretrained(folder)
        plain = logits(model)
        assert len(lora.apply(model, 3, targets, alpha=5)) == 4
        np.testing.assert_array_equal(logits(model), plain)  # as lora_B is 0
        stir(model)
        changed = logits(model)
        assert np.abs(changed - plain).max() > 0.01
        ours = tmp_path / f"{kind.__name__}-ours"
        lora.save(model, ours, base=str(folder))
        np.testing.assert_allclose(theirs(folder, ours), changed, atol=1e-5)
        again = from_pretrained(folder)
        assert lora.load(again, ours) == [name for name, _ in lora.adapted(model)]
        np.testing.assert_array_equal(logits(again), changed)
        lora.merge(again)
        np.testing.assert_allclose(logits(again), changed, atol=1e-5)
        assert type(again) is kind and not lora.is_applied(again)
        save_pretrained(again, tmp_path / f"{kind.__name__}-merged")

        config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM",
                                 init_lora_weights=False)  # fmt: skip
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
        made = peft.get_peft_model(plain, config)
        made.save_pretrained(tmp_path / f"{kind.__name__}-theirs")
        with torch.no_grad():
            want = made.eval()(torch.from_numpy(WORDS)).logits.numpy()
        read = from_pretrained(folder)
        lora.load(read, tmp_path / f"{kind.__name__}-theirs")
        np.testing.assert_allclose(logits(read), want, atol=1e-5)


def steps(model: Any, count: int = 3) -> list[float]:
    optimizer = optim.AdamW(lora.parameters(model), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(count):
        loss = model(WORDS, WORDS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.ranks(2, timeout=300)
def test_training_over_ranks(tmp_path: Path) -> None:
    """As on one rank: the frozen model stays as it is, and adapters move."""
    folder = base(tmp_path / "base")
    fsdpc.manual_seed(8)
    alone = from_pretrained(folder)
    lora.apply(alone, 4)
    want = steps(alone)
    fsdpc.manual_seed(8)
    with fsdpc.deferred_init():
        model = from_config(folder)
        lora.apply(model, 4)
    first = {n: p for n, p in from_pretrained(folder).named_parameters()}
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    load_pretrained(model, folder)
    found = steps(model)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert found[2] < found[0]
    for name, p in model.named_parameters():
        full = fsdpc.full_tensor(p).numpy()
        if name in first:
            np.testing.assert_array_equal(full, first[name].numpy(), err_msg=name)
    lora.save(model, tmp_path / "adapter")
    fsdpc.barrier()
    read = from_pretrained(folder)
    lora.load(read, tmp_path / "adapter")
    np.testing.assert_allclose(logits(read), logits(model), atol=1e-5)
    lora.load(model, tmp_path / "adapter")  # each rank its own rows
    np.testing.assert_allclose(logits(read), logits(model), atol=1e-5)
    with pytest.raises(RuntimeError, match="not sharded: lora.save"):
        lora.merge(model)
    with pytest.raises(ValueError, match="has adapters: lora.merge"):
        save_pretrained(model, tmp_path / "whole")


@pytest.mark.ranks(1, timeout=300)
def test_what_is_refused(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    model = from_pretrained(folder)
    for options, text in (
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank": 2, "targets": ["q_proj", "query"]}, "no linear layer is called 'query'; there"),
        ({"rank": 2, "dropout": 1.0}, "dropout must be in"),
    ):
        with pytest.raises(ValueError, match=text):
            lora.apply(model, **options)
    with pytest.raises(ValueError, match="no adapters"):
        lora.merge(model)
    with pytest.raises(FileNotFoundError, match="no folder of PEFT's adapters"):
        lora.load(model, tmp_path)
    lora.apply(model, 2, "q_proj")
    with pytest.raises(ValueError, match="has adapters already"):
        lora.apply(model, 2)
    lora.save(model, tmp_path / "adapter")
    content = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    other = from_pretrained(folder)
    lora.apply(other, 2, "v_proj")
    with pytest.raises(checkpoint.CheckpointError, match="missing .*v_proj"):
        lora.load(other, tmp_path / "adapter")
    for key, value in (("use_dora", True), ("bias", "all"), ("rank_pattern", {"q": 3})):
        path = tmp_path / "adapter" / "adapter_config.json"
        path.write_text(json.dumps({**content, key: value}))
        with pytest.raises(ValueError, match=f"the key '{key}'"):
            lora.load(from_pretrained(folder), tmp_path / "adapter")


@pytest.mark.ranks(1, timeout=240)
def test_from_the_command_line(tmp_path: Path) -> None:
    folder, data = base(tmp_path / "base"), str(Path(__file__).parents[2] / "docs")
    small = ["--batch", "2", "--seq", "16", "--steps", "2", "--data", data, "--sample", "0",
             "--init-from", str(folder), "--export", str(tmp_path / "out")]  # fmt: skip
    words = [sys.executable, "-m", "fsdpc", "train", "--ranks", "2", "--eval-bytes", "0", *small,
             "--lora", "4", "--lora-targets", "q_proj,v_proj", "--lora-alpha", "4"]  # fmt: skip
    of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "FSDPC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(of_a_rank)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    content = lora.read_config(tmp_path / "out")
    assert content["r"] == 4 and content["base_model_name_or_path"] == str(folder.resolve())
    model = from_pretrained(folder)
    assert len(lora.load(model, tmp_path / "out")) == 4
    words = ["generate", str(folder), "a", "--adapter", str(tmp_path / "out")]
    assert main.main([*words, "--max-new-tokens", "2"]) == 0
    assert all(np.abs(layer.lora_B.numpy()).max() > 0 for _, layer in lora.adapted(model))
    for given, text in (
        (["--lora", "0"], "--lora must be at least 1, got 0"),
        (["--lora-alpha", "3"], "--lora-alpha needs --lora RANK"),
        (["--lora", "3", "--lora-alpha", "-1"], "--lora-alpha must be above 0"),
    ):
        with pytest.raises(ValueError, match=text):
            check(parser().parse_args([*small, *given]))
    with pytest.raises(ValueError, match="--lora needs --init-from DIR"):
        check(parser().parse_args(["--lora", "3"]))
