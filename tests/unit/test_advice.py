"""What `fsdpc plan` advises where a model does not fit."""

from __future__ import annotations

from typing import Any

import pytest

import fsdpc
from fsdpc.cli import estimate, plan
from fsdpc.models import Llama, ModelConfig
from fsdpc.planning.advice import ROOM

SEQ = 512
CONFIG = ModelConfig(vocab_size=64, dim=256, layers=8, heads=4, inner=1024, max_seq=SEQ)
WORLD: dict[str, Any] = {"ranks": 2, "bandwidth": 1e9, "flops": 1e10, "seq": SEQ}


def planned(memory: float, **options: Any) -> Any:
    return fsdpc.plan(CONFIG, memory=memory, **{**WORLD, "device": "cuda", **options})


def least(**options: Any) -> float:
    return min(c.memory for c in planned(1, **options).choices)


def test_each_way_to_save_memory_is_advised() -> None:
    found = planned(0.9 * least()).advise()
    names = [a.changes[0].option.split()[0] for a in found.advised]
    assert names == ["--state-dtype", "--offload", "--lora"]
    assert [a.changes[0].alters for a in found.advised] == [False, False, True]
    shorter = planned(0.95 * least()).advise()
    assert "--seq" in str(shorter)
    for each in (found, shorter):
        costs = [a.cost() for a in each.advised]
        assert costs == sorted(costs) and "nothing fits as asked" in str(each)
        assert all(len(line) <= 80 for line in str(each).split("\n"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("part", [0.9, 0.8, 0.6, 0.4])
def test_what_is_advised_fits_when_it_is_given_back(device: str, part: float) -> None:
    limit = part * least(device=device)
    for advised in planned(limit, device=device).advise().advised:
        sets = {name: value for c in advised.changes for name, value in c.sets.items()}
        with fsdpc.deferred_init():
            model = Llama(CONFIG)
        if "lora" in sets:
            fsdpc.lora.apply(model, sets["lora"])
        again = fsdpc.plan(
            model, memory=limit, **{**WORLD, "device": device, "seq": sets.get("seq", SEQ)},
            state_dtype=sets.get("state_dtype"), offload_policy=sets.get("offload_policy"),
        )  # fmt: skip
        same = [c for c in again.choices if c.options == advised.choice.options]
        assert [c.memory for c in same] == [advised.choice.memory] and same[0].fits
        assert advised.choice.memory <= limit


def test_two_changes_where_one_is_not_enough() -> None:
    alone = [a.choice.memory for part in (0.9, 0.6, 0.4, 0.3)
             for a in planned(part * least()).advise().advised if len(a.changes) == 1]  # fmt: skip
    found = planned(0.9 * min(alone)).advise()
    assert found.advised and {len(a.changes) for a in found.advised} == {2}
    nothing = planned(1000).advise()
    assert not nothing.advised and "no change of states, offload" in str(nothing)


def test_room_needs_no_advice() -> None:
    some = planned(least() / (1 - 1.2 * ROOM)).advise()
    assert str(some).startswith("advice: it fits, in ") and not some.advised
    just = planned(least() * 1.05).advise()
    assert "to spare; these leave 10%" in str(just).replace("\n", " ") and just.advised
    assert all(a.choice.memory <= (1 - ROOM) * least() * 1.05 for a in just.advised)


def test_no_adapters_for_adapters_and_no_bf16_twice() -> None:
    with fsdpc.deferred_init():
        model = Llama(CONFIG)
    fsdpc.lora.apply(model, 4)
    found = fsdpc.plan(model, memory=1000, state_dtype="bfloat16", device="cuda", **WORLD)
    memory = 0.97 * min(c.memory for c in found.choices)
    found = fsdpc.plan(model, memory=memory, state_dtype="bfloat16", device="cuda", **WORLD)
    names = {c.option.split()[0] for a in found.advise().advised for c in a.changes}
    assert names <= {"--offload", "--seq"} and names


def test_the_command_ends_with_options_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--preset", "2M", "--ranks-per-host", "2", "--device", "cuda"]
    asked = [*common, "--memory", "0.02", "--batch", "4", "--seq", "512", "--top", "1"]
    assert plan.main(asked) == 2
    said = capsys.readouterr()
    assert said.err == "fsdpc plan: nothing fits in 20.48 MiB\n"
    assert all(len(line) <= 80 for line in said.out.split("\n"))
    advice = said.out[said.out.index("advice: nothing fits") :]
    blocks = advice.split(" tokens/s:\n")
    assert len(blocks) > 2
    for head, body in zip(blocks, blocks[1:]):
        memory = " ".join(head.split("\n")[-1].split()[:2])
        words = body[: body.index("(")].split()
        given = dict(zip(words[::2], words[1::2]))
        whole = [w for pair in {"--seq": "512", **given}.items() for w in pair]
        assert estimate.main([*common, *whole]) == 0
        total = capsys.readouterr().out.split("total")[1].split("\n")[0].strip()
        # The played step, which plan() shows, may hold a little more than the dry run.
        assert total.endswith(" MiB") and float(total[:-4]) <= float(memory[:-4]) < 20.48
        changed = {k: v for k, v in given.items() if k in ("--lora", "--seq", "--offload",
                                                           "--state-dtype")}  # fmt: skip
        again = {"--batch": "4", "--seq": "512", **changed, "--memory": "0.02"}
        assert plan.main([*common, *(w for p in again.items() for w in p)]) == 0
        assert memory in capsys.readouterr().out
