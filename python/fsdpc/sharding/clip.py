"""Gradient norms, and clipping by global norm or by value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fsdpc import _core, distributed
from fsdpc._core import Tensor
from fsdpc.nn.module import Module, Parameter
from fsdpc.sharding import overflow

NAMED = 5  # maximum number of offending parameters named in an error


def clip_grad_norm_(
    module: Module | Iterable[Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``; collective.

    Parameters
    ----------
    module : Module or iterable of Parameter
        Parameters whose gradients are counted, each once. Sharded units are counted as a whole,
        without ignored parameters.
    max_norm : float
        ``inf`` only measures the norm. A NaN norm makes all gradients NaN, as in PyTorch.
    norm_type : float, default 2
        1, 2, ``inf`` (the largest magnitude) or another number above 0.
    error_if_nonfinite : bool, default False
        Whether to raise, leaving gradients unchanged, if the norm is NaN or infinite. On a GPU,
        this synchronises.

    Returns
    -------
    Tensor, 0-d float64
        The norm over all ranks before clipping. Its bits do not depend on world size or layout:
        powers are summed in float64 over fixed leaves and added exactly.

    Raises
    ------
    FloatingPointError
        The norm is not finite and ``error_if_nonfinite`` is set; the error names the parameters.
    ValueError
        ``max_norm`` or ``norm_type`` is invalid, or some parameters are sharded while others have
        gradients but neither belong to a unit nor are ignored.

    Notes
    -----
    Sharded gradients are not changed immediately: the optimizer applies the factor when it reads
    them, or the first access to ``.grad`` does. There is one small all-reduce per shard group.
    Powers must fit in float64: for a large ``norm_type``, the norm of finite gradients can be
    infinite or 0.

    On a GPU, the norm and the factor stay in GPU memory, and reading the norm synchronises. A
    ``norm_type`` other than 1, 2 or ``inf``, or a :class:`fsdpc.amp.LossScaler`, synchronises
    immediately.

    Examples
    --------
    >>> import fsdpc
    >>> layer = fsdpc.nn.Linear(2, 1, bias=False)
    >>> layer(fsdpc.tensor([[3.0, 4.0]])).sum().backward()
    >>> float(fsdpc.clip_grad_norm_(layer, 1.0))  # before clipping
    5.0
    >>> round(float(fsdpc.clip_grad_norm_(layer, 1.0)), 6)
    1.0
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}")
    named = _named(module)
    units, plain = _gradients(named)
    if not on_same_ranks(units):
        raise NotImplementedError(
            "a total norm of units on meshes of different ranks: call this for each mesh's "
            "parameters with max_norm=inf, sum the powers of the norms over the ranks that have "
            "other parameters, and clip each mesh's to max_norm * its norm / the root of all sums"
        )
    p = float(norm_type)
    if not (error_if_nonfinite or overflow.is_watching(units)):
        return _core.clip_grads(units, plain, p, float(max_norm))
    norm = _core.grad_norm(units, plain, p)
    if math.isfinite(norm) or p in (1, 2, math.inf):  # other powers may themselves have overflowed
        overflow.report(units, not math.isfinite(norm))
    if error_if_nonfinite and not math.isfinite(norm):
        largest = grad_norms(module, math.inf)
        wrong = [f"'{name}'" for name, x in largest.items() if not math.isfinite(x)]
        bad = ", ".join(wrong[:NAMED])
        bad += f" and {len(wrong) - NAMED} more" if wrong[NAMED:] else ""
        raise FloatingPointError(
            f"the global gradient norm is {norm}: gradients hold NaN or infinity, in {bad}; drop "
            "them (zero_grad()) and go on, or set error_if_nonfinite=False"
            if bad
            else f"the global gradient norm is {norm}, though all gradients are finite: powers of "
            f"{norm_type} do not fit float64; take norm_type 2 or inf"
        )
    _core.scale_grads(units, plain, norm, float(max_norm))
    return _core.tensor(norm, dtype=_core.float64)


def grad_norms(module: Module | Iterable[Parameter], norm_type: float = 2.0) -> dict[str, float]:
    """Compute the norm of each parameter's gradient over all ranks; collective.

    Parameters
    ----------
    module : Module or iterable of Parameter
        As for :func:`clip_grad_norm_`.
    norm_type : float, default 2
        1, 2, ``inf`` or another number above 0.

    Returns
    -------
    dict of str to float
        Norms by name, for parameters with a gradient. Like the global norm, they are exact and
        independent of the world size.

    Notes
    -----
    Reads the gradients once, and makes one all-reduce with 560 bytes per parameter.

    Examples
    --------
    >>> import fsdpc
    >>> layer = fsdpc.nn.Linear(2, 1)
    >>> layer(fsdpc.tensor([[3.0, 4.0]])).sum().backward()
    >>> fsdpc.grad_norms(layer)
    {'weight': 5.0, 'bias': 1.0}
    """
    named = _named(module)
    units, plain = _gradients(named)
    sharded, others = _core.grad_norms(units, plain, float(norm_type))
    of, rest = dict(zip(units, sharded)), iter(others)
    norms = {}
    for name, p in named:
        if p._unit is not None:
            norm = of[p._unit][p._index]
            if norm is not None:
                norms[name] = norm
        elif _is_plain(p):
            norms[name] = next(rest)
    return norms


def clip_grad_value_(module: Module | Iterable[Parameter], clip_value: float) -> None:
    """Clamp every gradient element to [-``clip_value``, ``clip_value``], in place.

    Parameters
    ----------
    module : Module or iterable of Parameter
        Parameters whose gradients are clamped, without ignored ones.
    clip_value : float
        At least 0. NaN stays NaN.

    Notes
    -----
    Makes one pass over the gradient shards, after applying any factor deferred by
    :func:`clip_grad_norm_` or a loss scaler. It does not communicate.

    Examples
    --------
    >>> import fsdpc
    >>> layer = fsdpc.nn.Linear(2, 1, bias=False)
    >>> layer(fsdpc.tensor([[3.0, 0.5]])).sum().backward()
    >>> fsdpc.clip_grad_value_(layer, 1.0)
    >>> layer.weight.grad.tolist()
    [[1.0, 0.5]]
    """
    if not clip_value >= 0:
        raise ValueError(f"clip_value must be at least 0, got {clip_value}")
    params = [p for _, p in _named(module) if not getattr(p, "_ignored", False)]
    for p in params:
        if p._unit is not None:
            p._unit.refuse_stepped()
    grads = [p.grad for p in params]
    _core.clamp_([g for g in grads if g is not None], float(clip_value))


def _named(module: Module | Iterable[Parameter]) -> list[tuple[str, Parameter]]:
    """Return every parameter once, with its name."""
    if isinstance(module, Module):
        return list(module.named_parameters())
    params = [module] if isinstance(module, Parameter) else list(module)
    once = {id(p): p for p in params}.values()
    names = [getattr(p, "_name", f"number {i}") for i, p in enumerate(once)]
    if len(set(names)) < len(names):  # separate units may use the same name
        names = [f"number {i} ('{name}')" for i, name in enumerate(names)]
    return list(zip(names, once, strict=True))


def _is_plain(p: Parameter) -> bool:
    """Return whether a parameter is unsharded and has a gradient that counts towards the norm."""
    return p._unit is None and not getattr(p, "_ignored", False) and p.grad is not None


def on_same_ranks(units: Sequence[Any]) -> bool:
    """Return whether the ranks that share a unit share all of these units."""
    if all(unit.comms == units[0].comms for unit in units):
        return True
    return all(math.prod(unit.mesh_shape) == distributed.world_size() for unit in units)


def _gradients(named: list[tuple[str, Parameter]]) -> tuple[list[Any], list[Tensor]]:
    """Return units and unsharded gradients; raise if both exist, because ranks would disagree."""
    units = list(dict.fromkeys(p._unit for _, p in named if p._unit is not None))
    plain = [(name, p) for name, p in named if _is_plain(p)]
    if units and plain:
        names = ", ".join(f"'{name}'" for name, _ in plain)
        raise ValueError(
            f"{names}: held by no unit, so the norm would differ between ranks; call fully_shard() "
            "on the module around them, or give them as its ignored_params"
        )
    return units, [p.grad for _, p in plain if p.grad is not None]
