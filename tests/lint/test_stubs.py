"""_core.pyi and the extension as it was built name the same things."""

from __future__ import annotations

import ast
import inspect

import pytest

from fsdpc import _core

from .tree import ROOT

STUB = ast.parse((ROOT / "python" / "fsdpc" / "_core.pyi").read_text())


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Public names that these statements declare."""
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif isinstance(node, ast.Assign):
            names.update((each.id, node) for each in node.targets if isinstance(each, ast.Name))
    return {name: node for name, node in names.items() if not name.startswith("_")}


def is_alias(node: ast.stmt) -> bool:
    """Whether a statement names a type for the stub alone."""
    return isinstance(node, ast.Assign) or (
        isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation)
    )


def test_the_module_has_what_the_stub_declares() -> None:
    names = {name for name, node in declared(STUB.body).items() if not is_alias(node)}
    missing = {name for name in names if not hasattr(_core, name)}
    # A protocol or a typed dict is for the checker only.
    missing -= {node.name for node in STUB.body if isinstance(node, ast.ClassDef)
                and any(ast.unparse(base) in ("Protocol", "TypedDict") for base in node.bases)}
    assert not missing


def test_the_stub_declares_what_the_module_has() -> None:
    public = {name for name in dir(_core) if not name.startswith("_")}
    assert public <= set(declared(STUB.body))


def test_classes_have_the_same_members() -> None:
    for name, node in declared(STUB.body).items():
        kind = getattr(_core, name, None)
        if not isinstance(node, ast.ClassDef) or not inspect.isclass(kind):
            continue
        own = {member for member in vars(kind) if not member.startswith("_")}
        assert own == set(declared(node.body)), name


def test_functions_have_the_signature_that_the_stub_declares() -> None:
    """Operations say theirs to help() and take the arguments that it names."""
    seen = 0
    for name, node in declared(STUB.body).items():
        function = getattr(_core, name, None)
        if not isinstance(node, ast.FunctionDef) or not getattr(function, "__text_signature__", 0):
            continue
        seen += 1
        found = inspect.signature(function).parameters
        defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + node.args.defaults
        expected = {
            a.arg: inspect.Parameter.empty if d is None else ast.literal_eval(d)
            for a, d in zip(node.args.args, defaults, strict=True)
        }
        assert {n: p.default for n, p in found.items()} == expected, name
        for argument in found:
            with pytest.raises((TypeError, ValueError)) as caught:
                function(**dict.fromkeys(list(found)[:1] + [argument], object()))
            assert "unexpected argument" not in str(caught.value), (name, argument)
    assert seen > 30
