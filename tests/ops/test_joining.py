"""Tensors joined, cut, padded, turned, repeated, multiplied by letters, beside NumPy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from beside import noise, same_as_torch
from oracle import FLOATS

import fsdpc

F = fsdpc.functional
CASES = {
    "cat": (lambda x: F.cat([x, x, x[:1]], 0), lambda x: torch.cat([x, x, x[:1]], 0)),
    "stack": (lambda x: F.stack([x, x * 2], 1), lambda x: torch.stack([x, x * 2], 1)),
    "split": (lambda x: F.split(x, [1, 3], 1)[1], lambda x: x.split([1, 3], 1)[1]),
    "chunk": (lambda x: x.chunk(3, 2)[1], lambda x: x.chunk(3, 2)[1]),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3), value=0.5),
            lambda x: TF.pad(x, (1, 2, 0, 3), value=0.5)),
    "pad less": (lambda x: F.pad(x, (-1, 2, 3, -2)), lambda x: TF.pad(x, (-1, 2, 3, -2))),
    "pad reflect": (lambda x: F.pad(x, (2, 1, 3, 0), "reflect"),
                    lambda x: TF.pad(x[None], (2, 1, 3, 0), "reflect")[0]),
    "pad replicate": (lambda x: F.pad(x, (2, 7, 1, 0), "replicate"),
                      lambda x: TF.pad(x[None], (2, 7, 1, 0), "replicate")[0]),
    "flip": (lambda x: x.flip((0, -1)), lambda x: x.flip((0, -1))),
    "roll": (lambda x: x.roll(2, 1), lambda x: x.roll(2, 1)),
    "repeat": (lambda x: x.repeat(2, 1, 3, 2), lambda x: x.repeat(2, 1, 3, 2)),
    "repeat none": (lambda x: x.repeat(0, 1, 1), lambda x: x.repeat(0, 1, 1)),
    "interleave": (lambda x: x.repeat_interleave(3, 1), lambda x: x.repeat_interleave(3, 1)),
    "tril": (lambda x: x.tril(-1), lambda x: x.tril(-1)),
    "triu": (lambda x: x.triu(1), lambda x: x.triu(1)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CASES)
def test_beside_torch(name, dtype):
    op, theirs = CASES[name]
    same_as_torch(op, theirs, [noise(3, 4, 5)], dtype, 3, name)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64"])
@pytest.mark.parametrize("name", CASES)
def test_integers(name, dtype):
    if name in ("stack", "pad") and dtype in ("bool", "uint8"):
        pytest.skip("no arithmetic on them")
    op, theirs = CASES[name]
    a = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 9, (3, 4, 5))
    y = op(fsdpc.tensor(a).to(dtype))
    assert y.dtype.name == dtype
    assert y.to("int64").tolist() == theirs(torch.tensor(a)).tolist()


EQUATIONS = [
    ("ij,jk->ik", (3, 4), (4, 5)), ("ij,jk", (3, 4), (4, 5)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    ("i,j->ij", (3,), (4,)), ("i,i->", (5,), (5,)), ("ij,kj->ki", (3, 4), (5, 4)),
    ("abc,cd->dab", (2, 3, 4), (4, 5)), ("ijk,k->j", (2, 3, 4), (4,)),
    ("ij,ij->ij", (3, 4), (3, 4)),
    ("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)), ("i,jk->ij", (2,), (3, 4)),
    (",ij->ji", (), (2, 3)),
    ("...ij,...jk->...ik", (2, 3, 4), (5, 1, 4, 2)), ("i...,...->i...", (3, 2, 4), (4,)),
    ("...i,ij", (2, 3, 4), (4, 5)), ("b...,b...->...", (2, 3), (2, 3)),
    ("...ij,jk->ik", (2, 3, 4), (4, 5)),
    ("ij,jk->ik", (3, 1), (4, 2)), ("...,i->...i", (), (3,)),
]  # fmt: skip


@pytest.mark.parametrize(("equation", "a", "b"), EQUATIONS)
def test_einsum(equation, a, b):
    inputs = [noise(*a), noise(*b, seed=1)]
    for dtype in FLOATS:
        same_as_torch(lambda x, y: F.einsum(equation, x, y),
                      lambda x, y: torch.einsum(equation, x, y), inputs, dtype, 6)  # fmt: skip


def test_outer_and_one_hot():
    same_as_torch(F.outer, torch.outer, [noise(3), noise(4, seed=1)])
    ids = fsdpc.tensor([[0, 2], [1, 1]])
    assert F.one_hot(ids, 3).tolist() == [[[1, 0, 0], [0, 0, 1]], [[0, 1, 0], [0, 1, 0]]]
    assert F.one_hot(ids, 3).dtype is fsdpc.int64
    assert F.one_hot(ids[:0], 3).shape == (0, 2, 3)
    for wrong, id_ in ((ids, 2), (ids - 1, -1), (ids.to("uint8"), 2)):
        with pytest.raises(IndexError, match=f"id {id_} of 2 classes"):
            F.one_hot(wrong, 2)
    with pytest.raises(TypeError, match="integers, not float32"):
        F.one_hot(ids.float(), 3)


def test_what_is_refused():
    x = fsdpc.zeros(2, 3)
    for equation in ("ii,ij->j", "ij,jk->il", "ij", "i...j,ij->j...k", "......,ij->j",
                     "ijk...,ij->j", "ij,jk,kl->il"):  # fmt: skip
        with pytest.raises(ValueError, match="einsum"):
            F.einsum(equation, x, x)
    with pytest.raises(ValueError, match="index 'j' of 'ij,jk->ik' has 3 and 2 elements"):
        F.einsum("ij,jk->ik", x, x)
    with pytest.raises(ValueError, match="chunk: 0 parts"):
        x.chunk(0)
    with pytest.raises(ValueError, match="pad: 3 widths for 2 dimensions"):
        F.pad(x, (1, 1, 1))
    with pytest.raises(ValueError, match="widths 3, 0 reflect only 3 elements"):
        F.pad(x, (3, 0), "reflect")
    with pytest.raises(ValueError, match="mode is 'constant', 'reflect' or 'replicate'"):
        F.pad(x, (1, 0), "circular")
    with pytest.raises(ValueError, match=r"repeat: counts \[2\] for a tensor of 2 dimensions"):
        x.repeat(2)
    with pytest.raises(ValueError, match="outer: shapes"):
        F.outer(x, x)
    with pytest.raises(ValueError, match="tril: a tensor of 1 dimensions"):
        x[0].tril()


def test_parts_of_nothing_and_numbers_of_numpy():
    """As PyTorch cuts them."""
    empty = fsdpc.zeros(2, 0)
    for ours, want in (
        (F.split(empty, 2, 1), [(2, 0)]),
        (F.split(empty, 0, -1), [(2, 0)]),
        (F.chunk(empty, 3, 1), [(2, 0)] * 3),
        (F.split(fsdpc.zeros(0), []), []),
        (F.split(fsdpc.zeros(5), np.int64(2)), [(2,), (2,), (1,)]),
        (F.split(fsdpc.zeros(5), np.array([1, 4])), [(1,), (4,)]),
        (F.chunk(fsdpc.zeros(5), np.int64(2)), [(3,), (2,)]),
    ):
        assert [part.shape for part in ours] == want
    assert fsdpc.ones(2).repeat(np.int64(2)).shape == (4,)


def test_sizes_that_cut_nothing_are_named():
    x = fsdpc.zeros(2)
    for sizes, text in (
        (0, "split: parts of 0 for dimension 0 of 2 elements; give at least 1"),
        (-1, "split: parts of -1"),
        ([3, -1], r"split: sizes \[3, -1\] .* at least 0"),
    ):
        with pytest.raises(ValueError, match=text):
            F.split(x, sizes)
    for op in (F.split, F.chunk):
        with pytest.raises(IndexError, match=f"{op.__name__}: dimension 1 of a tensor with 1"):
            op(x, 1, 1)
    with pytest.raises(ValueError, match="repeat_interleave: -1 repeats"):
        x.repeat_interleave(-1, 0)
