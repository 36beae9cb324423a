"""_core.pyi and the extension as it was built name the same things."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fsdpc import _core

from .tree import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import stub_args  # noqa: E402
import stub_methods  # noqa: E402

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


def functions_and_methods() -> Iterator[tuple[str, Any, ast.FunctionDef]]:
    """Yield (name, what is built, what the stub says) of functions and methods of the extension."""
    for name, node in declared(STUB.body).items():
        if isinstance(node, ast.FunctionDef):
            yield name, getattr(_core, name), node
        elif isinstance(node, ast.ClassDef) and hasattr(_core, name):
            built = vars(getattr(_core, name))
            for inner, member in declared(node.body).items():
                if isinstance(member, ast.FunctionDef) and inspect.ismethoddescriptor(built[inner]):
                    yield f"{name}.{inner}", built[inner], member


def test_functions_have_the_signature_that_the_stub_declares() -> None:
    """The build takes signatures and docstrings from the stub: build again if this fails."""
    seen = 0
    for name, function, node in functions_and_methods():
        seen += 1
        found = inspect.signature(function).parameters
        namespace: dict[str, Any] = {}
        source = f"from __future__ import annotations\ndef f({ast.unparse(node.args)}): ..."
        exec(source, namespace)
        expected = inspect.signature(namespace["f"]).parameters
        said = {p: (each.kind, each.default) for p, each in expected.items() if p != "self"}
        assert {p: (x.kind, x.default) for p, x in found.items() if p != "self"} == said, name
        assert (inspect.getdoc(function) or "").startswith(
            (ast.get_docstring(node) or "").partition("\n\n")[0]), name  # fmt: skip
    assert seen > 200


def test_everything_is_documented() -> None:
    """Methods and attributes of the engine by a line, what is public by more."""
    missing = [name for name, function, _ in functions_and_methods() if not function.__doc__]
    for name in declared(STUB.body):
        kind = getattr(_core, name, None)
        if inspect.isclass(kind):
            missing += [f"{name}.{member}" for member, value in vars(kind).items()
                        if not member.startswith("_") and not value.__doc__]  # fmt: skip
    assert not missing


def test_methods_have_the_signatures_of_their_functions() -> None:
    """If this fails, run python tools/stub_methods.py."""
    stub = stub_methods.STUB.read_text()
    assert stub_methods.updated(stub) == stub


ROW = """
# ---- operations ----

def twist(
    x: Tensor, dim: int, by: int = 2, how: Literal["left", "right"] = "right", *, to: Dims = None
) -> Tensor:  # method
    ...
"""


def test_a_row_of_the_stub_becomes_a_struct_and_a_table() -> None:
    header, source = stub_args.texts(ROW)
    members = ["fsdpc_tensor *x", "int dim", "int64_t by", "bool right", "bool to[FSDPC_MAX_DIMS]"]
    assert all(f"    {member};\n" in header for member in members)
    assert ".by = 2, .right = true}" in header and "(F, M) \\\n    M(twist)" in header
    assert '{"dim", FSDPC_PY_INT, true, ' in source and '{"left", "right"}' in source
    assert '{"twist", 5, 4, false, twist_params}' in source


def test_a_function_with_too_many_arguments_is_refused() -> None:
    many = ", ".join(f"x{i}: int" for i in range(10))
    with pytest.raises(AssertionError, match="twist has 10 arguments, at most 9"):
        stub_args.texts(f"def twist({many}) -> Tensor: ...")
