"""Unsharded parameters in private memory have the bits of those in the parameter buffer."""

from __future__ import annotations

import os

import pytest
import torch

import fsdpc
from fsdpc.launching.forked import Report, run_forked
from fsdpc.torch import MixedPrecisionPolicy, clip_grad_norm_, optim

from .common import batch, build, full_parameters, loss_of, shard


def trained() -> dict[str, bytes]:
    """Full parameters after steps of each precision and way of resharding, as bytes."""
    fsdpc.init()
    found = {}
    for param_dtype in (None, torch.bfloat16):
        for reshard in (True, False):
            policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
            model = shard(build(), mp_policy=policy, reshard_after_forward=reshard)
            optimizer = optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(3):
                loss_of(model, batch(step, fsdpc.rank())).backward()
                clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            for name, value in full_parameters(model).items():
                found[f"{name} {param_dtype} {reshard}"] = value.numpy().tobytes()
    fsdpc.shutdown()
    return found


@pytest.mark.ranks(1, init=False)
def test_no_alias_mode_has_the_same_bits() -> None:
    results = []
    for mode in ("0", "1"):
        said: list[str] = []
        outcome = run_forked(lambda: Report("ok", (os.environ["FSDPC_NO_ALIAS"], trained())), 2,
                             said.append, timeout=300, env={"FSDPC_NO_ALIAS": mode})  # fmt: skip
        assert not outcome.failures, outcome.describe() + "".join(said)
        for report in outcome.reports:
            assert report is not None and report.value[0] == mode
            results.append(report.value[1])
    assert len(results) == 4 and len(results[0]) == 4 * 15
    assert all(result == results[0] for result in results[1:])
