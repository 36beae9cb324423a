"""Make the docstrings of the extension, with signatures that ``inspect`` reads, from its stub.

``python/fsdpc/_core.pyi`` is the only place where a function of the extension has its signature,
its types and its documentation. The build writes them as C strings, ``fsdpc_doc_NAME`` for a
function or class and ``fsdpc_doc_TYPE_NAME`` for a method or attribute, and the tables of csrc/bind
name these: what the stub does not declare does not compile.

A method without a docstring has that of the function of its name.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "fsdpc" / "_core.pyi"


def signature(node: ast.FunctionDef, name: str, first: str = "") -> str:
    """Write a signature as CPython's own docstrings have it: `first` in front, without types."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    given = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    return f"{name}({', '.join(filter(None, (first, given)))})"


def docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return a docstring, or ""."""
    return ast.get_docstring(node) or ""


def members(node: ast.ClassDef, functions: dict[str, ast.FunctionDef]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the methods and attributes of a class."""
    for each, behind in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            said = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
            yield each.target.id, behind.value.value if said else ""
        elif isinstance(each, ast.FunctionDef):
            decorators = [ast.unparse(one) for one in each.decorator_list]
            if "property" in decorators:
                yield each.name, docstring(each)
            elif not decorators:
                text = docstring(each)
                if not text and each.name in functions:
                    itself = functions[each.name].args.args[0].arg
                    says, gap, more = docstring(functions[each.name]).partition("\n\n")
                    text = f"{says}\n\n``{itself}`` is this tensor.{gap}{more}"
                yield each.name, signature(each, each.name, "$self") + f"\n--\n\n{text}"


def texts(stub: str) -> dict[str, str]:
    """Return the docstrings by the names that C has for them."""
    tree = ast.parse(stub)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = {
        name: signature(node, name, "$module") + f"\n--\n\n{docstring(node)}"
        for name, node in functions.items()
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            inner = dict(members(node, functions))
            makes = [each for each in node.body if isinstance(each, ast.FunctionDef)
                     and each.name in ("__init__", "__new__")]
            head = "".join(signature(each, node.name) + "\n--\n\n" for each in makes)
            found[node.name] = head + docstring(node)
            found |= {f"{node.name}_{name}": text for name, text in inner.items()}
    return found


def write(folder: Path) -> Path:
    """Write ``bind/stub_docs.h`` and ``.c`` below a folder, if they change; returns the latter."""
    found = texts(STUB.read_text(encoding="utf-8"))
    head = "/* Made from python/fsdpc/_core.pyi by tools/stub_docs.py. */\n"
    header = head + "#ifndef FSDPC_STUB_DOCS_H\n#define FSDPC_STUB_DOCS_H\n"
    header += "".join(f"extern const char fsdpc_doc_{name}[];\n" for name in found) + "#endif\n"
    source = head + '#include "bind/stub_docs.h"\n'
    for name, text in found.items():
        lines = "\n".join(f"    {literal(line)}" for line in text.splitlines(keepends=True))
        source += f"const char fsdpc_doc_{name}[] =\n{lines or literal('')};\n"
    put(folder / "bind" / "stub_docs.h", header)
    return put(folder / "bind" / "stub_docs.c", source)


def put(path: Path, content: str) -> Path:
    """Write a file unless it has this content; returns its path."""
    if not path.exists() or path.read_text(encoding="utf-8") != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return path


def literal(line: str) -> str:
    """Write a line as a string of C; beyond ASCII as UTF-8."""
    return json.dumps(line, ensure_ascii=False)
