"""Enable and disable gradient recording."""

from __future__ import annotations

from contextlib import ContextDecorator

from fsdpc import _core


class _GradMode(ContextDecorator):
    _mode: bool

    def __enter__(self) -> None:
        self._before = _core.set_grad_enabled(self._mode)

    def __exit__(self, *exc: object) -> None:
        _core.set_grad_enabled(self._before)

    def _recreate_cm(self) -> _GradMode:
        return type(self)()  # each call of a decorated function has its own context


class no_grad(_GradMode):
    """Disable the recording of operations; usable as a context manager or a decorator.

    Examples
    --------
    >>> import fsdpc
    >>> x = fsdpc.ones(2, requires_grad=True)
    >>> with fsdpc.no_grad():
    ...     y = 2 * x
    >>> y.requires_grad
    False
    """

    _mode = False


class enable_grad(_GradMode):
    """Enable the recording of operations; usable as a context manager or a decorator.

    Examples
    --------
    >>> import fsdpc
    >>> x = fsdpc.ones(2, requires_grad=True)
    >>> with fsdpc.no_grad(), fsdpc.enable_grad():
    ...     y = 2 * x
    >>> y.requires_grad
    True
    """

    _mode = True
