"""Masters, states and gradients in memory of the host, beside the emulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import EnvironmentOf, last_json

PROGRAM = str(Path(__file__).with_name("offloads.py"))


def ranks(environment: dict[str, str], *arguments: str, **more: str) -> list[Any]:
    """What each rank of offloads.py returned."""
    return last_json(environment, PROGRAM, *arguments, **more)


@pytest.mark.parametrize("world, kinds", [
    ("1", "AdamW,bf16 states,amsgrad"), ("2", "SGD,Lion"),
])
def test_bits_are_those_of_the_device_alone(environment_of: EnvironmentOf, world: str,
                                            kinds: str) -> None:
    """Whoever steps, under every strategy in turn; and what lies where."""
    for found in ranks(environment_of(world), "bits", world, kinds):
        assert list(found) == kinds.split(",")
        for kind, (differing, held) in found.items():
            assert differing == [], kind
            for name, of in held.items():
                away = {key: of[key] == 0 for key in ("master", "state", "grad")}
                assert away == {
                    "master": name in ("masters", "both", "all", "everything"),
                    "state": name in ("states", "both", "all", "everything"),
                    "grad": name in ("all", "everything"),
                }, (kind, name)
                assert (of["pinned"] > 0) == (any(away.values()) or name == "params"), (kind, name)


@pytest.mark.parametrize("world, names", [
    ("1", "nothing,states,masters,all"), ("2", "nothing,both,everything"),
])
def test_rows_are_written_saved_and_resumed(environment_of: EnvironmentOf, tmp_path: Path,
                                            world: str, names: str) -> None:
    """Each resumes from another's files, which have the same bytes."""
    several = len(names.split(","))
    environment = environment_of(world)
    for rank, found in enumerate(ranks(environment, "between", world, f"{tmp_path}:{names}")):
        assert found == [[], [], [], 0 if rank else several]


def test_nothing_waits_before_the_step(nccl: dict[str, str]) -> None:
    """Clipping leaves its factor on the device, and the copies of gradients bring it along."""
    for found in ranks(nccl, "ahead", "2"):
        assert found == {"nothing": [0, True], "both": [0, True], "all": [0, True],
                         "everything": [0, True], "differing": []}


def test_plan_is_the_peak(nccl: dict[str, str]) -> None:
    for found in ranks(nccl, "planned", "2"):
        assert len(found) == 7
        for held, plan, same, on_cpu in found:
            assert held == plan and same
            assert "pinned" not in on_cpu
        assert [plan["pinned"] > 0 for _, plan, _, _ in found] == [False] + [True] * 6


@pytest.mark.parametrize("world", ["1", "2"])
def test_activations(environment_of: EnvironmentOf, world: str) -> None:
    """The device's bits, and the plan's bytes: what leaves is in pinned memory."""
    for kept, recomputed, peaks in ranks(environment_of(world), "activations", world):
        assert kept == recomputed == []
        for pinned, plan, peak, planned in peaks:
            assert pinned == plan and peak == planned
        held = [peak for _, _, peak, _ in peaks]
        assert held[1] < held[0] / 1.5 and held[3] < held[2]
        assert [pinned > 0 for pinned, *_ in peaks] == [False, True] * 2


@pytest.mark.parametrize("world", ["1", "2"])
def test_averages(environment_of: EnvironmentOf, world: str) -> None:
    for found in ranks(environment_of(world), "averages", world):
        assert found == [[], True]


def test_what_cannot_be_is_refused(nccl: dict[str, str], tmp_path: Path) -> None:
    for said in ranks(nccl, "refused", "2", str(tmp_path)):
        for line, begins in zip(said, [
            "NotImplementedError: offload to 'disk' where ranks compute on cuda: it works only on",
            "NotImplementedError: params='host' for shards of one rank",
            "NotImplementedError: offload to 'disk' where ranks compute on cuda: it works only on",
            "MismatchError: ",
            "NotImplementedError: ",
            "NotImplementedError: graph_step() with activations of unit",
            "NotImplementedError: activations='disk' where ranks compute on cuda: they can be on",
            ", on the host ('masters', 'optimizer')",
        ], strict=True):
            assert line.startswith(begins), said
        assert "unit 'Perceptron' has an offload_policy" in said[4]
