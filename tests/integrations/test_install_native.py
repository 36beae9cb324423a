"""transformers shards models itself while it loads them (``DistributedConfig``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fsdpc
from tests.torch.common import join_gloo

pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.20")

from transformers import LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from .install_runs import Words, llama, sharded_by

STEPS, ROWS = 10, 4


def train(folder: Path, shards: int, tp: int) -> tuple[Any, list[float]]:
    model = LlamaForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=tp, fsdp_size=shards)
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    words, losses = Words(STEPS * ROWS), []
    for step in range(STEPS):
        rows = range(ROWS * step, ROWS * (step + 1))
        x = torch.stack([words[i]["input_ids"] for i in rows]).chunk(shards)[dist.get_rank() // tp]
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Full values by name."""
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def check(tmp_path: Path, shards: int, tp: int) -> None:
    join_gloo(tmp_path)
    folder = tmp_path / "model"
    if dist.get_rank() == 0:
        llama().save_pretrained(folder)
    dist.barrier()
    runs = []
    for ours in (False, True):
        with sharded_by(ours):
            model, losses = train(folder, shards, tp)
        assert isinstance(model, fsdpc.torch.FSDPModule) == ours
        assert all(isinstance(p, DTensor) for p in model.parameters())
        runs.append((whole(model), losses))
    (theirs, expected), (values, losses) = runs
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    for name, value in theirs.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6 * scale)


@pytest.mark.ranks(2, init=False, timeout=200)
def test_sharded_models_are_loaded(tmp_path: Path) -> None:
    """Weights are read straight into shards, and no weight is initialised afterwards."""
    check(tmp_path, 2, 1)


@pytest.mark.ranks(4, init=False, timeout=300)
def test_tensor_parallel_models_are_loaded(tmp_path: Path) -> None:
    """``tp_plan`` of the model, with the rest sharded over the other dimension."""
    check(tmp_path, 2, 2)
