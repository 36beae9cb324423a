"""Reductions: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpc import _core
from fsdpc.torch.backend._base import Base
from fsdpc.torch.backend._calls import operation
from fsdpc.torch.backend._works import (
    InvalidArgument,
    Operation,
    all_of,
    as_list,
    check,
    check_alike,
    check_device,
    dense_of,
    described,
    flat,
    options,
    root_of,
)

#: Reductions of the C library; a mean is a sum that is divided.
_OPS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "sum"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "and"),
    (dist.ReduceOp.BOR, "or"),
    (dist.ReduceOp.BXOR, "xor"),
)
_DTYPES = {
    getattr(torch, name): name
    for name in ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "bool")
}
_LOCAL = {"sum": torch.sum, "product": torch.prod, "max": torch.amax, "min": torch.amin}


def _op_of(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _name_of(op: Any) -> str:
    for known, name in _OPS:
        if op == known:
            return name
    raise InvalidArgument(f"a process group of fsdpc does not reduce by {getattr(op, 'op', op)}")


class Reductions(Base):
    """Operations that combine the ranks' tensors."""

    def _reduce(
        self,
        tensor: Tensor,
        out: Tensor | None,
        op: Any,
        first: int,
        part: int,
        call: str = "all_reduce",
    ) -> tuple[_core.GroupWork, Callable[[], Any] | None]:
        """Reduce a contiguous tensor; ``out`` receives a part of the result."""
        if tensor.is_complex():
            if not (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG):
                raise InvalidArgument(f"{tensor.dtype}: complex numbers are only added")
            tensor = torch.view_as_real(tensor)
            out = out if out is None else torch.view_as_real(out)
            first, part = 2 * first, 2 * part
        name = _name_of(op)
        floats, mean = tensor.is_floating_point(), op == dist.ReduceOp.AVG
        if (mean and not floats) or tensor.dtype == torch.uint64:
            raise InvalidArgument(
                f"a process group of fsdpc does not reduce {tensor.dtype} by "
                f"{'avg' if mean else name}"
            )
        if floats and name in ("and", "or", "xor"):
            raise InvalidArgument(f"{name} of {tensor.dtype}: bitwise operations are of integers")
        wide: torch.dtype | None = None
        if tensor.dtype not in _DTYPES:
            wide = torch.float32 if floats else torch.int64
        elif tensor.dtype in (torch.float16, torch.bfloat16) and (mean or name == "product"):
            wide = torch.float32
        target = out
        if wide is not None:
            tensor = tensor.to(wide)
            target = None if out is None else torch.empty(out.shape, dtype=wide)
        handle = self._group.all_reduce(
            (tensor, target), tensor.data_ptr(), 0 if target is None else target.data_ptr(),
            tensor.numel(), _DTYPES[tensor.dtype], name, first, part,
            f"{call} {'avg' if mean else name} {described(tensor)}",
        )  # fmt: skip
        if out is None or target is None or (wide is None and not mean):
            return handle, None

        def finish() -> None:
            if mean:
                target.div_(self._size)
            if wide is not None:
                out.copy_(target)

        return handle, finish

    @operation("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None, **more: Any) -> Operation:
        """Reduce all tensors of all ranks, into each of them."""
        opts = options(dist.AllreduceOptions, opts, reduceOp=more.get("op"))
        tensors = as_list(tensors)
        check_alike("allreduce", tensors, tensors[0])
        check_device(tensors)
        if tensors[0].layout == torch.sparse_coo:
            return self._reduce_sparse(tensors, opts)
        if len(tensors) == 1:
            return self._reduce_all(tensors, opts)
        check(tensors)
        op = _op_of(opts)
        name = _name_of(op)
        if name not in _LOCAL:
            raise InvalidArgument(f"allreduce: {name} of several tensors of a rank")
        one = _LOCAL[name](torch.stack(tensors), dim=0)
        handle, finish = self._reduce(one, one, op, 0, one.numel())
        return self._done(
            [handle], tensors, opts,
            all_of([finish, lambda: [tensor.copy_(one) for tensor in tensors]]),
        )  # fmt: skip

    def _reduce_sparse(self, tensors: list[Tensor], opts: Any) -> Operation:
        """Add sparse tensors, whose numbers of elements differ between ranks."""
        if _op_of(opts) != dist.ReduceOp.SUM:
            raise InvalidArgument("unsupported reduction operation: sparse tensors are only added")
        mine = sum(tensors[1:], tensors[0]).coalesce()
        head = torch.tensor([mine._nnz(), mine.sparse_dim(), mine.dense_dim(), *mine.shape])
        heads = self._gather_now(head)
        for rank, other in enumerate(heads):
            if not torch.equal(other[1:], head[1:]):
                raise InvalidArgument(
                    f"allreduce: rank {self._ranks[rank]} has a sparse tensor of another shape"
                )
        counts = heads[:, 0].tolist()
        indices = torch.zeros(max(counts), mine.sparse_dim(), dtype=torch.int64)
        indices[: mine._nnz()] = mine.indices().T
        values = mine.values().new_zeros(max(counts), *mine.values().shape[1:])
        values[: mine._nnz()] = mine.values()
        every = zip(counts, self._gather_now(indices), self._gather_now(values), strict=True)
        chosen = [(i[:n], v[:n]) for n, i, v in every]
        total = torch.sparse_coo_tensor(
            torch.cat([i for i, _ in chosen]).T, torch.cat([v for _, v in chosen]), mine.shape
        ).coalesce()
        for tensor in tensors:
            tensor.copy_(total)
        return self._done([], tensors, opts)

    @operation("all_reduce")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        """Reduce each tensor over the ranks, in place."""
        return self._reduce_all(as_list(tensors), opts)

    def _reduce_all(self, tensors: list[Tensor], opts: Any) -> Operation:
        for at, tensor in enumerate(tensors):
            if tensor.layout != tensors[0].layout:
                raise InvalidArgument(
                    f"allreduce_coalesced: invalid tensor layout at index {at}: {tensor.layout}"
                )
        check(tensors)
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            raise InvalidArgument("allreduce_coalesced: tensors must all have the same type")
        op = _op_of(opts)
        handles, finishes = [], []
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            dense, back = dense_of(tensor)
            handle, finish = self._reduce(dense, dense, op, 0, dense.numel())
            handles.append(handle)
            finishes += [finish, back]
        return self._done(handles[::-1], tensors, opts, all_of(finishes))

    @operation("reduce")
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, **more: Any) -> Operation:
        """Reduce a tensor over the ranks into the root's."""
        opts = options(dist.ReduceOptions, opts, rootRank=more.get("root"), reduceOp=op)
        tensors = as_list(tensors)
        root, op = root_of(opts, self._size), _op_of(opts)
        if len(tensors) != 1 or (opts is not None and opts.rootTensor != 0):
            raise InvalidArgument(
                f"reduce: requires a single-element tensor list, got {len(tensors)}, invalid root "
                f"tensor: {0 if opts is None else opts.rootTensor}"
            )
        check(tensors)
        (tensor,) = tensors
        dense, back = dense_of(tensor)
        if self._rank != root:
            handle, _ = self._reduce(dense, None, op, 0, 0, f"reduce to {root}")
            return self._done([handle], tensors, opts)
        handle, finish = self._reduce(dense, dense, op, 0, dense.numel(), f"reduce to {root}")
        return self._done([handle], tensors, opts, all_of([finish, back]))

    @operation("reduce_scatter")
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Operation:
        """Reduce lists of tensors; each rank receives the result with its own index."""
        (output,), (parts,) = outputs, inputs
        check([output, *parts])
        if len(parts) != self._size or parts[self._rank].numel() != output.numel():
            raise InvalidArgument(
                f"reduce_scatter: {len(parts)} tensors, of which this rank's has "
                f"{parts[self._rank].numel() if len(parts) > self._rank else 0} elements, for "
                f"{self._size} ranks and an output of {output.numel()}"
            )
        first = sum(part.numel() for part in parts[: self._rank])
        sizes = zlib.crc32(str([part.numel() for part in parts]).encode())
        what = f"reduce_scatter {sizes:08x}"  # ranks must agree on the parts
        return self._scattered([output], [flat(parts)], [first], opts, what)

    def _scattered(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        firsts: list[int],
        opts: Any,
        what: str = "reduce_scatter",
    ) -> Operation:
        op = _op_of(opts)
        handles, finishes = [], []
        for output, whole, first in zip(outputs, inputs, firsts, strict=True):
            dense, back = dense_of(output)
            handle, finish = self._reduce(
                whole.contiguous(), dense, op, first, dense.numel(), what
            )
            handles.append(handle)
            finishes += [finish, back]
        return self._done(handles[::-1], outputs, opts, all_of(finishes))

    @operation("reduce_scatter")
    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Operation:
        """Reduce a tensor; each rank receives an equal part of the result."""
        return self._scatter_all([output], [whole], opts)

    @operation("reduce_scatter")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Operation:
        """Reduce each of the tensors; each rank receives an equal part of the results."""
        return self._scatter_all(outputs, inputs, opts)

    def _scatter_all(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Operation:
        check([*outputs, *inputs])
        for output, whole in zip(outputs, inputs, strict=True):
            if whole.numel() != output.numel() * self._size or whole.dtype != output.dtype:
                raise InvalidArgument(
                    f"reduce_scatter: an input of {whole.numel()} {whole.dtype} for {self._size} "
                    f"ranks and an output of {output.numel()} {output.dtype}"
                )
        firsts = [self._rank * output.numel() for output in outputs]
        return self._scattered(outputs, inputs, firsts, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
