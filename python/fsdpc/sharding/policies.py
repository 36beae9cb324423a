"""The precision of a unit's compute and communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdpc import _core


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionPolicy:
    """Dtypes for a unit's compute and communication, as in PyTorch FSDP2.

    Parameters
    ----------
    param_dtype : dtype, optional
        Dtype of the gathered parameters and hence of compute; by default the original dtype. The
        optimizer's masters keep the original dtype.
    reduce_dtype : dtype, optional
        Dtype in which gradients are written and sent; by default ``param_dtype``. Sums over ranks
        are always in float32.
    output_dtype : dtype, optional
        Dtype to which the module's floating point outputs are cast.
    cast_forward_inputs : bool, default True
        Whether to cast the module's floating point inputs to ``param_dtype``.

    Examples
    --------
    >>> import fsdpc
    >>> policy = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)
    >>> layer = fsdpc.fully_shard(fsdpc.nn.Linear(2, 1), mp_policy=policy)
    >>> layer(fsdpc.ones(1, 2)).dtype.name
    'bfloat16'
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, field)
            if value is None:
                continue
            value = _core.as_dtype(value)
            if not value.is_floating_point:
                raise TypeError(f"{field} must be a floating point dtype, got {value.name}")
            object.__setattr__(self, field, value)
