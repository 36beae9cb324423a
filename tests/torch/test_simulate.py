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


def sent_by_a_host(strategy: str, hosts: int, **options: Any) -> list[float]:
    """Bytes that each host's ranks sent to other hosts in the last of three steps."""
    mesh = None
    if strategy.startswith("HYBRID"):
        mesh = fsdpc.init_device_mesh("cpu", (hosts, 4 // hosts))
    model = build()
    for block in model.blocks():
        fsdpc.fully_shard(block, strategy=strategy, mesh=mesh, **options)
    fsdpc.fully_shard(model, strategy=strategy, mesh=mesh, **options)
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
@pytest.mark.parametrize(
    ("dtype", "form"), [("fp32", None), ("bf16", None), ("bf16", "int8")],
    ids=["fp32", "bf16", "bf16-int8"],
)  # fmt: skip
def test_bytes_are_those_of_a_run(
    dtype: str,
    form: str | None,
    ranks_of_host: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = 4 // ranks_of_host
    join_again(hosts, tmp_path, monkeypatch)
    fsdpc.torch._mesh.join()
    policy = fsdpc.MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = fsdpc.MixedPrecisionPolicy(
            param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32
        )
    compression = fsdpc.Compression(gather=form, reduce=form)
    for strategy in STRATEGIES:
        found = fsdpc.simulate(
            build(), (1, 8), hosts=hosts, ranks_per_host=ranks_of_host, bandwidth=1e9,
            latency=0.0, flops=1e12, strategy=strategy, mp_policy=policy, accumulate=MICRO_STEPS,
            compression=compression,
        )  # fmt: skip
        sent_by_hosts = sent_by_a_host(
            strategy, hosts, mp_policy=policy, compression=compression
        )
        if form is None:
            assert sent_by_hosts == [found.sent_between] * hosts, strategy
        # Sums of groups are coded apart, whose sizes the record does not have.
        assert sent_by_hosts == pytest.approx([found.sent_between] * hosts, rel=2e-3), strategy
    leave()
