"""Deterministic mode under torch: the same bits however ranks and micro-steps split a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdpc
from fsdpc import _core
from fsdpc.launching.forked import Report, run_forked
from fsdpc.torch import MixedPrecisionPolicy, full_grad, optim
from fsdpc.torch._unit import sharded_modules

from .common import batch, build, full_parameters, loss_of, shard

MICRO = 8


def trained(postponed: bool, total: int = MICRO, dtype: torch.dtype | None = None) -> int:
    """Two steps over the same micro-batches each, however ranks share them; a checksum.

    Of powers of two the loss is divided, of others it is left whole.
    """
    fsdpc.init(deterministic=True)
    ours = shard(build(), mp_policy=MixedPrecisionPolicy(dtype, dtype))
    optimizer = optim.AdamW(ours.parameters(), lr=1e-2)
    ranks = fsdpc.world_size()
    if total != MICRO:
        for _, module in sharded_modules(ours):
            module.set_gradient_divide_factor(total)
    for step in range(2):
        for micro in range(total // ranks):
            last = micro == total // ranks - 1
            ours.set_requires_gradient_sync(last or not postponed)
            loss = loss_of(ours, batch(step, micro * ranks + fsdpc.rank()).to(dtype))
            (loss * ranks / total if total == MICRO else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = torch.cat([v.reshape(-1) for v in full_parameters(ours).values()])
    fsdpc.shutdown()
    return _core.crc32c(0, values.numpy())


def results(ranks: int, postponed: bool, *options: Any) -> tuple[set[int], str]:
    lines: list[str] = []
    outcome = run_forked(
        lambda: Report("ok", trained(postponed, *options)), ranks, lines.append, timeout=300
    )
    assert not outcome.failures, outcome.describe()
    return {report.value for report in outcome.reports if report}, "".join(lines)


@pytest.mark.ranks(1, init=False)
def test_micro_steps_that_postpone_gradients_do_not_see_the_split() -> None:
    (alone,), text = results(1, True)
    assert text == ""
    for ranks in (2, 4):
        assert results(ranks, True) == ({alone}, "")


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_splits_other_than_powers_of_two(dtype: torch.dtype | None) -> None:
    (alone,), text = results(1, True, 12, dtype)
    assert text == ""
    for ranks in (2, 3, 4, 6):
        assert results(ranks, True, 12, dtype) == ({alone}, "")


@pytest.mark.ranks(1, init=False)
def test_micro_steps_that_hand_out_gradients_warn_once() -> None:
    _, text = results(2, False)
    for rank in "01":
        named = f"fsdpc rank {rank}: warning: deterministic mode: gradients of '"
        assert text.count(named) == 1
    assert "call set_requires_gradient_sync(False) on the model" in text


def half(divided: bool) -> int:
    """A checksum of small gradients in fp16, of eight micro-batches however they are split."""
    fsdpc.init(deterministic=True)
    ours = shard(build(), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))
    ranks = fsdpc.world_size()
    if not divided:
        for _, module in sharded_modules(ours):
            module.set_gradient_divide_factor(MICRO)
    for micro in range(MICRO // ranks):
        ours.set_requires_gradient_sync(micro == MICRO // ranks - 1)
        loss = loss_of(ours, batch(0, micro * ranks + fsdpc.rank()).half()) * 1e-2
        (loss * ranks / MICRO if divided else loss).backward()
    values = torch.cat([full_grad(p).reshape(-1) for p in ours.parameters()])
    fsdpc.shutdown()
    return _core.crc32c(0, values.numpy())


@pytest.mark.ranks(1, init=False)
def test_fp16_sees_the_split_unless_the_factor_divides() -> None:
    def run(ranks: int, divided: bool) -> tuple[set[int], str]:
        lines: list[str] = []
        outcome = run_forked(lambda: Report("ok", half(divided)), ranks, lines.append, timeout=300)
        assert not outcome.failures, outcome.describe()
        return {report.value for report in outcome.reports if report}, "".join(lines)

    (alone,), text = run(1, False)
    assert text == "" and run(2, False) == ({alone}, "")
    (rounded,), text = run(1, True)
    assert rounded != alone and text.count("are fp16 and divided by micro-steps too early") == 1
    assert "call set_gradient_divide_factor(ranks x micro-steps)" in text
