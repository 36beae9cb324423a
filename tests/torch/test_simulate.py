"""What simulate() says that hosts send, against the counters of runs on pretended hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc.models import Llama, ModelConfig

from .test_hosts import join_again, leave, links

CONFIG = ModelConfig(vocab_size=128, dim=128, layers=3, heads=4, inner=256)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD", "HYBRID_SHARD",
              "HYBRID_SHARD_ZERO2")  # fmt: skip
MICRO_STEPS = 2


def build() -> Llama:
    with fsdpc.deferred_init():
        return Llama(CONFIG)


def sent_by_a_host(strategy: str, policy: Any, hosts: int) -> list[float]:
    """Bytes that each host's ranks sent to other hosts in the last of three steps."""
    mesh = None
    if strategy.startswith("HYBRID"):
        mesh = fsdpc.init_device_mesh("cpu", (hosts, 4 // hosts))
    model = build()
    for block in model.blocks():
        fsdpc.fully_shard(block, strategy=strategy, mesh=mesh, mp_policy=policy)
    fsdpc.fully_shard(model, strategy=strategy, mesh=mesh, mp_policy=policy)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    ids = np.zeros((1, 8), np.int64)
    for _ in range(3):
        before = links[0].sent_bytes
        for _ in range(MICRO_STEPS):
            model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = links[0].sent_bytes - before
    of_ranks = fsdpc.all_gather(np.array([sent])).reshape(hosts, -1)
    return [float(n) for n in of_ranks.sum(axis=1)]


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("ranks_of_host", [2, 1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_are_those_of_a_run(
    dtype: str, ranks_of_host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = 4 // ranks_of_host
    join_again(hosts, tmp_path, monkeypatch)
    fsdpc.torch._mesh.join()
    policy = fsdpc.MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = fsdpc.MixedPrecisionPolicy(
            param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32
        )
    for strategy in STRATEGIES:
        found = fsdpc.simulate(
            build(), (1, 8), hosts=hosts, ranks_per_host=ranks_of_host, bandwidth=1e9,
            latency=0.0, flops=1e12, strategy=strategy, mp_policy=policy, accumulate=MICRO_STEPS,
        )  # fmt: skip
        for sent in sent_by_a_host(strategy, policy, hosts):
            assert sent == found.sent_between, strategy
    leave()
