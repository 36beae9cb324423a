"""A DeepSpeed configuration trains as a plain loop does, and every key of it is accounted for."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.needs import need_torch

torch = need_torch()

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import fsdpc  # noqa: E402
from fsdpc.integrations import _units, deepspeed  # noqa: E402
from fsdpc.torch._unit import states_of  # noqa: E402
from tests.torch.common import (  # noqa: E402
    Net,
    assert_same_parameters,
    average_grads,
    batch,
    build,
    full,
    join_gloo,
    loss_of,
)

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-deepspeed.md"
BASE = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2, "total_num_steps": 10},
    },
}
#: Rates of the steps of these: the first twice, as DeepSpeed's scheduler begins before the first.
RATES = [0.0, 0.0, 0.01, 0.01, 0.00875]


def engine_of(config: Any, model: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model or build()
    options.setdefault("model_parameters", model.parameters())
    return deepspeed.initialize(model=model, config=config, **options)[0]


def train(engine: Any, steps: range) -> list[float]:
    rates = []
    for step in steps:
        rates.append(engine.get_lr()[0])
        for micro in range(2):
            engine.backward(loss_of(engine, batch(step, fsdpc.rank(), micro)))
            engine.step()
    return rates


def by_hand(steps: int) -> Any:
    """The same, unsharded, with averaged gradients."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATES[step]
        for micro in range(2):
            (loss_of(model, batch(step, fsdpc.rank(), micro)) / 2).backward()
        average_grads(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.ranks(2, init=False)
def test_stages_train_as_by_hand(tmp_path: Path) -> None:
    join_gloo(tmp_path)
    join = fsdpc.torch._mesh.join()
    assert join.size == 2
    plain = by_hand(5)
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4}
    for zero in (
        {"stage": 0},
        {"stage": 1, "overlap_comm": True},
        {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_param": disk, "offload_optimizer": disk},
    ):
        file = tmp_path / "ds_config.json"
        if fsdpc.rank() == 0:
            file.write_text(json.dumps({**BASE, "zero_optimization": zero}))
        fsdpc.barrier()
        engine = engine_of(file, build(seed=3 + fsdpc.rank()))  # rank 0's values count
        assert engine.zero_optimization_stage() == zero["stage"]
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (16, 4)
        assert train(engine, range(5)) == pytest.approx(RATES)
        assert engine.get_global_grad_norm() > 0.1
        assert (engine.micro_steps, engine.global_steps, engine.skipped_steps) == (10, 5, 0)
        assert_same_parameters(engine.module, plain)
    dist.destroy_process_group()
    fsdpc.shutdown()


def test_the_host_is_where_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "zero_optimization.stage": 3,
        "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization.offload_optimizer.ratio": 0.5,  # of what is on a disk
    }
    assert "offload_policy" not in deepspeed._shard_options(said)  # they are there
    monkeypatch.setattr(deepspeed, "get_default_device", lambda: "cuda")
    policy = deepspeed._shard_options(said)["offload_policy"]
    assert (policy.optimizer, policy.masters, policy.gradients) == ("host",) * 3
    assert (policy.params, policy.fraction) == ("device", 1)


