"""The table of operations for drawn.py: each row draws cases of one operation."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF
from drawn import ANY, FLOATS, INTS, NUMBERS, TORCH, Case, Draw, Row

import fsdpc
from fsdpc import functional as F

Ours = Callable[..., Any]


def each(ours: Ours, theirs: Ours, dtypes: Sequence[str] = FLOATS, **how: Any) -> Row:
    """An operation of one tensor, element by element."""
    return Row(lambda d: Case([d.tensor(d.shape(), dtypes)], ours, theirs), **how)


def pair(ours: Ours, theirs: Ours, dtypes: Sequence[str] = NUMBERS, **how: Any) -> Row:
    """An operation of two tensors that broadcast."""

    def draw(d: Draw) -> Case:
        shape = d.shape()
        both = [d.tensor(shape, dtypes), d.tensor(d.broadcastable(shape), dtypes)]
        return Case(both if d.flag() else both[::-1], ours, theirs)

    return Row(draw, **{"promotes": True, **how})


def exactly(op: Ours) -> Ours:
    """Compare integers as int64: torch casts numbers and 0-d tensors to the other's dtype."""

    def fn(x: Any, y: Any) -> Any:
        both = [t.long() if isinstance(t, torch.Tensor) and not t.is_floating_point() else t
                for t in (x, y)]  # fmt: skip
        return op(*both)

    return fn


def scalar(op: Ours, theirs: Ours, dtypes: Sequence[str] = NUMBERS, **how: Any) -> Row:
    """An operator of a tensor and a number, on either side."""

    def draw(d: Draw) -> Case:
        number, left = d.number(), d.flag()
        if op is operator.pow and number in (0.1, 1e-3):
            number = 0.25  # which every dtype holds: powers are steep
        return Case(
            [d.tensor(d.shape(), dtypes)],
            lambda x: op(number, x) if left else op(x, number),
            lambda x: theirs(number, x) if left else theirs(x, number),
            f"number {number} left={left}",
        )

    return Row(draw, **how)


def over(ours: Ours, theirs: Ours, dtypes: Sequence[str] = FLOATS, **how: Any) -> Row:
    """A reduction over all, one or several dimensions."""

    def draw(d: Draw) -> Case:
        shape = d.shape()
        dim, keep = d.dims(shape), d.flag()
        keep = keep and dim is not None
        return Case(
            [d.tensor(shape, dtypes)],
            lambda x: ours(x, dim, keepdim=keep),
            lambda x: theirs(x, dim, keepdim=keep) if dim is not None else theirs(x),
            f"dim {dim} keepdim {keep}",
        )

    return Row(draw, **{"whole": True, **how})


def of_bools(theirs: Ours) -> Ours:
    """torch's any and all of uint8 are uint8."""
    return lambda x, *args, **kw: theirs(x != 0, *args, **kw)


def along(ours: Ours, theirs: Ours, dtypes: Sequence[str] = FLOATS, **how: Any) -> Row:
    """An operation along one dimension."""

    def draw(d: Draw) -> Case:
        shape = d.shape()
        dim = d.dim(shape)
        return Case(
            [d.tensor(shape, dtypes)],
            lambda x: ours(x, dim),
            lambda x: theirs(x, dim),
            f"dim {dim}",
        )

    return Row(draw, **{"lenient": ("of a tensor with 0 dimensions",), **how})


def drawn(fn: Callable[[Draw], Case], **how: Any) -> Row:
    return Row(fn, **how)


def with_arguments(
    ours: Ours,
    theirs: Ours,
    arguments: Callable[[Draw, tuple[int, ...]], tuple[Any, ...]],
    dtypes: Sequence[str] = ANY,
    low: int = 0,
    **how: Any,
) -> Row:
    """An operation of one tensor and of arguments that depend on its shape."""

    def draw(d: Draw) -> Case:
        shape = d.shape(low)
        given = arguments(d, shape)
        return Case(
            [d.tensor(shape, dtypes)],
            lambda x: ours(x, *given),
            lambda x: theirs(x, *given),
            f"arguments {given}",
        )

    return Row(draw, **how)


# ---- what rows need ----


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


OVERFLOWS = ("does not fit",)
SMOOTH = {"extreme": False, "whole": True, "units": 16}
LOSS = {**SMOOTH, "dtyped": False}  # float32 of 16-bit floats

