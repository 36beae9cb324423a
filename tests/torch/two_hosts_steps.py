"""What a rank of test_two_hosts.py does: trains until the file that it is given is there.

All its waits are the engine's: torch's own collectives know nothing of the watch.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsdpc
from fsdpc.torch import fully_shard

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("ready", flush=True)
done = 0.0
while not done:
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    done = fsdpc.broadcast(float(Path(sys.argv[1]).exists()))
print("done", flush=True)
