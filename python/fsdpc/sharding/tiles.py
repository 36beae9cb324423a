"""Modules in tiles of tokens: activations of one tile at a time (ALST, Bekman et al. 2025).

    (..., tokens, features) -> rows -> tiles -> forward per tile, recomputed in backward -> rows

The wide layer of an MLP has several times as many features as its input. A tiled module keeps only
its input for backward, which recomputes one tile after another, the last tile first. The functions
here serve both frontends, which differ in how they recompute, split and join.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from fsdpc import _core, nn
from fsdpc.nn.module import Module
from fsdpc.nn.normalization import _BatchNorm
from fsdpc.sharding.activation import is_checkpointed, replace_forward, wrapped_forward

__all__ = ["tile_tokens"]


class Frontend(NamedTuple):
    """What tiles need from a frontend."""

    module: type
    tensor: type
    mixing: tuple[type, ...]  # modules whose output at a token depends on other tokens
    recompute: Callable[..., Any]  # (function, tensors): keep only the tensors for backward
    split: Callable[[Any, int], Iterable[Any]]  # along the last dimension but one
    join: Callable[[list[Any]], Any]


def _split(x: _core.Tensor, tokens: int) -> Iterable[_core.Tensor]:
    # A slice is recorded just before its tile, so that backward frees the tile's gradient first.
    rows = x.shape[-2]
    return (x[..., at : at + tokens, :] for at in range(0, max(rows, 1), tokens))


def _join(tiles: list[_core.Tensor]) -> _core.Tensor:
    return _core.concat(tiles, -2)


_NATIVE = Frontend(
    module=Module,
    tensor=_core.Tensor,
    mixing=(_BatchNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.AvgPool1d, nn.AvgPool2d,
            nn.MaxPool1d, nn.MaxPool2d),
    recompute=_core.checkpoint,
    split=_split,
    join=_join,
)  # fmt: skip


def tile_tokens(modules: Iterable[Module], tokens: int) -> int:
    """Make modules compute a tile of tokens at a time, and recompute each tile in backward.

    Activations inside such a module exist for one tile at a time. Only its inputs are kept for
    backward.

    Parameters
    ----------
    modules : iterable of Module
        Modules whose output at a token depends on this token only, such as
        ``[block.mlp for block in model.blocks()]``. They are changed in place.
    tokens : int
        Most tokens in a tile, counted over all sequences of a batch.

    Returns
    -------
    int
        Number of changed modules.

    Raises
    ------
    TypeError
        ``modules`` is not an iterable of modules, or ``tokens`` is not an int.
    ValueError
        ``tokens`` is less than 1; or a module is tiled or recomputed already, has no forward, or
        contains attention, batch or group norms, convolutions or pools, which mix tokens. A call
        raises it for tensors that are not (..., tokens, features) with the same leading dimensions.

    Notes
    -----
    A module gets tiles of shape (1, ..., 1, tokens, features), with as many dimensions as its
    input, and returns a tensor or a tuple of tensors (1, ..., 1, tokens, any). It is tiled without
    gradients too. All tensors among its arguments are split, so masks per sequence are refused.

    A weight's gradient is a sum over tiles, added from the last tile to the first. It is not
    bitwise equal to that of an untiled module, but runs with the same tiles are. Units add in
    their ``reduce_dtype``; without units, gradients of 16 bits are rounded after each tile, so use
    few tiles. In measurements on CPUs with AVX2 and AVX-512, MLPs in tiles of at least five tokens
    (the last one too) returned the bits of untiled ones, as did the gradients of their inputs.
    GPUs have not been measured. Dropout draws other numbers than without tiles, and the same ones
    again in backward.

    A tiled module inside a checkpointed block runs three times in a step instead of twice. Units
    inside a tiled module are gathered for each tile, so all ranks need the same number of tiles:
    shard the module, or one around it, instead. Modules that mix tokens in other ways than those
    above are not detected.

    Source: ALST (Bekman et al. 2025).

    Examples
    --------
    >>> import fsdpc
    >>> model = fsdpc.models.Llama(fsdpc.models.preset("2M"))
    >>> whole = fsdpc.memory_plan(model, 1, (4, 256)).activation
    >>> fsdpc.tile_tokens([block.mlp for block in model.blocks()], 128)  # how many they are
    4
    >>> fsdpc.memory_plan(model, 1, (4, 256)).activation < 0.7 * whole
    True
    """
    return tile(_NATIVE, modules, tokens)


def tile(frontend: Frontend, modules: Iterable[Any], tokens: int) -> int:
    """Do what :func:`tile_tokens` says with a frontend's modules."""
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        raise TypeError(f"tile_tokens: tokens must be an int, got {tokens!r}")
    if tokens < 1:
        raise ValueError(f"tile_tokens: tokens must be at least 1, got {tokens}")
    if isinstance(modules, frontend.module) and not _lacks_forward(frontend, modules):
        raise TypeError(
            f"tile_tokens takes an iterable of modules, got a {type(modules).__name__}: put it "
            "into a list"
        )
    chosen = list({id(m): m for m in modules}.values())
    for module in chosen:
        _check_module(frontend, module)
    for module in chosen:
        replace_forward(module, _run, frontend, type(module).__name__, tokens)
    return len(chosen)


