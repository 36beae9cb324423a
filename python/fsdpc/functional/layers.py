"""Layers without state: products, activations, normalisation, embeddings, dropout."""

from __future__ import annotations

from fsdpc import _core
from fsdpc._core import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, layout: str = "oi") -> Tensor:
    """Multiply rows by a weight: ``x @ weight.T + bias``.

    Parameters
    ----------
    x : Tensor
        (..., in)
    weight : Tensor
        (out, in), or (in, out) with layout "io"; of x's dtype.
    bias : Tensor, optional
        (out), of x's dtype.
    layout : {"oi", "io"}
        The second is how transformers' Conv1D, and so GPT-2, has its weights.

    Returns
    -------
    Tensor
        (..., out)

    Notes
    -----
    The gradient of the weight is written straight to where it belongs (a sharded parameter's reduce
    buffer, added in its dtype), without a temporary.

    Examples
    --------
    >>> import fsdpc
    >>> x, w = fsdpc.tensor([[1.0, 2.0]]), fsdpc.tensor([[3.0, 4.0]], requires_grad=True)
    >>> fsdpc.functional.linear(x, w).sum().backward()
    >>> w.grad.tolist()
    [[1.0, 2.0]]
    """
    return _core.linear(x, weight, bias, layout)


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, layout: str = "oi"
) -> Tensor:
    """Multiply rows by a weight and apply gelu: ``gelu(linear(x, weight, bias), "tanh")``.

    Parameters
    ----------
    x : Tensor
        (..., in)
    weight : Tensor
        (out, in), or (in, out) with layout "io"; of x's dtype.
    bias : Tensor, optional
        (out), of x's dtype.
    layout : {"oi", "io"}
        The second is how transformers' Conv1D, and so GPT-2, has its weights.

    Returns
    -------
    Tensor
        (..., out)

    Raises
    ------
    TypeError
        An operand is no tensor of floats, or not of x's dtype.
    ValueError
        Shapes do not fit.

    Notes
    -----
    Gelu by tanh, GPT-2's, is the form that GPUs compute in a product's own kernel: for bf16 and
    fp16, where cuBLASLt has one for the shape.  It rounds once where two operations round twice.
    Elsewhere the bits are those of the two.  For gelu by erf write
    ``gelu(linear(x, weight, bias))``.  Backward, a :func:`linear` that alone uses the result of a
    gelu by tanh, this one's or ``gelu(x, "tanh")``, makes the gradient of what gelu was taken of in
    the same way.

    Examples
    --------
    >>> import fsdpc
    >>> x, w = fsdpc.tensor([[1.0, 2.0]]), fsdpc.tensor([[3.0, 4.0]])
    >>> fsdpc.functional.linear_gelu(x, w).tolist()
    [[11.0]]
    """
    return _core.linear_gelu(x, weight, bias, layout)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Apply the Gaussian error linear unit.

    Parameters
    ----------
    x : Tensor
    approximate : {"none", "tanh"}
        By erf, or by tanh as GPT-2 has it.

    Source: Hendrycks & Gimpel 2016.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> [round(y, 4) for y in F.gelu(tensor([-1.0, 0.0, 1.0])).tolist()]
    [-0.1587, 0.0, 0.8413]
    """
    return _core.gelu(x, approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gate by SiLU: ``silu(gate) * up`` in one pass.

    Source: Shazeer 2020.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.swiglu(tensor([0.0]), tensor([3.0])).tolist()  # silu(gate) * up
    [0.0]
    """
    return _core.swiglu(gate, up)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Normalise exponentials along a dimension; along any but the last it costs two copies.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.softmax(tensor([1.0, 1.0])).tolist()
    [0.5, 0.5]
    """
    return _core.softmax(x, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Take the logarithm of :func:`softmax`, computed without overflow.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> [round(y, 4) for y in F.log_softmax(tensor([1.0, 1.0])).tolist()]
    [-0.6931, -0.6931]
    """
    return _core.log_softmax(x, dim)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift.

    Parameters
    ----------
    x : Tensor
        (..., cols)
    weight, bias : Tensor, optional
        (cols), of x's dtype.
    eps : float
        Added to the variance.

    Source: Ba, Kiros & Hinton 2016.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.layer_norm(tensor([[1.0, 3.0]]), eps=0.0).tolist()
    [[-1.0, 1.0]]
    """
    return _core.layer_norm(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Divide the last dimension by its root mean square, then scale.

    Source: Zhang & Sennrich 2019.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.rms_norm(tensor([[1.0, -1.0]]), eps=0.0).tolist()
    [[1.0, -1.0]]
    """
    return _core.rms_norm(x, weight, eps)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Pick rows of a table.

    Parameters
    ----------
    ids : Tensor
        Any shape, int32 or int64.
    weight : Tensor
        (rows, dim)

    Returns
    -------
    Tensor
        (..., dim)

    Raises
    ------
    IndexError
        An id is negative or names no row.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.embedding(tensor([1, 0, 1]), tensor([[1.0], [2.0]])).tolist()
    [[2.0], [1.0], [2.0]]
    """
    return _core.embedding(ids, weight)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of elements by angles that grow with the position.

    Parameters
    ----------
    x : Tensor
        (batch, tokens, heads, dim); elements i and i + dim/2 are a pair.
    cos, sin : Tensor
        (tokens or more, dim/2), see :func:`rotary_tables`; no gradient.

    Source: Su et al. 2021; halves as in LLaMA checkpoints of transformers.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> cos, sin = F.rotary_tables(tokens=2, dim=2)
    >>> F.rotary(tensor([[[[1.0, 0.0], [1.0, 0.0]]]]), cos, sin).tolist()[0][0][0]
    [1.0, 0.0]
    """
    return _core.rotary(x, cos, sin)


def rotary_tables(tokens: int, dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines that :func:`rotary` takes, (tokens, dim/2) in fp32.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> cos, sin = F.rotary_tables(tokens=8, dim=4)
    >>> cos.shape, sin.shape
    ((8, 2), (8, 2))
    """
    import numpy as np

    frequencies = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    angles = np.arange(tokens, dtype=np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return _core.tensor(cos), _core.tensor(sin)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zero elements with probability p and scale the others by 1 / (1 - p).

    Notes
    -----
    The mask is a function of the seed (``fsdpc.manual_seed``) and of how many random streams were
    taken before; it is not kept, and recomputation draws the same one.

    Source: Srivastava et al. 2014.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.dropout(tensor([1.0, 2.0]), 0.5, training=False).tolist()
    [1.0, 2.0]
    """
    return _core.dropout(x, p, training)
