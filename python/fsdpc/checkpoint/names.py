"""Tensor names in other libraries' checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

FAMILIES = ("llama", "gpt2")

# Buffers that old checkpoints contain, but that are now computed.
_GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")


def file_names(
    names: str | Mapping[str, str] | Callable[[str], str] | None,
    wanted: Iterable[str],
    given: dict[str, Any],
) -> dict[str, str]:
    """Map each name in the model to the name in the file.

    Parameters
    ----------
    names : "llama", "gpt2", mapping, callable or None
        As for :func:`fsdpc.checkpoint.load`.
    wanted : iterable of str
        Names in the model.
    given : dict
        The checkpoint's tensors by name. Tensors that a family's files contain but no model needs
        are removed.
    """
    if names is None:
        return {name: name for name in wanted}
    if isinstance(names, Mapping):
        return {name: names.get(name, name) for name in wanted}
    if callable(names):
        return {name: names(name) for name in wanted}
    if names == "llama":
        _drop(given, (".rotary_emb.inv_freq",))
        return {name: _with_or_without("model.", name, given) for name in wanted}
    if names == "gpt2":
        _drop(given, _GPT2_BUFFERS)
        if "transformer.wte.weight" in given or "wte.weight" in given:
            given.pop("lm_head.weight", None)  # tied, but in some files
        return {name: _with_or_without("transformer.", name, given) for name in wanted}
    raise ValueError(f"names must be 'llama', 'gpt2', a mapping or a function, got {names!r}")


def _with_or_without(prefix: str, name: str, given: Mapping[str, Any]) -> str:
    """Handle base models, whose tensor names lack the prefix that models with a head use."""
    short = name.removeprefix(prefix)
    return short if name not in given and short in given else name


def _drop(given: dict[str, Any], endings: tuple[str, ...]) -> None:
    for name in [name for name in given if name.endswith(endings)]:
        del given[name]
