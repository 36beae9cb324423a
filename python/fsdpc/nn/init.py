"""Counter-based initialisation: element i of a parameter depends only on (seed, stream, i).

Every call uses the next stream of the generator that :func:`fsdpc.manual_seed` seeded. The full
parameters are therefore the same at any world size, whether deferred or not.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.nn.parameter import Parameter, Recipe
from fsdpc.tensors.grad_mode import no_grad

P = TypeVar("P", bound=Tensor)


def _init(p: P, kind: str, a: float, b: float) -> P:
    recipe = Recipe(kind, float(a), float(b), _core.initial_seed(), _core.next_stream())
    if isinstance(p, Parameter) and p._unit is not None:
        recipe.fill_unit(p._unit, p._index)
    elif isinstance(p, Parameter) and p.is_deferred:
        p._recipe = recipe
    else:
        recipe.fill(p)
    return p


def zero_row_(p: P, row: int) -> P:
    """Set one row of a new, possibly deferred, parameter to 0.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.init.zero_row_(nn.Parameter(fsdpc.ones(2, 2)), 1).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    if isinstance(p, Parameter) and p.is_deferred:
        assert p._recipe is not None
        p._recipe = p._recipe._replace(zero_row=row)
    else:
        with no_grad():
            p[row] = 0
    return p


def normal_(p: P, mean: float = 0.0, std: float = 1.0) -> P:
    """Fill with independent normal values (Box-Muller transform of Philox numbers).

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> p = nn.init.normal_(nn.Parameter(fsdpc.empty(1000)), std=0.02)
    >>> 0.01 < float(p.detach().std().item()) < 0.03
    True
    """
    return _init(p, "normal", mean, std)


def uniform_(p: P, low: float = 0.0, high: float = 1.0) -> P:
    """Fill with independent values from a uniform distribution on [low, high).

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> p = nn.init.uniform_(nn.Parameter(fsdpc.empty(100)), -1.0, 1.0)
    >>> -1 <= p.detach().min().item() <= p.detach().max().item() < 1
    True
    """
    return _init(p, "uniform", low, high)


def constant_(p: P, value: float) -> P:
    """Fill with one value.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.init.constant_(nn.Parameter(fsdpc.empty(2)), 0.5).tolist()
    [0.5, 0.5]
    """
    return _init(p, "constant", value, 0.0)


def zeros_(p: P) -> P:
    """Fill with 0.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.init.zeros_(nn.Parameter(fsdpc.empty(2))).tolist()
    [0.0, 0.0]
    """
    return constant_(p, 0.0)


def ones_(p: P) -> P:
    """Fill with 1.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.init.ones_(nn.Parameter(fsdpc.empty(2))).tolist()
    [1.0, 1.0]
    """
    return constant_(p, 1.0)


_GAINS = {
    "linear": 1.0,
    "sigmoid": 1.0,
    "tanh": 5 / 3,
    "relu": math.sqrt(2),
    "selu": 0.75,
    **{f"conv{d}d": 1.0 for d in (1, 2, 3)},
}


def calculate_gain(nonlinearity: str, a: float | None = None) -> float:
    """Return the recommended gain for a nonlinearity.

    Parameters
    ----------
    nonlinearity : str
        "linear", "conv1d" to "conv3d", "sigmoid", "tanh", "relu", "leaky_relu" or "selu".
    a : float, optional
        Slope of a leaky ReLU below 0, 0.01 by default.

    Raises
    ------
    ValueError
        The function is unknown.

    Examples
    --------
    >>> from fsdpc import nn
    >>> round(nn.init.calculate_gain("relu"), 4)
    1.4142
    """
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if a is None else a) ** 2))
    if nonlinearity not in _GAINS:
        names = ", ".join([*_GAINS, "leaky_relu"])
        raise ValueError(f"no gain is known of {nonlinearity!r}; known are {names}")
    return _GAINS[nonlinearity]


def xavier_uniform_(p: P, gain: float = 1.0) -> P:
    """Fill with uniform values of variance ``2 gain^2 / (fan in + fan out)``.

    Source: Glorot & Bengio 2010.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> p = nn.init.xavier_uniform_(nn.Parameter(fsdpc.empty(3, 3)))
    >>> p.detach().abs().max().item() <= 1  # sqrt(6 / (3 + 3))
    True
    """
    fan_in, fan_out = _fans(p)
    bound = gain * math.sqrt(6 / (fan_in + fan_out))
    return uniform_(p, -bound, bound)


