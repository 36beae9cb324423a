"""Copies: broadcast, all_gather, gather, scatter, all_to_all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    by_input,
    check,
    check_alike,
    dense_of,
    described,
    flat,
    n_bytes,
    options,
    root_of,
    unpack,
)


class Copies(Base):
    """Operations that copy the ranks' tensors."""

    @operation("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None, **more: Any) -> Operation:
        """Copy the root's tensor to all tensors of all ranks."""
        opts = options(dist.BroadcastOptions, opts, rootRank=more.get("root"))
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root, which = root_of(opts, self._size), 0 if opts is None else opts.rootTensor
        if not 0 <= which < len(tensors):
            raise InvalidArgument(f"broadcast: invalid root tensor: {which} of {len(tensors)}")
        check_alike("broadcast", tensors, tensors[0])
        check(tensors)
        dense, back = dense_of(tensors[which])
        handle = self._group.broadcast(
            dense, dense.data_ptr(), n_bytes(dense), root, described(dense)
        )
        others = [tensor for i, tensor in enumerate(tensors) if i != which]
        copies = [back, *([lambda: [tensor.copy_(dense) for tensor in others]] if others else [])]
        return self._done([handle], tensors, opts, all_of(copies))

    @operation("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Operation:
        """Copy every rank's tensors to all ranks; each list of outputs is in rank order."""
        if isinstance(inputs, Tensor):
            outputs, inputs, opts = [outputs], [inputs], options(dist.AllgatherOptions, None)
        inputs = as_list(inputs, "input tensor")
        if len(outputs) != len(inputs):
            raise InvalidArgument(
                "allgather: requires input/output tensor lists to have the same length, got "
                f"{len(inputs)} and {len(outputs)}"
            )
        check_alike("allgather", inputs, inputs[0])
        for at, parts in enumerate(outputs):
            if len(parts) != self._size * len(inputs):
                raise InvalidArgument(
                    f"allgather: invalid output tensor list at index {at}: {len(parts)} tensors, "
                    f"not {self._size * len(inputs)}"
                )
            check_alike("allgather", parts, inputs[0])
        check([*inputs, *(part for parts in outputs for part in parts)])
        send = flat(inputs)
        handle, whole = self._gather(send)
        result = outputs if len(outputs) > 1 else outputs[0]
        return self._done(
            [handle], result, opts, lambda: [unpack(whole, parts) for parts in outputs]
        )

    @operation("all_gather")
    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Operation:
        """Copy every rank's tensors to all ranks; ``outputs`` has a list for each rank."""
        inputs = as_list(inputs, "input tensor")
        if len(outputs) != self._size:
            raise InvalidArgument(
                f"all_gather: output lists should be equal to world size, {self._size}, not "
                f"{len(outputs)}"
            )
        handles, results = [], []
        for parts, tensor in zip(by_input(outputs, len(inputs)), inputs, strict=True):
            for part in parts:
                if part.shape != tensor.shape:
                    raise InvalidArgument(
                        f"all_gather: invalid size of output tensor at index {len(handles)}: "
                        f"{list(part.shape)}, not {list(tensor.shape)}"
                    )
            check_alike("all_gather", parts, tensor)
            check([*parts, tensor])
            handle, whole = self._gather(tensor)
            handles.append(handle)
            results.append((whole, parts))
        return self._done(
            handles[::-1], [part for _, parts in results for part in parts], opts,
            lambda: [unpack(whole, parts) for whole, parts in results],
        )  # fmt: skip

    @operation("all_gather")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Operation:
        """Copy every rank's tensor into its part of the output on all ranks."""
        return self._gather_all([output], [tensor], opts)

    @operation("all_gather")
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Operation:
        """Copy every rank's tensors into their parts of the outputs on all ranks."""
        return self._gather_all(outputs, inputs, opts)

    def _gather_all(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Operation:
        check([*outputs, *inputs])
        handles, backs = [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.numel() != self._size * tensor.numel() or output.dtype != tensor.dtype:
                raise InvalidArgument(
                    f"all_gather: {self._size} tensors of {tensor.numel()} {tensor.dtype} into "
                    f"one of {output.numel()} {output.dtype}"
                )
            whole, back = dense_of(output)
            handles.append(self._gather(tensor, whole)[0])
            backs.append(back)
        return self._done(handles[::-1], outputs, opts, all_of(backs))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @operation("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Operation:
        """Copy every rank's tensor to the root."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = options(dist.GatherOptions, opts, rootRank=more.get("root"))
        root = root_of(opts, self._size)
        if len(inputs) != 1:
            raise InvalidArgument("gather: requires a single-element input tensor list")
        (tensor,) = inputs
        parts = self._root_list("gather", "output", outputs, root, tensor)
        check([tensor, *parts])
        n = n_bytes(tensor)
        whole = torch.empty(len(parts) * tensor.numel(), dtype=tensor.dtype)
        extents = [(0, n if parts else 0, p * n) for p in range(self._size)]
        handle = self._exchange(
            tensor.contiguous(), whole, n, extents, root, f"gather {described(tensor)}"
        )
        return self._done([handle], parts, opts, lambda: unpack(whole, parts))

    def _root_list(
        self, what: str, side: str, lists: list[list[Tensor]], root: int, like: Tensor
    ) -> list[Tensor]:
        """Return the root's list of a tensor for each rank; no other rank has one."""
        if self._rank != root:
            if lists and lists[0]:
                raise InvalidArgument(f"{what}: requires empty {side} on non-root")
            return []
        if len(lists) != 1:
            raise InvalidArgument(
                f"{what}: requires a single-element {side} list containing a list with "
                f"{self._size} tensors."
            )
        if len(lists[0]) != self._size:
            raise InvalidArgument(
                f"{what}: Incorrect {side} list size {len(lists[0])}. {side.capitalize()} list "
                f"size should be {self._size}, same as size of the process group."
            )
        check_alike(what, lists[0], like)
        return lists[0]

    @operation("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Operation:
        """Copy the root's tensors to one rank each."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = options(dist.ScatterOptions, opts, rootRank=more.get("root"))
        root = root_of(opts, self._size)
        if len(outputs) != 1:
            raise InvalidArgument("scatter: requires a single-element output tensor list")
        (output,) = outputs
        parts = self._root_list("scatter", "input", inputs, root, output)
        check([output, *parts])
        n = n_bytes(output)
        send = flat(parts) if parts else torch.empty(0, dtype=output.dtype)
        dense, back = dense_of(output)
        extents = [(self._rank * n, n, 0) if p == root else (0, 0, 0) for p in range(self._size)]
        handle = self._exchange(
            send, dense, n * self._size, extents, root, f"scatter {described(output)}"
        )
        return self._done([handle], outputs, opts, back)

    @operation("all_to_all")
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Operation:
        """Send a part of the tensor to each rank; splits count rows."""
        check([output, tensor])
        sends = self._split_bytes(tensor, input_splits, "input")
        receives = self._split_bytes(output, output_splits, "output")
        dense, back = dense_of(output)
        handle, compare = self._all_to_all(tensor.contiguous(), dense, sends, receives)
        return self._done([handle], [output], opts, all_of([compare, back]))

    alltoall_base = all_to_all_single

    @operation("all_to_all")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Operation:
        """Send one of the tensors to each rank."""
        check([*outputs, *inputs])
        if len(outputs) != self._size or len(inputs) != self._size:
            raise InvalidArgument(
                f"all_to_all: {len(inputs)} inputs and {len(outputs)} outputs for {self._size} "
                "ranks"
            )
        whole = torch.empty(sum(output.numel() for output in outputs), dtype=outputs[0].dtype)
        sends, receives = list(map(n_bytes, inputs)), list(map(n_bytes, outputs))
        handle, compare = self._all_to_all(flat(inputs), whole, sends, receives)
        return self._done(
            [handle], outputs, opts, all_of([compare, lambda: unpack(whole, outputs)])
        )

    def _split_bytes(self, tensor: Tensor, splits: Sequence[int] | None, what: str) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise InvalidArgument(
                    f"all_to_all: {rows} rows of the {what} are not divisible by {self._size} ranks"
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise InvalidArgument(
                f"all_to_all: {what} splits {list(splits)} for {self._size} ranks and {rows} rows"
            )
        row = n_bytes(tensor) // rows if rows else 0
        return [split * row for split in splits]

    def _all_to_all(
        self, send: Tensor, recv: Tensor, sends: list[int], receives: list[int]
    ) -> tuple[_core.GroupWork, Callable[[], Any]]:
        """Post an all_to_all; return it and a check for afterwards."""
        handle = self._group.all_to_all(
            (send, recv), send.data_ptr(), recv.data_ptr(), sends, receives,
            f"all_to_all {described(send)}",
        )  # fmt: skip

        def compare() -> None:
            if handle.differ is not None:
                p, q, sent, expected = handle.differ
                raise InvalidArgument(
                    f"all_to_all: rank {self._ranks[p]} sends {sent} bytes to rank "
                    f"{self._ranks[q]}, which expects {expected}"
                )

        return handle, compare
