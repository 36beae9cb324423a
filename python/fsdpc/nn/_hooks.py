"""Module hooks: functions called around forward and backward.

Backward hooks are recorded on the tape: identity operations on the module's arguments and on its
output call them in backward. In a sharded module they therefore run inside the unit, while its
parameters are gathered, and again in each recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fsdpc import _core
from fsdpc._core import Tensor


class HookHandle:
    """A handle that can remove a module hook.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> model = nn.Linear(2, 2)
    >>> handle = model.register_forward_hook(lambda module, args, y: print(y.shape))
    >>> y = model(fsdpc.ones(1, 2))
    (1, 2)
    >>> handle.remove()
    >>> y = model(fsdpc.ones(1, 2))
    """

    def __init__(self, hooks: dict[int, Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Remove the hook; further calls do nothing."""
        self._hooks.pop(id(self), None)


class Hooked:
    """Base class that registers hooks and calls them around forward and backward."""

    forward: Callable[..., Any]

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, with_kwargs: bool = False
    ) -> HookHandle:
        """Call ``hook(module, args)`` before each forward.

        Parameters
        ----------
        hook : callable
            Its result, unless None, replaces the arguments: a tuple or a single value, or
            ``(args, kwargs)`` if called with keywords.
        with_kwargs : bool, default False
            Call ``hook(module, args, kwargs)``.

        Returns
        -------
        HookHandle
            Call ``remove()`` to unregister the hook.

        Notes
        -----
        Hooks run in registration order. In a sharded module they see gathered parameters.
        """
        return self._add_hook("before", hook, with_kwargs)

    def register_forward_hook(
        self, hook: Callable[..., Any], *, with_kwargs: bool = False
    ) -> HookHandle:
        """Call ``hook(module, args, output)`` after each forward.

        Parameters
        ----------
        hook : callable
            Its result, unless None, replaces the output.
        with_kwargs : bool, default False
            Call ``hook(module, args, kwargs, output)``.

        Returns
        -------
        HookHandle
            Call ``remove()`` to unregister the hook.
        """
        return self._add_hook("after", hook, with_kwargs)

    def register_full_backward_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> HookHandle:
        """Call ``hook(module, grad_output)`` before each backward of the module.

        Parameters
        ----------
        hook : callable
            ``grad_output`` is a tuple with a gradient, or None, for each output. The hook's result,
            unless None, replaces it: a tuple or one gradient, with the same shapes and dtypes.
        prepend : bool, default False
            Call it before the hooks that are already registered.

        Returns
        -------
        HookHandle
            Call ``remove()`` to unregister the hook for later forwards.

        Examples
        --------
        >>> import fsdpc
        >>> layer = fsdpc.nn.Identity()
        >>> handle = layer.register_full_backward_pre_hook(lambda module, grad: (2 * grad[0],))
        >>> x = fsdpc.ones(2, requires_grad=True)
        >>> layer(x).sum().backward()
        >>> x.grad.tolist()
        [2.0, 2.0]
        """
        return self._add_hook("backward before", hook, prepend=prepend)

    def register_full_backward_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> HookHandle:
        """Call ``hook(module, grad_input, grad_output)`` after each backward of the module.

        Parameters
        ----------
        hook : callable
            ``grad_input`` is a tuple with a gradient, or None, for each positional argument
            (PyTorch passes zeros for tensors); ``grad_output`` has one for each output. The hook's
            result, unless None, replaces ``grad_input``: a tuple or one gradient, with the same
            shapes and dtypes.
        prepend : bool, default False
            Call it before the hooks that are already registered.

        Returns
        -------
        HookHandle
            Call ``remove()`` to unregister the hook for later forwards.

        Notes
        -----
        As in PyTorch, if no argument requires a gradient, the hook is called when the output
        gradients exist, and must not replace them. The output must be a tensor or a tuple of
        tensors; otherwise forward raises TypeError.

        Examples
        --------
        >>> import fsdpc
        >>> layer = fsdpc.nn.Linear(2, 1, bias=False)
        >>> handle = layer.register_full_backward_hook(
        ...     lambda module, grad_input, grad_output: print(grad_output[0].tolist())
        ... )
        >>> layer(fsdpc.ones(1, 2, requires_grad=True)).sum().backward()
        [[1.0]]
        """
        return self._add_hook("backward after", hook, prepend=prepend)

    def _add_hook(
        self, when: str, hook: Callable[..., Any], with_kwargs: bool = False, prepend: bool = False
    ) -> HookHandle:
        hooks = self.__dict__.setdefault("_call_hooks", {})
        handle = HookHandle(hooks)
        others = dict(hooks) if prepend else {}
        if prepend:
            hooks.clear()
        hooks[id(handle)] = (when, hook, with_kwargs, handle)  # keeps the handle's id unique
        hooks.update(others)
        return handle

    def _method(self) -> Callable[..., Any]:
        """Return the function that a call runs: forward, surrounded by any hooks."""
        return self._hooked if self.__dict__.get("_call_hooks") else self.forward

    def _hooked(self, *args: Any, **kwargs: Any) -> Any:
        hooks = list(self.__dict__["_call_hooks"].values())
        for when, hook, with_kwargs, _ in hooks:
            if when != "before":
                continue
            changed = hook(self, args, kwargs) if with_kwargs else hook(self, args)
            if changed is not None and with_kwargs:
                args, kwargs = changed
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        backward = _Backward(self, hooks)
        output = self.forward(*backward.arguments(args), **kwargs)
        for when, hook, with_kwargs, _ in hooks:
            if when == "after":
                given = (args, kwargs) if with_kwargs else (args,)
                changed = hook(self, *given, output)
                output = output if changed is None else changed
        return backward.output(output)


