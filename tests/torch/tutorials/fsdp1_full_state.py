"""Saving full weights on rank 0, and a second model that starts from them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


def fsdp_main(rank: int, world_size: int, folder: str) -> list[float]:
    model = FSDP(make(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(10 + rank)
    data = torch.randn(8, 5)
    losses = []
    for _ in range(3):
        loss = (model(data) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save_policy):
        cpu_state = model.state_dict()
    if rank == 0:
        torch.save(cpu_state, f"{folder}/model.pt")
    else:
        assert not cpu_state
    dist.barrier()

    resumed = make(1)
    if rank == 0:
        resumed.load_state_dict(torch.load(f"{folder}/model.pt"))
    sharded = FSDP(resumed, sync_module_states=True)
    losses.append(float((sharded(data) ** 2).mean().detach()))

    other = FSDP(make(0))
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        other.load_state_dict(torch.load(f"{folder}/model.pt"))
    losses.append(float((other(data) ** 2).mean().detach()))
    return losses
