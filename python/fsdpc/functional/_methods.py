"""Add the operations that are written in Python to Tensor, as methods and operators.

The extension defines the methods of its own operations. The others are functions in this package
whose first argument is the tensor; this module adds them to the type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.functional import elementwise, indexing, reductions, shapes

METHODS = {
    elementwise: ["clamp", "isfinite", "isinf", "isnan", "logical_and", "logical_not",
                  "logical_or", "logical_xor"],
    reductions: ["all", "amax", "amin", "any", "argmax", "argmin", "cumsum", "logsumexp", "max",
                 "min", "norm", "std", "var"],
    indexing: ["argsort", "gather", "index_select", "masked_fill", "masked_select", "nonzero",
               "scatter_add", "sort", "topk"],
    shapes: ["chunk", "flip", "outer", "repeat", "repeat_interleave", "roll", "split", "tril",
             "triu"],
}  # fmt: skip


def _of_bools(name: str, fn: Any) -> Any:
    def operator(self: Tensor, other: Any) -> Any:
        other = other if isinstance(other, Tensor) else _core.tensor(other)
        for t in (self, other):
            if t.dtype is not _core.bool_:
                raise TypeError(
                    f"{name} is for tensors of bool, not {t.dtype.name}: compare with 0 first, or "
                    "use functional.logical_and, logical_or or logical_xor"
                )
        return fn(self, other)

    return operator


def _inverted(self: Tensor) -> Tensor:
    if self.dtype is not _core.bool_:
        raise TypeError(f"~ is for tensors of bool, not {self.dtype.name}: compare with 0 instead")
    return elementwise.logical_not(self)


def _rows(self: Tensor) -> Iterator[Tensor]:
    if self.ndim == 0:
        raise TypeError("iteration over a tensor without dimensions: it is one number, item()")
    return (self[i] for i in range(len(self)))


def _contains(self: Tensor, element: Any) -> bool:
    return bool(reductions.any(self == element).item())


def install() -> None:
    """Add the methods to the Tensor type."""
    for module, names in METHODS.items():
        for name in names:
            setattr(Tensor, name, getattr(module, name))
    for name, sign, fn in (
        ("and", "&", elementwise.logical_and),
        ("or", "|", elementwise.logical_or),
        ("xor", "^", elementwise.logical_xor),
    ):
        setattr(Tensor, f"__{name}__", _of_bools(sign, fn))
        setattr(Tensor, f"__r{name}__", _of_bools(sign, fn))
    type.__setattr__(Tensor, "__invert__", _inverted)
    type.__setattr__(Tensor, "__iter__", _rows)
    type.__setattr__(Tensor, "__contains__", _contains)
    type.__setattr__(Tensor, "_take", indexing.take_along)
    type.__setattr__(Tensor, "_put", indexing.put_along)
