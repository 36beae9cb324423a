"""Lets ``torch.distributed.checkpoint`` (DCP) save and load rows of a larger tensor.

As with DTensor, DCP's planners get a tensor's pieces from three methods and compare ``size()`` with
the full shape in the file. The planners drop duplicate writes, which are those with the same name
and offsets. Replicas are therefore written only once, while every rank's rows are written because
their offsets differ. A rank without rows writes and reads nothing.

Asynchronous saves copy tensors first, so ``new_empty()`` preserves the class. Operations that would
return plain tensors raise an error, because DCP would mistake the results for whole tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_PLANNER = "torch.distributed.checkpoint.default_planner"
_VMAP = "torch._functorch.vmap"
_STAGER = "torch.distributed.checkpoint._state_dict_stager"
#: Stages state dicts as plain tensors in torch 2.8 and older.
_COPIER = "torch.distributed._state_dict_utils"


def check_read(function: Any, args: Any, kwargs: Any) -> None:
    """Raise if an operation would read rows as a whole tensor; ``_reads.check`` replaces this."""


class Part:
    """A mixin for tensors that contain rows of a whole tensor."""

    _fsdpc_what = "a parameter"  # used in error messages
    _fsdpc_cure = ""

    def _fsdpc_part(self) -> tuple[int, torch.Size]:
        """Return the index of the first row and the whole tensor's shape."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Raise if a program uses DTensor's attributes, and suggest a replacement."""
        kind = type(self).__name__
        if name in ("device_mesh", "placements"):
            raise AttributeError(
                f"'{kind}' object has no attribute '{name}', as it is not a DTensor: "
                "get_model_state_dict() and get_optimizer_state_dict() of fsdpc.torch give whole "
                "values, as full_tensor() does; set_model_state_dict() and "
                "set_optimizer_state_dict() take them"
            )
        raise AttributeError(f"'{kind}' object has no attribute '{name}'")

    def _fsdpc_info(self) -> Any:
        """Return which rows of a parameter these are, or None if they belong to no parameter."""
        raise NotImplementedError

    def _fsdpc_home(self) -> Any:
        """Return the identity of the whole tensor that a copy of these rows belongs to."""
        raise NotImplementedError

    def _fsdpc_plain(self) -> torch.Tensor:
        """Return a plain tensor over the same memory, with the same version counter."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.detach(self).as_subclass(torch.Tensor)  # type: ignore[arg-type]

    def size(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor's size, or the whole tensor's size if DCP's planner calls."""
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller == _PLANNER and not args and not kwargs:
            return self._fsdpc_part()[1]
        if caller == _COPIER:
            raise NotImplementedError(
                f"torch's copy of a state dict makes plain tensors of rows of "
                f"{tuple(self._fsdpc_part()[1])}, and would keep one rank's: use "
                "torch.distributed.checkpoint.save, or fsdpc.checkpoint"
            )
        if caller == _VMAP:  # vmap's wrappers hide the tensors inside
            check_read(torch.vmap, (self,), {})
        return super().size(*args, **kwargs)  # type: ignore[misc]

    def new_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Create a plain tensor, or one of this class for the stager of an asynchronous save."""
        made = super().new_empty(*args, **kwargs)  # type: ignore[misc]
        if sys._getframe(1).f_globals.get("__name__") == _STAGER:
            return self._fsdpc_staged(made)
        return made

    def _fsdpc_staged(self, made: torch.Tensor) -> torch.Tensor:
        return made.as_subclass(type(self))  # type: ignore[type-var]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        begin, whole = self._fsdpc_part()
        rows = self._fsdpc_plain()
        if not rows.numel() and whole.numel():
            return []
        offsets = torch.Size([begin, *[0] * (len(whole) - 1)])
        return [ChunkStorageMetadata(offsets, rows.shape)]

    def __create_write_items__(self, fqn: str, _: Any = None) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._fsdpc_plain())
        whole = self._fsdpc_part()[1]
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._fsdpc_plain()
