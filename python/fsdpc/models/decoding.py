"""Token-by-token text generation with a cache, for sharded and unsharded language models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fsdpc import distributed, nn
from fsdpc.models.cache import KeyValueCache
from fsdpc.models.config import ModelConfig
from fsdpc.sharding.fsdp_module import FSDPModule
from fsdpc.tensors.grad_mode import no_grad

Prompts = Sequence[int] | Sequence[Sequence[int]] | np.ndarray


class LanguageModel(nn.Module):
    """A model that can generate text; its forward must accept ids (B, T) and a cache."""

    config: ModelConfig

    def generate(
        self,
        tokens: Prompts,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Iterable[int] | None = None,
        seed: int = 0,
    ) -> Any:
        """Continue one sequence, or a batch of sequences with different lengths.

        Parameters
        ----------
        tokens : sequence of int, or sequence of such sequences
            Prompts of at least one token each; with a sharded model, a rank may have none.
        max_new_tokens : int
            Maximum number of tokens to add.
        temperature : float, default 0
            Logits are divided by it before sampling; 0 selects the most likely token.
        top_k : int, optional
            Sample from this many of the most likely tokens.
        top_p : float, optional
            Sample from the smallest set of most likely tokens whose probabilities sum to at least
            this.
        stop : int or iterable of int, optional
            Tokens that end a sequence; they are included in the result. By default the
            configuration's ``eos_token_id``; ``()`` means none.
        seed : int, default 0
            Sampling seed: the same prompts in the same order give the same tokens.

        Returns
        -------
        ndarray of int64, (prompt + new tokens,), or list of them
            A list if a batch was given.

        Raises
        ------
        ValueError
            A prompt is empty, a number is out of range, or prompt and new tokens exceed the model's
            ``max_seq``.

        Notes
        -----
        Runs in evaluation mode without gradients. Collective for a sharded model outside
        ``hold()``: prompts and token counts may differ between ranks, and all ranks continue until
        the last one is done. Inside ``hold()`` each rank generates independently.

        Examples
        --------
        >>> import fsdpc
        >>> from fsdpc.models import Llama, preset
        >>> model = Llama(preset("2M"))
        >>> len(model.generate([1, 2, 3], 5))
        8
        >>> [len(row) for row in model.generate([[1, 2, 3], [4]], 5, temperature=0.8, top_k=10)]
        [8, 6]
        """
        prompts, single = as_prompts(tokens)
        rows = [[row] for row in prompts]
        for new in self.stream(
            prompts, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop,
            seed=seed,
        ):  # fmt: skip
            for row, token in zip(rows, new, strict=True):
                if token is not None:
                    row.append(np.array([token], np.int64))
        found = [np.concatenate(row) for row in rows]
        return found[0] if single else found

    def stream(
        self,
        tokens: Prompts,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Iterable[int] | None = None,
        seed: int = 0,
    ) -> Iterator[list[int | None]]:
        """Yield new tokens as they are generated; accepts the same arguments as :meth:`generate`.

        Yields
        ------
        list of int or None
            A token for each sequence, None for those that have ended.

        Raises
        ------
        ValueError
            As for :meth:`generate`, before the first token.

        Notes
        -----
        With a sharded model outside ``hold()``, all ranks must exhaust the iterator.
        """
        prompts, _ = as_prompts(tokens)
        sampler = Sampler(temperature, top_k, top_p, seed)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        longest = max(map(len, prompts), default=1)
        if longest + max_new_tokens > self.config.max_seq and max_new_tokens:
            raise ValueError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones are more than the "
                f"{self.config.max_seq} that the model was made for: ask for fewer new tokens, or "
                "give the end of the prompt"
            )
        ends = self.config.eos_token_id if stop is None else stop
        ends = () if ends is None else (ends,) if isinstance(ends, (int, np.integer)) else ends
        return self._decode(prompts, max_new_tokens, sampler, frozenset(ends))

    def _decode(
        self, prompts: list[np.ndarray], limit: int, sampler: Sampler, ends: frozenset[int]
    ) -> Iterator[list[int | None]]:
        together = is_collective(self)
        shown = prompts or [np.zeros(1, np.int64)]  # a rank without prompts still participates
        lengths = np.array([len(row) for row in shown])
        ids = np.zeros((len(shown), int(lengths.max())), np.int64)
        for row, prompt in enumerate(shown):
            ids[row, : len(prompt)] = prompt
        cache = KeyValueCache(lengths, int(lengths.max()) + max(limit, 1))
        going = np.ones(len(prompts), bool)
        made = 0
        while True:
            more = bool(made < limit and going.any())
            if not (distributed.all_reduce(int(more), "max") if together else more):
                return
            logits = self._evaluate(ids, cache)
            if not more:  # only for the other ranks; the cache does not change
                ids = ids[:, -1:]
                continue
            cache.advance()
            words = [sampler.pick(row, logits[row]) if on else None for row, on in enumerate(going)]
            ids = np.array([[word or 0] for word in words], np.int64)
            going = np.array([word is not None and word not in ends for word in words], bool)
            made += 1
            yield words

    def _evaluate(self, ids: np.ndarray, cache: KeyValueCache) -> np.ndarray:
        """Return the logits for each sequence's next token, as float64 of shape (B, vocab_size)."""
        was_training = self.training
        if was_training:
            self.eval()
        try:
            with no_grad():
                logits = self(ids, cache=cache)
            return logits[:, -1].float().numpy().astype(np.float64)
        finally:
            if was_training:
                self.train()


class Sampler:
    """Chooses the next token; has the same parameters as :meth:`LanguageModel.generate`."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int
    ) -> None:
        if not 0 <= temperature < np.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
        self.temperature: float = temperature
        self.top_k: int | None = top_k
        self.top_p: float | None = top_p
        self.seed: int = seed
        self._generators: dict[int, np.random.Generator] = {}

    def pick(self, row: int, logits: np.ndarray) -> int:
        """Return a sequence's next token, given float64 logits of shape (vocab_size,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        weights = np.exp((logits - logits.max()) / self.temperature)
        order = np.argsort(-weights, kind="stable")
        if self.top_k is not None:
            order = order[: self.top_k]
        shares = weights[order] / weights[order].sum()
        if self.top_p is not None:
            count = int(np.searchsorted(np.cumsum(shares), self.top_p)) + 1
            order, shares = order[:count], shares[:count] / shares[:count].sum()
        generator = self._generators.setdefault(row, np.random.default_rng([self.seed, row]))
        return int(order[generator.choice(len(order), p=shares)])


def as_prompts(tokens: Prompts) -> tuple[list[np.ndarray], bool]:
    """Return prompts as int64 arrays, and whether a single prompt was passed.

    Raises
    ------
    ValueError
        A prompt is empty, or contains anything but integers.
    """
    single = len(tokens) > 0 and np.ndim(tokens[0]) == 0
    rows = [np.asarray(row) for row in ([tokens] if single else tokens)]
    for number, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0 or row.dtype.kind not in "iu":
            raise ValueError(
                f"prompt {number} must be a sequence of at least one token, got {row!r:.60}"
            )
    return [row.astype(np.int64) for row in rows], single


def is_collective(model: nn.Module) -> bool:
    """Return whether the model's forward gathers parameters from several ranks."""
    if not distributed.is_initialized() or distributed.world_size() == 1:
        return False
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return bool(units) and not any(m._fsdpc_held for m in units)
