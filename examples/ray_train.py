"""Under Ray Train: TorchTrainer starts the ranks, fully_shard shards, checkpoints outlive a rank.

python examples/ray_train.py FOLDER [STEPS]   # two CPU workers; again, it goes on from FOLDER
"""

import sys
from collections.abc import Callable
from typing import Any

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import torch
from torch import nn

import fsdpc
from fsdpc.checkpoint import CheckpointManager
from fsdpc.torch import fully_shard  # was: torch.distributed.fsdp


def train(config: dict[str, Any], report: Callable[[dict[str, Any]], Any]) -> None:
    """Train on this worker; Ray calls it on each. `report` takes metrics, like ray.train.report."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)],
        nn.Linear(32, 8),
    )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)  # not ray.train.torch.prepare_model, which would wrap it in DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    manager = CheckpointManager(config["folder"], max_to_keep=2, every_steps=5)
    state = {"model": model, "optimizer": optimizer}
    begin = manager.restore(state) or 0  # also after Ray restarts a failed run
    for step in range(begin + 1, config["steps"] + 1):
        generator = torch.Generator().manual_seed(fsdpc.world_size() * step + fsdpc.rank())
        x = torch.randn(16, 6, 32, generator=generator)
        loss = nn.functional.mse_loss(model(x), x[..., :8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step(step, state)
        if step % 5 == 0:  # a report waits for those of the other workers
            mean = fsdpc.all_reduce(loss.item(), "mean")
            report({"step": step, "loss": mean, "begin": begin, "ranks": fsdpc.world_size()})


def main() -> None:
    """Train under Ray, on a cluster on this host that ends with the script."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, report
    from ray.train.torch import TorchConfig, TorchTrainer

    folder, steps = sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 20
    ray.init(num_cpus=2, object_store_memory=100 << 20)
    trainer = TorchTrainer(
        lambda config: train(config, report),
        train_loop_config={"folder": f"{folder}/checkpoints", "steps": steps},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=2)),
        torch_config=TorchConfig(backend="gloo"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
