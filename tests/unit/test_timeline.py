"""Timelines: their peak is the plan's, their times are the simulation's; pictures of them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc.models import Llama, ModelConfig, preset
from fsdpc.planning.schedule import Act, Schedule, Use
from fsdpc.planning.simulate import Simulation, simulate

SVG = "{http://www.w3.org/2000/svg}"
CONFIG = ModelConfig(vocab_size=64, dim=64, layers=3, heads=4, inner=128, max_seq=32)
HALF = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)


def llama(checkpoint: Any = None) -> Llama:
    with fsdpc.deferred_init():
        model = Llama(CONFIG)
    if checkpoint:
        fsdpc.checkpoint_activations(model.blocks(), checkpoint)
    return model


def play(checkpoint: Any = None, hosts: int = 2, **options: Any) -> Simulation:
    given = {"hosts": hosts, "ranks_per_host": 2, "bandwidth": 1e9, "latency": 1e-5, "flops": 1e11,
             "mp_policy": HALF, "memory_bandwidth": 20e9, **options}  # fmt: skip
    return simulate(llama(checkpoint), (2, 32), **given)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"])
def test_peaks_and_times_add_up(strategy: str, device: str) -> None:
    for checkpoint, accumulate in ((None, 1), ("all", 1), (0.5, 3)):
        found = play(checkpoint, strategy=strategy, device=device, accumulate=accumulate)
        line = found.timeline
        planned = fsdpc.memory_plan(
            llama(checkpoint), _mesh(strategy), strategy=strategy, mp_policy=HALF
        ).for_device(device).for_hosts(2)  # fmt: skip
        activation = max(a.bytes for a in line.activations)
        assert activation == found.memory.activation
        assert line.peak == found.memory.total == planned.total + activation
        assert f"({line.peak:,} bytes)" in found._repr_html_()
        length = {lane: sum(s.end - s.begin for s in line.spans if s.lane == lane)
                  for lane in ("compute", "wait")}  # fmt: skip
        assert length["compute"] == pytest.approx(found.compute, rel=1e-9)
        assert length["wait"] == pytest.approx(found.exposed_total, rel=1e-9, abs=1e-12)
        assert sum(length.values()) == pytest.approx(line.step, rel=1e-9)
        assert all(0 <= s.begin <= s.end <= line.step * (1 + 1e-9) for s in line.spans)
        ends = [a.end for a in line.activations]
        assert ends == sorted(ends) and ends[-1] == pytest.approx(line.step)
        assert max(g.bytes for g in line.gathered) <= found.memory.unsharded


def _mesh(strategy: str) -> tuple[int, int]:
    return {"NO_SHARD": (4, 1), "HYBRID_SHARD": (2, 2)}.get(strategy, (1, 4))


@pytest.mark.ranks(2)
def test_the_peak_is_the_runs() -> None:
    """Category by category, and all of it on the rank that the parameter buffer is counted on."""
    line = play(hosts=1).timeline
    model = llama()
    for block in model.blocks():
        fsdpc.fully_shard(block, mp_policy=HALF)
    fsdpc.fully_shard(model, mp_policy=HALF)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    ids = np.zeros((2, 32), np.int64)
    for _ in range(3):
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = fsdpc.memory_stats()
    peaks = {name: held[f"{name}_peak_bytes"] for name in (*line.held, "activation")}
    most = max(a.bytes for a in line.activations)
    assert {**line.held, "activation": most} == {
        **peaks, "unsharded": peaks["unsharded"] if fsdpc.rank() == 0 else line.held["unsharded"]
    }  # fmt: skip
    if fsdpc.rank() == 0:
        assert line.peak == sum(peaks.values())


def test_what_happens_when() -> None:
    line = play(device="cuda").timeline
    units = [f"model.layers.{i}" for i in range(3)]
    forward = [s.unit for s in line.spans if s.what == "forward" and s.unit in units]
    backward = [s.unit for s in line.spans if s.what == "backward" and s.unit in units]
    assert list(dict.fromkeys(forward)) == units == list(dict.fromkeys(backward))[::-1]
    gathers = [s for s in line.spans if s.lane == "gather"]
    assert [s.unit for s in gathers].count(units[0]) == 2  # for forward and for backward
    assert all(s.bytes > 0 and s.end > s.begin for s in gathers)
    assert len([s for s in line.spans if s.lane == "reduce"]) == 4
    assert len([s for s in line.spans if s.lane == "free"]) == 7  # the root stays between the two
    assert line.spans[len([s for s in line.spans if s.lane == "compute"]) - 1].what == "optimizer"
    assert f"{units[1]}" in str(line) and "peak" in str(line)


def test_a_limit_is_a_line() -> None:
    line = play(device="cuda").timeline
    assert "limit" not in line._repr_html_()
    over = ET.fromstring(line.with_limit(line.peak - 2048)._repr_html_())
    words = [each.text or "" for each in over.iter(f"{SVG}text")]
    assert any(each.endswith(": 2.00 KiB too much") for each in words)
    shared = play(device="cpu").timeline  # two ranks of a host have one parameter buffer
    fits = shared.with_limit(shared.peak - shared.held["unsharded"] / 2)._repr_html_()
    assert "with a rank&#x27;s share of unsharded" in fits and "too much" not in fits
    with pytest.raises(ValueError, match="limit must be above 0 bytes, got -1"):
        line.with_limit(-1)


def test_two_ways_beside_each_other(tmp_path: Any) -> None:
    a, b = play(strategy="FULL_SHARD", device="cuda"), play(strategy="SHARD_GRAD_OP", device="cuda")
    both = a.beside(b, limit=2e9)
    rows = {name: (x, y) for name, x, y, _ in both.rows}
    assert rows["total"] == (a.memory.total, b.memory.total)
    assert rows["sent to other hosts"] == (a.sent_between, b.sent_between)
    assert rows["step"] == (a.step, b.step)
    assert "sent to other hosts" in str(both) and "b - a" in str(both)
    both.save(tmp_path / "both.svg")
    root = ET.parse(tmp_path / "both.svg").getroot()
    words = [each.text for each in root.iter(f"{SVG}text")]
    assert words.count("gathers") == 2 and "b - a" in words
    for name, n in (("unsharded", a.memory.unsharded), ("unsharded", b.memory.unsharded)):
        assert f"{name}: " in both._repr_html_() and f"({n:,} bytes)" in both._repr_html_()
    with pytest.raises(ValueError, match="limit must be above 0"):
        a.beside(b, limit=0)


def test_large_steps_are_small_pictures() -> None:
    with fsdpc.deferred_init():
        model = Llama(preset("7B"))
    found = simulate(model, (1, 4096), hosts=2, ranks_per_host=8, bandwidth=4e11, latency=5e-6,
                     flops=4e14, device="cuda", accumulate=8)  # fmt: skip
    drawn = found._repr_html_()
    ET.fromstring(drawn)
    assert len(drawn) < 500_000 and "script" not in drawn


@pytest.mark.parametrize("layers", [3, 200])
def test_schedules_show_themselves(layers: int) -> None:
    names = [f"layers.{i}" for i in range(layers)]
    uses = tuple(Use(name, "forward") for name in names)
    acts = tuple(Act(name, what, "forward") for name in names
                 for what in ("gather", "forward", "reshard"))  # fmt: skip
    drawn = Schedule(uses, 1, acts)._repr_html_()
    root = ET.fromstring(drawn)
    told = [each.text for each in root.iter(f"{SVG}title")]
    assert f"{3 * layers - 1}: reshard of layers.{layers - 1}, for forward" in told
    assert ("160 more units" in drawn) == (layers == 200)
    ET.fromstring(Schedule(uses, 1)._repr_html_())
