"""Trains small torch models under the frontend; prints what came of it as JSON.

    torch_training.py DEVICE [RANKS]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdpc
import fsdpc.torch
from fsdpc.torch import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, fully_shard

STEPS = 2
MAX_NORM = 0.05  # below the norms of first steps
DELAYS = 77
# What several ranks run.
SHARED = frozenset({"mlp", "transformer bf16", "no_sync", "torch's AdamW", "rewritten",
                    "offloaded"})
HOME = torch.device("cpu")  # where torch's tensors are, for whichever device they stand


class Block(nn.Module):
    """x + gelu(linear(layer_norm(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Mlp(nn.Module):
    """Blocks between linear layers of odd sizes."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.again = again  # how activations are computed again: reentrant or not; None: kept
        self.first, self.last = nn.Linear(7, 12), nn.Linear(12, 5, bias=False)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.again is None else checkpoint(block, x, use_reentrant=self.again)
        return self.last(x)


class Transformer(nn.Module):
    """Two causal layers over words, with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(19, 12)
        layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers
        self.head = nn.Linear(12, 19, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, mask = self.words(ids), nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask.to(x.dtype), is_causal=True)
        return self.head(x)


def generator(step: int) -> torch.Generator:
    """Of one batch of this rank."""
    return torch.Generator().manual_seed(1000 * fsdpc.rank() + step)


def rows(step: int) -> torch.Tensor:
    """Inputs of an Mlp."""
    return torch.randn(4, 7, generator=generator(step))


def ids(step: int) -> torch.Tensor:
    """Inputs of a Transformer."""
    return torch.randint(19, (2, 6), generator=generator(step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients reach everything."""
    return (model(x).float() ** 2).mean()


def shard(model: Any, **options: Any) -> Any:
    """Every block a unit, and the rest one."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def values_of(model: nn.Module) -> dict[str, Any]:
    """Full parameters by name, as bits of float32."""
    return {name: value.float().flatten().view(torch.int32).tolist()
            for name, value in fsdpc.torch.get_model_state_dict(model).items()}


def number(value: Any) -> float:
    """A scalar, behind what computes it."""
    return float(value.detach())


def train(model: Any, batch: Callable[[int], torch.Tensor], optimizer: Any = None, *,
          micro_steps: int = 1, synced: bool = True, steps: int = STEPS) -> dict[str, Any]:
    """Train; return losses, norms and parameters."""
    own = isinstance(model, fsdpc.torch.FSDPModule)
    if optimizer is None:
        optimizer = (fsdpc.torch.optim.AdamW if own else torch.optim.AdamW)(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2)
    clip = clip_grad_norm_ if own else nn.utils.clip_grad_norm_
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_steps):
            if own and not synced:
                model.set_requires_gradient_sync(micro == micro_steps - 1)
            loss = loss_of(model, batch(10 * step + micro))
            loss.backward()
            losses.append(number(loss))
        norms.append(number(clip(model.parameters(), MAX_NORM)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "values": values_of(model)}


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    """The same model everywhere."""
    torch.manual_seed(5)
    return kind()


def frozen() -> nn.Module:
    """Of which the first layer and a norm do not train."""
    model = made(Mlp)
    for p in (*model.first.parameters(), *model.blocks[0].norm.parameters()):
        p.requires_grad_(False)
    return model


def deferred() -> Any:
    """Sharded on the meta device and filled from a state dict."""
    values = made(Mlp).state_dict()
    with torch.device("meta"):
        model = shard(Mlp())
    model.to_empty(device="cpu")
    model.load_state_dict(values)
    return model


def resumed(policy: Any = None) -> dict[str, Any]:
    """Some steps, a checkpoint, and one step by another model that loads it."""
    model = shard(made(Mlp), offload_policy=policy)
    optimizer = fsdpc.torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, rows, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        fsdpc.checkpoint.save(f"{folder}/a", {"model": model, "optimizer": optimizer})
        torch.manual_seed(6)
        again = shard(Mlp())
        optimizer = fsdpc.torch.optim.AdamW(again.parameters(), lr=1e-2)
        fsdpc.checkpoint.load(f"{folder}/a", {"model": again, "optimizer": optimizer})
    states = fsdpc.torch.get_optimizer_state_dict(again, optimizer)["state"]
    steps = {name: float(state["step"]) for name, state in states.items()}
    return {**train(again, rows, optimizer, steps=1), "steps": steps}


STATES = fsdpc.OffloadPolicy(optimizer="host")
ALL = fsdpc.OffloadPolicy(masters="host", gradients="host", optimizer="host")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Torch's own, over DTensors."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def clipped_by_torch() -> dict[str, Any]:
    """Torch's optimizer and its clipping, whose norms are global."""
    model = shard(made(Mlp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows(step)).backward()
        norms.append(number(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return {"norms": norms, "values": values_of(model)}


def rewritten() -> dict[str, Any]:
    """Values by every other way in: full copies, initialisation, rank 0's, a step's states."""
    model = shard(made(Mlp))
    with fsdpc.torch.summon_full_params(model), torch.no_grad():
        model.last.weight.mul_(2)
    torch.manual_seed(8)
    model.blocks[0].linear.reset_parameters()
    values = {"first.bias": torch.arange(7.0, 19.0)}
    fsdpc.torch.set_model_state_dict(model, values, strict=False, rank0_only=True)
    model.first.weight.data.add_(1)
    with torch.no_grad():
        model.blocks[1].norm.weight.mul_(0.5)
    model.unshard()
    seen = model.first.weight.sum()
    model.reshard()
    optimizer = torch_adamw(model)
    result = train(model, rows, optimizer, steps=1)
    states = fsdpc.torch.get_optimizer_state_dict(model, optimizer)
    fsdpc.torch.set_optimizer_state_dict(model, optimizer := torch_adamw(model), states)
    with model.hold(), torch.no_grad():
        held = number(loss_of(model, rows(1)))
    grads = model.last.weight.grad.full_tensor().flatten().tolist()
    return {**train(model, rows, optimizer, steps=1), "before": result, "held": held,
            "seen": number(seen), "grads": grads}


def offloaded() -> dict[str, Any]:
    """Masters, gradients and states in host memory; weights are read and written between steps."""
    model = shard(made(Mlp), offload_policy=ALL)
    optimizer = fsdpc.torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = [train(model, rows, optimizer, micro_steps=2)]
    average = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p, 0.5)
            p.copy_(mean)
        model.last.weight.data.mul_(2)
    results.append(train(model, rows, optimizer, synced=False, micro_steps=2))
    states = fsdpc.torch.get_optimizer_state_dict(model, optimizer)["state"]
    moments = {name: state["exp_avg_sq"].flatten().tolist() for name, state in states.items()}
    return {**results[1], "before": results[0], "moments": moments}


def of_fsdp1() -> dict[str, Any]:
    """FSDP1's class, its clipping and its state dicts."""
    plain = made(Mlp)
    policy = fsdpc.torch.wrap.ModuleWrapPolicy({Block})
    model = fsdpc.torch.FullyShardedDataParallel(plain, auto_wrap_policy=policy, device_id=HOME)
    result = train(model, rows)
    optimizer = fsdpc.torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, rows(4)).backward()
    clipped = number(model.clip_grad_norm_(MAX_NORM))
    optimizer.step()
    states = model.optim_state_dict(model, optimizer)["state"]
    moments = {name: state["exp_avg"].flatten().tolist() for name, state in states.items()}
    return {**result, "clipped": clipped, "moments": moments}


def cases() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every case by name."""
    yield "mlp", lambda: train(shard(made(Mlp)), rows)
    yield "mlp bf16", lambda: train(shard(made(Mlp), mp_policy=BF16), rows)
    yield "mlp kept", lambda: train(shard(made(Mlp), reshard_after_forward=False), rows)
    yield "transformer", lambda: train(shard(made(Transformer)), ids)
    yield "transformer bf16", lambda: train(shard(made(Transformer), mp_policy=BF16), ids)
    yield "accumulated", lambda: train(shard(made(Mlp)), rows, micro_steps=2)
    yield "no_sync", lambda: train(shard(made(Mlp)), rows, micro_steps=2, synced=False)
    yield "reentrant", lambda: train(shard(made(lambda: Mlp(True))), rows)
    yield "recomputed", lambda: train(shard(made(lambda: Mlp(False))), rows)
    yield "frozen", lambda: train(shard(frozen()), rows)
    yield "deferred", lambda: train(deferred(), rows)
    yield "resumed", resumed
    yield "clipped by torch", clipped_by_torch
    yield "torch's AdamW", lambda: with_torch_adamw(shard(made(Mlp)))
    yield "rewritten", rewritten
    yield "offloaded", offloaded
    yield "states offloaded", lambda: train(
        shard(made(Transformer), mp_policy=BF16, offload_policy=STATES), ids)
    yield "resumed offloaded", lambda: resumed(CPUOffloadPolicy())
    yield "fsdp1", of_fsdp1
    yield "narrow", lambda: train(shard(made(Mlp).to(torch.bfloat16)), rows_bf16)


def with_torch_adamw(model: Any) -> dict[str, Any]:
    """Torch's AdamW over DTensors."""
    return train(model, rows, torch_adamw(model))


def rows_bf16(step: int) -> torch.Tensor:
    """Inputs of an Mlp in bfloat16."""
    return rows(step).bfloat16()


def run_cases(names: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Run these cases, or all; on "cuda" torch's stream changes with each, and work comes late."""
    gpu = None
    torch.set_num_threads(1)
    if sys.argv[1] == "cuda":
        import torch_beside

        gpu = torch_beside.Gpu()
        gpu.runtime.delays(DELAYS)
    results = {}
    for name, run in cases():
        if names and name not in names:
            continue
        with gpu.stream(gpu.runtime.stream()) if gpu else nullcontext():
            results[name] = run()
    return results


def run_rank() -> dict[str, Any]:
    """What several ranks do, and what they communicate over."""
    return {**run_cases(SHARED), "transport": fsdpc.distributed.world().transport}


def main() -> None:
    """Run on one rank, plain torch too, or on several."""
    if len(sys.argv) > 2:
        print(json.dumps(fsdpc.launch(run_rank, int(sys.argv[2]), timeout=200)))
        return
    results = run_cases()
    results["plain mlp"] = train(made(Mlp), rows)
    results["plain transformer"] = train(made(Transformer), ids)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
