"""The projections of GPT-2, which fsdpc once saved the other way round.

Transformers' GPT-2 and ours have them as (in, out).  Ours had them as (out, in) while manifests
were of version 1, and manifests of other models still are; a native GPT-2's are of version 2.
Where the version leaves it open the biases tell: one is as long as its weight's outputs.  In a
whole model they always do, since c_attn is not square.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsdpc.checkpoint.manifest import CheckpointError
from fsdpc.checkpoint.pieces import Piece
from fsdpc.checkpoint.source import Source, SourceTensor
from fsdpc.models.gpt2 import Projection

VERSION = 2  # of manifests
_WEIGHTS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def of_model(model: Any) -> set[str]:
    """Return the names of a native model's projections."""
    return {
        f"{path}.weight" if path else "weight"
        for path, module in model.named_modules()
        if isinstance(module, Projection)
    }


def is_in_out(tensors: Mapping[str, Any]) -> bool | None:
    """Return whether a model's saved projections are (in, out); None where none of them tells."""
    told = None
    for name in named(tensors):
        bias, shape = tensors.get(name.removesuffix("weight") + "bias"), tensors[name].shape
        if bias is None or len(shape) != 2 or shape[0] == shape[1]:
            continue
        if shape[1] != bias.shape[0]:
            return False
        told = True
    return told


def named(names: Iterable[str]) -> list[str]:
    """Return those names that GPT-2's projections go by."""
    return [name for name in names if name.endswith(_WEIGHTS)]


def check(model: Any, source: Source, pairs: list[tuple[Piece, SourceTensor]]) -> None:
    """Refuse to read projections that are, or may be, the other way round.

    ``pairs`` are pieces of the model and what they are to be read from.

    Raises
    ------
    CheckpointError
        Names the first of them.
    """
    told, own = is_in_out(source.model), of_model(model)
    if told or (told is None and source.content.get("version", VERSION) >= VERSION):
        return
    for piece, saved in pairs:
        is_square = saved.shape == saved.shape[::-1]
        if piece.shape != saved.shape[::-1] or (is_square and piece.name not in own):
            continue
        if told is None and is_square:
            raise CheckpointError(
                f"{source.folder}: '{piece.name}' is {saved.shape}, and nothing there says whether "
                "(in, out) or, as fsdpc once saved GPT-2, (out, in): load it from a checkpoint of "
                "the whole model"
            )
        if told is False and (piece.name in own or named([piece.name])):
            raise CheckpointError(
                f"{source.folder} has GPT-2's projections as (out, in), as fsdpc once saved them, "
                f"and the model has them as (in, out) ('{piece.name}' {saved.shape} and "
                f"{piece.shape}): turn them by 'fsdpc ckpt convert --turn-gpt2 FROM TO'"
            )
