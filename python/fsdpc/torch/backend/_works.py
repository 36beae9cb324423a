"""Operations in flight, and the arguments that torch passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import DistBackendError

from fsdpc import _core

ANY = -1  # the source of a message that may come from any rank


class InvalidArgument(ValueError, RuntimeError):
    """Arguments that cannot be right; torch's own back ends raise RuntimeError."""


class OtherDevice(InvalidArgument):
    """A tensor is not in the host's memory."""


class DeadlineError(DistBackendError, TimeoutError):
    """A deadline passed; torch's own back ends raise a RuntimeError.

    The page docs/troubleshooting.md#exceptions explains what to do.
    """


@contextmanager
def deadlines() -> Iterator[None]:
    """Raise DeadlineError where the C library raises TimeoutError."""
    try:
        yield
    except TimeoutError as error:
        raise DeadlineError(*error.args) from None


class Operation(Work):
    """An operation, or several, and what is left to do with their results."""

    def __init__(
        self,
        handles: Sequence[_core.GroupWork],
        result: list[Tensor],
        finish: Callable[[], Any] | None,
    ) -> None:
        super().__init__()
        self._handles, self._result, self._finish = list(handles), result, finish
        self._source = ANY
        self._turn = threading.Lock()  # to advance it
        self._error: Exception | None = None
        self.forget: Callable[[], Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done, for at most ``timeout`` or, if it is 0, until the group's."""
        end = time.monotonic() + timeout.total_seconds()
        while timeout and not self.is_completed():
            if time.monotonic() > end:
                raise DeadlineError(f"Timed out: an operation is not done after {timeout}")
            time.sleep(0.0001)
        with self._turn:
            self._advance(lambda handle: handle.wait() is None)
        return True

    def _advance(self, step: Callable[[_core.GroupWork], bool]) -> bool:
        """Return whether it is done; raise its error, now and later."""
        if self._error is not None:
            raise self._error
        try:
            while self._handles and step(self._handles[-1]):
                self._source = self._handles.pop().source
            if self._handles:
                return False
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        except TimeoutError as error:
            self._error = DeadlineError(*error.args)
            raise self._error from None
        except Exception as error:
            self._error = error
            raise
        finally:
            if (self._error is not None or not self._handles) and self.forget is not None:
                self.forget()
                self.forget = None
        return True

    def is_completed(self) -> bool:
        """Advance operations; return whether this one is done."""
        if not self._turn.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            return self._advance(lambda handle: handle.test())
        finally:
            self._turn.release()

    def advance(self) -> None:
        """Advance it; its own caller learns of an error."""
        with suppress(Exception):
            self.is_completed()

    def is_success(self) -> bool:
        """Return whether it is done; a failure raises."""
        return self.is_completed()

    def result(self) -> list[Tensor]:
        """Return the tensors that it fills, after waiting for them."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Wait, and return a future that is done."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


def described(tensor: Tensor) -> str:
    """Return what the ranks compare besides the operation and its bytes."""
    return str(tensor.dtype)[6:]


def n_bytes(tensor: Tensor) -> int:
    """Return the size of its elements."""
    return tensor.numel() * tensor.element_size()


def check(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that are not dense, or not in the host's memory."""
    check_device(tensors)
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise InvalidArgument(f"unsupported layout of a tensor: {tensor.layout}")


def check_device(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that are not in the host's memory."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise OtherDevice(
                f"a process group of fsdpc has a tensor on {tensor.device}; it carries tensors of "
                "CPUs only: name a back end for the others, as in 'cpu:fsdpc,cuda:nccl'"
            )


def dense_of(tensor: Tensor) -> tuple[Tensor, Callable[[], Any] | None]:
    """Return contiguous memory for a result, and how to copy it to the tensor."""
    if tensor.is_contiguous():
        return tensor, None
    made = tensor.contiguous()
    return made, lambda: tensor.copy_(made)


def check_alike(what: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    """Refuse tensors of different layouts, dtypes or shapes."""
    for at, tensor in enumerate(tensors):
        if tensor.layout != like.layout:
            raise InvalidArgument(
                f"{what}: invalid tensor layout at index {at}: {tensor.layout}, not {like.layout}"
            )
        if tensor.dtype != like.dtype:
            raise InvalidArgument(
                f"{what}: invalid tensor type at index {at}: {tensor.dtype}, not {like.dtype}"
            )
        if tensor.shape != like.shape:
            raise InvalidArgument(
                f"{what}: invalid tensor size at index {at}: {list(tensor.shape)}, not "
                f"{list(like.shape)}"
            )


def options(kind: Any, opts: Any, **given: Any) -> Any:
    """Return options for calls that pass a root or a reduction instead, as torch accepts them."""
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(opts, kind) or (opts is None and not given):
        return opts
    made = kind()
    if opts is not None:
        setattr(made, "rootRank" if isinstance(opts, int) else "reduceOp", opts)
    for name, value in given.items():
        setattr(made, name, value)
    return made


def root_of(opts: Any, size: int) -> int:
    """Return the root's rank in the group."""
    root = 0 if opts is None else opts.rootRank
    if not 0 <= root < size:
        raise InvalidArgument(f"invalid root rank: {root}, of a group of {size}")
    return int(root)


def as_list(tensors: Tensor | Sequence[Tensor], what: str = "tensor") -> list[Tensor]:
    """Return a list of at least one tensor."""
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not found:
        raise InvalidArgument(f"requires non-empty {what} list")
    return found


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors' elements, one tensor after the other."""
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(flat: Tensor, outputs: Sequence[Tensor]) -> None:
    """Copy consecutive elements to the tensors."""
    at = 0
    for output in outputs:
        output.copy_(flat[at : at + output.numel()].view(output.shape))
        at += output.numel()


def is_async(opts: Any) -> bool:
    """Return whether the caller waits for the result itself."""
    return bool(getattr(opts, "asyncOp", True)) if opts is not None else False


class Async:
    """Options of an operation that is not waited for."""

    asyncOp = True  # noqa: N815


def all_of(functions: Sequence[Callable[[], Any] | None]) -> Callable[[], Any] | None:
    """Return a function that calls all of these, or None if there are none."""
    found = [function for function in functions if function is not None]
    return (lambda: [function() for function in found]) if found else None


def by_input(outputs: list[list[Tensor]], inputs: int) -> list[list[Tensor]]:
    """Transpose all_gather_coalesced's lists, one a rank, to one an input."""
    for each in outputs:
        if len(each) != inputs:
            raise InvalidArgument(
                f"all_gather: invalid output size: (expected length {inputs}, got {len(each)})"
            )
    return [list(parts) for parts in zip(*outputs, strict=True)]