@pytest.mark.ranks(2, init=False)
def test_checkpoints_halves_and_groups(tmp_path: Path) -> None:
    join_gloo(tmp_path)
    config = {**BASE, "zero_optimization": {"stage": 3}}
    whole = engine_of(config)
    train(whole, range(5))
    engine = engine_of(config)
    train(engine, range(3))
    assert engine.save_checkpoint(tmp_path / "run", client_state={"seen": [1, "two"]})
    engine = engine_of(config)
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, {})
    path, state = engine.load_checkpoint(tmp_path / "run")
    assert path == str(tmp_path / "run" / "global_step3") and state == {"seen": [1, "two"]}
    assert engine.global_steps == 3
    assert train(engine, range(3, 5)) == pytest.approx(RATES[3:])
    for p, q in zip(engine.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())

    half = engine_of({**BASE, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    assert half(batch(0, 0)).dtype is torch.bfloat16
    train(half, range(3))
    assert next(half.parameters()).dtype is torch.float32
    half.save_16bit_model(tmp_path / "half")
    if fsdpc.rank() == 0:
        saved = torch.load(tmp_path / "half" / "pytorch_model.bin")
        assert {v.dtype for v in saved.values()} == {torch.bfloat16}
        build().load_state_dict(saved)

    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
    scaled = engine_of({**BASE, "fp16": fp16})
    train(scaled, range(2))
    assert scaled.cur_scale == 32 and scaled.skipped_steps == 0
    before = [p.detach().clone() for p in scaled.parameters()]
    bad = float("inf") if fsdpc.rank() == 1 else 1.0
    for _ in range(2):
        scaled.backward(loss_of(scaled, batch(2, 0)) * bad)
        scaled.step()
    assert scaled.cur_scale == 16 and scaled.skipped_steps == 1 and scaled.global_steps == 3
    assert all(torch.equal(p, q) for p, q in zip(scaled.parameters(), before, strict=True))

    model = build()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": [model.first.bias]}]
    grouped = engine_of(BASE, model, model_parameters=groups)
    assert [g["weight_decay"] for g in grouped.optimizer.param_groups] == [0.5, 0.1]
    assert sum(len(g["params"]) for g in grouped.optimizer.param_groups) == len(decayed) + 1
    train(grouped, range(1))
    model = build()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    given = engine_of({"train_micro_batch_size_per_gpu": 4}, model, optimizer=mine)
    with given.no_sync():
        given.backward(loss_of(given, batch(0, 0)))
        with pytest.raises(RuntimeError, match="inside engine.no_sync"):
            given.step()
    given.backward(loss_of(given, batch(0, 0)))
    given.step()
    assert given.optimizer is mine and given.get_lr() == [0.1]
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False)
def test_defaults_are_deepspeeds(tmp_path: Path) -> None:
    """Since 0.19.3 norms are clipped to 1.0, and bf16 skips steps that are not finite."""
    join_gloo(tmp_path)
    base = {"train_micro_batch_size_per_gpu": 4, "optimizer": BASE["optimizer"]}
    assert engine_of(base).gradient_clipping() == 1.0
    plain = engine_of({**base, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
    before = plain.module.first.weight.full_tensor()
    plain.backward(1e3 * loss_of(plain, batch(0, fsdpc.rank())))
    plain.step()
    assert plain.get_global_grad_norm() > 100 and plain.was_step_applied()
    assert (plain.module.first.weight.full_tensor() - before).norm() <= 1
    bad = float("nan") if fsdpc.rank() == 1 else 1.0
    for stage, said, skips in (
        (0, {}, False), (1, {}, True), (2, {}, True), (3, {}, False),
        (2, {"check_grad_overflow": False}, False), (3, {"check_grad_overflow": True}, True),
    ):  # fmt: skip
        bf16 = {"enabled": True, **said}
        engine = engine_of({**base, "bf16": bf16, "zero_optimization": {"stage": stage}})
        engine.backward(loss_of(engine, batch(0, fsdpc.rank())) * bad)
        engine.step()
        values = engine.module.first.weight.full_tensor()
        assert bool(values.isfinite().all()) == skips == (not engine.was_step_applied())
        assert (engine.global_steps, engine.skipped_steps) == (1, int(skips))
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(1)
def test_what_scripts_ask_an_engine() -> None:
    engine = engine_of({**BASE, "train_batch_size": 8})
    assert engine.device == torch.device("cpu") and engine.local_rank == 0
    assert (engine.dp_world_size, engine.mp_world_size, engine.global_samples) == (1, 1, 0)
    assert not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization())
    assert engine.get_batch_info() == (8, 4, 2)
    loss = engine.forward(batch(0, 0).to(engine.device)).mean()
    whole = engine.backward(loss, retain_graph=True, scale_wrt_gas=False)
    assert torch.equal(whole, loss)
    engine.step()
    assert not engine.was_step_applied()
    assert torch.equal(engine.backward(loss), loss / 2)
    plain = build()
    plain(batch(0, 0)).mean().backward()
    torch.testing.assert_close(
        full(engine.module.first.bias.grad), 1.5 * plain.first.bias.grad, check_dtype=False
    )
    engine.zero_grad()
    assert engine.module.first.bias.grad is None
    engine.step()
    engine.module(batch(0, 0)).mean().backward()
    with pytest.raises(RuntimeError, match="without engine.backward.*accumulation_steps 2"):
        engine.step()
    with pytest.raises(AttributeError, match="has no .train_batch. here, and neither has"):
        engine.train_batch()


@pytest.mark.ranks(1)
def test_quantised_communication_is_compression() -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2}
    engine = engine_of(BASE | {"zero_optimization": zero})
    units = [each.unit for each in states_of(engine)]
    assert {(unit.gather_codec, unit.reduce_codec) for unit in units} == {("int8", "exact")}
    engine = engine_of(BASE | {"zero_optimization": {**zero, "zero_quantized_gradients": True}})
    units = [each.unit for each in states_of(engine)]
    assert {(unit.gather_codec, unit.reduce_codec) for unit in units} == {("int8", "int8")}


@pytest.mark.ranks(1)
def test_what_cannot_be_honoured_is_refused() -> None:
    for more, message in (
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation': False"),
        ({"gradient_allreduce_op": "sum"}, 'refused unless "mean"'),
        ({"expert_parallel": {"enabled": True}}, "'expert_parallel'.*not supported"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "super_offload",
        ),
        (
            {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
            "zero_quantized_nontrainable_weights': True",
        ),
        ({"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size"),
        ({"elasticity": {"enabled": True}}, "'elasticity'"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype"),
        ({"optimizer": {"type": "OneBitAdam"}}, "pass optimizer= instead"),
        ({"scheduler": {"type": "LRRangeTest"}}, "pass lr_scheduler= instead"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            engine_of({**BASE, "train_batch_size": 8, **more})
    for more, message in (
        ({"zero_optimisation": {}}, "'zero_optimisation' is no key"),
        ({"fp16": {"scale": 2}}, "'fp16.scale' is no key"),
        ({"train_micro_batch_size_per_gpu": 3}, "train_batch_size 8 is not .* 3 x .* 2 x 1 ranks"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "choose one"),
        ({"zero_optimization": {"stage": 4}}, "stage 4 is not"),
    ):
        with pytest.raises(ValueError, match=message):
            engine_of({**BASE, "train_batch_size": 8, **more})
    with pytest.raises(NotImplementedError, match=r"initialize\(mpu=...\)"):
        engine_of({**BASE, "train_batch_size": 8}, mpu=object())
    off = {
        "wandb": {"enabled": False},
        "zero_optimization": {"mics_shard_size": -1},
        "managed_gradient_accumulation": True,
        "gradient_allreduce_op": "mean",
    }
    said: list[str] = []
    log = logging.getLogger("fsdpc.integrations")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: said.append(record.getMessage()) or False)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=build(), training_data=TensorDataset(torch.randn(16, 7)),
        config={**BASE, "train_batch_size": 8, "steps_per_print": 5, "aio": {}, **off},
    )  # fmt: skip
    assert said == ["DeepSpeed keys without effect here: steps_per_print, aio"]
    assert len(loader) == 4 and scheduler is engine.lr_scheduler and optimizer is engine.optimizer


def test_rates_are_deepspeeds() -> None:
    """By its formulas, written out."""

    def rates(kind: str, count: int = 8, **options: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        schedule = deepspeed.SCHEDULES[kind](optimizer, **options)
        found = []
        for _ in range(count):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        again = deepspeed.SCHEDULES[kind](torch.optim.SGD([torch.zeros(1)], lr=1.0), **options)
        again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
        assert again.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        return found

    options = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4}
    logs = [0.1 + 0.4 * math.log(k + 1) / math.log(4) for k in range(4)]
    assert rates("WarmupLR", **options) == pytest.approx([0.1, *logs, 0.5, 0.5, 0.5])
    assert rates("WarmupLR", 4, warmup_num_steps=2, warmup_type="linear") == [0, 0, 0.5, 1]
    found = rates("WarmupDecayLR", total_num_steps=6, **options)
    assert found == pytest.approx([0.1, *logs, 0.5, 0.3, 0.1])
    found = rates("WarmupCosineLR", 6, total_num_steps=4, warmup_num_steps=2, cos_min_ratio=0.2)
    assert found == pytest.approx([0, 0, 1, 0.6, 0.2, 0.2])


def test_the_page_has_the_table_of_the_code() -> None:
    page = PAGE.read_text()
    table = page.split("| key | here |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    rows: dict[str, list[str]] = {}
    for name, key in deepspeed.KEYS.items():
        rows.setdefault(key.says, []).append(f"`{name}`")
    assert table == [f"| {', '.join(names)} | {says} |" for says, names in rows.items()]


@pytest.mark.ranks(2, init=False)
def test_the_page_runs_as_it_is(tmp_path: Path) -> None:
    join_gloo(tmp_path)
    torch.set_num_threads(1)
    os.chdir(tmp_path)
    script = tmp_path / f"train{dist.get_rank()}.py"
    script.write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = runpy.run_path(str(script), run_name="__main__")
    losses = [float(x) for x in re.findall(r"loss (\d\.\d+)", printed.getvalue())]
    assert len(losses) == 4 and losses[-1] < 0.7 * losses[0]
    assert found["state"] == {"epoch": 3} and found["engine"].global_steps == 32
    dist.destroy_process_group()
    fsdpc.shutdown()


def test_plans_of_models_are_followed() -> None:
    class Planned(Net):
        fsdp_plan = {"blocks.0": "keep_full_weight"}

    model = nn.Module()
    model.net = Planned()
    assert _units.plan_of(None, model) == {"net.blocks.0": "keep_full_weight"}
