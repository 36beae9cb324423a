"""Writes to parts of parameters and gradients: they are right, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .common import assert_same_grads, assert_same_parameters, full
from .test_reads import stepped, stepped_twins


@pytest.mark.ranks([1, 2])
def test_masks_choose_what_is_written() -> None:
    for write in (
        lambda p: p.data.masked_fill_(p > 0, 0),
        lambda p: p.data.mul_(p <= 0),
        lambda p: p.data.__setitem__(p.detach() > 0, 0),
    ):
        _, p = stepped()
        whole = full(p)
        write(p)
        assert torch.equal(full(p), whole.clamp(max=0))


#: Writes to a part of a parameter.
WRITES: dict[str, Callable[[Any], Any]] = {
    "row": lambda p: p[0].zero_(),
    "last row": lambda p: p[-1].fill_(2.0),
    "row of data": lambda p: p.data[3].zero_(),
    "set": lambda p: p.__setitem__(0, 1.0),
    "set element": lambda p: p.__setitem__((-1, 0), 1.0),
    "set of data": lambda p: p.data.__setitem__(slice(1, 4), 1.0),
    "set of a gradient": lambda p: p.grad.__setitem__(0, 0.0),
    "narrow": lambda p: p.narrow(0, 1, 2).mul_(2),
    "chunk": lambda p: p.chunk(2)[1].mul_(2),
    "diagonal": lambda p: p.diagonal().fill_(1),
    "copy": lambda p: p[0].copy_(p[1]),
    "foreach": lambda p: torch._foreach_zero_([p[1]]),
    "drawn": lambda p: p[0].normal_(),
    "drawn rows": lambda p: p[:2].uniform_(),
    "drawn column": lambda p: p[:, 0].normal_(),
    "drawn transposed": lambda p: p.T.exponential_(),
    "view": lambda p: p.view(-1).zero_(),
    "column": lambda p: p[:, 2].zero_(),
    "column of a transpose": lambda p: p.T[2].fill_(3),
    "set column": lambda p: p.__setitem__((slice(None), 2), 1.0),
    "transposed": lambda p: p.T.fill_(3),
    "eye": nn.init.eye_,
    "eye out": lambda p: torch.eye(*p.shape, out=p),
    "product": lambda p: p.addmm_(p @ p.T, p.clone()),
    "tril": lambda p: p.tril_(),
    "norm of columns": lambda p: p.div_(p.norm(dim=0, keepdim=True)),
    "centred": lambda p: p.sub_(p.mean(0)),
    "out": lambda p: torch.mul(p, 2.0, out=p),
}
#: Those that are right on any number of ranks; of the others some may be refused.
ARE_RIGHT = {
    "column",
    "column of a transpose",
    "set column",
    "transposed",
    "norm of columns",
    "centred",
    "out",
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("dim", [20, 5])
def test_no_write_is_lost(dim: int) -> None:
    """Each is right, or refused by name with nothing written."""
    wrong = {}
    for name, write in WRITES.items():
        try:
            check_write(name, write, dim)
        except (AssertionError, ValueError) as error:
            wrong[name] = str(error).strip().splitlines()[0]
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


def check_write(name: str, write: Callable[[Any], Any], dim: int) -> None:
    ours, plain = stepped_twins(dim)
    p = ours.first.weight
    before, rows = (full(p), full(p.grad)), p.to_local()
    with torch.no_grad():
        torch.manual_seed(7)
        write(plain.first.weight)
        torch.manual_seed(7)
        try:
            write(p)
        except (RuntimeError, NotImplementedError) as error:
            assert name not in ARE_RIGHT, error
            assert torch.equal(full(p), before[0]) and torch.equal(full(p.grad), before[1])
            assert re.search(r"rows \d+:\d+ of .*first.weight'", str(error)), error
            return
    assert p.to_local().data_ptr() == rows.data_ptr() and p.to_local().shape == rows.shape
    assert_same_parameters(ours, plain)
    assert_same_grads(ours, plain)
