"""The table of ``fsdpc plan --gpus``: its numbers are memory_plan's."""

from __future__ import annotations

import argparse

import pytest

import fsdpc
from fsdpc import lora
from fsdpc.cli import plan
from fsdpc.models import PRESETS, Llama, preset
from fsdpc.planning import capacity

POLICY = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)


def planned(name: str, ranks: int, adapters: bool = False, offload: bool = False) -> int:
    with fsdpc.deferred_init():
        model = Llama(preset(name))
    if adapters:
        lora.apply(model, 16)
    fsdpc.checkpoint_activations(model.blocks(), "all")
    policy = fsdpc.OffloadPolicy(masters="host", optimizer="host") if offload else None
    plan = fsdpc.memory_plan(model, ranks, mp_policy=POLICY, offload_policy=policy)
    step = fsdpc.memory_plan(model, 1, (2, 512), mp_policy=POLICY)
    return plan.for_device("cuda").total + step.activation


def test_rows_are_plans() -> None:
    text = capacity.table(2, 4 * 2**30, 2, 512, POLICY)
    rows = {line.split()[0]: line for line in text.splitlines()[1 : 1 + len(PRESETS)]}
    assert set(rows) == set(PRESETS)
    for options in ({}, {"offload": True}, {"adapters": True}):
        needed = planned("1B", 2, **options)
        over = needed / 2**30 - 4
        said = f"{needed / 2**30:.1f} GiB" + (f", {over:.1f} over" if over > 0 else " fits")
        assert said in rows["1B"]
    sizes = [planned(name, 2) for name in list(rows)[:4]]
    assert sizes == sorted(sizes)
    assert all(len(line) <= 80 for line in text.splitlines()), text
    largest = [line.split() for line in text.splitlines()[-3:]]
    assert [words[0] for words in largest] == ["125M", "125M", "1B"]
    assert [words[1] for words in largest] == ["--strategy", "--offload", "--lora"]


def test_nothing_fits() -> None:
    text = capacity.table(1, 1e6, 2, 512, POLICY)
    assert text.count("\n  none ") == 3


@pytest.mark.parametrize("text", ["4x24GB", "4x24", " 4x24.0GiB"])
def test_gpus_are_read(text: str) -> None:
    assert capacity.gpus(text) == (4, 24.0)


@pytest.mark.parametrize("text", ["4", "x24GB", "0x24GB", "4x0", "4x24TB", "fourx24GB"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="as 4x24GB"):
        capacity.gpus(text)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--gpus", "2x16GB", "--batch", "1", "--seq", "256"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 GPUs of 16 GiB, batch 1 x 256 tokens a rank, bf16")
    assert plan.main(["--preset", "2M"]) == 2
    assert "--memory X" in capsys.readouterr().err


def test_adapters_are_among_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--preset", "2M", "--lora", "4", "--memory", "1", "--batch", "1", "--seq", "64"]
    assert plan.main(small) == 0
    assert "each with --lora 4 --init-from FOLDER" in capsys.readouterr().out
