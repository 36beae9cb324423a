"""A torch.profiler trace with the name of every unit: what waited, what computed.

    fsdpc run --ranks 2 examples/torch/07_profiler.py [FOLDER]

Open FOLDER/trace_rank0.json at https://ui.perfetto.dev or in chrome://tracing.
"""

import sys
from pathlib import Path

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdpc
from fsdpc.torch import fully_shard, optim

FOLDER = Path(sys.argv[1] if sys.argv[1:] else ".")


class Model(nn.Module):
    """A few layers of a transformer between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(0)
model = Model()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = optim.AdamW(model.parameters(), lr=1e-3)


def step() -> None:
    x = torch.randn(8, 32, 16)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(2):
    step()  # the first step records the order of units; later steps prefetch
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for _ in range(3):
        step()

if fsdpc.rank() == 0:
    profiler.export_chrome_trace(str(FOLDER / "trace_rank0.json"))
    for event in profiler.key_averages():
        if event.key.startswith("FSDP::"):
            print(f"{event.key}: {event.count} times, {event.cpu_time_total / event.count:.0f} us")
