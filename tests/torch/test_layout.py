"""The layout of torch modules is what the torch frontend holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
import fsdpc.torch
from fsdpc.torch import fully_shard


def made(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(3)
    with torch.device(device):
        return nn.Sequential(nn.Linear(9, 12), nn.Conv1d(2, 3, 5), nn.Linear(12, 9))


@pytest.mark.ranks([1, 3])
def test_the_layout_is_what_ranks_have() -> None:
    model: Any = made()
    unsharded = {name: p.detach().clone() for name, p in model.named_parameters()}
    for child in model:
        fully_shard(child)
    fully_shard(model)
    layout = fsdpc.sharding_layout(model)
    owned = {f"{unit}.{p.name}": rows for unit, p, rows in layout.owned(fsdpc.rank())}
    for name, p in model.named_parameters():
        own = owned.get(name)
        first, numel = (own.first, own.numel) if own else (0, 0)
        rows = unsharded[name].reshape(-1)[first : first + numel]
        assert torch.equal(p.detach().to_local().reshape(-1), rows)
    assert model._repr_html_() == layout._repr_html_()
    planned = fsdpc.sharding_layout(made("meta"), fsdpc.world_size(), plan={"*": {}})
    assert planned.units[1:] == layout.units[1:]
