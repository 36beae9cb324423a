"""Count lines of code: without docstrings, comments and blank lines.

    python tools/code_lines.py              # the folders that docs/design.md has ceilings for
    python tools/code_lines.py csrc python  # these folders, and those inside them

tests/lint compares the same counts with the ceilings.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("csrc", "kernels", "python/fsdpc", "tests")
C, PYTHON = {".c", ".h", ".cpp", ".cu", ".cuh"}, {".py", ".pyi"}
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENCODING, tokenize.ENDMARKER}  # fmt: skip


def code_lines(path: Path) -> int:
    """Return how many lines of a source have code on them."""
    text = path.read_text(encoding="utf-8")
    return _of_python(text) if path.suffix in PYTHON else _of_c(text)


def count(folder: str) -> int:
    """Return the lines of code of the folder's sources that git knows."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", folder], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout  # fmt: skip
    paths = [ROOT / name for name in listed.splitlines()]
    return sum(code_lines(p) for p in paths if p.suffix in C | PYTHON and p.is_file())


def _of_python(text: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            if isinstance(first.value.value, str):
                lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def _of_c(text: str) -> int:
    found, at, inside = 0, 0, False  # inside a comment
    for line in text.splitlines():
        code, at = False, 0
        while at < len(line):
            if inside:
                end = line.find("*/", at)
                inside = end < 0
                at = len(line) if inside else end + 2
            elif line.startswith("//", at):
                break
            elif line.startswith("/*", at):
                inside, at = True, at + 2
            elif line[at] in "\"'":
                code, at = True, _past(line, at)
            else:
                code, at = code or not line[at].isspace(), at + 1
        found += code
    return found


def _past(line: str, at: int) -> int:
    """Return where a string or a character that begins at ``at`` has ended."""
    quote, at = line[at], at + 1
    while at < len(line) and line[at] != quote:
        at += 2 if line[at] == "\\" else 1
    return at + 1


def main() -> None:
    """Print the counts."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("folders", nargs="*", help="count these, and each folder in them")
    folders = options.parse_args().folders
    for folder in folders or FOLDERS:
        inside = sorted(p for p in (ROOT / folder).iterdir() if p.is_dir()) if folders else []
        for path in [ROOT / folder, *inside]:
            name = str(path.relative_to(ROOT))
            if n := count(name):
                print(f"{n:8,}  {name}")


if __name__ == "__main__":
    main()
