"""Sampling text from a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpc.grad_mode import no_grad


@no_grad()
def generate(
    model: Any,
    prompt: np.ndarray,
    tokens: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    context: int | None = None,
    each: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Continue a sequence word by word.

    Parameters
    ----------
    model : module
        ids (1, T) -> logits (1, T, V).
    prompt : ndarray of int, (T,)
        At least one word.
    tokens : int
        How many to add.
    temperature : float, default 0.8
        0 takes the likeliest word.
    seed : int, default 0
        The same on every rank of a sharded model, as all of them must run every forward.
    context : int, optional
        Words the model sees at most; ``model.config.max_seq`` by default.
    each : callable, optional
        Called with every word when it is known.

    Returns
    -------
    ndarray of int64, (T + tokens,)
    """
    rng = np.random.default_rng(seed)
    limit = context or model.config.max_seq
    ids = np.asarray(prompt, dtype=np.int64)
    if ids.size == 0:
        raise ValueError("generate needs a prompt of at least one token")
    was_training = model.training
    model.eval()
    try:
        for _ in range(tokens):
            logits = model(ids[None, -limit:])[0, -1].float().numpy().astype(np.float64)
            if temperature == 0:
                word = int(logits.argmax())
            else:
                weights = np.exp((logits - logits.max()) / temperature)
                word = int(rng.choice(weights.size, p=weights / weights.sum()))
            ids = np.append(ids, word)
            if each is not None:
                each(word)
    finally:
        model.train(was_training)
    return ids
