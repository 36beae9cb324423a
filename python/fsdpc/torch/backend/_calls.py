"""What every call of an operation shares: tensors on other devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from fsdpc.torch.backend._works import OtherDevice

_Method = TypeVar("_Method", bound=Callable[..., Any])


def operation(_: str) -> Callable[[_Method], _Method]:
    """Make a method an operation of process groups.

    Tensors on another device go to the group of that device's back end, by the same method.
    """
    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except OtherDevice:
                others = self.others()
                if others is None:
                    raise
            return getattr(others, method.__name__)(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
