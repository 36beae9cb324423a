"""State dicts of optimizers over sharded parameters: each rank's are its own rows, and say so."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdpc
from fsdpc.torch import optim

from .common import batch, build, join_gloo, loss_of, shard

MAKERS = {"torch": torch.optim.AdamW, "ours": optim.AdamW}


def trained(kind: str) -> tuple[Any, Any]:
    ours = shard(build())
    optimizer = MAKERS[kind](ours.parameters())
    for step in range(2):
        loss_of(ours, batch(step, fsdpc.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours, optimizer


def sent_from_rank_0(value: Any) -> Any:
    """Through torch.save and torch.load, which takes nothing but plain types."""
    file = io.BytesIO()
    torch.save(value, file)
    given = [file.getvalue()]
    dist.broadcast_object_list(given, src=0)
    return torch.load(io.BytesIO(given[0]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("stepped", [False, True])
def test_states_of_another_rank_are_refused(kind: str, stepped: bool, tmp_path: Any) -> None:
    join_gloo(tmp_path)
    ours, optimizer = trained(kind)
    own = copy.deepcopy(optimizer.state_dict())
    other = sent_from_rank_0(optimizer.state_dict())
    fresh = optimizer if stepped else MAKERS[kind](ours.parameters())
    if fsdpc.rank() == 0:
        fresh.load_state_dict(other)
    else:
        with pytest.raises(
            ValueError, match="in the state dict is of rows 0:.* this rank has rows"
        ):
            fresh.load_state_dict(other)
            fresh.step()  # torch's had no hooks before its first step
        fresh = MAKERS[kind](ours.parameters())
    fresh.load_state_dict(copy.deepcopy(own))
    loss_of(ours, batch(3, fsdpc.rank())).backward()
    fresh.step()
    state = fresh.state_dict()["state"][0]
    assert state["step"] == 3
    assert not torch.equal(state["exp_avg"], own["state"][0]["exp_avg"])
    dist.destroy_process_group()


@pytest.mark.ranks([1, 2, 3])
def test_rows_of_any_dtype_are_gathered() -> None:
    model = shard(build())
    for p in model.parameters():
        for dtype in (torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.float64):
            copy = p.detach().to(dtype)
            assert torch.equal(copy.full_tensor(), p.full_tensor().to(dtype))
        numel = p.to_local().numel()
        with pytest.raises(ValueError, match=f"and this rank's rows have {numel}$"):
            p.fsdpc.unit.collect(p.fsdpc._index, fsdpc._core.zeros(numel + 1))
