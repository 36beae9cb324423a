"""Per-rank random number generators: Python's, NumPy's, and any that a frontend registers.

A checkpoint contains the generator states of every rank. They are restored only if the number of
ranks is the same as when they were saved. Otherwise, the states cannot be assigned to ranks, and
the generators stay unchanged.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpc import distributed
from fsdpc.checkpoint.manifest import CheckpointError
from fsdpc.distributed.agree import gather_bytes

_kinds: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}


def register(kind: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
    """Store a generator's state in checkpoints, under this name in the manifest.

    ``get`` returns its state as JSON, or None if it is unused; ``put`` restores that state.
    """
    _kinds[kind] = (get, put)


def words(array: Any) -> str:
    """Return an array's bytes as base64 text."""
    return base64.b64encode(array.tobytes()).decode()


def from_words(text: str, dtype: Any) -> Any:
    """Return the array from which :func:`words` made this text."""
    return np.frombuffer(base64.b64decode(text), dtype).copy()


def gather() -> list[dict[str, Any]]:
    """Return the generator states of every rank; collective."""
    mine = {kind: get() for kind, (get, _) in _kinds.items()}
    text = json.dumps({kind: state for kind, state in mine.items() if state is not None}).encode()
    return [json.loads(each) for each in gather_bytes(distributed.world(), text)]


def restore(every: list[dict[str, Any]]) -> None:
    """Restore this rank's generators from :func:`gather`, if the number of ranks is the same."""
    world = distributed.world()
    if len(every) != world.size:
        return
    for kind, state in every[world.rank].items():
        if kind not in _kinds:
            continue
        try:
            _kinds[kind][1](state)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"random numbers of {kind} cannot be restored: {error}") from None


def _python() -> Any:
    version, state, gauss = random.getstate()
    return [version, words(np.array(state, np.uint32)), gauss]


def _set_python(state: Any) -> None:
    version, text, gauss = state
    random.setstate((version, tuple(from_words(text, np.uint32).tolist()), gauss))


def _numpy() -> Any:
    if "numpy.random" not in sys.modules:
        return None
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # the user replaced it with set_bit_generator
        return None
    inner = state["state"]
    return [words(inner["key"]), int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])]


def _set_numpy(state: Any) -> None:
    text, *rest = state
    np.random.set_state(("MT19937", from_words(text, np.uint32), *rest))


register("python", _python, _set_python)
register("numpy", _numpy, _set_numpy)
