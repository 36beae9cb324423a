"""Saving the optimizer's state by name, and going on from it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def make(rank: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)), use_orig_params=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def steps(model: Any, optim: Any, data: torch.Tensor, n: int) -> list[float]:
    losses = []
    for _ in range(n):
        loss = (model(data) ** 2).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(float(loss.detach()))
    return losses


def fsdp_main(rank: int, world_size: int, folder: str) -> list[float]:
    model, optim = make(rank)
    torch.manual_seed(10 + rank)
    data = torch.randn(8, 5)
    losses = steps(model, optim, data, 3)
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=True),
    )
    state_dict = model.state_dict()
    optim_state_dict = FSDP.optim_state_dict(model, optim)
    if rank == 0:
        torch.save((state_dict, optim_state_dict), f"{folder}/checkpoint.pt")
    dist.barrier()
    losses += steps(model, optim, data, 3)

    model, optim = make(rank)
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    )
    state_dict, optim_state_dict = torch.load(f"{folder}/checkpoint.pt")
    model.load_state_dict(state_dict)
    optim_state_dict = FSDP.optim_state_dict_to_load(
        model=model, optim=optim, optim_state_dict=optim_state_dict
    )
    optim.load_state_dict(optim_state_dict)
    again = steps(model, optim, data, 3)
    assert again == losses[3:], (again, losses[3:])
    return losses
