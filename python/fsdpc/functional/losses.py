"""Losses. Results are float32 (float64 for float64), because they are sums of many small numbers.

``reduction`` is "mean", "sum" or "none", as in PyTorch. Classes are the last dimension.
"""

from __future__ import annotations

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.functional.elementwise import where, wide
from fsdpc.functional.indexing import gather, index_select


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the cross entropy of logits and targets.

    Parameters
    ----------
    logits : Tensor
        (..., classes)
    targets : Tensor
        (...), int32 or int64; or the probability of every class, (..., classes), as floats.
    ignore_index : int
        Rows with this target are ignored.
    reduction : {"mean", "sum", "none"}
        The mean covers only rows that are not ignored, weighted by their targets' weights.
    weight : Tensor, optional
        (classes), floats.
    label_smoothing : float
        This fraction of the target, in [0, 1), is spread over all classes.

    Returns
    -------
    Tensor
        A float32 scalar for logits of any dtype, or (...) with "none". The mean is NaN if all rows
        are ignored.

    Raises
    ------
    IndexError
        A target is neither a class nor ``ignore_index``.
    ValueError
        Shapes do not match, or an option is out of range.

    Notes
    -----
    Class ids without weights use a single kernel; everything else is composed of
    :func:`log_softmax` and :func:`nll_loss`.

    Source: Szegedy et al. 2016 (label smoothing).

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> round(F.cross_entropy(tensor([[0.0, 0.0]]), tensor([1])).item(), 4)  # log(2)
    0.6931
    """
    _check_reduction("cross_entropy", reduction)
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"cross_entropy: label_smoothing is {label_smoothing}, not in [0, 1)")
    ids = targets.shape != logits.shape or not targets.dtype.is_floating_point
    usual = reduction == "mean" and label_smoothing == 0
    if ids and weight is None and (usual or logits.dtype is not _core.float64):
        return _core.cross_entropy(logits, targets, ignore_index, reduction, label_smoothing)
    log_p = _core.log_softmax(wide(logits), -1)
    if not ids:
        return _of_probabilities(log_p, wide(targets), reduction, weight, label_smoothing)
    loss = nll_loss(log_p, targets, ignore_index, reduction, weight)
    if label_smoothing == 0:
        return loss
    even = log_p if weight is None else log_p * wide(weight)
    spread = where(targets != ignore_index, -even.mean(-1), 0.0)
    if reduction == "none":
        smooth = spread
    elif reduction == "sum":
        smooth = spread.sum()
    else:
        smooth = spread.sum() / _counted(targets, ignore_index, weight, log_p.dtype)
    return loss * (1 - label_smoothing) + smooth * label_smoothing


def nll_loss(
    log_p: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Compute the negative log likelihood of the targets.

    Parameters
    ----------
    log_p : Tensor
        (..., classes), such as the result of :func:`log_softmax`.
    targets : Tensor
        (...), int32 or int64.
    ignore_index, reduction, weight
        As for :func:`cross_entropy`.

    Returns
    -------
    Tensor
        A scalar, or (...) with "none".

    Raises
    ------
    IndexError
        A target is neither a class nor ``ignore_index``.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.nll_loss(tensor([[-0.5, -2.0]]), tensor([1])).item()
    2.0
    """
    _check_reduction("nll_loss", reduction)
    if log_p.shape[:-1] != targets.shape:
        raise ValueError(f"nll_loss: log_p {log_p.shape} and targets {targets.shape} do not fit")
    if reduction == "mean" and weight is None and log_p.dtype is not _core.float64:
        return _core.nll_loss(log_p, targets, ignore_index)
    counts = targets != ignore_index
    ids = where(counts, targets, 0)
    loss = -gather(wide(log_p), -1, ids.unsqueeze(-1)).squeeze(-1)
    if weight is not None:
        loss = loss * index_select(wide(weight), 0, ids.reshape(-1)).reshape(ids.shape)
    loss = where(counts, loss, 0.0)
    if reduction == "mean":
        return loss.sum() / _counted(targets, ignore_index, weight, loss.dtype)
    return _reduced(loss, reduction)