def is_tiled(module: Any) -> bool:
    """Return whether :func:`tile_tokens` changed a module."""
    wrapped = wrapped_forward(module)
    return isinstance(wrapped, partial) and wrapped.func is _run


def _lacks_forward(frontend: Frontend, module: Any) -> bool:
    return type(module).forward is frontend.module.forward  # type: ignore[attr-defined]


def _check_module(frontend: Frontend, module: Any) -> None:
    kind = type(module).__name__
    if not isinstance(module, frontend.module):
        raise TypeError(f"tile_tokens takes modules, got {kind}")
    if _lacks_forward(frontend, module):
        raise ValueError(f"tile_tokens: {kind} has no forward: choose the modules in it")
    wrapped = wrapped_forward(module)
    if is_tiled(module):
        raise ValueError(f"tile_tokens: {kind} is in tiles of {wrapped.args[2]} tokens already")
    if is_checkpointed(module) or kind == "CheckpointWrapper":
        raise ValueError(
            f"tile_tokens: {kind} is checkpointed already; a tiled module recomputes by itself"
        )
    for name, m in module.named_modules():
        attends = any(base.__name__.endswith("Attention") for base in type(m).__mro__)
        if attends or isinstance(m, frontend.mixing):
            where = f"'{name}' of {kind}, a {type(m).__name__}," if name else kind
            raise ValueError(
                f"tile_tokens: {where} mixes tokens; choose modules whose output at a token "
                "depends on this token only"
            )


def _run(frontend: Any, name: str, tokens: int, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module's forward on tiles; the name is for errors."""
    values: list[Any] = [*args, *kwargs.values()]
    at, lead = _tensors(frontend, name, values, [*map(str, range(len(args))), *kwargs])
    ones, rows = (1,) * (len(lead) - 1), math.prod(lead)
    flat = [values[i].reshape(*ones, rows, values[i].shape[-1]) for i in at]
    for i in at:
        values[i] = None  # the closure below lives until backward

    def call(*tensors: Any) -> Any:
        given = list(values)
        for i, t in zip(at, tensors, strict=True):
            given[i] = t
        return forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    outputs: list[tuple[Any, ...]] = []
    single = False
    for tensors in zip(*(frontend.split(t, tokens) for t in flat), strict=True):
        y = frontend.recompute(call, *tensors)
        single = not isinstance(y, tuple)
        outputs.append((y,) if single else y)
        _check_output(frontend, name, outputs[-1], tuple(tensors[0].shape[:-1]))
    joined = (frontend.join(list(parts)) for parts in zip(*outputs, strict=True))
    result = tuple(y.reshape(*lead, y.shape[-1]) for y in joined)
    return result[0] if single else result


def _tensors(
    frontend: Frontend, name: str, values: list[Any], labels: list[str]
) -> tuple[list[int], tuple[int, ...]]:
    """Return the places of tensors among the arguments, and their leading dimensions."""
    at = [i for i, value in enumerate(values) if isinstance(value, frontend.tensor)]
    for label, value in zip(labels, values, strict=True):
        inner = [*value.values()] if isinstance(value, dict) else value
        if isinstance(inner, (list, tuple)) and any(isinstance(t, frontend.tensor) for t in inner):
            raise TypeError(
                f"tile_tokens: argument '{label}' of {name} is a {type(value).__name__} with "
                "tensors, which are not split: pass them as arguments"
            )
    lead = tuple(values[at[0]].shape[:-1]) if at else ()
    if not lead:
        raise ValueError(f"tile_tokens: {name} needs a tensor (..., tokens, features)")
    for i in at:
        shape = tuple(values[i].shape)
        if shape[:-1] != lead:
            raise ValueError(
                f"tile_tokens: argument '{labels[i]}' of {name} is {shape}, which cannot be split "
                f"like argument '{labels[at[0]]}' {tuple(values[at[0]].shape)}"
            )
    return at, lead


def _check_output(frontend: Frontend, name: str, output: Any, lead: tuple[int, ...]) -> None:
    for y in output:
        shape = tuple(y.shape) if isinstance(y, frontend.tensor) else None
        if not shape or shape[:-1] != lead:
            got = type(y).__name__ if shape is None else shape
            raise ValueError(
                f"tile_tokens: {name} returned {got} for a tile {lead} of tokens: it must return "
                "tensors (..., tokens, features) with the same leading dimensions"
            )
