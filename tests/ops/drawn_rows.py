"""The table of operations for drawn.py: each row draws cases of one operation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as TF
from drawn import ANY, FLOATS, NUMBERS, Case, Draw, Row
from drawn_cases import (
    attention,
    batch_normed,
    by_array,
    by_mask,
    cast,
    clamp_numbers,
    clamp_tensors,
    classes,
    convolved,
    convolved_images,
    counted,
    einsums,
    expanded,
    filled,
    first,
    folded,
    gather,
    grouped,
    joined,
    linear,
    looked_up,
    losses,
    masked_fill,
    normed,
    norms,
    one_hot,
    padding,
    pooled,
    products,
    rms_normed,
    scatter,
    select,
    sizes,
    sliced,
    spaced,
    statistic,
    two,
    where_number,
    where_tensors,
)

from fsdpc import functional as F

Ours = Callable[..., Any]


NO_DIMENSION = ("of a tensor with 0 dimensions",)  # torch takes -1 and 0 there


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
        if op in (operator.pow, operator.eq, operator.lt, operator.ge) and number in (0.1, 1e-3):
            number = 0.25  # which every dtype holds
        if op is operator.pow and abs(number) > 2**24:
            number = 3  # fp32 rounds an odd exponent to an even one
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

    return Row(draw, **{"lenient": NO_DIMENSION, **how})


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
    "silu": each(F.silu, TF.silu, whole=True),
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
    "logsumexp": along(F.logsumexp, torch.logsumexp, whole=True, units=8),
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
    "conv2d": drawn(convolved_images, special_grad=False, **SMOOTH),
    "attention": drawn(attention, special=False, **SMOOTH),
    "group_norm": drawn(grouped, whole=True, units=64, extreme=False, special=False,
                        allows="more than 1 value per channel"),
    "topk": with_arguments(lambda x, *a: F.topk(x.detach(), *a)[0],  # of equals
                           lambda x, *a: torch.topk(x.detach(), *a)[0], first,
                           lenient=NO_DIMENSION, allows="does not support bool"),
    "slices": with_arguments(lambda x, i: x[i], lambda x, i: x[i], sliced),
    "mask as index": drawn(by_mask),
    "array as index": drawn(by_array, whole=True),
    "embedding": drawn(looked_up, whole=True),
    "einsum": drawn(einsums, **SMOOTH),
    "swiglu": drawn(two(F.swiglu, lambda a, b: TF.silu(a) * b), **SMOOTH),
    "one_hot": drawn(one_hot),
    "linspace": drawn(spaced, whole=True, lenient=OVERFLOWS),
    "full": drawn(filled, lenient=OVERFLOWS, signed=True),
    "arange": drawn(counted, lenient=OVERFLOWS),
    "cast": drawn(cast, lenient=OVERFLOWS),
}  # fmt: skip