def mse_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Compute the mean squared difference of two tensors, with broadcasting.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.mse_loss(tensor([1.0, 2.0]), tensor([1.0, 4.0])).item()
    2.0
    """
    _check_reduction("mse_loss", reduction)
    away = wide(x) - wide(target)
    return _reduced(away * away, reduction)


def l1_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Compute the mean absolute difference of two tensors, with broadcasting.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.l1_loss(tensor([1.0, 2.0]), tensor([1.0, 4.0])).item()
    1.0
    """
    _check_reduction("l1_loss", reduction)
    return _reduced(_core.abs(wide(x) - wide(target)), reduction)


def smooth_l1_loss(x: Tensor, target: Tensor, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Average the differences, squared below ``beta`` and absolute above (Girshick 2015).

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.smooth_l1_loss(tensor([0.0, 2.0]), tensor([1.0, 4.0])).item()
    1.0
    """
    _check_reduction("smooth_l1_loss", reduction)
    if not beta > 0:
        raise ValueError(f"smooth_l1_loss: beta is {beta}; it must be positive")
    return _reduced(_core.huber(wide(x) - wide(target), beta), reduction)


def binary_cross_entropy_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Compute the binary cross entropy of logits.

    Parameters
    ----------
    x : Tensor
        Logits.
    target : Tensor
        Probabilities, in x's shape.
    weight, pos_weight : Tensor, optional
        Factors for each loss and for its positive part; they broadcast.
    reduction : {"mean", "sum", "none"}
        The mean divides by the number of elements.

    Returns
    -------
    Tensor
        A scalar, or x's shape with "none". Large logits do not overflow.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> round(F.binary_cross_entropy_with_logits(tensor([0.0]), tensor([1.0])).item(), 4)
    0.6931
    """
    _check_reduction("binary_cross_entropy_with_logits", reduction)
    if x.shape != target.shape:
        raise ValueError(f"binary_cross_entropy_with_logits: x {x.shape}, target {target.shape}")
    x = wide(x)
    target = target.to(x.dtype)
    loss = _core.softplus(-x)  # -log sigmoid(x)
    if pos_weight is not None:
        loss = loss * ((wide(pos_weight) - 1) * target + 1)
    loss = (1 - target) * x + loss
    return _reduced(loss if weight is None else loss * wide(weight), reduction)


def kl_div(
    log_p: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False
) -> Tensor:
    """Average the terms of a Kullback-Leibler divergence, ``target * (log(target) - log_p)``.

    Parameters
    ----------
    log_p : Tensor
        Log-probabilities.
    target : Tensor
        Probabilities, or log-probabilities with ``log_target``.
    reduction : {"mean", "sum", "none", "batchmean"}
        "batchmean", the divergence itself, divides the sum by the first dimension's size.
    log_target : bool

    Returns
    -------
    Tensor
        A scalar, or the terms with "none". Terms are 0 where the target is 0.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.kl_div(tensor([[-1.0, -1.0]]), tensor([[1.0, 0.0]]), reduction="sum").item()
    1.0
    """
    if reduction != "batchmean":
        _check_reduction("kl_div", reduction)
    log_p, target = wide(log_p), wide(target)
    if log_target:
        loss = _core.exp(target) * (target - log_p)
    else:
        some = target > 0
        loss = where(some, target * (_core.log(where(some, target, 1.0)) - log_p), 0.0)
    if reduction == "batchmean":
        return loss.sum() / loss.shape[0]
    return _reduced(loss, reduction)


def _check_reduction(name: str, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction is 'mean', 'sum' or 'none', not {reduction!r}")


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _counted(
    targets: Tensor, ignore_index: int, weight: Tensor | None, dtype: _core.dtype
) -> Tensor:
    """Return the number of rows that are not ignored or, with weights, the sum of their weights."""
    counts = targets != ignore_index
    if weight is None:
        return counts.sum().to(dtype)
    ids = where(counts, targets, 0).reshape(-1)
    weights = index_select(wide(weight), 0, ids).reshape(targets.shape)
    return where(counts, weights, 0.0).sum()


def _of_probabilities(
    log_p: Tensor, target: Tensor, reduction: str, weight: Tensor | None, smoothing: float
) -> Tensor:
    """Compute the cross entropy of two distributions, averaged over rows as in PyTorch."""
    if log_p.shape != target.shape:
        raise ValueError(f"cross_entropy: logits {log_p.shape} and targets {target.shape}")
    if smoothing:
        target = target * (1 - smoothing) + smoothing / log_p.shape[-1]
    each = log_p * target
    return _reduced(-(each if weight is None else each * wide(weight)).sum(-1), reduction)
