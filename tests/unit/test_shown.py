"""Small things show themselves in notebooks: well-formed, with their numbers, of any size."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import _core, nn
from fsdpc.checkpoint import LoadReport
from fsdpc.sharding.mesh import DeviceMesh
from fsdpc.testing import Difference

SVG = "{http://www.w3.org/2000/svg}"


def words(thing: Any) -> list[str]:
    """All text of what it shows, which must be well-formed."""
    root = ET.fromstring(thing._repr_html_())
    return [each.strip() for each in root.itertext() if each.strip()]


def test_tensors() -> None:
    seen = words(fsdpc.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert seen == ["Tensor float32 (2, 3) · 24 B · cpu", *"012345"]
    large = words(fsdpc.arange(2000.0).reshape(2, 10, 100))
    assert large[:3] == ["Tensor float32 (2, 10, 100) · 7.81 KiB · cpu", "[0]", "0"]
    assert large.count("…") == 6 + 7  # a column and a row
    assert words(fsdpc.tensor(2.5))[1] == "2.5" and words(fsdpc.zeros((0, 3)))[1] == "no elements"
    assert words(fsdpc.tensor([True, False]))[1:] == ["1", "0"]
    assert words(fsdpc.tensor([1.5, float("nan")], dtype="bfloat16"))[1:] == ["1.5", "nan"]
    with fsdpc.deferred_init():
        weight = nn.Linear(3, 2).weight
    assert words(weight) == ["Parameter float32 (2, 3) · 24 B · cpu · requires_grad",
                             "deferred: it has no memory yet"]  # fmt: skip


@pytest.mark.ranks(2)
def test_sharded_parameters_say_what_is_here() -> None:
    model = fsdpc.fully_shard(nn.Linear(4, 6, bias=False))
    first = 12 * fsdpc.rank()
    assert words(model.weight)[1] == (
        f"parameter 'weight' of unit 'Linear', over 2 ranks; this rank owns elements {first} to "
        f"{first + 11}"
    )
    mesh = fsdpc.init_device_mesh("cpu", (2, 1))
    root = ET.fromstring(mesh._repr_html_())
    outlined = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "o"]
    assert [each.get("y") for each in outlined] == [str(56 + 26 * fsdpc.rank())]
    assert {"rank 1: replica 1, shard 0", repr(mesh)} <= set(words(mesh))


def test_large_meshes_are_cut() -> None:
    comms = [_core.Comm(0, n, None) for n in (64, 32)]
    seen = words(DeviceMesh(comms, ("replicate", "shard"), (64, 32)))
    assert "and more, 2048 ranks together" in seen and len(seen) < 600


def test_estimates() -> None:
    found = fsdpc.estimate(params=7e9, world=8, strategy="FULL_SHARD", dtype="bfloat16")
    seen = words(found)
    assert seen[seen.index("unsharded", 2) + 1] == f"{found.held['unsharded'] / 2**30:,.2f} GiB"
    assert seen[seen.index("published") + 1] == f"{found.published / 2**30:,.2f} GiB"
    cost = fsdpc.training_cost(tokens=1e12, flops_per_token=4e10, ranks=2048, flops=134e12, price=2)
    assert words(cost)[-1] == f"{cost.cost:,.0f}"


def test_differences_and_loads() -> None:
    found = Difference(step=3, what="gradient", name="a<b>.weight", index=(0, 7), a=1.0, b=2.0,
                       ulp=5, dtype="float32", count=2, numel=8)  # fmt: skip
    seen = words(found)
    assert "step 3, rank 0: gradient a<b>.weight" in seen and "2 of 8 (25.0%)" in seen
    assert words(LoadReport({"step": 3}, ["a.weight"], zeroed=["0.0.residual"]))[2:] == [
        "{'step': 3}", "missing", "a.weight", "unexpected", "nothing", "zeroed", "0.0.residual"
    ]  # fmt: skip
