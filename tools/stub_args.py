"""Make the C structs that hold parsed arguments, and the tables that parse them, from the stub.

``python/fsdpc/_core.pyi`` is the table of operations: a function there has its name, its arguments
with types and defaults, and its docstring (tools/stub_docs.py). The build writes for a function
``softmax`` and a method ``Tensor.flatten``, in ``bind/stub_args.h``:

- ``fsdpc_args_softmax``, ``fsdpc_args_Tensor_flatten``: a struct with a member for each argument,
  and with ``object``, the first argument as it was given,
- ``FSDPC_DEFAULTS_softmax``: its value if every optional argument is omitted,
- ``fsdpc_signature_softmax``: the table for ``fsdpc_py_parse`` (csrc/bind/tensor/ops.h),
- ``FSDPC_OPERATIONS(F, M)`` for the section of that name, and the same for other sections whose
  name begins so: F(name) for each function, or M(name) if its signature ends in ``# method``: it
  is then also a method of Tensor.

Functions whose arguments are only positional parse them themselves.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stub_docs import STUB, put

MOST = 9  # FSDPC_PY_MAX_PARAMS
SECTION = re.compile(r"# ---- (.*) ----")
METHOD = "  # method"

# Type in the stub: the kind, of enum fsdpc_py_kind, and the member of the struct. Other types are
# passed as objects.
KINDS = {
    "Tensor": ("TENSOR", "fsdpc_tensor *{}"),
    "Tensor | None": ("TENSOR_OR_NONE", "fsdpc_tensor *{}"),
    "bool": ("BOOL", "bool {}"),
    "int": ("INT64", "int64_t {}"),
    "float": ("DOUBLE", "double {}"),
    "str": ("TEXT", "const char *{}"),
    "Number": ("NUMBER", "fsdpc_scalar {}"),
    "DTypeLike": ("DTYPE", "fsdpc_dtype {}"),
    "DTypeLike | None": ("DTYPE_OR_NONE", "int {} /* -1: None */"),
    "Dims": ("DIMS", "bool {}[FSDPC_MAX_DIMS]"),
    "int | Sequence[int]": ("EXTENTS", "fsdpc_py_extents {}"),
    "Pair": ("SIZES_2", "size_t {}[2]"),
    "tuple[int, int, int, int]": ("SIZES_4", "size_t {}[4]"),
}
# The C functions take dimensions as int, numbers of things as size_t, and seeds modulo 2^64.
BY_NAME = {
    r"(\w+_)?dim\d?": {"int": ("INT", "int {}")},
    r"rows|columns|chunk_rows|groups|window|steps": {"int": ("COUNT", "size_t {}")},
    r"seed|stream": {"int": ("BITS64", "uint64_t {}")},
}
DEFAULTS = {"True": "true", "False": "false", "None": "NULL"}


@dataclass
class Argument:
    """A row of the table that parses."""

    name: str
    kind: str
    member: str
    default: str | None  # in C; None: the argument is required
    choices: tuple[str, ...] = ()

    def member_name(self) -> str:
        """Return the member's name: a choice of two is whether it is the second."""
        return self.choices[1] if self.choices else self.name


def argument(node: ast.arg, default: ast.expr | None) -> Argument:
    """Read an argument."""
    says = ast.unparse(node.annotation) if node.annotation else "Any"
    kinds = next((found for name, found in BY_NAME.items() if re.fullmatch(name, node.arg)), {})
    kind, member = kinds.get(says) or KINDS.get(says) or ("OBJECT", "PyObject *{}")
    value = None if default is None else ast.unparse(default)
    choices: tuple[str, ...] = ()
    if says.startswith("Literal["):
        choices = ast.literal_eval(says.removeprefix("Literal"))[:]
        kind, member = "CHOICE", "bool {}"
        value = value and str(ast.literal_eval(value) == choices[1])
    elif says.startswith("Callable["):
        kind = "CALLABLE"
    elif kind == "OBJECT" and says.endswith("| None"):
        kind = "OBJECT_OR_NONE"
    elif kind == "DTYPE_OR_NONE":
        value = value and "-1"
    elif kind == "TEXT" and value:
        value = f'"{ast.literal_eval(value)}"'
    elif kind == "NUMBER" and value:
        value = f"{{.integral = true, .fits = true, .whole = {value}, .real = {value}}}"
    return Argument(node.arg, kind, member, value and DEFAULTS.get(value, value), tuple(choices))


def arguments(node: ast.FunctionDef) -> Iterator[tuple[Argument, bool]]:
    """Yield the arguments, with whether they are accepted by position; ``*args`` comes last."""
    every = node.args
    defaults = [None] * (len(every.args) - len(every.defaults)) + list(every.defaults)
    for each, default in zip(every.args, defaults, strict=True):
        yield argument(each, default), True
    for each, default in zip(every.kwonlyargs, every.kw_defaults, strict=True):
        yield argument(each, default), False
    if every.vararg:
        yield argument(every.vararg, None), False


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions and the methods of Tensor, with the names that C has for them."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and node.name == "Tensor":
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and ast.get_docstring(each):
                    if not each.decorator_list and len(each.args.args) != 0:
                        each.args.args[0].annotation = ast.Name("Tensor")
                        yield f"Tensor_{each.name}", each


