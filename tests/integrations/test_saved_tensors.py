"""Activations on a disk under transformers' own checkpointing, with the bits of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fsdpc
from fsdpc.torch import shard_by_plan

from .test_transformers import SIZES


def train(policy: Any, reentrant: bool | None) -> list[Any]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 5})
    model = transformers.LlamaForCausalLM(config)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    shard_by_plan(model, classes=["LlamaDecoderLayer"], offload_policy=policy)
    model.train()
    ids = torch.randint(3, 61, (4, 60), generator=torch.Generator().manual_seed(1))
    seen = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        seen.append(float(loss.detach()))
    assert (fsdpc.memory_stats()["disk_read_bytes"] > 0) == (policy is not None)
    return [*seen, *(p.grad.full_tensor().numpy().tobytes() for p in model.parameters())]


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=str)
def test_bits_are_those_of_memory(reentrant: bool | None, disk: Path) -> None:
    policy = fsdpc.OffloadPolicy(activations="disk", path=disk)
    assert train(None, reentrant) == train(policy, reentrant)
