"""Attention, as one kernel call or one per document, or composed if a mask needs a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.functional.elementwise import logical_and, logical_not, logical_or, where, wide
from fsdpc.functional.shapes import lower, repeat_interleave


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhtd",
    mask: Tensor | None = None,
) -> Tensor:
    """Weight values by the softmax of query-key products, without storing a T x T matrix.

    Parameters
    ----------
    q : Tensor
        (batch, heads, tokens, dim), or (batch, tokens, heads, dim) with layout "bthd".
    k, v : Tensor
        The same, but with their own number of tokens, and a number of heads that divides q's.
    causal : bool
        Query t of Tq attends to keys up to t + (Tk - Tq): the last query attends to all keys.
    scale : float, optional
        1 / sqrt(dim) by default.
    layout : {"bhtd", "bthd"}
        "bthd" is the layout that projections produce, and needs no transposes.
    mask : Tensor, optional
        Broadcasts to (batch, heads, Tq, Tk) in either layout. A bool mask is True where a query
        attends to a key; a float mask is added to the scaled products. Without keys, a query's
        result is zeros.

    Returns
    -------
    Tensor
        In q's shape.

    Raises
    ------
    ValueError
        Shapes do not match.

    Notes
    -----
    If a mask requires a gradient, or with any mask on GPUs, (batch, heads, Tq, Tk) products are
    kept for backward, in at least float32.

    Source: Vaswani et al. 2017; blocked after Dao et al. 2022.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> q, v = tensor([[[[1.0], [1.0]]]]), tensor([[[[2.0], [4.0]]]])
    >>> F.scaled_dot_product_attention(q, q, v, causal=True).tolist()
    [[[[2.0], [3.0]]]]
    """
    if mask is None or not (mask.requires_grad or q.device == "cuda"):
        if mask is not None and mask.dtype is not _core.bool_:
            mask = _to_add(mask, q)
        return _core.scaled_dot_product_attention(q, k, v, causal, scale, layout, mask)
    if layout not in ("bhtd", "bthd"):
        raise ValueError(
            f"scaled_dot_product_attention: layout is 'bhtd' or 'bthd', not {layout!r}"
        )
    if layout == "bthd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = _groups(q, k)
    if groups > 1:
        v = repeat_interleave(v, groups, 1)
    y = (attention_weights(q, k, causal, scale, mask) @ wide(v)).to(q.dtype)
    return y.transpose(1, 2) if layout == "bthd" else y


def attention_weights(
    q: Tensor,
    k: Tensor,
    causal: bool = False,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the attention weights, by which the values are multiplied.

    Parameters
    ----------
    q, k : Tensor
        (batch, heads, Tq, dim) and (batch, a divisor of q's heads, Tk, dim).
    causal, scale, mask
        As for :func:`scaled_dot_product_attention`.

    Returns
    -------
    Tensor
        (batch, heads, Tq, Tk), float32 (float64 for float64). Rows sum to 1, or are zeros if a
        query has no keys.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> q = tensor([[[[1.0], [1.0]]]])  # one head, two tokens
    >>> F.attention_weights(q, q, causal=True).tolist()
    [[[[1.0, 0.0], [0.5, 0.5]]]]
    """
    groups = _groups(q, k)
    if groups > 1:
        k = repeat_interleave(k, groups, 1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = wide(q) @ wide(k).transpose(-2, -1) * scale
    seen = None if mask is None else mask if mask.dtype is _core.bool_ else mask > -math.inf
    if causal:
        tq, tk = scores.shape[-2:]
        before = lower(tq, tk, tk - tq)
        seen = before if seen is None else logical_and(seen, before)
    if seen is None:
        return _core.softmax(scores, -1)
    if mask is not None and mask.dtype is not _core.bool_:
        scores = scores + where(mask > -math.inf, mask, 0.0)
    some = seen.expand(scores.shape).sum(-1, True) > 0
    scores = where(logical_or(seen, logical_not(some)), scores, -math.inf)
    return where(some, _core.softmax(scores, -1), 0.0)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    causal: bool = True,
    scale: float | None = None,
    layout: str = "bhtd",
) -> Tensor:
    """Compute attention separately for each document in rows of packed documents.

    Parameters
    ----------
    q : Tensor
        (batch, heads, tokens, dim), or (batch, tokens, heads, dim) with layout "bthd".
    k, v : Tensor
        The same, with a number of heads that divides q's (grouped queries).
    lengths : sequence of int
        Each document's number of tokens, row by row; lengths in a row sum to its token count.
        :func:`fsdpc.data.document_lengths` computes them.
    causal : bool
        A query attends to its document's keys up to its own position; if False, to all of them.
    scale, layout
        As for :func:`scaled_dot_product_attention`.

    Returns
    -------
    Tensor
        In q's shape.

    Raises
    ------
    ValueError
        The lengths do not sum to the row lengths, or shapes do not match.
    RuntimeError
        Called inside :func:`fsdpc.graph_step`, whose replays would reuse the lengths.

    Notes
    -----
    Each document is one call to the fused kernel, without a mask, so shorter documents take less
    time.

    Source: Dao 2023 (variable lengths), Krell et al. 2021 (packing without cross-contamination).

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> q, v = tensor([[[[1.0], [1.0]]]]), tensor([[[[2.0], [4.0]]]])
    >>> F.varlen_attention(q, q, v, [1, 1]).tolist()  # two documents of one token
    [[[[2.0], [4.0]]]]
    """
    return _core.varlen_attention(q, k, v, lengths, causal, scale, layout)


def _to_add(mask: Tensor, q: Tensor) -> Tensor:
    """Convert a mask to a float dtype in which the kernel can add it to the scores."""
    if q.dtype is _core.float64:
        return mask.to(_core.float64)
    halves = (_core.float32, _core.bfloat16, _core.float16)
    return mask if mask.dtype in halves else mask.to(_core.float32)


def _groups(q: Tensor, k: Tensor) -> int:
    """Return the number of query heads per key head."""
    heads, shared = q.shape[1], k.shape[1]
    if shared == 0 or heads % shared:
        raise ValueError(f"attention: {heads} query heads and {shared} of keys; make it divide")
    return heads // shared
