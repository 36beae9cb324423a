"""Save and restore the contents of Python objects: attributes, dicts, lists, sets and generators.

Planning runs a model's forward on memory that is never written. Anything that modules keep from
that forward must be removed afterwards, whatever container it is in, including garbage in reference
cycles.

A full garbage collection visits every object in the process, which takes half a second if torch and
transformers are imported, and `plan` would need dozens. Automatic collection is therefore disabled
during planning: new objects stay in the youngest generation, and only that generation is collected.
"""

from __future__ import annotations

import gc
import random
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from fsdpc._core import Tensor

_LEAVES = (Tensor, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, np.ndarray)


class Snapshot:
    """Saves the state of everything reachable from an object, and restores it when the block ends.

    The snapshot keeps references rather than copies, so in-place writes to arrays are not undone.
    Tensors, arrays, classes, functions and imported modules are not searched. Objects that the
    block created and dropped are freed afterwards, including those in cycles.
    """

    def __init__(self, root: Any) -> None:
        self._held: list[tuple[Any, Any]] = []
        self._streams = random.getstate(), np.random.get_state()
        seen: set[int] = set()
        waiting = [root]
        while waiting:
            obj = waiting.pop()
            if id(obj) in seen or isinstance(obj, _LEAVES):
                continue
            seen.add(id(obj))
            if isinstance(obj, dict):
                self._held.append((obj, dict(obj)))
                waiting.extend(obj.values())
            elif isinstance(obj, (list, set)):
                self._held.append((obj, type(obj)(obj) if type(obj) in (list, set) else list(obj)))
                waiting.extend(obj)
            elif isinstance(obj, (tuple, frozenset)):
                waiting.extend(obj)
            elif isinstance(obj, np.random.Generator):
                self._held.append((obj, obj.bit_generator.state))
            elif isinstance(obj, random.Random):
                self._held.append((obj, obj.getstate()))
            elif hasattr(obj, "__dict__"):
                waiting.append(vars(obj))

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()
        self._collected = _collections()

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
            # A garbage collection inside the block has moved its survivors to an older
            # generation.
            gc.collect(0 if _collections() == self._collected else 2)
        finally:
            if self._collects:
                gc.enable()

    def _restore(self) -> None:
        """Restore the previous contents in the same objects."""
        for obj, held in self._held:
            if isinstance(obj, np.random.Generator):
                obj.bit_generator.state = held
            elif isinstance(obj, random.Random):
                obj.setstate(held)
            elif isinstance(obj, list):
                obj[:] = held
            else:
                obj.clear()
                obj.update(held)
        random.setstate(self._streams[0])
        np.random.set_state(self._streams[1])


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())
