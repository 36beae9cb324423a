"""Loss modules, built on the functions of the same names."""

from __future__ import annotations

from fsdpc import functional as F
from fsdpc._core import Tensor
from fsdpc.nn.module import Module


class _Loss(Module):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")
        self.reduction = reduction

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"


class CrossEntropyLoss(_Loss):
    """Cross entropy of logits; see :func:`fsdpc.functional.cross_entropy`.

    Parameters
    ----------
    weight : Tensor, optional
        (classes); a buffer, which is not trained.
    ignore_index : int
    reduction : {"mean", "sum", "none"}
    label_smoothing : float

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> loss = nn.CrossEntropyLoss()
    >>> round(loss(tensor([[0.0, 0.0]]), tensor([1])).item(), 4)  # log(2)
    0.6931
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(reduction)
        self.ignore_index: int = ignore_index
        self.label_smoothing: float = label_smoothing
        self.register_buffer("weight", weight)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits (..., classes), targets (...) -> scalar, or (...) without reduction."""
        return F.cross_entropy(
            logits,
            targets,
            self.ignore_index,
            self.reduction,
            self.weight,
            self.label_smoothing,
        )


class NLLLoss(_Loss):
    """Negative log likelihood of log-probabilities; see :func:`fsdpc.functional.nll_loss`.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.NLLLoss()(tensor([[-0.5, -2.0]]), tensor([1])).item()
    2.0
    """

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__(reduction)
        self.ignore_index = ignore_index
        self.register_buffer("weight", weight)

    def forward(self, log_p: Tensor, targets: Tensor) -> Tensor:
        """log_p (..., classes), targets (...) -> scalar, or (...) without reduction."""
        return F.nll_loss(log_p, targets, self.ignore_index, self.reduction, self.weight)


class MSELoss(_Loss):
    """The mean squared difference.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.MSELoss()(tensor([1.0, 2.0]), tensor([1.0, 4.0])).item()
    2.0
    """

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Map two tensors of one shape to a scalar, or to that shape without reduction."""
        return F.mse_loss(x, target, self.reduction)


class L1Loss(_Loss):
    """The mean absolute difference.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.L1Loss()(tensor([1.0, 2.0]), tensor([1.0, 4.0])).item()
    1.0
    """

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Two tensors of one shape -> scalar, or that shape without reduction."""
        return F.l1_loss(x, target, self.reduction)


class BCEWithLogitsLoss(_Loss):
    """Binary cross entropy; see :func:`fsdpc.functional.binary_cross_entropy_with_logits`.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> loss = nn.BCEWithLogitsLoss()
    >>> round(loss(tensor([0.0]), tensor([1.0])).item(), 4)  # log(2)
    0.6931
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
    ) -> None:
        super().__init__(reduction)
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Map logits and probabilities to a scalar, or to their shape without reduction."""
        return F.binary_cross_entropy_with_logits(
            x, target, self.weight, self.reduction, self.pos_weight
        )


class KLDivLoss(Module):
    """Kullback-Leibler divergence; see :func:`fsdpc.functional.kl_div`.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> loss = nn.KLDivLoss(reduction="sum")
    >>> round(loss(tensor([-1.0, 0.0]), tensor([1.0, 0.0])).item(), 4)
    1.0
    """

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__()
        self.reduction: str = reduction
        self.log_target: bool = log_target

    def forward(self, log_p: Tensor, target: Tensor) -> Tensor:
        """Two tensors of one shape -> scalar, or that shape without reduction."""
        return F.kl_div(log_p, target, self.reduction, self.log_target)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, log_target={self.log_target}"
