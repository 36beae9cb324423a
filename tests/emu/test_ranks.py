"""Several ranks on the emulated GPU, as processes, from Python."""

from __future__ import annotations

import ctypes.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import EMULATION_ALONE, TIMEOUT_S, EnvironmentOf, last_json, run
from ranks import CATEGORIES, HALF, PLANNED
from training import ON_GPU

import fsdpc

SOON_S = 5.0
PROGRAM = str(Path(__file__).with_name("ranks.py"))
VALUES = [4.5, [0, 1, 2], 1, [0, 3, 6], [2.5, 0.0]]  # of three ranks that say who they are


def ranks(environment: dict[str, str], *arguments: str, **more: str) -> list[Any]:
    """What each rank of ranks.py returned."""
    return last_json(environment, PROGRAM, *arguments, **more)


def test_strategies_have_the_same_bits(nccl: dict[str, str]) -> None:
    """With two micro-steps, clipping and AdamW; a sum of two has one order."""
    results = ranks(nccl, "strategies", "cuda", "2", "perceptron,qlora")
    for rank in results:
        assert rank.pop("transport") == "nccl"
        for variants in rank.values():
            assert len(variants) == 8
            assert all(result == variants["FULL_SHARD"] for result in variants.values()), variants
    norms, digests = ({dtype: rank[f"perceptron {dtype}"]["FULL_SHARD"][which] for dtype in
                       ("fp32", "bf16")} for rank in results[:1] for which in (1, 2))
    assert digests["fp32"] != digests["bf16"] and min(norms["fp32"]) > 0.3, "nothing was clipped"
    for rank in results:
        for dtype, digest in digests.items():
            assert rank[f"perceptron {dtype}"]["NO_SHARD"][1:] == [norms[dtype], digest]


def test_reduce_buffers_lend_a_head_its_gradients_memory(nccl: dict[str, str]) -> None:
    for (kept, bits), (more, expected) in ranks(nccl, "loans", "cuda", "2"):
        assert bits == expected and more - kept == 64 * 16 * 4


def test_units_on_different_meshes(nccl: dict[str, str]) -> None:
    """Each mesh has streams and NCCL communicators of its own; all post in one order."""
    on = {device: ranks(nccl, "meshes", device, "4") for device in ("cpu", "cuda")}
    for here, there in zip(on["cpu"], on["cuda"], strict=True):
        assert (here["transport"], there["transport"]) == ("shm", "nccl")
        assert there["losses"] == pytest.approx(here["losses"], rel=1e-4)
        assert here["losses"][-1] < here["losses"][0]


def test_steps_over_whole_matrices_have_the_bits_of_one_rank(nccl: dict[str, str]) -> None:
    """Rows of a matrix meet by NCCL's broadcasts, and sums by column in its all-reduce."""
    alone, *_ = ranks(nccl, "matrices", "cuda", "1")
    assert ranks(nccl, "matrices", "cuda", "4") == [alone] * 4
    assert len(set(alone)) == 3, "iterations are in one dtype"


@EMULATION_ALONE
def test_ranks_leave_nothing_behind(nccl: dict[str, str]) -> None:
    for found in ranks(nccl, "ways", "cuda", "2"):
        assert found["transport"] == "nccl", found
        assert found["before"] == found["after"], found
        assert found["with"][1] > 0, found


def test_sums_have_the_bits_of_shared_memory(nccl: dict[str, str]) -> None:
    """Gradients with the same bits on both devices are summed, clipped and stepped alike."""
    on = {device: ranks(nccl, "strategies", device, "2", "weighted")
          for device in ("cpu", "cuda")}
    assert [on[device][0].pop("transport") for device in on] == ["shm", "nccl"]
    for key, variants in on["cpu"][0].items():
        for variant, result in variants.items():
            assert on["cuda"][0][key][variant][1:] == result[1:], (key, variant)


def test_four_ranks_over_nccl_have_the_bits_of_their_sums(nccl: dict[str, str]) -> None:
    """Sums are in NCCL's order, so meshes of one stage differ from those of two, and no others.

    NCCL 2.30 on an H200 has another order for what is reduced on all ranks, with no shards.
    """
    results = ranks(nccl, "strategies", "cuda", "4", "perceptron")
    for rank in results:
        assert rank.pop("transport") == "nccl"
        assert {key: [result[1:] for result in variants.values()]
                for key, variants in rank.items()} == {
            key: [result[1:] for result in variants.values()]
            for key, variants in results[0].items()}
        for variants in rank.values():
            assert len(variants) == 10
            for name, result in variants.items():
                like = "HYBRID_SHARD 2x2" if "2x2" in name else "FULL_SHARD"
                if not (ON_GPU and name == "NO_SHARD"):
                    assert result == variants[like], name


