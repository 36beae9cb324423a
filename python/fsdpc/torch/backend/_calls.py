"""What every call of an operation shares: tensors on other devices, and labels for profilers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch.autograd import profiler

from fsdpc.torch.backend._works import OtherDevice

_Method = TypeVar("_Method", bound=Callable[..., Any])


def operation(label: str) -> Callable[[_Method], _Method]:
    """Make a method an operation of process groups.

    Under a profiler, a call is a range ``fsdpc:label``; a call with ``async_op`` ends when it is
    posted. Tensors on another device go to the group of that device's back end, by the same method.
    """
    title = f"fsdpc:{label}"

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if not profiler._is_profiler_enabled:
                    return method(self, *args, **kwargs)
                with profiler.record_function(title):
                    return method(self, *args, **kwargs)
            except OtherDevice:
                others = self.others()
                if others is None:
                    raise
            return getattr(others, method.__name__)(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
