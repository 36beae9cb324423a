"""Normalise over groups of channels, or over the batch of one rank or of all ranks."""

from __future__ import annotations

from typing import Any

from fsdpc import _core
from fsdpc import functional as F
from fsdpc._core import Tensor
from fsdpc.functional.normalization import counted_batch_norm
from fsdpc.nn import init
from fsdpc.nn.module import Module, Parameter
from fsdpc.tensors.grad_mode import no_grad


class GroupNorm(Module):
    """Normalise groups of channels to mean 0 and variance 1, then scale and shift (Wu & He 2018).

    Parameters
    ----------
    num_groups, num_channels : int
        ``num_groups`` must divide ``num_channels``.
    eps : float
    affine : bool
        Whether to have ``weight`` and ``bias`` (num_channels).
    dtype : dtype, default float32

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.GroupNorm(2, 4)(fsdpc.ones(1, 4, 8)).shape
    (1, 4, 8)
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"GroupNorm: {num_groups} groups of {num_channels} channels")
        self.num_groups: int = num_groups
        self.num_channels: int = num_channels
        self.eps: float = eps
        _register_scale(self, num_channels, affine, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, num_channels, ...) -> the same shape."""
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}"


class _BatchNorm(Module):
    """Base class of batch norms; in eval mode they use running statistics, stored as buffers."""

    _dims: tuple[int, ...] = ()
    _over_ranks = False
    _may_lack = ("num_batches_tracked",)  # state dicts of torch before 0.4.1 lack it

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_features: int = num_features
        self.eps: float = eps
        self.momentum: float | None = momentum
        self.track_running_stats = track_running_stats
        _register_scale(self, num_features, affine, dtype)
        tracked = track_running_stats
        self.register_buffer("running_mean", _core.zeros(num_features) if tracked else None)
        self.register_buffer("running_var", _core.ones(num_features) if tracked else None)
        self.register_buffer(
            "num_batches_tracked", _core.zeros((), dtype="int64") if tracked else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, num_features, ...) -> the same shape."""
        if self._dims and x.ndim not in self._dims:
            raise ValueError(f"{type(self).__name__}: x has shape {x.shape}, not {self._dims} dims")
        if not self.training and self.track_running_stats:
            kept = (self.running_mean, self.running_var)
            return F.batch_norm(x, kept, self.weight, self.bias, self.eps)
        y, mean, var, count = counted_batch_norm(
            x, self.weight, self.bias, self.eps, self._over_ranks
        )
        if self.training and self.track_running_stats:
            self._track(mean, var, count)
        return y

    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        with no_grad():
            seen = self.num_batches_tracked + 1
            part = 1 / seen.double() if self.momentum is None else self.momentum
            unbiased = var.double() * (count / (count - 1))
            for kept, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                kept.copy_(kept.double() * (1 - part) + new.double() * part)
            self.num_batches_tracked.copy_(seen)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class BatchNorm1d(_BatchNorm):
    """Normalise features over this rank's batch (Ioffe & Szegedy 2015).

    Parameters
    ----------
    num_features : int
    eps : float
    momentum : float or None
        Weight of a batch in the running statistics; None averages all batches.
    affine : bool
        Whether to have ``weight`` and ``bias`` (num_features).
    track_running_stats : bool
        Whether to keep running statistics, in float32 buffers, for ``eval()``.
    dtype : dtype, default float32

    Notes
    -----
    Ranks see different batches, so their running statistics differ; checkpoints contain rank 0's.
    :class:`SyncBatchNorm` keeps the same statistics on all ranks.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> norm = nn.BatchNorm1d(1, eps=0.0)
    >>> norm(tensor([[1.0], [3.0]])).tolist()
    [[-1.0], [1.0]]
    >>> round(norm.running_mean.item(), 4)
    0.2
    """

    _dims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Normalise channels of (batch, channels, height, width); see :class:`BatchNorm1d`.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.BatchNorm2d(3)(fsdpc.ones(2, 3, 4, 4)).shape
    (2, 3, 4, 4)
    """

    _dims = (4,)


class SyncBatchNorm(_BatchNorm):
    """Normalise channels over the batches of all ranks; see :class:`BatchNorm1d`.

    Notes
    -----
    Forward and backward are collective: forward makes two small sums over ranks, backward one.
    Statistics (including running ones) and gradients equal those of a single rank with all
    batches. Batch sizes may differ.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.SyncBatchNorm(3)(fsdpc.ones(2, 3, 4, 4)).shape  # one rank: as BatchNorm2d
    (2, 3, 4, 4)
    """

    _over_ranks = True


def _register_scale(module: Module, features: int, affine: bool, dtype: Any) -> None:
    for name, fill in (("weight", init.ones_), ("bias", init.zeros_)):
        p = fill(Parameter.empty((features,), dtype)) if affine else None
        module.register_parameter(name, p)
