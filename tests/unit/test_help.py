"""help() shows how every public callable is called, and most by an example."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

import fsdpc
from fsdpc import _core

MODULES = ["fsdpc", "fsdpc.functional", "fsdpc.nn", "fsdpc.nn.init", "fsdpc.optim", "fsdpc.data",
           "fsdpc.models", "fsdpc.checkpoint", "fsdpc.optim.lr_scheduler",
           "fsdpc.sharding.activation",
           "fsdpc.tensors.creation", "fsdpc.launching.launcher", "fsdpc.testing",
           "fsdpc.distributed", "fsdpc.sharding.wrap",
           "fsdpc.lora", "fsdpc.monitor.loggers", "fsdpc.torch"]  # fmt: skip


def callables(module: str) -> dict[str, Any]:
    """Return the public functions and classes of a module, exceptions left out."""
    if module == "fsdpc.torch":
        pytest.importorskip("torch")
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    ]
    values = {name: getattr(found, name) for name in names}
    return {
        name: value for name, value in values.items()
        if callable(value) and not inspect.ismodule(value) and value is not _core.dtype
        and not (inspect.isclass(value) and issubclass(value, BaseException))
        and not getattr(value, "__module__", "").startswith("torch.")  # handed on by fsdpc.torch
    }


def methods_of_tensors() -> dict[str, Any]:
    """Return the public methods of Tensor, of the extension and composed in Python."""
    return {f"Tensor.{name}": value for name, value in vars(_core.Tensor).items()
            if callable(value) and not name.startswith("_")}


def faults_of(name: str, value: Any) -> list[str]:
    """Return what help() lacks of a callable: a signature, a sentence, an example."""
    try:
        inspect.signature(value)
    except (TypeError, ValueError):
        return [f"{name} has no signature"]
    text = value.__doc__ or ""
    if inspect.isclass(value) and re.match(rf"{value.__name__}\(", text):
        return [f"{name} has the docstring that a dataclass makes"]
    first = text.strip().partition("\n\n")[0]
    if not re.fullmatch(r"[A-Z\d].*[.:]", first, re.DOTALL):
        return [f"the docstring of {name} begins with {first!r}, no sentence"]
    return [] if ">>> " in text else [f"{name} has no example"]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_callable_has_a_signature_and_an_example(module: str) -> None:
    found = callables(module)
    assert found
    faults = [fault for name, value in found.items() for fault in faults_of(name, value)]
    assert not faults


def test_every_method_of_tensors_has_a_signature_and_an_example() -> None:
    found = methods_of_tensors()
    assert len(found) > 90
    faults = [fault for name, value in found.items() for fault in faults_of(name, value)]
    assert not faults


def test_exceptions_of_fsdpc_have_an_example() -> None:
    """And no signature: they are made by the engine alone."""
    for error in (fsdpc.PeerError, fsdpc.MismatchError):
        assert ">>> " in error.__doc__