ROWS: dict[str, Row] = {
    "abs": each(F.abs, torch.abs),
    "sign": each(F.sign, lambda x: x.sign().where(~x.isnan(), x)),
    "exp": each(F.exp, torch.exp),
    "expm1": each(F.expm1, torch.expm1),
    "log": each(F.log, torch.log),
    "log1p": each(F.log1p, torch.log1p),
    "sqrt": each(F.sqrt, torch.sqrt),
    "rsqrt": each(F.rsqrt, torch.rsqrt),
    "sin": each(F.sin, torch.sin),
    "cos": each(F.cos, torch.cos),
    "tanh": each(F.tanh, torch.tanh),
    "erf": each(F.erf, torch.erf),
    "sigmoid": each(F.sigmoid, torch.sigmoid),
    "relu": each(F.relu, torch.relu),
    "silu": each(F.silu, TF.silu),
    "gelu": each(F.gelu, TF.gelu, whole=True, extreme=False),
    "gelu tanh": each(partial(F.gelu, approximate="tanh"), partial(TF.gelu, approximate="tanh"),
                      whole=True, extreme=False),
    "neg": each(F.neg, torch.neg, NUMBERS),
    "isnan": each(F.isnan, torch.isnan, ANY),
    "isinf": each(F.isinf, torch.isinf, ANY),
    "isfinite": each(F.isfinite, torch.isfinite, ANY),
    "logical_not": each(F.logical_not, torch.logical_not, ANY),
    "add": pair(F.add, torch.add),
    "sub": pair(F.sub, torch.sub),
    "mul": pair(F.mul, torch.mul),
    "div": pair(F.div, torch.div),
    "pow": pair(F.pow, torch.pow),
    "maximum": pair(F.maximum, torch.maximum),
    "minimum": pair(F.minimum, torch.minimum),
    "eq": pair(operator.eq, exactly(operator.eq), ANY),
    "lt": pair(operator.lt, exactly(operator.lt), ANY),
    "ge": pair(operator.ge, exactly(operator.ge), ANY),
    "logical_and": pair(F.logical_and, exactly(torch.logical_and), ANY, promotes=False),
    "logical_or": pair(F.logical_or, exactly(torch.logical_or), ANY, promotes=False),
    "logical_xor": pair(F.logical_xor, exactly(torch.logical_xor), ANY, promotes=False),
    "add number": scalar(operator.add, operator.add, lenient=OVERFLOWS, whole=True),
    "sub number": scalar(operator.sub, operator.sub, lenient=OVERFLOWS, whole=True),
    "mul number": scalar(operator.mul, operator.mul, lenient=OVERFLOWS),
    "div number": scalar(operator.truediv, operator.truediv),
    "pow number": scalar(operator.pow, operator.pow, lenient=OVERFLOWS, allows="without overflow"),
    "eq number": scalar(operator.eq, exactly(operator.eq), ANY),
    "lt number": scalar(operator.lt, exactly(operator.lt), ANY),
    "ge number": scalar(operator.ge, exactly(operator.ge), ANY),
    "where": drawn(where_tensors, signed=True, promotes=True),
    "where number": drawn(where_number, lenient=OVERFLOWS, signed=True),
    "masked_fill": drawn(masked_fill, lenient=OVERFLOWS, signed=True),
    "clamp": drawn(clamp_numbers, lenient=OVERFLOWS, signed=True),
    "clamp tensors": drawn(clamp_tensors),
    "sum": over(F.sum, torch.sum, (*NUMBERS, "bool"), units=16, extreme=False),
    "mean": over(F.mean, torch.mean, units=16, extreme=False),
    "any": over(F.any, of_bools(torch.any), ANY),
    "all": over(F.all, of_bools(torch.all), ANY),
    "amax": over(F.amax, lambda x, dim=(), keepdim=False: torch.amax(x, dim, keepdim), ANY,
                 special_grad=False),
    "amin": over(F.amin, lambda x, dim=(), keepdim=False: torch.amin(x, dim, keepdim), ANY,
                 special_grad=False),
    "max": along(lambda x, d: F.max(x, d), lambda x, d: torch.max(x, d), ANY),
    "min": along(lambda x, d: F.min(x, d), lambda x, d: torch.min(x, d), ANY),
    "argmax": along(F.argmax, torch.argmax, NUMBERS),
    "argmin": along(F.argmin, torch.argmin, NUMBERS),
    "var": drawn(statistic("var"), **SMOOTH),
    "std": drawn(statistic("std"), **SMOOTH),
    "norm": drawn(norms, special_grad=False, **SMOOTH),
    "logsumexp": along(F.logsumexp, torch.logsumexp, whole=True, units=8, special_grad=False),
    "softmax": along(F.softmax, torch.softmax, whole=True, units=16),
    "log_softmax": along(F.log_softmax, torch.log_softmax, whole=True, units=16),
    "cumsum": along(F.cumsum, torch.cumsum, (*NUMBERS, "bool"), whole=True, extreme=False),
    "flip": along(F.flip, lambda x, d: torch.flip(x, (d,)), ANY),
    "roll": along(lambda x, d: F.roll(x, 2, d), lambda x, d: torch.roll(x, 2, d), ANY),
    "split": with_arguments(F.split, torch.split, sizes),
    "chunk": with_arguments(F.chunk, torch.chunk, lambda d, s: (d.choose([0, 1, 2, 3]), d.dim(s))),
    "pad": with_arguments(F.pad, TF.pad, padding, NUMBERS, lenient=OVERFLOWS, signed=True),
    "repeat": with_arguments(F.repeat, lambda x, n: x.repeat(n), lambda d, s: (
        [d.choose([0, 1, 2]) for _ in range(len(s) + d.choose([0, 1]))],)),
    "repeat_interleave": with_arguments(
        F.repeat_interleave, torch.repeat_interleave,
        lambda d, s: (d.choose([-1, 0, 1, 3]), d.dim(s)), low=1),
    "tril": with_arguments(F.tril, torch.tril, lambda d, s: (d.choose([-1, 0, 2]),)),
    "triu": with_arguments(F.triu, torch.triu, lambda d, s: (d.choose([-1, 0, 2]),)),
    "transpose": with_arguments(
        lambda x, a, b: x.transpose(a, b), torch.transpose,
        lambda d, s: (d.dim(s), d.dim(s)), low=1),
    "permute": with_arguments(lambda x, p: x.permute(*p), torch.permute, folded),
    "expand": with_arguments(F.expand, lambda x, s: x.expand(s), expanded),
    "stack": drawn(joined(F.stack, torch.stack)),
    "cat": drawn(joined(F.cat, torch.cat)),
    "outer": drawn(lambda d: Case([d.tensor(d.shape(1, 1), ["float32"]),
                                   d.tensor(d.shape(1, 1), ["float32"])], F.outer, torch.outer)),
    "gather": drawn(gather),
    "scatter_add": drawn(scatter, whole=True, extreme=False),
    "index_select": drawn(select),
    "sort": along(F.sort, lambda x, d: torch.sort(x, dim=d, stable=True), ANY),
    "sort down": along(lambda x, d: F.sort(x, d, True),
                       lambda x, d: torch.sort(x, dim=d, descending=True, stable=True), ANY),
    "masked_select": pair(lambda x, m: F.masked_select(x, m != 0),
                          lambda x, m: torch.masked_select(x, m != 0), ANY,
                          promotes=False),
    "nonzero": each(F.nonzero, torch.nonzero, ANY),
    "matmul": drawn(products(F.matmul, torch.matmul), **SMOOTH),
    "linear": drawn(linear, **SMOOTH),
    "layer_norm": drawn(normed, whole=True, units=64, extreme=False),
    "rms_norm": drawn(rms_normed, whole=True, units=64, extreme=False),
    "batch_norm": drawn(batch_normed, whole=True, units=64, extreme=False,
                        lenient=("batch statistics of shape",)),
    "mse_loss": drawn(losses(F.mse_loss, TF.mse_loss), **LOSS),
    "l1_loss": drawn(losses(F.l1_loss, TF.l1_loss), special=False, **LOSS),
    "smooth_l1_loss": drawn(losses(F.smooth_l1_loss, TF.smooth_l1_loss), **LOSS),
    "bce": drawn(losses(F.binary_cross_entropy_with_logits,
                        TF.binary_cross_entropy_with_logits, 0), **LOSS),
    "kl_div": drawn(losses(F.kl_div, TF.kl_div, 0), **LOSS),
    "cross_entropy": drawn(classes(F.cross_entropy, TF.cross_entropy), **LOSS),
    "nll_loss": drawn(classes(F.nll_loss, TF.nll_loss), **LOSS),
    "max_pool2d": drawn(pooled(F.max_pool2d, TF.max_pool2d)),
    "avg_pool2d": drawn(pooled(F.avg_pool2d, TF.avg_pool2d), **SMOOTH),
    "conv1d": drawn(convolved, special_grad=False, **SMOOTH),
    "full": drawn(filled, lenient=OVERFLOWS, signed=True),
    "arange": drawn(counted, lenient=OVERFLOWS),
    "cast": drawn(cast, lenient=OVERFLOWS),
}  # fmt: skip
