"""plan(): every choice is what memory_plan and simulate say of it, in order; refusals; the command.

What fits is compared with calls of the two, made by hand here.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fsdpc
from fsdpc.cli import plan
from fsdpc.cli.train_options import parser
from fsdpc.models import Llama, ModelConfig, preset

CONFIG = ModelConfig(vocab_size=64, dim=64, layers=4, heads=4, inner=128, max_seq=32)
WORLD = {"ranks": 4, "bandwidth": 1e9, "flops": 1e10}
ALONE = {**WORLD, "ranks": 1}  # few choices


def llama() -> Llama:
    with fsdpc.deferred_init():
        return Llama(CONFIG)


def test_choices_are_planned_and_played() -> None:
    model = llama()
    found = fsdpc.plan(model, memory=2.5e6, ranks_per_host=2, batch=2, latency=1e-5, **WORLD)
    assert not any("forward" in block.__dict__ for block in model.blocks())
    ways = {(c.strategy, c.mesh) for c in found.choices}
    hybrid = {("HYBRID_SHARD", (2, 2)), ("HYBRID_SHARD_ZERO2", (2, 2))}
    shards = {(name, (1, 4)) for name in ("SHARD_OPTIM", "SHARD_GRAD_OP", "FULL_SHARD")}
    assert ways == {("NO_SHARD", (4, 1)), *shards, *hybrid}
    assert len(found.choices) == len(ways) * 3 * 2
    fitting = [c for c in found.choices if c.fits]
    assert 0 < len(fitting) < len(found.choices) and found.choices[: len(fitting)] == tuple(fitting)
    steps = [round(c.simulation.step, 4) for c in fitting]
    assert steps == sorted(steps) and found.best is found.choices[0]
    assert {c.checkpoint for c in fitting} == {None, 0.5, "all"}
    for c in (found.best, fitting[-1]):
        twin = llama()
        if c.checkpoint:
            fsdpc.checkpoint_activations(twin.blocks(), c.checkpoint)
        policy = fsdpc.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
        by_hand = fsdpc.simulate(
            twin, (c.micro_batch, 32), hosts=2, ranks_per_host=2, bandwidth=1e9, latency=1e-5,
            flops=1e10, strategy=c.strategy, mesh=c.mesh, accumulate=c.accumulate, mp_policy=policy,
        )  # fmt: skip
        assert c.simulation.step == by_hand.step
        plan, shared = by_hand.memory, by_hand.sharing_ranks
        assert c.memory == plan.total - plan.unsharded + plan.unsharded / shared <= 2.5e6
        assert c.micro_batch * c.accumulate == 2
    for c in found.choices[len(fitting) :]:
        assert c.memory > 2.5e6 and c.reason.startswith("does not fit: ")
    assert "fastest: computes" in found.best.reason
    assert any("slower: " in c.reason and "more" in c.reason for c in fitting)
    text = found.table(3)
    assert found.best.options in " ".join(text.split())
    assert f"and {len(found.choices) - 3} more" in text
    assert str(found).count(" ms ") >= len(fitting)
    assert all(len(line) <= 80 for line in str(found).split("\n"))


def test_options_are_those_of_fsdpc_train() -> None:
    # With a byte nothing is played, and all choices are there.
    found = fsdpc.plan(CONFIG, memory=1, batch=2, disk_bandwidth=1e9, device="cpu", **WORLD)
    offloads = {c.offload for c in found.choices}
    both = "masters=disk:/var/tmp,optimizer=disk"
    assert offloads == {"none", "optimizer=disk:/var/tmp", both}
    for c in found.choices:
        o = parser().parse_args(c.options.split())
        assert (o.strategy, o.batch, o.accumulate) == (c.strategy, c.micro_batch, c.accumulate)
        assert o.mesh == (c.mesh if c.strategy.startswith("HYBRID") else None)
        assert o.checkpoint_activations == (None if c.checkpoint is None else str(c.checkpoint))
        assert str(o.offload).replace("None", "none") == c.offload
    gpus = fsdpc.plan(CONFIG, memory=1, disk_bandwidth=1e9, device="cuda", **WORLD)
    assert {c.offload for c in gpus.choices} == {"none"}


def test_less_memory_takes_more_sharding_and_recomputation() -> None:
    """With as much memory as the smallest choice needs, that one is left."""
    much = fsdpc.plan(CONFIG, memory=1e9, batch=2, **ALONE)
    least = min(c.memory for c in much.choices)
    little = fsdpc.plan(CONFIG, memory=least, batch=2, **ALONE).best
    assert (little.memory, little.checkpoint, little.micro_batch) == (least, "all", 1)
    assert much.best.memory > least and much.best.simulation.step < little.simulation.step


def test_models_of_transformers_have_a_twin() -> None:
    fields = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 32,
    }  # fmt: skip
    theirs = SimpleNamespace(config=SimpleNamespace(hidden_size=64, to_dict=lambda: fields))
    assert str(fsdpc.plan(theirs, memory=1e9, **ALONE)) == str(
        fsdpc.plan(CONFIG, memory=1e9, **ALONE)
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"memory": 1e5}, ValueError, r"nothing fits: --strategy .* KiB of reduce and"),
        ({"memory": 0}, ValueError, "memory must be above 0"),
        ({"memory": 1e9, "ranks_per_host": 3}, ValueError, "4 ranks on hosts of 3"),
        ({"memory": 1e9, "batch": 0}, ValueError, "batch must be a whole number"),
        ({"memory": 1e9, "strategy": "NO_SHARD"}, TypeError, "no option 'strategy'"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fsdpc.plan(CONFIG, **options, **WORLD).best  # noqa: B018


def test_what_is_no_model() -> None:
    with pytest.raises(ValueError, match="int is neither an fsdpc.nn.Module nor a configuration"):
        fsdpc.plan(3, memory=1e9, **WORLD)


def test_a_page_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    small = ["--preset", "2M", "--ranks-per-host", "2", "--batch", "1", "--seq", "64", "--html"]
    assert plan.main([*small, str(page), "--memory", "1", "--top", "2"]) == 0
    assert f"wrote {page}\nadvice: it fits" in capsys.readouterr().out
    text = page.read_text()
    root = ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    headings = [each.text for each in root.iter("{http://www.w3.org/1999/xhtml}h2")]
    assert headings == ["The fastest step", "Memory of a rank", "Who owns which rows",
                        "Beside the fastest of another strategy"]  # fmt: skip
    assert len(list(root.iter("{http://www.w3.org/2000/svg}svg"))) == 4
    with fsdpc.deferred_init():
        model = Llama(preset("2M"))
    found = fsdpc.plan(model, memory=2**30, ranks=2, bandwidth=1e9, flops=1e12, batch=1, seq=64)
    assert fsdpc.sharding_layout(model, 2)._repr_html_() in text
    assert found.best.simulation is not None and found.best.options in text
    assert f"({found.best.simulation.memory.total:,} bytes)" in text
    assert "<script" not in text and found.best.options in found._repr_html_()
    ET.fromstring(found._repr_html_())
    assert plan.main([*small, str(page), "--memory", "0.001"]) == 2
    assert "Nothing fits" in page.read_text() and "Who owns which rows" in page.read_text()


@pytest.mark.parametrize(
    ("place", "why"),
    [("no/plan.html", "there is no folder .*no: make it first"), (".", "is a folder: name a file")],
)
def test_a_page_that_cannot_be_written(
    place: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / place)
    assert plan.main(["--memory", "1", "--html", path]) == 2
    said = capsys.readouterr()
    assert re.search(f"^fsdpc plan: --html .*{why}", said.err) and not said.out


def test_a_page_without_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="cannot be written: choose another place, or its rights"):
        plan.check_page(tmp_path / "plan.html")


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--preset", "2M", "--ranks-per-host", "1", "--batch", "2", "--seq", "64"]
    assert plan.main([*small, "--memory", "1", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama 2M, 1,869,504 parameters\n1 host x 1 rank (cpu), batch 2 x 64")
    assert "1 rank (cpu) on 1 host, 1.00 GiB each, 2 x 64 words" in out
    assert out.count("--strategy") == 2 and "fastest: " in out
    assert plan.main([*small, "--memory", "0.001"]) == 2
    said = capsys.readouterr()
    assert "does not fit" in said.out and "fsdpc plan: nothing fits" in said.err
    assert plan.main([*small, "--memory", "1", "--top", "0"]) == 2
