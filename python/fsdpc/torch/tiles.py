"""Torch modules in tiles of tokens; :mod:`fsdpc.sharding.tiles` has what both frontends share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

from fsdpc.sharding.tiles import Frontend, tile


def _recompute(call: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    if not torch.is_grad_enabled():
        return call(*tensors)
    return checkpoint(call, *tensors, use_reentrant=False)


def _split(x: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
    return x.split(tokens, -2)  # one node, which joins gradients once


def _join(tiles: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tiles, -2)


_TORCH = Frontend(
    module=nn.Module,
    tensor=torch.Tensor,
    mixing=(_NormBase, nn.GroupNorm, _ConvNd, nn.RNNBase, nn.RNNCellBase),
    recompute=_recompute,
    split=_split,
    join=_join,
)


def tile_tokens(modules: Iterable[nn.Module], tokens: int) -> int:
    """Make torch modules compute a tile of tokens at a time, and recompute each in backward.

    Activations inside such a module exist for one tile at a time. Only its inputs are kept for
    backward.

    Parameters
    ----------
    modules : iterable of nn.Module
        Modules whose output at a token depends on this token only, such as
        ``[layer.mlp for layer in model.model.layers]``. They are changed in place, before or after
        ``fully_shard``, fsdpc's or PyTorch's.
    tokens : int
        Most tokens in a tile, counted over all sequences of a batch.

    Returns
    -------
    int
        Number of changed modules.

    Raises
    ------
    TypeError, ValueError
        As :func:`fsdpc.tile_tokens`. Modules that mix tokens are classes named ``...Attention``,
        batch, instance and group norms, convolutions and recurrent layers.

    Notes
    -----
    :func:`fsdpc.tile_tokens` says what tiles and outputs must be, and which bits differ. Tiles run
    under ``torch.utils.checkpoint`` without reentrance. Autograd adds a weight's gradients over
    tiles in the unsharded parameter's dtype, so with bfloat16 use few tiles, or
    :func:`use_kernels`, whose layers add them in the unit's reduce buffer. Outputs need not be
    bitwise equal to an untiled module's.

    Source: ALST (Bekman et al. 2025).

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> x = torch.ones(2, 5, 4)
    >>> y = mlp(x)
    >>> tile_tokens([mlp], 3)  # 10 tokens in four tiles
    1
    >>> torch.allclose(mlp(x), y)
    True
    """
    return tile(_TORCH, modules, tokens)
