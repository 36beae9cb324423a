"""A convolutional network for digits: policy by size, a scheduler, sums over ranks, a file."""

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.fc1 = nn.Linear(128, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model: Any, loader: Any, optimizer: Any) -> float:
    model.train()
    ddp_loss = torch.zeros(2)
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target, reduction="sum")
        loss.backward()
        optimizer.step()
        ddp_loss[0] += loss.item()
        ddp_loss[1] += len(data)
    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    return float(ddp_loss[0] / ddp_loss[1])


def fsdp_main(rank: int, world_size: int, folder: str) -> list[float]:
    torch.manual_seed(0)
    digits = TensorDataset(torch.randn(32, 1, 12, 12), torch.randint(0, 10, (32,)))
    sampler = DistributedSampler(digits, rank=rank, num_replicas=world_size, shuffle=True)
    loader = DataLoader(digits, batch_size=8, sampler=sampler)
    my_auto_wrap_policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = Net()
    model = FSDP(
        model,
        auto_wrap_policy=my_auto_wrap_policy,
        cpu_offload=CPUOffload(offload_params=False),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    )
    optimizer = optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses.append(train(model, loader, optimizer))
        scheduler.step()
    dist.barrier()
    states = model.state_dict()
    if rank == 0:
        torch.save(states, f"{folder}/mnist_cnn.pt")
    dist.barrier()
    single = Net()
    single.load_state_dict(torch.load(f"{folder}/mnist_cnn.pt"))
    losses.append(float(single(torch.ones(1, 1, 12, 12)).detach().norm()))
    return losses