def parses(node: ast.FunctionDef) -> bool:
    """Return whether a function's arguments are parsed by the table."""
    every = node.args
    named = [each for each in (*every.args, *every.kwonlyargs) if each.arg != "self"]
    return not every.posonlyargs and not every.kwarg and bool(named or every.vararg)


def operations(stub: str, tree: ast.Module) -> Iterator[tuple[str, str, bool]]:
    """Yield (section, name, whether it is a method too) of the operations."""
    lines, section = stub.splitlines(), ""
    at = 0
    for node in tree.body:
        for line in lines[at : node.lineno]:
            found = SECTION.fullmatch(line)
            section = found[1] if found else section
        at = node.lineno
        if section.startswith("operations") and isinstance(node, ast.FunctionDef):
            yield section, node.name, is_method(lines, node)


def is_method(lines: list[str], node: ast.FunctionDef) -> bool:
    """Return whether a function's signature ends in ``# method``."""
    return any(line.endswith(METHOD) for line in lines[node.lineno - 1 : node.body[0].lineno - 1])


def struct(name: str, rows: list[tuple[Argument, bool]]) -> str:
    """Write the struct of a function's arguments, and its defaults."""
    text = f"\ntypedef struct fsdpc_args_{name} {{\n    PyObject *object;\n"
    defaults = [".object = NULL"]
    for each, _ in rows:
        member, _, comment = each.member.format(each.member_name()).partition(" /*")
        text += f"    {member};{comment and ' /*' + comment}\n"
        if each.default not in (None, "NULL", "false"):
            defaults.append(f".{each.member_name()} = {each.default}")
    text += f"}} fsdpc_args_{name};\n"
    text += f"#define FSDPC_DEFAULTS_{name} {{{', '.join(defaults)}}}\n"
    return text + f"extern const fsdpc_py_signature fsdpc_signature_{name};\n"


def table(name: str, node: ast.FunctionDef, rows: list[tuple[Argument, bool]]) -> str:
    """Write the table that parses a function's arguments."""
    text = f"\nstatic const fsdpc_py_param {name}_params[] = {{\n"
    for each, _ in rows:
        quoted = ", ".join(f'"{choice}"' for choice in each.choices) or "NULL"
        required = str(each.default is None and each.name != "self").lower()
        if node.args.vararg and node.args.vararg.arg == each.name:
            required = "false"
        where = f"offsetof(fsdpc_args_{name}, {each.member_name()})"
        text += f'    {{"{each.name}", FSDPC_PY_{each.kind}, {required}, {where}, {{{quoted}}}}},\n'
    rest = bool(node.args.vararg)
    by_position = sum(positional for _, positional in rows)
    return text + (
        f"}};\nconst fsdpc_py_signature fsdpc_signature_{name} = "
        f'{{"{node.name}", {len(rows) - rest}, {by_position}, {str(rest).lower()}, '
        f"{name}_params}};\n"
    )


def texts(stub: str) -> tuple[str, str]:
    """Return the header and the source."""
    tree = ast.parse(stub)
    head = "/* Made from python/fsdpc/_core.pyi by tools/stub_args.py. */\n"
    header = head + "#ifndef FSDPC_STUB_ARGS_H\n#define FSDPC_STUB_ARGS_H\n"
    header += '#include "bind/tensor/ops.h"\n'
    source = head + '#include "bind/stub_args.h"\n\n#include <stddef.h>\n'
    source += f'_Static_assert(FSDPC_PY_MAX_PARAMS >= {MOST}, "see tools/stub_args.py");\n'
    listed: dict[str, str] = {}
    for section, name, also in operations(stub, tree):
        row = f" \\\n    {'M' if also else 'F'}({name})"
        listed[section] = listed.get(section, "") + row
    for name, node in functions(tree):
        if parses(node):
            rows = list(arguments(node))
            assert len(rows) <= MOST, f"{name} has {len(rows)} arguments, at most {MOST}"
            assert rows[0][0].kind == "TENSOR" or all(row.kind != "DIMS" for row, _ in rows), name
            header += struct(name, rows)
            source += table(name, node, rows)
    for section, row in listed.items():
        header += f"\n#define FSDPC_{section.upper().replace(': ', '_')}(F, M){row}\n"
    return header + "\n#endif\n", source


def write(folder: Path) -> Path:
    """Write ``bind/stub_args.h`` and ``.c`` below a folder, if they change; returns the latter."""
    header, source = texts(STUB.read_text(encoding="utf-8"))
    put(folder / "bind" / "stub_args.h", header)
    return put(folder / "bind" / "stub_args.c", source)
