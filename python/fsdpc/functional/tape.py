"""What is joined to the tape by hand: marks, recomputation, and backwards written in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdpc import _core
from fsdpc._core import Tensor


def boundary(x: Tensor, callback: Callable[[], Any]) -> Tensor:
    """Return x such that backward calls a function when the gradient of the result is complete.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import functional as F
    >>> x = fsdpc.ones(1, requires_grad=True)
    >>> y = F.boundary(x, lambda: print("backward has come here"))
    >>> (2 * y).sum().backward()
    backward has come here
    """
    return _core.boundary(x, callback)


def checkpoint(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function without keeping its intermediate results: backward runs it again.

    Parameters
    ----------
    fn : callable
        Called with the arguments behind it, and once more in each backward.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import functional as F
    >>> x = fsdpc.tensor([1.0, 2.0], requires_grad=True)
    >>> F.checkpoint(lambda x: F.relu(x) * x, x).sum().backward()
    >>> x.grad.tolist()
    [2.0, 4.0]
    """
    return _core.checkpoint(fn, *args, **kwargs)


def custom(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    backward: Callable[..., Tensor | Sequence[Tensor | None] | None],
) -> tuple[Tensor, ...]:
    """Join outputs to inputs on the tape, with a backward written in Python.

    Parameters
    ----------
    inputs : sequence of Tensor
        What the outputs were computed from, of any shapes and dtypes.
    outputs : sequence of Tensor
        The results, of any shapes and dtypes. Those of integers and bool have no gradient.
    backward : callable
        Called once for each backward through the result, with a gradient for each output, of its
        shape and dtype, or None. It returns a gradient for each input, of its shape and dtype, or
        None: as a sequence, or alone if there is one input. Nothing is recorded while it runs.

    Returns
    -------
    tuple of Tensor
        A tensor for each output, over the same memory. In ``no_grad``, or if no input requires
        grad, they require none and ``backward`` is dropped.

    Raises
    ------
    TypeError
        ``inputs`` or ``outputs`` is no sequence of tensors.

    Notes
    -----
    A call of ``Tensor.backward`` raises ValueError if ``backward`` returned another number of
    gradients than there are inputs, or one of another shape or dtype than its input; TypeError if
    it returned something else; and what ``backward`` raised. docs/custom.md has examples, also of
    kernels in C.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import functional as F
    >>> def cube(x):
    ...     with fsdpc.no_grad():
    ...         y = x * x * x
    ...     return F.custom([x], [y], lambda dy: 3 * dy * x * x)[0]
    >>> x = fsdpc.tensor([1.0, 2.0], requires_grad=True)
    >>> cube(x).sum().backward()
    >>> x.grad.tolist()
    [3.0, 12.0]
    """
    return _core.custom(inputs, outputs, backward)
