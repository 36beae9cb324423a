"""audit() behind the torch frontend; tests/dist has the rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, fully_shard

from .common import batch, build, loss_of


def sharded(policy: MixedPrecisionPolicy | None = None) -> Any:
    model = build()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy or MixedPrecisionPolicy())
    return fully_shard(model, mp_policy=policy or MixedPrecisionPolicy())


@pytest.mark.ranks(2)
def test_gradients_are_checked_as_natively() -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for policy in (None, half):
        model = sharded(policy)
        auditor, seen = fsdpc.audit(model, every=1), []
        for step in range(5):
            for micro in range(2):
                loss_of(model, batch(10 * step + micro, fsdpc.rank())).backward()
            seen.append(auditor.step())
            model.zero_grad()
        assert len({each.unit for each in seen}) == 4
        assert all(0 < each.largest < 1 for each in seen)
    for wrong in range(2):
        model = sharded()
        auditor = fsdpc.audit(model, every=wrong + 1)
        for step in range(wrong + 1):
            loss_of(model, batch(step, fsdpc.rank())).backward()
            if step < wrong:
                assert auditor.step() is None
                model.zero_grad()
                continue
            if fsdpc.rank() == 0:
                model.first.weight.grad.to_local()[1, 3] += 1e-3
            with pytest.raises(fsdpc.MismatchError, match=r"'first.weight' .* first at \[1, 3\]"):
                auditor.step()
