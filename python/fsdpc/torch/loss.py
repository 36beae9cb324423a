"""The loss of a language model's head, whose logits never all exist.

The engine's operation runs on torch's memory, on a tape of its own: torch sees one node, whose
backward runs that tape. Weights are used as torch passes them, so inside a unit's forward the
head's weight is the gathered one. On a CPU, its gradient is computed in the unit's reduce buffer,
without torch, unless hooks or ``torch.autograd.grad`` ask for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fsdpc import _core
from fsdpc.tensors.grad_mode import enable_grad
from fsdpc.torch.kernels import accumulates, unit_of

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Compute ``cross_entropy(linear(input, weight), target)`` without storing all logits.

    Parameters
    ----------
    input : torch.Tensor
        (..., in), float32, bfloat16, float16 or float64.
    weight : torch.Tensor
        (classes, in), of the same dtype; autocast converts both. A sharded weight is gathered:
        inside its unit's forward it is whole already.
    target : torch.Tensor
        (...), int32 or int64.
    ignore_index : int
        Rows with this target are ignored.
    reduction : {"mean", "sum", "none"}
        The mean covers only rows that are not ignored.
    label_smoothing : float
        This fraction of the target, in [0, 1), is spread over all classes.
    softcap : float
        If positive, logits become ``softcap * tanh(logits / softcap)``, as in Gemma.
    z_loss : float
        Adds this factor times the square of each row's log-sum-exp.

    Returns
    -------
    torch.Tensor
        A float32 scalar, or (...) with "none".

    Raises
    ------
    IndexError
        A target is neither a class nor ``ignore_index``.
    ValueError
        Shapes do not match, or an option is out of range.
    TypeError
        Dtypes differ, or are not floats.

    Notes
    -----
    On a CPU, 24 MiB of logits (at least 64 rows) exist at a time. The gradients of input and weight
    are computed in forward, so backward runs once, and second derivatives are not supported.

    Examples
    --------
    >>> x, weight = torch.zeros(1, 4), torch.zeros(2, 4)
    >>> round(linear_cross_entropy(x, weight, torch.tensor([1])).item(), 4)  # log(2)
    0.6931
    """
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(dtype), weight.to(dtype)
    if input.dtype not in _FLOATS or input.dtype is not weight.dtype:
        raise TypeError(
            f"linear_cross_entropy: input is {input.dtype} and weight {weight.dtype}; both must "
            "have one float dtype"
        )
    return _Loss.apply(input, weight, target, (ignore_index, 0, reduction, label_smoothing,
                                               softcap, z_loss))  # fmt: skip


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, options: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)  # for torch's checks of writes
        ours = [_core.from_dlpack(t.detach().contiguous()) for t in (x, weight)]
        for each, needed in zip(ours, ctx.needs_input_grad, strict=False):
            each.requires_grad = needed
        direct = ctx.needs_input_grad[1] and weight.is_cpu and not weight._backward_hooks
        ctx.unit = unit_of(getattr(weight, "_fsdpc_target", None)) if direct else None
        if ctx.unit is not None:
            ctx.unit[0].lend(ctx.unit[1], ours[1])
        ids = _core.from_dlpack(target.contiguous())
        with enable_grad():  # without gradients that are needed, nothing is recorded
            loss = _core.linear_cross_entropy(*ours, ids, *options)
        if loss.requires_grad:
            ctx.ours = loss, ours
        return torch.from_dlpack(loss.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> Any:
        weight = ctx.saved_tensors[1]
        if ctx.ours is None:
            raise RuntimeError("linear_cross_entropy: backward ran already, and it can run once")
        (loss, ours), ctx.ours = ctx.ours, None
        if ctx.unit is not None:
            accepts = accumulates(ctx.next_functions[1][0]) and not weight._backward_hooks
            ctx.unit[0].accept(ours[1], accepts)
        loss.backward(_core.from_dlpack(dloss.contiguous()))
        del loss
        grads = [None if t.grad is None else torch.from_dlpack(t.grad) for t in ours]
        return *grads, None, None
