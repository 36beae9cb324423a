"""``fsdpc.integrations.accelerate`` with the real package, on two ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fsdpc
from tests.torch.common import (
    assert_same_parameters,
    average_grads,
    build,
    full_parameters,
    join_gloo,
    twin,
)

from .scripts import script_of

accelerate = pytest.importorskip("accelerate")


def data() -> DataLoader:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(30, 7), torch.randn(30, 5)), batch_size=4)


def start(**options: Any) -> tuple[Any, ...]:
    """An unsharded copy, and what is prepared: model, optimizer, loader, scheduler."""
    from fsdpc.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    model = build()
    plain = twin(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    found = prepare(accelerator, model, optimizer, data(), scheduler, classes=["Block"])
    assert found[0] is model and optimizer.param_groups[0]["params"][0].fsdpc is not None
    return accelerator, plain, *found


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[Any]:
    norms = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                accelerator.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return norms


def train_plain(plain: Any, loader: Any) -> tuple[Any, list[Any]]:
    """The same by hand, on averaged gradients."""
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    slower = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    norms = []
    for step, (inputs, targets) in enumerate(loader):
        (torch.nn.functional.mse_loss(plain(inputs), targets) / 2).backward()
        if step % 2:
            average_grads(plain)
            norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
            torch.nn.utils.clip_grad_value_(plain.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            slower.step()
            slower.step()  # accelerate's counts batches of all ranks
    return optimizer, norms


@pytest.mark.ranks(2, init=False, timeout=300)
def test_a_prepared_script_trains_saves_and_goes_on(tmp_path: Any) -> None:
    join_gloo(tmp_path)
    accelerator, plain, model, *rest = start()
    with accelerator.no_sync(model):
        assert not model._fsdpc_unit.requires_sync
    norms = train(accelerator, model, *rest)
    by_hand, own = train_plain(plain, rest[1])
    torch.testing.assert_close(norms, own, rtol=1e-4, atol=1e-5)
    assert_same_parameters(model, plain, rtol=1e-5, atol=1e-5)

    folder = tmp_path / "state"
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    saved = full_parameters(model)
    states = torch.load(folder / "optimizer.bin", weights_only=True)
    theirs = by_hand.state_dict()
    assert states["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]
    for i, values in theirs["state"].items():  # an unsharded optimizer could load the file
        torch.testing.assert_close(states["state"][i], values, rtol=1e-4, atol=1e-6)
    again = copy.deepcopy(rest[2].state_dict())
    train(accelerator, model, *rest)
    further = full_parameters(model)
    accelerator.load_state(str(folder))
    assert rest[2].state_dict() == again
    for name, value in full_parameters(model).items():
        assert torch.equal(value, saved[name]), name
    train(accelerator, model, *rest)
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, further[name], rtol=1e-6, atol=1e-7)

    accelerator.save_model(model, str(tmp_path / "model"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        from safetensors.torch import load_file

        plain.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    seen = [accelerator.gather_for_metrics(targets) for _, targets in rest[1]]
    assert torch.equal(torch.cat(seen), data().dataset.tensors[1])  # the last batch is short
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False, timeout=300)
def test_layers_that_are_not_to_be_split_are_units(tmp_path: Any) -> None:
    """Of a model without a plan, as the Trainer does and Accelerate's FSDP."""
    from fsdpc.integrations.accelerate import prepare

    join_gloo(tmp_path)
    accelerator = accelerate.Accelerator(cpu=True)
    model = build()
    model._no_split_modules = ["Block", "Elsewhere"]
    prepare(accelerator, model)
    named = dict(model.named_modules())
    units = {name for name, m in named.items() if "_fsdpc_state" in m.__dict__}
    kinds = {name: [c.__name__ for c in type(m).__mro__] for name, m in named.items()}
    blocks = {name for name, kind in kinds.items() if "Block" in kind}
    assert blocks and units == {"", *blocks}
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False, timeout=300)
def test_what_is_refused(tmp_path: Any) -> None:
    from fsdpc.integrations.accelerate import WholeStateOptimizer, check, prepare

    join_gloo(tmp_path)
    accelerator, _, model, optimizer, *_ = start()
    assert isinstance(optimizer, WholeStateOptimizer)
    with pytest.raises(ValueError, match=r"Net is sharded already: leave out \['classes'\]"):
        prepare(accelerator, model, classes=["Block"])
    assert prepare(accelerator, model) is model
    with pytest.raises(ValueError, match="brings no fsdp_plan"):
        prepare(accelerator, build())
    other = build()
    stepped = torch.optim.AdamW(other.parameters())
    other(torch.randn(2, 7)).sum().backward()
    stepped.step()
    with pytest.raises(ValueError, match="AdamW has states of the unsharded 'first.weight'"):
        prepare(accelerator, other, stepped, classes=["Block"])
    accelerator.ddp_handler = accelerate.DistributedDataParallelKwargs(comm_hook="fp16")
    with pytest.raises(ValueError, match=r"comm_hook=fp16.*reduce_dtype"):
        check(accelerator)
    accelerator.ddp_handler = accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)
    check(accelerator)
    accelerator.project_configuration.save_on_each_node = True
    with pytest.raises(ValueError, match="save_on_each_node"):
        check(accelerator)
    accelerator.project_configuration.save_on_each_node = False
    accelerator.state.num_processes = 1
    with pytest.raises(ValueError, match=r"2 ranks, and the accelerator counts 1.*cpu=True"):
        prepare(accelerator, build())
    accelerator.state.num_processes = 2
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    with pytest.raises(ValueError, match=r"made for FSDP .*give prepare\(\) options"):
        check(accelerator)
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False, timeout=300)
def test_the_script_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ranks as torchrun starts them; it loads at once what rank 0 is slow to write."""
    join_gloo(tmp_path)
    save = accelerate.checkpointing.save

    def slow(state: Any, path: Any, **options: Any) -> None:
        time.sleep(1.0 if fsdpc.rank() == 0 else 0.0)
        save(state, path, **options)

    monkeypatch.setattr("accelerate.checkpointing.save", slow)
    torch.set_num_threads(1)
    script = script_of("transformers.md", "accelerator.prepare")
    os.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    losses = [float(x) for x in re.findall(r"^epoch \d: loss ([\d.]+)", printed.getvalue(), re.M)]
    if fsdpc.rank() == 0:
        assert len(losses) == 5 and losses[-1] < 0.9 * losses[0]
    else:
        assert not losses
    assert (tmp_path / "state" / "model.safetensors").is_file()
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


ONE = """
import torch, torch.distributed as dist
from accelerate import Accelerator
from transformers import TrainingArguments
from fsdpc.torch import fully_shard
fully_shard(torch.nn.Linear(4, 2))
found = Accelerator(cpu=True)
print(dist.is_initialized(), found.distributed_type, found.num_processes)
print(TrainingArguments("run", use_cpu=True).parallel_mode)
"""


def test_one_rank_is_not_a_distributed_run(tmp_path: Path) -> None:
    """Sharding initialises torch.distributed, in a notebook as well; frameworks ignore that."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-c", ONE]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == "True DistributedType.NO 1\nParallelMode.NOT_PARALLEL\n", run.stderr
