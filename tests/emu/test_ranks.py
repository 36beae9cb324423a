"""Several ranks on the emulated GPU, as processes, from Python."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 240
SOON_S = 5.0
PROGRAM = str(Path(__file__).with_name("ranks.py"))

pytestmark = pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is not installed")


def run(environment: dict[str, str], *arguments: str,
        **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, beside the emulated GPU."""
    return subprocess.run([sys.executable, *arguments], env={**environment, **more},
                          capture_output=True, text=True, timeout=TIMEOUT_S)


def ranks(environment: dict[str, str], *arguments: str, **more: str) -> list[Any]:
    """What each rank of ranks.py returned."""
    done = run(environment, PROGRAM, *arguments, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("world", [2, 4])
def test_strategies_have_the_same_bits(environment: dict[str, str], world: int) -> None:
    """With two micro-steps, clipping and AdamW."""
    results = ranks(environment, "strategies", "cuda", str(world), "perceptron")
    for rank in results:
        assert rank.pop("transport") == "local_cuda"
        for variants in rank.values():
            assert len(variants) == 4 + 2 * (2 if world == 2 else 3)
            assert all(result == variants["FULL_SHARD"] for result in variants.values()), variants
    norms, digests = ({dtype: rank[f"perceptron {dtype}"]["FULL_SHARD"][which] for dtype in
                       ("fp32", "bf16")} for rank in results[:1] for which in (1, 2))
    assert digests["fp32"] != digests["bf16"] and min(norms["fp32"]) > 0.5, "nothing was clipped"
    for rank in results:
        for dtype, digest in digests.items():
            assert rank[f"perceptron {dtype}"]["NO_SHARD"][1:] == [norms[dtype], digest]


def test_sums_have_the_bits_of_shared_memory(environment: dict[str, str]) -> None:
    """Gradients with the same bits on both devices are summed, clipped and stepped alike."""
    on = {device: ranks(environment, "strategies", device, "2", "weighted")
          for device in ("cpu", "cuda")}
    assert [on[device][0].pop("transport") for device in on] == ["shm", "local_cuda"]
    for key, variants in on["cpu"][0].items():
        for variant, result in variants.items():
            assert on["cuda"][0][key][variant][1:] == result[1:], (key, variant)


def test_deterministic_mode_does_not_see_how_ranks_split(environment: dict[str, str]) -> None:
    one, two, four = (ranks(environment, "deterministic", "cuda", n)[0] for n in "124")
    assert one == two == four


def test_checkpoints_load_elsewhere_with_the_same_bytes(environment: dict[str, str],
                                                        tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    for device, world in (("cuda", "2"), ("cuda", "4"), ("cpu", "1")):
        ranks(environment, "checkpoint", device, world, path)
    saved = [{file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
             for folder in tmp_path.iterdir()]
    assert len(saved) == 3 and saved[0] and all(files == saved[0] for files in saved)


def test_a_killed_rank_is_named_to_those_who_reduce_with_it(environment: dict[str, str],
                                                            tmp_path: Path) -> None:
    done = run(environment, PROGRAM, "death", "cuda", "3", str(tmp_path / "end"))
    assert done.returncode != 0 and "rank 2 of 3 failed" in done.stderr, done.stderr
    killed = float((tmp_path / "end").read_text())
    for rank in range(2):
        text, ended = json.loads((tmp_path / f"end-{rank}").read_text())
        assert "rank 2" in text and "reduce_scatter" in text, text
        assert ended - killed < SOON_S


def test_launched_ranks_share_one_gpu(environment: dict[str, str]) -> None:
    assert ranks(environment, "who", "cuda", "3") == [["local_cuda", 4.5, [0, 1, 2], 1,
                                                       [0, 3, 6]]] * 3


def test_the_environment_of_torchrun(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import fsdpc\nfsdpc.set_default_device('cuda')\nfsdpc.init()\n"
                      "print(fsdpc.distributed.world().transport, fsdpc.all_reduce(fsdpc.rank()))")
    names = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": str(tmp_path)[-40:]}
    started = [subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
                                env={**environment, **names, "RANK": n, "LOCAL_RANK": n})
               for n in "01"]
    assert [rank.communicate(timeout=TIMEOUT_S)[0] for rank in started] == ["local_cuda 1\n"] * 2
    done = run(environment, "-m", "fsdpc", "run", "--ranks", "2", str(script))
    assert sorted(done.stdout.splitlines()) == [f"[{n}] local_cuda 1" for n in "01"], done.stderr


def test_the_command_trains_on_two_ranks(environment: dict[str, str], tmp_path: Path) -> None:
    text, metrics = tmp_path / "text.py", tmp_path / "metrics.jsonl"
    text.write_text("def train(model):\n    return model.step()\n" * 40)
    done = run(environment, "-m", "fsdpc", "train", "--device", "cuda", "--ranks", "2", "--steps",
               "1", "--batch", "1", "--seq", "8", "--sample", "0", "--data", str(text),
               "--metrics", str(metrics))
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert 5 < steps[0]["loss"] < 6


FAILS = """
import os, fsdpc
fsdpc.set_default_device(os.environ.pop("DEVICE", "cuda"))
if os.environ["RANK"] == "1" and "ASK" in os.environ:
    os.environ["FSDPC_TRANSPORT"] = os.environ["ASK"]
try:
    fsdpc.init()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("more, wanted", [
    ({"FSDPC_TRANSPORT": "pigeon"}, "ValueError: device 'cuda' has no transport 'pigeon': "
                                    "FSDPC_TRANSPORT is auto, nccl or local_cuda"),
    ({"ASK": "nccl"}, "rank 0 asks for 'auto', rank 1 for 'nccl'; set FSDPC_TRANSPORT alike"),
    ({"DEVICE": "cpu", "FSDPC_TRANSPORT": "nccl"},
     "ValueError: FSDPC_TRANSPORT is 'nccl', and ranks on device 'cpu' share memory"),
    ({"EMU_GPUS": "2", "FSDPC_NCCL_LIB": "/nowhere/libnccl.so.2"},
     "NotImplementedError: "),
], ids=["unknown", "disagree", "cpu", "missing"])
def test_a_transport_that_cannot_be_is_named_on_every_rank(
    environment: dict[str, str], tmp_path: Path, more: dict[str, str], wanted: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    done = run(environment, "-m", "fsdpc", "run", "--ranks", "2", str(script), **more)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(wanted in line for line in lines), done.stdout + done.stderr
    if "EMU_GPUS" in more:
        assert all("cannot load NCCL: /nowhere/libnccl.so.2" in line and "local_cuda" in line
                   for line in lines), lines
