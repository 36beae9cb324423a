"""Write the methods of Tensor that are functions too into the stub, with the functions' signatures.

    python tools/stub_methods.py          # writes them
    python tools/stub_methods.py --check  # fails if python/fsdpc/_core.pyi would change

They are the extension's operations marked with ``# method`` in the stub, and the functions that
``METHODS`` in python/fsdpc/functional/_methods.py lists.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from stub_args import operations
from stub_docs import ROOT, STUB

FUNCTIONAL = ROOT / "python" / "fsdpc" / "functional"
BEGIN = "    # operations that are methods too, by tools/stub_methods.py\n"
END = "    # end of operations that are methods too\n"
COLUMNS = 100


def composed() -> Iterator[ast.FunctionDef]:
    """Yield the functions composed in Python that are methods too."""
    tree = ast.parse((FUNCTIONAL / "_methods.py").read_text(encoding="utf-8"))
    (listed,) = (node.value for node in tree.body if isinstance(node, ast.Assign)
                 and ast.unparse(node.targets[0]) == "METHODS")  # fmt: skip
    assert isinstance(listed, ast.Dict)
    for module, names in zip(listed.keys, listed.values, strict=True):
        source = FUNCTIONAL / f"{ast.unparse(module)}.py"  # type: ignore[arg-type]
        found = {node.name: node for node in ast.parse(source.read_text(encoding="utf-8")).body
                 if isinstance(node, ast.FunctionDef)}  # fmt: skip
        yield from (found[name] for name in ast.literal_eval(names))


def method(node: ast.FunctionDef) -> str:
    """Write a function's signature as that of a method."""
    node.args.args[0] = ast.arg("self")
    assert node.returns, f"{node.name} says what it returns"
    given = re.sub(r"(?<! )=", " = ", ast.unparse(node.args))  # as ruff writes defaults
    line = f"    def {node.name}({given}) -> {ast.unparse(node.returns)}: ...\n"
    assert len(line) <= COLUMNS + 1, f"{node.name}: wrap its signature here"
    return line


def updated(stub: str) -> str:
    """Return the stub with the methods that it should have."""
    tree = ast.parse(stub)
    names = {name for _, name, also in operations(stub, tree) if also}
    ours = [node for node in tree.body if isinstance(node, ast.FunctionDef)
            and node.name in names]  # fmt: skip
    before, _, rest = stub.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "".join(map(method, (*ours, *composed()))) + END + after


def main() -> int:
    """Write or check; returns the exit status."""
    stub = STUB.read_text(encoding="utf-8")
    text = updated(stub)
    if "--check" not in sys.argv[1:]:
        STUB.write_text(text, encoding="utf-8")
    elif text != stub:
        print("python/fsdpc/_core.pyi is out of date: run python tools/stub_methods.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
