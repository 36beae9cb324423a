"""Policies that cannot be, folders that are no place, and what the command line says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.offload import on_disk

import fsdpc
from fsdpc import _core, nn
from fsdpc.cli.cluster_options import model_of
from fsdpc.cli.estimate import estimate_parser, plan_of
from fsdpc.sharding import offload

pytestmark = pytest.mark.usefixtures("no_engine_threads")  # launch() forks


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "tape"}, "optimizer='tape': a tier is one of device, host, disk"),
        ({"gradients": None}, "gradients=None: a tier is one of"),
        ({"masters": "disk"}, "masters on a disk needs a path"),
        ({"masters": "disk", "path": ""}, "masters on a disk needs a path"),
        ({"path": "/var/tmp"}, "a path or a fraction, and nothing is on a disk: say what"),
        ({"fraction": 0.5}, "a path or a fraction, and nothing is on a disk: say what"),
        ({"optimizer": "disk", "path": "/var/tmp", "fraction": 0}, r"fraction=0 is not in \(0, 1]"),
        ({"optimizer": "disk", "path": "/var/tmp", "fraction": 1.5}, "fraction=1.5 is not in"),
        ({"optimizer": "disk", "path": "/x", "fraction": float("nan")}, "fraction=nan is not in"),
    ],
)
def test_policies_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fsdpc.OffloadPolicy(**options)


def test_the_default_is_no_disk() -> None:
    assert fsdpc.OffloadPolicy().on_disk == ()
    policy = fsdpc.OffloadPolicy(gradients="disk", params="disk", masters="host", path="/var/tmp")
    assert policy.on_disk == ("params", "gradients") and policy.on_host == ("masters",)


@pytest.mark.ranks(1)
def test_folders_that_are_no_place(disk: Path) -> None:
    (disk / "file").write_text("")
    for path, kind, said in (
        ("/dev/shm", ValueError, "offload to '/dev/shm': its file system is tmpfs, whose files "
         "lie in memory; name a folder on a disk of this host"),
        (disk / "nowhere", OSError, f"cannot offload to the folder '{disk}/nowhere': No such file"),
        (disk / "file", OSError, f"cannot make a file in the folder '{disk}/file': Not a direct"),
    ):  # fmt: skip
        policy = fsdpc.OffloadPolicy(optimizer="disk", path=path)
        with pytest.raises(kind, match=said):
            fsdpc.fully_shard(nn.Linear(3, 3), offload_policy=policy)
    for wrong in ("disk", fsdpc.MixedPrecisionPolicy()):
        with pytest.raises(TypeError, match="offload_policy must be an OffloadPolicy, got"):
            fsdpc.fully_shard(nn.Linear(3, 3), offload_policy=wrong)  # type: ignore[arg-type]
    fsdpc.fully_shard(nn.Linear(3, 3), offload_policy=fsdpc.OffloadPolicy())
    assert [each.name for each in disk.iterdir()] == ["file"]


@pytest.mark.ranks(1)
def test_gpus_have_no_disk_and_graphs_no_cpu(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no captured step meets an array on a disk."""
    policy = on_disk(disk, "masters", "optimizer")
    model = fsdpc.fully_shard(nn.Linear(4, 4), offload_policy=policy)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    with pytest.raises(NotImplementedError, match=r"graph_step\(\) needs device 'cuda'"):
        fsdpc.graph_step(model, optimizer)
    monkeypatch.setattr(offload, "get_default_device", lambda: "cuda")
    with pytest.raises(NotImplementedError, match="offload to 'disk' where ranks compute on cuda"):
        fsdpc.fully_shard(nn.Linear(4, 4), offload_policy=policy)


@pytest.mark.ranks(2)
def test_ranks_agree_on_what_lies_where(disk: Path) -> None:
    """Each may have a folder of its own; what lies there is the same."""
    own = disk / str(fsdpc.rank())
    own.mkdir()
    here = fsdpc.OffloadPolicy(optimizer="disk", path=own)
    fsdpc.fully_shard(nn.Linear(3, 3), offload_policy=here)
    other = fsdpc.OffloadPolicy(masters="disk", path=own) if fsdpc.rank() else here
    with pytest.raises(fsdpc.MismatchError, match="on disk"):
        fsdpc.fully_shard(nn.Linear(3, 3), offload_policy=other)


def test_a_tier_counts_what_it_holds(disk: Path) -> None:
    stats = _core.Tier(disk, 0).stats()
    assert stats["file_bytes"] == stats["read_bytes"] == stats["written_bytes"] == 0
    with pytest.raises(ValueError, match="chunks of 100 elements: a multiple of 4096"):
        _core.Tier(disk, 0, 100)


def estimated(*options: str) -> dict[str, float]:
    """What one of 8 ranks holds by category, in bytes; as in the output, without zeros of some."""
    o = estimate_parser().parse_args(["--preset", "1B", "--ranks-per-host", "8", *options])
    plan = plan_of(o, model_of(o))
    return dict([*plan._parts(), ("total", plan.total), *plan._beside()])


def test_estimate_shows_files_and_staging() -> None:
    here = estimated()
    there = estimated("--offload", "optimizer=disk:/nowhere,masters=disk")
    assert "file" not in here and "staging" not in here
    assert there["master"] == there["state"] == 0
    assert there["file"] == pytest.approx(here["master"] + here["state"], rel=1e-3)
    assert 2**20 < there["staging"] < 2**26  # a few chunks, whatever the model
    total = here["total"] - there["file"] + there["staging"]
    assert there["total"] == pytest.approx(total, rel=1e-3)
    half = estimated("--offload", "optimizer=disk:/nowhere,fraction=0.5")
    assert half["file"] == pytest.approx(half["state"], rel=1e-3)
    assert half["state"] == pytest.approx(here["state"] / 2, rel=1e-3)


def test_estimate_shows_host_memory_beside_a_gpu() -> None:
    """On CPUs it is the device's; on GPUs it is counted apart, with chunks on their way."""
    on_host = ("--offload", "masters=host,optimizer=host")
    assert estimated(*on_host) == estimated()
    here, there = estimated("--device", "cuda"), estimated("--device", "cuda", *on_host)
    assert there["master"] == there["state"] == 0 and there["unsharded"] == here["unsharded"]
    ring = there["pinned"] - here["master"] - here["state"]
    assert ring == pytest.approx(4 * (4 * 2**20 + 64), rel=1e-3)
    assert there["total"] == pytest.approx(here["total"] - here["master"] - here["state"], rel=1e-3)
    params = estimated("--device", "cuda", "--offload", "params=host")
    assert params["pinned"] == pytest.approx(here["unsharded"] - params["unsharded"], rel=1e-3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer", "optimizer='': a tier is one of device, host, disk"),
        ("optimizer=disk", "optimizer on a disk needs a path"),
        ("optimizer=disk:", "optimizer on a disk needs a path"),
        ("optimizer=disk:/a,masters=disk:/b", "one folder for all that is offloaded"),
        ("states=disk:/a", "'states=disk:/a': one of params, masters, optimizer"),
        ("optimizer=disk:/a,fraction=0", "fraction=0.0 is not in (0, 1]"),
        ("optimizer=disk:/a,fraction=half", "could not convert string to float: 'half'"),
    ],
)
def test_offload_of_the_command_line(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        estimate_parser().parse_args(["--offload", text])
    assert said in capsys.readouterr().err