def xavier_normal_(p: P, gain: float = 1.0) -> P:
    """Fill with normal values of variance ``2 gain^2 / (fan in + fan out)``.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.init.xavier_normal_(nn.Parameter(fsdpc.empty(4, 3))).shape
    (4, 3)
    """
    return normal_(p, 0.0, gain * math.sqrt(2 / sum(_fans(p))))


def kaiming_uniform_(
    p: P, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> P:
    """Fill with uniform values of variance ``gain^2 / fan``.

    Parameters
    ----------
    p : Parameter or Tensor
        Has at least 2 dimensions: (out, in, window ...).
    a : float
        Slope of a leaky ReLU below 0.
    mode : {"fan_in", "fan_out"}
        Preserve the variance of values in forward, or of gradients in backward.
    nonlinearity : str
        As for :func:`calculate_gain`.

    Source: He et al. 2015.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> p = nn.init.kaiming_uniform_(nn.Parameter(fsdpc.empty(4, 6)), nonlinearity="relu")
    >>> p.detach().abs().max().item() <= 1  # sqrt(2) * sqrt(3 / 6)
    True
    """
    bound = math.sqrt(3) * _kaiming(p, a, mode, nonlinearity)
    return uniform_(p, -bound, bound)


def kaiming_normal_(
    p: P, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> P:
    """Fill with normal values of variance ``gain^2 / fan``; see :func:`kaiming_uniform_`.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.init.kaiming_normal_(nn.Parameter(fsdpc.empty(4, 6)), nonlinearity="relu").shape
    (4, 6)
    """
    return normal_(p, 0.0, _kaiming(p, a, mode, nonlinearity))


def trunc_normal_(p: P, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> P:
    """Fill with normal values, redrawing those outside [a, b].

    Raises
    ------
    RuntimeError
        The parameter is deferred or sharded: elements depend on each other's draws.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> p = nn.init.trunc_normal_(nn.Parameter(fsdpc.empty(100)), std=1.0, a=-1.0, b=1.0)
    >>> p.detach().abs().max().item() <= 1
    True
    """
    rng = _host_generator(p, "trunc_normal_")
    values = rng.normal(mean, std, p.shape)
    while (outside := (values < a) | (values > b)).any():
        values[outside] = rng.normal(mean, std, int(outside.sum()))
    return _write(p, values)


def orthogonal_(p: P, gain: float = 1.0) -> P:
    """Fill with a (semi-)orthogonal matrix times a gain; dimensions after the first are flattened.

    Raises
    ------
    RuntimeError
        The parameter is deferred or sharded: elements depend on each other.

    Source: Saxe et al. 2013.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> p = nn.init.orthogonal_(nn.Parameter(fsdpc.empty(2, 2))).detach()
    >>> (p @ p.T - fsdpc.eye(2)).abs().max().item() < 1e-6
    True
    """
    if p.ndim < 2:
        raise ValueError(f"orthogonal_: shape {p.shape}; at least 2 dimensions are needed")
    rows, cols = p.shape[0], math.prod(p.shape[1:])
    normal = _host_generator(p, "orthogonal_").normal(size=(max(rows, cols), min(rows, cols)))
    q, r = np.linalg.qr(normal)
    q *= np.sign(np.diag(r))
    return _write(p, gain * (q.T if rows < cols else q).reshape(p.shape))


def eye_(p: P) -> P:
    """Fill with an identity matrix, cut to the parameter's shape.

    Raises
    ------
    RuntimeError
        The parameter is deferred or sharded.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.init.eye_(nn.Parameter(fsdpc.empty(2, 3))).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    _host_generator(p, "eye_")
    return _write(p, np.eye(*p.shape))


def _fans(p: Tensor) -> tuple[int, int]:
    if p.ndim < 2:
        raise ValueError(f"shape {p.shape} has no fans: at least 2 dimensions are needed")
    window = math.prod(p.shape[2:])
    return p.shape[1] * window, p.shape[0] * window


def _kaiming(p: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"mode is 'fan_in' or 'fan_out', not {mode!r}")
    fan = _fans(p)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(fan)


def _host_generator(p: Tensor, name: str) -> np.random.Generator:
    """Return a generator for the next stream, for parameters that must be drawn as a whole."""
    if p.is_deferred or getattr(p, "_unit", None) is not None:
        raise RuntimeError(
            f"{name} draws a parameter as a whole: use it before fully_shard, outside of "
            "deferred_init()"
        )
    key = [_core.initial_seed() % 2**64, _core.next_stream()]
    return np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))


def _write(p: P, values: np.ndarray) -> P:
    with no_grad():
        p.copy_(np.ascontiguousarray(values))
    return p
