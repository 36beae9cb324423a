"""What a rank of test_two_hosts.py does: trains until the file that it is given is there."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdpc.torch import fully_shard

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("ready", flush=True)
done = torch.zeros(())
while not done:
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    done.fill_(Path(sys.argv[1]).exists())
    dist.broadcast(done, 0)
print("done", flush=True)
