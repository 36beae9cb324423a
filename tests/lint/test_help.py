"""help() shows how every public callable is called, and most by an example."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import pytest

import fsdpc

from .tree import ROOT

MODULES = ["fsdpc", "fsdpc.functional", "fsdpc.nn", "fsdpc.nn.init", "fsdpc.optim", "fsdpc.data",
           "fsdpc.models", "fsdpc.checkpoint", "fsdpc.lr_scheduler", "fsdpc.activation",
           "fsdpc.creation", "fsdpc.launcher", "fsdpc.testing", "fsdpc.distributed",
           "fsdpc.wrap", "fsdpc.lora", "fsdpc.loggers"]  # fmt: skip
#: Types of the extension, whose docstrings stand in the stub; nobody calls the first three.
OF_THE_STUB = {"MismatchError", "PeerError", "Tensor", "dtype"}


def callables(module: str) -> dict[str, Any]:
    """Return the public functions and classes of a module, exceptions left out."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    ]
    values = {name: getattr(found, name) for name in names}
    return {
        name: value for name, value in values.items()
        if callable(value) and not inspect.ismodule(value) and name not in OF_THE_STUB
        and not (inspect.isclass(value) and issubclass(value, BaseException))
    }


@pytest.mark.parametrize("module", MODULES)
def test_every_public_callable_has_a_signature(module: str) -> None:
    found = callables(module)
    assert found
    for name, value in found.items():
        try:
            inspect.signature(value)
        except (TypeError, ValueError):
            pytest.fail(f"help({module}.{name}) shows no signature: wrap it in Python")


def test_every_public_callable_of_the_package_has_an_example() -> None:
    stub = ast.parse((ROOT / "python" / "fsdpc" / "_core.pyi").read_text())
    texts = {name: inspect.getdoc(value) for name, value in callables("fsdpc").items()}
    texts |= {node.name: ast.get_docstring(node) for node in stub.body
              if isinstance(node, ast.ClassDef) and node.name in OF_THE_STUB}
    assert len(texts) > 80 and set(fsdpc.__all__) >= set(texts) >= OF_THE_STUB
    missing = [name for name, text in texts.items() if ">>> " not in (text or "")]
    assert not missing, f"no example in the docstrings of {missing}"


def test_every_operation_in_python_has_an_example() -> None:
    """Those of the extension have their docstrings in C."""
    found = {name: value for name, value in callables("fsdpc.functional").items()
             if inspect.isfunction(value)}
    assert len(found) > 70
    missing = [name for name, value in found.items() if ">>> " not in (value.__doc__ or "")]
    assert not missing, f"no example in the docstrings of {missing}"