@EMULATION_ALONE
def test_runs_of_three_over_nccl_have_the_same_bits(nccl: dict[str, str]) -> None:
    """The fake has one order of sums. NCCL 2.30 on an H100 has another for each strategy here."""
    for rank in ranks(nccl, "strategies", "cuda", "3", "weighted"):
        assert rank.pop("transport") == "nccl"
        for variants in rank.values():
            assert len(variants) == 6
            assert all(result == variants["FULL_SHARD"] for result in variants.values()), variants


@pytest.mark.parametrize("world, variants", [("2", 4), ("4", 3)])
def test_a_step_over_nccl_waits_for_no_device(nccl: dict[str, str], world: str,
                                              variants: int) -> None:
    """Loss, backward, clipping by a norm, AdamW and zero_grad, of ranks whose devices are still."""
    for rank in ranks(nccl, "ahead", "cuda", world, FSDPC_TIMEOUT_S="120"):
        assert len(rank) == variants
        for name, (running, still) in rank.items():
            assert still == running and still["waits"] == 0, name
            assert still["clipped"], name


@pytest.fixture(scope="module")
def undivided(environment: dict[str, str]) -> dict[str, Any]:
    """What one rank makes of all contributions in deterministic mode."""
    return ranks(environment, "deterministic", "cuda", "1", "fp32,bf16")[0]


@pytest.mark.parametrize("world, dtypes", [("2", "fp32"), ("4", "fp32,bf16")])
def test_deterministic_mode_does_not_see_how_ranks_split(
    nccl: dict[str, str], undivided: dict[str, Any], world: str, dtypes: str
) -> None:
    """Nor the strategy, nor who sums; and takes the memory that was planned."""
    plans = []
    for rank in ranks(nccl, "deterministic", "cuda", world, dtypes):
        for variant, (result, (held, planned)) in rank.items():
            assert result == undivided[f"FULL_SHARD {variant.split()[-1]}"][0], variant
            assert held == planned, variant
            plans.append(planned)
    assert min(plans) > 0


def test_three_ranks_sum_as_one_does(nccl: dict[str, str]) -> None:
    """Deterministic mode, where each reduction leaves sums over some of the ranks."""
    ((wanted, _),) = ranks(nccl, "deterministic", "cuda", "1", "fp32:6")[0].values()
    for rank in ranks(nccl, "deterministic", "cuda", "3", "fp32:6"):
        assert len(rank) == 6
        for variant, (result, (held, planned)) in rank.items():
            assert result == wanted and held == planned, variant


