"""Run linear layers of torch modules on the engine's matrix products.

On a CPU, torch's matrix products take most of a step. The engine's are faster in float32, and they
write weight gradients directly into the unit's reduce buffer instead of into separate tensors. The
engine sums in a different order, so results are not bitwise equal to torch's. Models therefore have
to opt in.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fsdpc import _core

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_PLAIN = (torch.Tensor, nn.Parameter)  # other classes may lack or override memory

_is_compiling = torch.compiler.is_compiling
_is_transforming = torch._C._are_functorch_transforms_active
_will_run = torch._C._will_engine_execute_node


def use_kernels(module: nn.Module) -> nn.Module:
    """Make the linear layers of a module use the engine's matrix products.

    Parameters
    ----------
    module : nn.Module
        An unsharded module. Every ``nn.Linear`` in it, or the module itself, becomes a
        :class:`KernelLinear`; subclasses of ``nn.Linear`` do not change.

    Returns
    -------
    nn.Module
        The module.

    Raises
    ------
    RuntimeError
        Part of the module is sharded: call this before ``fully_shard``.

    Notes
    -----
    The engine multiplies dense float32 and bfloat16 CPU tensors. With other tensors, and under
    autocast, ``torch.compile`` and ``torch.func``, the layers compute as before. Threads are the
    engine's (``fsdpc.set_num_threads``). Second derivatives are not supported.

    Examples
    --------
    >>> model = use_kernels(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    >>> type(model[0]).__name__
    'KernelLinear'
    """
    layers = []
    for name, m in module.named_modules():
        if "_fsdpc_state" in m.__dict__:
            raise RuntimeError(
                f"use_kernels(): '{name or type(m).__name__}' is sharded already; call it before "
                "fully_shard()"
            )
        if type(m) is nn.Linear:
            layers.append(m)
    for layer in layers:
        layer.__class__ = KernelLinear
    return module


class KernelLinear(nn.Linear):
    """An ``nn.Linear`` that uses the engine's matrix products; see :func:`use_kernels`.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import KernelLinear
    >>> KernelLinear(4, 2)(torch.ones(1, 4)).shape
    torch.Size([1, 2])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input @ weight.T + bias``."""
        if _fits(input, self.weight, self.bias):
            return _Product.apply(input, self.weight, self.bias)
        return super().forward(input)


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    if _is_compiling() or _is_transforming() or torch.is_autocast_enabled("cpu"):
        return False
    return (
        type(x) in _PLAIN
        and type(weight) in _PLAIN
        and x.is_cpu
        and weight.is_cpu
        and weight.dtype in _DTYPES
        and x.dtype is weight.dtype
        and (bias is None or bias.dtype is weight.dtype)
        and x.layout is torch.strided
        and weight.is_contiguous()
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
    )


def target(full: nn.Parameter, state: Any, index: int) -> None:
    """Make an unsharded parameter's gradient go to parameter ``index`` of the unit."""
    full._fsdpc_target = (weakref.ref(state), index)  # type: ignore[attr-defined]


class _Product(torch.autograd.Function):
    """y = x W' + b."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.target = getattr(weight, "_fsdpc_target", None)  # a saved tensor may lack it
        n_out, n_in = weight.shape
        y = x.new_empty((*x.shape[:-1], n_out))
        _core.product(
            y.data_ptr(), x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
            y.numel() // n_out if n_out else 0, n_out, n_in, False, True, _DTYPES[x.dtype],
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dy = dy.contiguous()
        n_out, n_in = weight.shape
        rows = dy.numel() // n_out if n_out else 0
        dtype = _DTYPES[x.dtype]
        dx = dweight = dbias = None
        if needs_bias:
            dbias = dy.reshape(-1, n_out).sum(0)
        if needs_weight and not _takes(ctx, dy, x, rows, n_out, n_in):
            dweight = torch.empty_like(weight)
            _core.product(dweight.data_ptr(), dy.data_ptr(), x.data_ptr(), 0, n_out, n_in, rows,
                          True, False, dtype)  # fmt: skip
        if needs_x:
            dx = torch.empty_like(x)
            _core.product(dx.data_ptr(), dy.data_ptr(), weight.data_ptr(), 0, rows, n_in, n_out,
                          False, False, dtype)  # fmt: skip
        return dx, dweight, dbias


def _takes(ctx: Any, dy: torch.Tensor, x: torch.Tensor, rows: int, n_out: int, n_in: int) -> bool:
    """Add the gradient to the weight's unit; return whether the unit accepted it."""
    found = unit_of(ctx.target)
    if found is None or not accumulates(ctx.next_functions[1][0]):
        return False
    unit, index = found
    return unit.add_product(index, dy.data_ptr(), x.data_ptr(), rows, n_out, n_in)


def unit_of(target: Any) -> tuple[_core.TorchUnit, int] | None:
    """Return the unit that a gathered weight's ``_fsdpc_target`` names, and the weight's index."""
    reference, index = target or (None, 0)
    state = None if reference is None else reference()
    return None if state is None else (state.torch_unit, index)


def accumulates(node: Any) -> bool:
    """Return whether the running backward adds to the ``.grad`` that this node accumulates."""
    try:
        return _will_run(node)
    except RuntimeError:  # torch.autograd.grad() has to return the gradient
        return False
