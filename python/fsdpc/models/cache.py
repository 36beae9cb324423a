"""A cache of past keys and values, so that each new token requires computing only one row."""

from __future__ import annotations

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.models.attention import attend, weighted


class KeyValueCache:
    """The keys and values of every block, for a batch of sequences of different lengths.

    Parameters
    ----------
    lengths : ndarray of int, (B,)
        Number of tokens in each prompt. Prompts begin at position 0 and are padded at the end.
    capacity : int
        Maximum number of tokens in a sequence.

    Notes
    -----
    The first forward takes the prompts, (B, T). Each later one takes the next token of every
    sequence, (B, 1). Padding after the prompts needs no mask: no token attends to later positions,
    and the next tokens overwrite them.
    """

    def __init__(self, lengths: np.ndarray, capacity: int) -> None:
        self.lengths: np.ndarray = np.asarray(lengths, dtype=np.int64).copy()
        self.capacity = capacity
        self.begun: bool = False  # whether it already contains the prompts
        self._rooms: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def positions(self) -> np.ndarray:
        """The position of each sequence's next token, of shape (B,)."""
        return self.lengths

    def advance(self) -> None:
        """Advance the positions past the tokens added by the last forward."""
        if self.begun:
            self.lengths += 1
        self.begun = True

    def last(self, x: Tensor) -> Tensor:
        """Select the row of each sequence's newest token: (B, T, dim) -> (B, 1, dim)."""
        if self.begun:
            return x
        rows = [x[row, int(length) - 1] for row, length in enumerate(self.lengths)]
        return _core.stack(rows).unsqueeze(1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate (B, T, heads, D) by (T, D / 2) tables or, for new tokens, by (B, D / 2) tables.

        Each new token has its own position, so the batch replaces the token dimension.
        """
        if not self.begun:
            return _core.rotary(x, cos, sin)
        batch, _, heads, dim = x.shape
        return _core.rotary(x.view(1, batch, heads, dim), cos, sin).view(batch, 1, heads, dim)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Add a block's keys and values, and attend over all of the block's tokens so far.

        Parameters
        ----------
        layer : int
            The block's index.
        q : Tensor
            (B, T, heads, D)
        k, v : Tensor
            (B, T, kv_heads, D)
        window : int, optional
            As for :func:`fsdpc.models.attention.attend`.

        Returns
        -------
        Tensor
            (B, T, heads, D)
        """
        batch, tokens, kv_heads, dim = k.shape
        if layer not in self._rooms:
            shape = (batch, self.capacity, kv_heads, dim)
            # zeros, because a weight of 0 does not cancel NaN in uninitialised memory
            self._rooms[layer] = (
                _core.zeros(shape, dtype=k.dtype),
                _core.zeros(shape, dtype=v.dtype),
            )
        keys, values = self._rooms[layer]
        begins = self.lengths if self.begun else np.zeros(batch, np.int64)
        for row, begin in enumerate(begins.tolist()):
            keys[row][begin : begin + tokens].copy_(k[row])
            values[row][begin : begin + tokens].copy_(v[row])
        if not self.begun:
            return attend(q, k, v, window)
        end = int(self.lengths.max()) + 1
        first = 0 if window is None else max(0, int(self.lengths.min()) + 1 - window)
        if batch == 1:  # a view, no copy
            keys, values = (t[0][first:end].unsqueeze(0) for t in (keys, values))
        else:
            keys, values = keys[:, first:end], values[:, first:end]
        if (self.lengths == self.lengths[0]).all():
            return _core.scaled_dot_product_attention(q, keys, values, layout="bthd")
        behind = self.lengths[:, None] - np.arange(first, end)
        seen = (behind >= 0) & (behind < (window or end))
        return weighted(q, keys, values, seen[:, None])
