"""What a rank of test_hosts.py does: python train.py RANKS_OF_HOST [raise]."""

import os
import sys
import zlib

import numpy as np

import fsdpc
from fsdpc import nn

PER_HOST = int(sys.argv[1])
RANK, SIZE = (
    int(next(os.environ[name] for name in names if name in os.environ))
    for names in (("OMPI_COMM_WORLD_RANK", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
)
os.environ.update(
    RANK=str(RANK),
    WORLD_SIZE=str(SIZE),
    LOCAL_RANK=str(RANK % PER_HOST),
    LOCAL_WORLD_SIZE=str(PER_HOST),
    FSDPC_RUN_ID=f"hosts {os.getppid()}",
)


class Net(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.last = nn.Linear(64, 32)

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        return self.last(fsdpc.functional.gelu(self.first(x)))


fsdpc.init()
fsdpc.manual_seed(0)
model = Net()
fsdpc.fully_shard(model.first)
fsdpc.fully_shard(model)
optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
rng = np.random.default_rng(RANK)
for step in range(5):
    if "raise" in sys.argv and step == 2 and RANK == 3:
        raise RuntimeError("rank 3 has enough")
    x = fsdpc.tensor(rng.standard_normal((8, 32)).astype(np.float32))
    optimizer.zero_grad()
    y = model(x)
    (y * y).mean().backward()
    fsdpc.clip_grad_norm_(model, 0.5)
    optimizer.step()
crc = 0
for name, value in sorted(model.state_dict().items()):
    crc = zlib.crc32(name.encode(), crc)
    crc = zlib.crc32(np.ascontiguousarray(np.asarray(value)).tobytes(), crc)
sys.stdout.write(f"crc:{crc:08x} \n")
