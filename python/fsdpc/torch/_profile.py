"""Label unit operations in profiler traces; does nothing unless a profiler runs.

    FSDP::forward (layers.0)    the whole forward; inside, FSDP::unshard is the wait for parameters
    FSDP::backward (layers.0)   from the first gradient of its outputs to the last of its inputs
    FSDP::reduce (Net)          the wait for reductions at the end of backward

If a unit's inputs need no gradients, its backward range ends when the whole backward ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import record_function
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdpc.torch._unit import Root, UnitState


def enter(state: UnitState, grad: bool, in_task: bool) -> tuple[Any, bool]:
    """Begin a forward; return its profiler range and the result of ``TorchUnit.enter``."""
    span = _begin(state, "forward")
    with record_function(f"FSDP::unshard ({state.unit.name})"):
        return span, state.torch_unit.enter(grad, in_task)


def _begin(state: UnitState, what: str) -> Any:
    span = record_function(f"FSDP::{what} ({state.unit.name})")
    span.__enter__()
    return span


def leave(span: Any) -> None:
    """End a range."""
    span.__exit__(None, None, None)


class Marks:
    """Wraps a TorchUnit for one forward; its marks open and close the backward range."""

    def __init__(self, state: UnitState) -> None:
        assert state.root is not None
        self._state, self._root = state, state.root
        self._span: Any = None

    def mark(self) -> Any:
        """Return the mark to attach to output nodes."""
        mark = self._state.torch_unit.mark()

        def begin(grads: Any) -> None:
            if self._span is None:
                self._span = _begin(self._state, "backward")
                self._root.spans.append(self._span)
                self._root.finish_spans = finish
            mark(grads)

        return begin

    def end_backward(self) -> None:
        """Record that the gradients of all inputs exist."""
        self._state.torch_unit.end_backward()
        if self._span in self._root.spans:
            self._root.spans.remove(self._span)
            leave(self._span)
        self._span = None


def finish(root: Root) -> None:
    """End all open ranges, then wait for reductions in a separate range."""
    while root.spans:
        leave(root.spans.pop())
    with record_function(f"FSDP::reduce ({root.states[0].unit.name})"):
        root.head.finish()


def mark_optimizers(note: Callable[[str], None]) -> list[Any]:
    """Report each step of torch's own optimizers from now on; return handles with ``remove()``.

    The engine's trace already contains the steps of ``fsdpc.torch.optim``.
    """

    def begin(optimizer: Any, *_: Any) -> None:
        if not type(optimizer).__module__.startswith("fsdpc."):
            note(f"optim {type(optimizer).__name__}")

    def end(optimizer: Any, *_: Any) -> None:
        if not type(optimizer).__module__.startswith("fsdpc."):
            note("optim_end")

    return [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
