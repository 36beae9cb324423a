"""Operations in random cases beside torch; `make soak` draws twenty times as many.

A failure prints the operation, its number and the case: run it alone by
``pytest tests/ops/test_drawn.py -k NAME``, or call ``check(ROWS[name], seed(name, number))``.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch
from drawn import Case, Draw, check
from drawn_cases import clamp_tensors, masked_fill
from drawn_rows import ROWS, along

import fsdpc

CASES = 120  # of each operation: some 25 s on one core for all


def seed(name: str, number: int) -> list[int]:
    return [zlib.crc32(name.encode()), number]


def run(name: str, numbers: range) -> None:
    found = []
    for number in numbers:
        text = check(ROWS[name], seed(name, number))
        if text:
            found.append(f"{name} {number}: {text}"[:1000])
    assert not found, f"{len(found)} of {len(numbers)} cases\n" + "\n".join(found[:5])


@pytest.mark.filterwarnings("ignore")  # torch warns of degenerate cases
@pytest.mark.parametrize("name", ROWS)
def test_cases(name: str) -> None:
    run(name, range(CASES))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
def test_many_cases(name: str) -> None:
    run(name, range(CASES, 20 * CASES))


def ignoring_nan(d: Draw) -> Case:
    case = clamp_tensors(d)
    sign = 1 if case.says == "min" else -1
    return replace(case, ours=lambda x, b: fsdpc.functional.where(x * sign < b * sign, b, x))


def through_floats(d: Draw) -> Case:
    case = masked_fill(d)
    number = float(case.says.removeprefix("value "))
    return replace(case, ours=lambda x, m: fsdpc.functional.masked_fill(x, m, number))


def faulty_logsumexp(x: fsdpc.Tensor, dim: int) -> fsdpc.Tensor:
    """The difference of large numbers, unless the first element is among the largest."""
    first = (x.ndim and (*(slice(None),) * (dim % x.ndim), slice(0, 1))) or ()
    return (x[first] - fsdpc.functional.log_softmax(x, dim)[first]).squeeze(dim) if first else x


FAULTS = {  # each was there once
    "logsumexp": along(faulty_logsumexp, torch.logsumexp).draw,
    "clamp tensors": ignoring_nan,
    "masked_fill": through_floats,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, name, replace(ROWS[name], draw=FAULTS[name]))
    with pytest.raises(AssertionError, match=name):
        run(name, range(CASES))
