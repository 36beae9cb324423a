"""Attention for models, fused except with weight dropout or with windows on GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor

_MASKED = np.float32(-1e30)  # score of a masked key; every row has unmasked keys


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    dropout: float = 0.0,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Apply causal attention.

    Parameters
    ----------
    q : Tensor
        (B, T, heads, D)
    k, v : Tensor
        (B, T, kv_heads, D), with heads a multiple of kv_heads.
    window : int, optional
        Number of tokens visible to a query, including its own; by default all up to its own.
    dropout : float, default 0
        Probability of dropping an attention weight.
    lengths : sequence of int, optional
        Document lengths, row by row; documents do not attend to each other; see
        :func:`fsdpc.functional.varlen_attention`.

    Returns
    -------
    Tensor
        (B, T, heads, D)

    Notes
    -----
    With dropout, the T x T weights are kept for backward. On a GPU, if the window is shorter than
    T, forward computes ``window`` x 2 ``window`` weights at a time and keeps all of them for
    backward.
    """
    tokens = q.shape[1]
    if window is not None and window >= tokens:
        window = None
    fused = not dropout and (window is None or q.device != "cuda")
    if lengths is not None:
        if fused:
            return _core.varlen_attention(q, k, v, lengths, layout="bthd", window=window or 0)
        return _each_document(q, k, v, window, dropout, lengths)
    if fused:
        return _core.scaled_dot_product_attention(
            q, k, v, causal=True, layout="bthd", window=window or 0
        )
    step = window or tokens
    parts = []
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        first = max(0, begin - step + 1)
        behind = np.arange(begin, end)[:, None] - np.arange(first, end)
        seen = (behind >= 0) & (behind < (window or tokens))
        parts.append(
            weighted(q[:, begin:end], k[:, first:end], v[:, first:end], seen[None], dropout)
        )
    return parts[0] if len(parts) == 1 else _core.concat(parts, 1)


def positions_of(lengths: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Return each token's position in its document, as int64 with the given `shape` (B, T)."""
    if sum(lengths) != math.prod(shape):
        raise ValueError(f"lengths {list(lengths)} add up to {sum(lengths)}, not to {shape} tokens")
    return np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]).reshape(shape)


def _each_document(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, dropout: float, lengths: Sequence[int]
) -> Tensor:
    """Apply attention to documents one by one, treating each as a separate row."""
    batch, tokens = q.shape[:2]
    ends = np.cumsum(lengths)
    borders = set(range(tokens, batch * tokens + 1, tokens))
    if not borders <= set(ends.tolist()) or (ends.size and ends[-1] != batch * tokens):
        raise ValueError(f"lengths {list(lengths)} do not make up {batch} rows of {tokens} tokens")
    rows: list[list[Tensor]] = [[] for _ in range(batch)]
    for length, end in zip(lengths, ends.tolist()):
        row, begin = divmod(end - length, tokens)
        part = (x[row : row + 1, begin : begin + length] for x in (q, k, v))
        rows[row].append(attend(*part, window, dropout))
    return _core.concat([_core.concat(parts, 1) for parts in rows], 0)


def weighted(q: Tensor, k: Tensor, v: Tensor, seen: np.ndarray, dropout: float = 0.0) -> Tensor:
    """Attend to the keys that are not masked.

    Parameters
    ----------
    q : Tensor
        (B, n, heads, D)
    k, v : Tensor
        (B, m, kv_heads, D)
    seen : ndarray of bool
        (B or 1, n, m); each query sees at least one key.
    dropout : float, default 0

    Returns
    -------
    Tensor
        (B, n, heads, D), in q's dtype. Scores and weights are float32 from the mask on.
    """
    batch, n, heads, dim = q.shape
    m, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    rows = q.permute(0, 2, 1, 3).reshape(batch, kv_heads, group * n, dim)
    mask = np.where(seen, np.float32(0), _MASKED)[:, None]  # (B or 1, 1, n, m)
    scores = rows @ k.permute(0, 2, 3, 1) * (1 / math.sqrt(dim))
    weights = (scores + _core.tensor(np.tile(mask, (1, 1, group, 1)))).softmax(-1)
    if dropout:
        weights = _core.dropout(weights, dropout, True)
    mixed = weights.to(v.dtype) @ v.permute(0, 2, 1, 3)
    return mixed.reshape(batch, heads, n, dim).permute(0, 2, 1, 3).contiguous()
