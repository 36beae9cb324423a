"""Cases of operations that need arguments of their own, for the table in drawn_rows.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF
from drawn import ANY, FLOATS, INTS, NUMBERS, TORCH, Case, Draw

import fsdpc
from fsdpc import functional as F

Ours = Callable[..., Any]


def where_tensors(d: Draw) -> Case:
    shape = d.shape()
    given = [d.tensor(d.broadcastable(shape), ["bool"]), d.tensor(shape, ANY)]
    given.append(d.tensor(d.broadcastable(shape), ANY))
    return Case(given, F.where, torch.where)


def where_number(d: Draw) -> Case:
    shape, number = d.shape(), d.number()
    given = [d.tensor(d.broadcastable(shape), ["bool"]), d.tensor(shape, NUMBERS)]
    if d.flag():
        return Case(given, lambda c, x: F.where(c, x, number),
                    lambda c, x: torch.where(c, x, number), f"else {number}")  # fmt: skip
    return Case(given, lambda c, x: F.where(c, number, x),
                lambda c, x: torch.where(c, number, x), f"then {number}")  # fmt: skip


def masked_fill(d: Draw) -> Case:
    shape, number = d.shape(), d.number()
    given = [d.tensor(shape, NUMBERS), d.tensor(d.broadcastable(shape), ["bool"])]
    return Case(given, lambda x, m: F.masked_fill(x, m, number),
                lambda x, m: x.masked_fill(m, number), f"value {number}")  # fmt: skip


def clamp_numbers(d: Draw) -> Case:
    x = d.tensor(d.shape(), NUMBERS)
    whole = x.dtype in INTS
    low, high = (d.choose([None, d.number(whole)]) for _ in range(2))
    if low is None and high is None:
        low = 0
    return Case([x], lambda x: F.clamp(x, low, high), lambda x: torch.clamp(x, low, high),
                f"bounds {low}, {high}")  # fmt: skip


def clamp_tensors(d: Draw) -> Case:
    shape = d.shape()
    x = d.tensor(shape)
    bound = d.tensor(d.broadcastable(shape), [x.dtype])
    name = d.choose(["min", "max"])
    return Case([x, bound], lambda x, b: F.clamp(x, **{name: b}),
                lambda x, b: torch.clamp(x, **{name: b}), name)  # fmt: skip


def sizes(d: Draw, shape: tuple[int, ...]) -> tuple[Any, ...]:
    dim = d.dim(shape)
    extent = shape[dim] if shape else 0
    if d.flag():
        return d.choose([-1, 0, 1, 2, 3, 40]), dim
    first = int(d.rng.integers(0, extent + 1))
    return [first, extent - first], dim


def padding(d: Draw, shape: tuple[int, ...]) -> tuple[Any, ...]:
    n = int(d.rng.integers(0, len(shape) + 1))
    number = d.number()
    number = 3 if abs(number) > 2**53 and number == number // 1 else number  # torch rounds it
    return [int(w) for w in d.rng.integers(-1, 3, 2 * n)], "constant", number


def folded(d: Draw, shape: tuple[int, ...]) -> tuple[Any, ...]:
    order = tuple(int(i) for i in d.rng.permutation(len(shape)))
    return (order,)


def expanded(d: Draw, shape: tuple[int, ...]) -> tuple[Any, ...]:
    lead = d.shape(0, 2)
    return ((*lead, *(d.choose([n, 4]) if n == 1 else n for n in shape)),)


def gather(d: Draw) -> Case:
    shape = d.shape(1)
    dim = d.dim(shape)
    x, index = d.tensor(shape, ANY), d.tensor(shape, ["int64"], 0)
    index.values = index.values % max(shape[dim], 1)
    return Case([x, index], lambda x, i: F.gather(x, dim, i), lambda x, i: x.gather(dim, i))


def scatter(d: Draw) -> Case:
    shape = d.shape(1)
    dim = d.dim(shape)
    x, index = d.tensor(shape), d.tensor(shape, ["int64"], 0)
    index.values = index.values % max(shape[dim], 1)
    src = d.tensor(shape, [x.dtype])
    return Case([x, index, src], lambda x, i, s: F.scatter_add(x, dim, i, s),
                lambda x, i, s: x.scatter_add(dim, i, s))  # fmt: skip


def select(d: Draw) -> Case:
    shape = d.shape(1)
    dim = d.dim(shape)
    x, index = d.tensor(shape, ANY), d.tensor(d.shape(1, 1), ["int64", "int32"], 0)
    index.values = index.values % max(shape[dim], 1)
    return Case([x, index], lambda x, i: F.index_select(x, dim, i),
                lambda x, i: x.index_select(dim, i))  # fmt: skip


def joined(ours: Ours, theirs: Ours) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        shape = d.shape(1)
        dim, dtype = d.dim(shape), d.choose(ANY)
        given = [d.tensor(shape, [dtype]) for _ in range(d.choose([1, 2, 3]))]
        return Case(given, lambda *xs: ours(xs, dim), lambda *xs: theirs(xs, dim), f"dim {dim}")

    return draw


def products(ours: Ours, theirs: Ours) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        n, k, m = (d.choose([0, 1, 2, 5, 17]) for _ in range(3))
        batch = d.shape(0, 2)
        left, right = d.choose([((n, k), (k, m)), ((k,), (k, m)), ((n, k), (k,)), ((k,), (k,)),
                                ((*batch, n, k), (k, m)), ((*batch, n, k), (*batch, k, m)),
                                ((n, k), (k + 1, m))])  # fmt: skip
        a = d.tensor(left)
        return Case([a, d.tensor(right, [a.dtype])], ours, theirs)

    return draw


def linear(d: Draw) -> Case:
    shape = d.shape(1)
    x = d.tensor(shape)
    out = d.choose([0, 1, 3, 16])
    given = [x, d.tensor((out, shape[-1]), [x.dtype]), d.tensor((out,), [x.dtype])]
    return Case(given, F.linear, TF.linear)


def normed(d: Draw) -> Case:
    shape = d.shape(1)
    x = d.tensor(shape)
    given = [x, *(d.tensor(shape[-1:], [x.dtype]) for _ in range(2))]
    return Case(given, lambda x, w, b: F.layer_norm(x, w, b, 0.1),
                lambda x, w, b: TF.layer_norm(x, x.shape[-1:], w, b, 0.1))  # fmt: skip


def rms_normed(d: Draw) -> Case:
    shape = d.shape(1)
    x = d.tensor(shape)
    return Case([x, d.tensor(shape[-1:], [x.dtype])], lambda x, w: F.rms_norm(x, w, 0.1),
                lambda x, w: TF.rms_norm(x, x.shape[-1:], w, 0.1))  # fmt: skip


def batch_normed(d: Draw) -> Case:
    shape = d.shape(2)
    return Case([d.tensor(shape)], lambda x: F.batch_norm(x, eps=0.1),
                lambda x: TF.batch_norm(x, None, None, training=True, eps=0.1))  # fmt: skip


def losses(ours: Ours, theirs: Ours, low: float = -math.inf) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        shape, reduction = d.shape(), d.choose(["mean", "sum", "none"])
        x = d.tensor(shape)
        target = d.tensor(shape, [x.dtype], low)
        return Case([x, target], partial(ours, reduction=reduction),
                    partial(theirs, reduction=reduction), reduction)  # fmt: skip

    return draw


def classes(ours: Ours, theirs: Ours) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        rows, count = d.choose([0, 1, 3, 17]), d.choose([1, 2, 7, 40])
        ids = d.tensor((rows,), ["int64"], 0)
        ids.values = np.where(d.rng.random(rows) < 0.2, -100, ids.values % count)
        reduction = d.choose(["mean", "sum", "none"])
        return Case([d.tensor((rows, count)), ids], partial(ours, reduction=reduction),
                    partial(theirs, reduction=reduction), reduction)  # fmt: skip

    return draw


def statistic(name: str) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        shape, correction = d.shape(), d.choose([0, 1, 1, 0.5])
        dim = d.dims(shape)
        return Case([d.tensor(shape)],
                    lambda x: getattr(F, name)(x, dim, correction),
                    lambda x: getattr(torch, name)(x, dim, correction=correction),
                    f"dim {dim} correction {correction}")  # fmt: skip

    return draw


def norms(d: Draw) -> Case:
    shape, p = d.shape(), d.choose([1, 2, 2, 3, 0.5, math.inf])
    dim = d.dims(shape)
    return Case([d.tensor(shape)], lambda x: F.norm(x, p, dim),
                lambda x: torch.linalg.vector_norm(x, p, dim), f"p {p} dim {dim}")  # fmt: skip


def filled(d: Draw) -> Case:
    number, dtype = d.number(), d.choose(ANY)
    return Case([], lambda: fsdpc.full((2,), number, dtype=dtype),
                lambda: torch.full((2,), number, dtype=TORCH[dtype]),
                f"{number} {dtype}")  # fmt: skip


def counted(d: Draw) -> Case:
    dtype = d.choose([*INTS, "float64"])
    start = d.choose([0, -3, 2**31 - 2, *[2**53 - 1, -(2**62) - 1] * (dtype != "float64")])
    step = d.choose([1, -2, 7])
    stop = start + step * d.choose([1, 3, 1025])
    return Case([], lambda: fsdpc.arange(start, stop, step, dtype=dtype),
                lambda: torch.arange(start, stop, step, dtype=TORCH[dtype]),
                f"{start} {stop} {step} {dtype}")  # fmt: skip


def cast(d: Draw) -> Case:
    dtype = d.choose(ANY)
    x = d.tensor(d.shape(), ANY)
    if x.dtype in FLOATS and dtype not in (*FLOATS, "bool"):  # what does not fit is undefined in C
        x.values = np.clip(np.nan_to_num(x.values), 0, 100)
    return Case([x], lambda x: x.to(dtype), lambda x: x.to(TORCH[dtype]), dtype)


def pooled(ours: Ours, theirs: Ours) -> Callable[[Draw], Case]:
    def draw(d: Draw) -> Case:
        shape = (d.choose([0, 1, 2]), d.choose([1, 3]), d.choose([2, 5, 9]), d.choose([3, 8]))
        kernel, stride = d.choose([1, 2, 3]), d.choose([1, 2, 3])
        pad = d.choose([0, kernel // 2])
        return Case([d.tensor(shape)], lambda x: ours(x, kernel, stride, pad),
                    lambda x: theirs(x, kernel, stride, pad),
                    f"kernel {kernel} stride {stride} padding {pad}")  # fmt: skip

    return draw


def convolved(d: Draw) -> Case:
    batch, inside, out = d.choose([0, 1, 2]), d.choose([1, 2, 4]), d.choose([1, 3])
    x = d.tensor((batch, inside, d.choose([3, 8])))
    kernel, stride, pad = d.choose([1, 2, 3]), d.choose([1, 2]), d.choose([0, 1])
    given = [x, d.tensor((out, inside, kernel), [x.dtype]), d.tensor((out,), [x.dtype])]
    return Case(given, lambda x, w, b: F.conv1d(x, w, b, stride, pad),
                lambda x, w, b: TF.conv1d(x, w, b, stride, pad), f"{stride} {pad}")  # fmt: skip


def convolved_images(d: Draw) -> Case:
    groups, part, filters = (d.choose([1, 2]) for _ in range(3))
    x = d.tensor((d.choose([0, 1, 2]), groups * part, d.choose([4, 9]), d.choose([5, 8])))
    weight = d.tensor((groups * filters, part, d.choose([1, 3]), d.choose([1, 2])), [x.dtype])
    stride, pad, spread = d.choose([1, 2]), d.choose([0, 1, (2, 0)]), d.choose([1, (1, 2)])
    return Case([x, weight], lambda x, w: F.conv2d(x, w, None, stride, pad, spread, groups),
                lambda x, w: TF.conv2d(x, w, None, stride, pad, spread, groups),
                f"stride {stride} padding {pad} dilation {spread} groups {groups}")  # fmt: skip


def attention(d: Draw) -> Case:
    batch, heads, queries, keys = (d.choose([1, 2]), d.choose([1, 3]), d.choose([1, 5, 33]),
                                   d.choose([1, 7, 40]))  # fmt: skip
    q = d.tensor((batch, heads, queries, d.choose([4, 16])))
    k, v = (d.tensor((batch, heads, keys, q.values.shape[-1]), [q.dtype]) for _ in range(2))
    for x in (q, k, v):
        x.values = x.values.clip(-2, 2)  # larger products leave fp32's exponent few digits
    mask = d.tensor(d.choose([(queries, keys), (batch, 1, queries, keys), (1, keys)]), ["bool"])
    mask.values[..., 0] = True  # torch's rows that see no key are NaN in some of its kernels
    if d.flag():
        return Case([q, k, v], F.scaled_dot_product_attention, TF.scaled_dot_product_attention)
    return Case([q, k, v, mask], lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, mask=m),
                lambda q, k, v, m: TF.scaled_dot_product_attention(q, k, v, m))  # fmt: skip


def grouped(d: Draw) -> Case:
    groups, part = d.choose([1, 2, 3]), d.choose([1, 2, 4])
    x = d.tensor((d.choose([1, 2, 5]), groups * part, *d.shape(1, 2)))
    given = [x, *(d.tensor((groups * part,), [x.dtype]) for _ in range(2))]
    return Case(given, lambda x, w, b: F.group_norm(x, groups, w, b, 0.1),
                lambda x, w, b: TF.group_norm(x, groups, w, b, 0.1), f"{groups}")  # fmt: skip


def first(d: Draw, shape: tuple[int, ...]) -> tuple[Any, ...]:
    dim = d.dim(shape)
    return d.choose([0, 1, 2, -1]), dim, d.flag()


def sliced(d: Draw, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Ranges with steps, numbers, new dimensions and an ellipsis."""
    index: list[Any] = []
    for n in shape[: int(d.rng.integers(0, len(shape) + 1))]:
        a, b = sorted(int(i) for i in d.rng.integers(-n - 2, n + 3, 2))
        ranges = [slice(a, b), slice(None, None, 2), slice(b, None), slice(-1, None)]
        index.append(d.choose([*ranges, int(d.rng.integers(-n - 1, n + 1))]))
    for item in (None, ...):
        if d.flag(0.3):
            index.insert(int(d.rng.integers(0, len(index) + 1)), item)
    return (tuple(index),)


