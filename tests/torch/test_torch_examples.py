"""Every script of examples/torch runs on two ranks and prints what it promises."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # optimizers import it at their first use: here once, not on every rank
import transformers  # noqa: F401

import fsdpc
from tests.unit.test_examples import EXAMPLES, HANGS_S, losses, run


def here(folder: Path, name: str, *arguments: str) -> str:
    """What all ranks printed, as :func:`run` returns it; on ranks that have torch already."""
    torch.set_num_threads(1)
    sys.argv = [name, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    lines = [f"[{fsdpc.rank()}] {line}\n" for line in printed.getvalue().splitlines()]
    (folder / f"printed_{fsdpc.rank()}").write_text("".join(lines))
    fsdpc.barrier()
    return "".join((folder / f"printed_{rank}").read_text() for rank in range(2))


def test_every_example_is_tested_here() -> None:
    names = {path.name for path in (EXAMPLES / "torch").glob("*.py")}
    assert names == set(re.findall(r'"torch/(\d\d_\w+\.py)"', Path(__file__).read_text()))


def test_fsdp2_loop() -> None:
    """Under both launchers, to the last digit that is printed."""
    name = "torch/01_fsdp2_loop.py"
    output = run(name, "11")
    seen = losses(output)
    assert len(seen) == 2 and seen[1] < seen[0]
    assert output.count("38 tensors, 101,456 elements") == 2
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), "11"], capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stderr
    mine = re.findall(r"step \d+: loss \S+ norm \d+\.\d{3}", output)
    theirs = re.findall(r"step \d+: loss \S+ norm \d+\.\d{3}", done.stdout)
    assert len(mine) == 4 and sorted(mine) == sorted(theirs)


@pytest.mark.ranks(2, timeout=300)
def test_fsdp1(tmp_path: Path) -> None:
    output = here(tmp_path, "torch/02_fsdp1.py", "11")
    seen = losses(output)
    assert len(seen) == 2 and seen[1] < seen[0]
    assert "[0] 38 tensors, 38 optimizer states" in output
    assert "[1] 0 tensors, 0 optimizer states" in output


@pytest.mark.ranks(2, timeout=300)
def test_strategies_keep_less_and_less(tmp_path: Path) -> None:
    output = here(tmp_path, "torch/03_no_shard.py", "3")
    found = re.findall(
        r"^\[0\] (\w+): loss ([\d.]+); .* master ([\d.]+).* state ([\d.]+)", output, re.M
    )
    names = ["NO_SHARD", "SHARD_OPTIM", "SHARD_GRAD_OP", "FULL_SHARD"]
    assert [name for name, *_ in found] == names
    assert len({loss for _, loss, _, _ in found}) == 1
    masters = [float(master) for *_, master, _ in found]
    assert masters[1] < 0.6 * masters[0] and masters[3] == masters[1]


@pytest.mark.ranks(2, timeout=300)
def test_llama_finetune(tmp_path: Path) -> None:
    output = here(tmp_path, "torch/04_llama_finetune.py", "21")
    seen = losses(output)
    assert len(seen) == 3 and seen[-1] < 0.9 * seen[0]
    assert "[0] 21 tensors to save" in output and "[1] 0 tensors to save" in output


@pytest.mark.ranks(2, timeout=300)
def test_lora(tmp_path: Path) -> None:
    seen = losses(here(tmp_path, "torch/05_lora.py", "31"))
    assert len(seen) == 4 and seen[-1] < seen[0]


@pytest.mark.ranks(2, timeout=300)
def test_accumulation_in_fp16(tmp_path: Path) -> None:
    output = here(tmp_path, "torch/06_accumulate_fp16.py", "31")
    seen = losses(output)
    assert seen[-1] < seen[0]
    scales = [float(scale) for scale in re.findall(r"^\[0\] .* scale (\S+)", output, re.M)]
    assert scales[-1] < 2**24


@pytest.mark.ranks(2, timeout=300)
def test_profiler(tmp_path: Path) -> None:
    output = here(tmp_path, "torch/07_profiler.py", str(tmp_path))
    found = set(re.findall(r"^\[0\] (FSDP::\w+ \([\w.]+\)): 3 times", output, re.M))
    units = ["Model", "layers.0", "layers.1", "layers.2"]
    kinds = ("forward", "unshard", "backward")
    expected = {f"FSDP::{kind} ({unit})" for unit in units for kind in kinds}
    assert found == expected | {"FSDP::reduce (Model)"}
    spans = {
        event["name"]: event
        for event in json.loads((tmp_path / "trace_rank0.json").read_text())["traceEvents"]
        if event.get("name") in expected and event.get("cat") == "user_annotation"
    }  # of each name the last
    for unit in units[1:]:  # inside the root's, and the last layer's backward comes first
        for kind in ("forward", "backward"):
            inner, outer = spans[f"FSDP::{kind} ({unit})"], spans[f"FSDP::{kind} (Model)"]
            assert outer["ts"] <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    starts = [spans[f"FSDP::backward (layers.{i})"]["ts"] for i in range(3)]
    assert starts == sorted(starts, reverse=True)


@pytest.mark.ranks(2, timeout=300)
def test_prepare_by_hand(tmp_path: Path) -> None:
    output = here(tmp_path, "torch/08_prepare_by_hand.py", "31")
    seen = losses(output)
    assert len(seen) == 4 and seen[-1] < 0.7 * seen[0]
    assert "[0] weight decay of the groups: [0.1, 0.0]" in output


@pytest.mark.ranks(4, timeout=300)
def test_tensor_parallel(tmp_path: Path) -> None:
    output = here(tmp_path, "torch/09_tensor_parallel.py", "61")
    seen = losses(output)
    assert len(seen) == 7 and seen[-1] < 0.8 * seen[0]
    assert "(128, 32) placed as (_StridedShard(dim=0, sf=2), Shard(dim=0)): (32, 32)" in output