def test_checkpoints_load_elsewhere_with_the_same_bytes(nccl: dict[str, str],
                                                        tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    for device, world in (("cuda", "2"), ("cuda", "4"), ("cpu", "1")):
        ranks(nccl, "checkpoint", device, world, path)
    saved = [{file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
             for folder in tmp_path.iterdir()]
    assert len(saved) == 3 and saved[0] and all(files == saved[0] for files in saved)


def test_a_killed_rank_is_named_to_those_who_reduce_with_it(nccl: dict[str, str],
                                                            tmp_path: Path) -> None:
    done = run(nccl, PROGRAM, "death", "cuda", "3", str(tmp_path / "end"))
    assert done.returncode != 0 and "rank 2 of 3 failed" in done.stderr, done.stderr
    killed = float((tmp_path / "end").read_text())
    for rank in range(2):
        text, ended = json.loads((tmp_path / f"end-{rank}").read_text())
        assert "rank 2" in text, text
        assert ended - killed < SOON_S


def test_launched_ranks_share_one_gpu(nccl: dict[str, str]) -> None:
    assert ranks(nccl, "who", "cuda", "3") == [["nccl", *VALUES]] * 3


@EMULATION_ALONE
def test_ranks_with_a_gpu_each_take_older_nccl(nccl: dict[str, str]) -> None:
    own = {**nccl, "EMU_GPUS": "3", "FAKE_NCCL_VERSION": "22809"}
    assert ranks(own, "who", "cuda", "3") == [["nccl", *VALUES]] * 3


SAID = """
import ctypes, json, sys
import fsdpc
if "before" in sys.argv or "used" in sys.argv:
    theirs = ctypes.CDLL(sys.argv[1])
    if "used" in sys.argv:
        assert theirs.ncclGetUniqueId(ctypes.create_string_buffer(128)) == 0
fsdpc.set_default_device("cuda")
fsdpc.init()
fsdpc.all_reduce(fsdpc.tensor([1.0]))
said = ctypes.CDLL(None).getenv
said.restype = ctypes.c_char_p
values = [said(name.encode()) for name in sys.argv[3:]]
if fsdpc.rank() == 0:
    print("said", json.dumps([value and value.decode() for value in values]))
"""
NAMES = ("NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_GRAPH_REGISTER", "NCCL_SYM_CE_THRESHOLD",
         "NCCL_RAS_ENABLE", "NCCL_SOCKET_IFNAME")


@EMULATION_ALONE
@pytest.mark.parametrize("when, more, sockets, warned", [
    ("fresh", {}, ["0", "=lo"], False),
    ("before", {}, [None, None], True),
    ("before", {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, [None, None], False),
    ("used", {"FAKE_NCCL_VERSION": "23100"}, [None, None], False),
    ("fresh", {"FAKE_NCCL_VERSION": "23100", "NCCL_SOCKET_IFNAME": "eth7"}, ["0", "eth7"], False),
    ("fresh", {"NCCL_SOCKET_FAMILY": "AF_INET6"}, ["0", None], False),
])
def test_what_nccl_is_told_by_the_environment(
    nccl: dict[str, str], tmp_path: Path, when: str, more: dict[str, str],
    sockets: list[str | None], warned: bool
) -> None:
    """In time, and once: who has used an older one before is told what to set."""
    script = tmp_path / "script.py"
    script.write_text(SAID)
    done = run({**nccl, **more}, "-m", "fsdpc", "run", "--ranks", "2", str(script),
               nccl["FSDPC_NCCL_LIB"], when, *NAMES)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    said = [line.split("said ")[1] for line in lines if "said " in line]
    assert [json.loads(line) for line in said] == [["1", "0", str(2**63 - 1), *sockets]], lines
    told = [line for line in lines if "set NCCL_LAUNCH_ORDER_IMPLICIT=1" in line]
    assert len(told) == warned and all("NCCL 2.30.7 before fsdpc" in line for line in told), told


def test_the_environment_of_torchrun(nccl: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import fsdpc\nfsdpc.set_default_device('cuda')\nfsdpc.init()\n"
                      "print(fsdpc.distributed.world().transport, fsdpc.all_reduce(fsdpc.rank()))")
    names = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": str(tmp_path)[-40:]}
    started = [subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
                                env={**nccl, **names, "RANK": n, "LOCAL_RANK": n})
               for n in "01"]
    assert [rank.communicate(timeout=TIMEOUT_S)[0] for rank in started] == ["nccl 1\n"] * 2
    done = run(nccl, "-m", "fsdpc", "run", "--ranks", "2", str(script))
    assert sorted(done.stdout.splitlines()) == [f"[{n}] nccl 1" for n in "01"], done.stderr


def test_the_command_trains_on_two_ranks(nccl: dict[str, str], tmp_path: Path) -> None:
    text, metrics = tmp_path / "text.py", tmp_path / "metrics.jsonl"
    text.write_text("def train(model):\n    return model.step()\n" * 40)
    done = run(nccl, "-m", "fsdpc", "train", "--device", "cuda", "--ranks", "2", "--steps",
               "1", "--batch", "1", "--seq", "8", "--sample", "0", "--data", str(text),
               "--metrics", str(metrics))
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert 5 < steps[0]["loss"] < 6


FAILS = """
import os, fsdpc
fsdpc.set_default_device("cuda")
if os.environ["RANK"] == "1" and "OF_ONE" in os.environ:
    os.environ["FSDPC_NCCL_LIB"] = os.environ["OF_ONE"]
try:
    fsdpc.init()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
NOWHERE = "/nowhere/libnccl.so.2"


def refused(nccl: dict[str, str], folder: Path, world: str = "2", **more: str) -> list[str]:
    """What each rank says that cannot join."""
    (folder / "script.py").write_text(FAILS)
    done = run(nccl, "-m", "fsdpc", "run", "--ranks", world, str(folder / "script.py"), **more)
    lines = done.stdout.splitlines()
    assert len(lines) == int(world), done.stdout + done.stderr
    return sorted(lines)


@EMULATION_ALONE
@pytest.mark.parametrize("more", [
    {"FSDPC_NCCL_LIB": NOWHERE}, {"FSDPC_NCCL_LIB": NOWHERE, "EMU_GPUS": "2"},
    {"OF_ONE": NOWHERE}, {"OF_ONE": NOWHERE, "EMU_GPUS": "2"}, {"FSDPC_NCCL_LIB": ""},
], ids=["shared", "own", "shared, of one", "own, of one", "none"])
def test_a_missing_nccl_is_named_on_every_rank(nccl: dict[str, str], tmp_path: Path,
                                               more: dict[str, str]) -> None:
    """Also if only one rank lacks it."""
    if not any(more.values()) and ctypes.util.find_library("nccl"):
        pytest.skip("the system has an NCCL, for GPUs")
    for rank, line in enumerate(refused(nccl, tmp_path, **more)):
        assert f"[{rank}] NotImplementedError: " in line, line
        assert ("rank 1: cannot" in line) == ("OF_ONE" in more and rank == 0), line
        if any(more.values()):
            assert f"cannot load NCCL: {NOWHERE}" in line and "name another" in line, line
        else:
            assert "no NCCL: libnccl.so.2" in line, line
            assert "2.30 where they share one: pip install nvidia-nccl-cu13" in line, line


@EMULATION_ALONE
@pytest.mark.parametrize("world, gpus, who", [
    ("2", "1", "ranks 0 and 1 share GPU 0000:1b:00.0"),
    ("4", "3", "ranks 0 and 3 share GPU 0000:1b:00.0"),
])
def test_older_nccl_for_ranks_that_share_a_gpu_is_refused_on_every_rank(
    nccl: dict[str, str], tmp_path: Path, world: str, gpus: str, who: str
) -> None:
    """A newer one is not: it lets ranks in most tests here."""
    for line in refused(nccl, tmp_path, world, EMU_GPUS=gpus, FAKE_NCCL_VERSION="22809"):
        assert "NotImplementedError: " in line, line
        assert (f"{who}, which NCCL 2.28.9 does not let them: install 2.30 or newer (pip's "
                "nvidia-nccl-cu13), or start as many ranks on a host as it has GPUs") in line, line


@EMULATION_ALONE
def test_nccl_that_orders_nothing_is_refused_on_every_rank(nccl: dict[str, str],
                                                           tmp_path: Path) -> None:
    for line in refused(nccl, tmp_path, EMU_GPUS="2", FAKE_NCCL_VERSION="22505"):
        assert "NotImplementedError: " in line and "NCCL 2.25.5 keeps no order" in line, line
        assert "install 2.26 or newer" in line, line


def test_what_the_environment_says_of_sharing_a_gpu_stays(nccl: dict[str, str]) -> None:
    done = run(nccl, PROGRAM, "strategies", "cuda", "2", "perceptron",
               NCCL_MULTI_RANK_GPU_ENABLE="0")
    assert done.returncode != 0 and "NCCL failed to begin" in done.stderr, done.stderr


def test_fulls_take_turns_in_the_memory_that_was_planned(nccl: dict[str, str]) -> None:
    for rank in ranks(nccl, "memory", "cuda", "2"):
        for held, of_the_model, of_its_plan, _ in rank.values():
            assert held == of_the_model == of_its_plan > 0, rank
        # Two of four blocks at a time, and a half of every block.
        assert rank["FULL_SHARD"][0] < 0.9 * rank["SHARD_GRAD_OP"][0]
        assert rank["FULL_SHARD"][0] < rank["FULL_SHARD ahead"][0] < rank["SHARD_GRAD_OP"][0]
        assert len({digest for *_, digest in rank.values()}) == 1, rank


@pytest.mark.parametrize("world", [1, 2])
def test_a_process_without_a_gpu_plans_what_one_holds(environment_of: EnvironmentOf,
                                                      world: int) -> None:
    """In pieces of 2 MiB, as a GPU that is not here is taken to map."""
    assert fsdpc.get_default_device() == "cpu"
    where = environment_of(world)
    for rank in ranks(where, "planned", "cuda", str(world), EMU_GRANULE=str(2 << 20)):
        for key, (held, planned) in rank.items():
            name, strategy, *grid = key.split()
            mesh = tuple(map(int, grid[0].split("x"))) if grid else world
            here = fsdpc.memory_plan(PLANNED[name][0](), mesh, strategy=strategy, mp_policy=HALF)
            there = here.for_device("cuda")
            assert held == planned == {each: getattr(there, each) for each in CATEGORIES}, key
        if world == 2:
            held = {name: rank[f"wide {name}"][0]["unsharded"]
                    for name in ("FULL_SHARD", "SHARD_GRAD_OP")}
            assert held["FULL_SHARD"] < held["SHARD_GRAD_OP"]