def by_mask(d: Draw) -> Case:
    shape = d.shape(1)
    lead = shape[: d.choose([1, len(shape)])]
    return Case([d.tensor(shape, ANY), d.tensor(lead, ["bool"])], lambda x, m: x[m],
                lambda x, m: x[m])  # fmt: skip


def by_array(d: Draw) -> Case:
    shape = d.shape(1)
    x, index = d.tensor(shape, ANY), d.tensor(d.shape(1, 2), ["int64"], 0)
    index.values = index.values % (2 * max(shape[0], 1)) - shape[0]
    return Case([x, index], lambda x, i: x[i], lambda x, i: x[i])


def looked_up(d: Draw) -> Case:
    ids, table = d.tensor(d.shape(0, 2), INTS, 0), d.tensor((10, d.choose([1, 3, 33])))
    return Case([ids, table], F.embedding, TF.embedding)


def einsums(d: Draw) -> Case:
    sizes = {c: d.choose([1, 2, 5]) for c in "bijk"}
    equation = d.choose(["ij,jk->ik", "bij,bjk->bik", "ij,kj->ki", "i,j->ij", "ij,ij->", "ij,ij->j",
                         "bij,jk->bik", "ijk,kb->bij"])  # fmt: skip
    left, right = (tuple(sizes[c] for c in p) for p in equation.split("->")[0].split(","))
    a = d.tensor(left)
    return Case([a, d.tensor(right, [a.dtype])], partial(F.einsum, equation),
                partial(torch.einsum, equation), equation)  # fmt: skip


def two(ours: Ours, theirs: Ours) -> Callable[[Draw], Case]:
    """Of one shape and dtype."""

    def draw(d: Draw) -> Case:
        shape = d.shape()
        a = d.tensor(shape)
        return Case([a, d.tensor(shape, [a.dtype])], ours, theirs)

    return draw


def one_hot(d: Draw) -> Case:
    ids = d.tensor(d.shape(0, 2), ["int64"], 0)
    return Case([ids], lambda i: F.one_hot(i, 11), lambda i: TF.one_hot(i, 11))


def spaced(d: Draw) -> Case:
    ends, dtype = (d.number(), d.number()), d.choose(["float32", "float64", "int64", "uint8"])
    ends = tuple(3 if not abs(e) < 2**31 else e for e in ends)
    steps = d.choose([0, 1, 2, 5, 1030])
    return Case([], lambda: fsdpc.linspace(*ends, steps, dtype=dtype),
                lambda: torch.linspace(*ends, steps, dtype=torch.float64).to(TORCH[dtype]),
                f"{ends} {steps} {dtype}")  # fmt: skip