class _Backward:
    """Runs the backward hooks for one call."""

    def __init__(self, module: Any, hooks: Sequence[Any]) -> None:
        on = _core.is_grad_enabled()
        self._module = module
        self._before = [hook for when, hook, *_ in hooks if on and when == "backward before"]
        self._after = [hook for when, hook, *_ in hooks if on and when == "backward after"]
        self._count = 0  # of arguments
        self._joined = False  # an argument has a gradient
        self._grad_output: tuple[Tensor | None, ...] | None = None

    def arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, replacing tensors by aliases that intercept gradients."""
        self._count = len(args)
        if self._after:
            args, self._joined = _joined(args, self._leave)
        return args

    def output(self, output: Any) -> Any:
        """Return the output, replacing tensors by aliases that intercept gradients."""
        if not (self._before or self._after):
            return output
        if type(output) is not tuple and not isinstance(output, Tensor):
            raise TypeError(
                f"{type(self._module).__name__} has backward hooks, so its output is to be a "
                f"tensor or a tuple, not {type(output).__name__}; hook a module inside it instead"
            )
        outputs, _ = _joined(output if type(output) is tuple else (output,), self._enter)
        return outputs if type(output) is tuple else outputs[0]

    def _enter(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        for hook in self._before:
            grads = _replaced("grad_output", grads, hook(self._module, grads))
        self._grad_output = grads
        if self._after and not self._joined:
            none: tuple[None, ...] = (None,) * self._count
            for hook in self._after:
                changed = hook(self._module, none, grads)
                if changed is not None and any(g is not None for g in changed):
                    raise RuntimeError(
                        "a backward hook returned gradients for a module none of whose arguments "
                        "requires one; return None"
                    )
        return grads

    def _leave(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        if self._grad_output is None:
            raise RuntimeError(
                f"gradients reached the arguments of {type(self._module).__name__} before those of "
                "its output were complete; its backward hooks need an output that everything else "
                "depends on"
            )
        for hook in self._after:
            changed = hook(self._module, grads, self._grad_output)
            grads = _replaced("grad_input", grads, changed)
        self._grad_output = None
        return grads


def _joined(values: tuple[Any, ...], call: Callable[..., Any]) -> tuple[tuple[Any, ...], bool]:
    """Alias the values that require gradients; return all values, and whether any was aliased.

    Backward passes `call` a gradient or None for each value; `call` returns the gradients to
    propagate.
    """
    at = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad]
    if not at:
        return values, False
    inside = [values[i] for i in at]
    made = _core.custom(inside, [x.detach() for x in inside], partial(_pass, call, at, len(values)))
    alias = dict(zip(at, made, strict=True))
    return tuple(alias.get(i, v) for i, v in enumerate(values)), True


def _pass(
    call: Callable[..., Any], at: list[int], count: int, *given: Tensor | None
) -> list[Tensor | None]:
    grads: list[Tensor | None] = [None] * count
    for i, grad in zip(at, given, strict=True):
        grads[i] = grad
    passed = call(tuple(grads))
    return [passed[i] for i in at]


def _replaced(
    name: str, grads: tuple[Tensor | None, ...], changed: Any
) -> tuple[Tensor | None, ...]:
    if changed is None:
        return grads
    changed = changed if isinstance(changed, tuple) else (changed,)
    if len(changed) != len(grads):
        raise RuntimeError(
            f"a backward hook returned {len(changed)} gradients for the {len(grads)} of {name}"
        )
    return changed
