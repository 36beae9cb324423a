"""What the site (mkdocs.yml, `make docs`) has beside the pages of docs/: an MkDocs hook.

- A page of the navigation named reference/fsdpc.X.md is the reference of the module fsdpc.X, from
  its sources and the stub of the extension; reference/commands.md is what `--help` prints.
- Pages of the tree that are not in docs/ (CONTRIBUTING.md, benchmarks/README.md, ...), and the
  examples, are pages of the site too.
- Links between files of the tree, as a git host follows them, become links of the site. What the
  site does not have (a source, a folder) is shown as text.
- Docstrings are reStructuredText in few places: roles become links, `::` a colon.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]

#: A file of the tree -> its page, or picture.
ELSEWHERE = {
    "README.md": "README.md",
    "docs": "README.md",
    "docs/README.md": "README.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "tests/README.md": "tests.md",
    "examples": "examples/index.md",
    "examples/torch": "examples/index.md",
}
COPIED = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md",
          "tests/README.md"]  # fmt: skip
COMMANDS = ["run", "train", "data", "data tokenize", "generate", "estimate", "simulate", "plan",
            "plot", "ckpt", "flight", "info"]  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")

_source_of: dict[str, str] = {}  # a page -> the file of the tree that it shows


# ---- pages that are not in docs/ ----------------------------------------------------------------


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and the pictures of benchmarks/README.md; README.md is the front page."""
    index = files.get_file_from_path("README.md")  # tables of pages, which the site's menu has
    if index is not None:
        files.remove(index)
    _source_of.update({file.src_uri: f"docs/{file.src_uri}" for file in files})
    for page in _named(config.nav):
        module = re.fullmatch(r"reference/(fsdpc[\w.]*)\.md", page)
        if module:
            files.append(File.generated(config, page, content=_reference(module[1])))
    files.append(File.generated(config, "reference/commands.md", content=_commands()))
    for name in COPIED:
        _add(files, config, name, ELSEWHERE[name], (ROOT / name).read_text(encoding="utf-8"))
    for path in sorted((ROOT / "benchmarks").glob("*.png")):
        ELSEWHERE[f"benchmarks/{path.name}"] = f"pictures/{path.name}"
        page = ELSEWHERE[f"benchmarks/{path.name}"]
        files.append(File.generated(config, page, abs_src_path=str(path)))
    _examples(files, config)
    return files


def _add(files: Files, config: Any, name: str, page: str, text: str) -> None:
    _source_of[page] = name
    files.append(File.generated(config, page, content=text))


def _named(nav: Any) -> Iterator[str]:
    """Yield the pages that a navigation names."""
    if isinstance(nav, str):
        yield nav
    for each in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _named(each)


def _reference(module: str) -> str:
    """Return the page of a module: its docstrings, and the names that are another library's."""
    text = f"::: {module}\n"
    for name in _shadowing(module):
        text += (f'\n<a id="{module}.{name}"></a>\n\n::: {module}.{name}.{name}\n'
                 "    options:\n      heading_level: 2\n      show_root_full_path: false\n")
    theirs = _names_of_others(module)
    if theirs:
        text += "\n## Names of torch's own\n\n" + "".join(
            f'- <a id="{module}.{name}"></a>`{name}` (`{where}`)\n' for name, where in theirs
        )
    return text


def _imports(module: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a module's source imports by name."""
    path = ROOT / "python" / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", each.name) for each in node.names)


def _shadowing(module: str) -> list[str]:
    """Return functions that hide the module they come from: griffe shows the module."""
    return [name for where, name in _imports(module) if where == f"{module}.{name}"]


def _names_of_others(module: str) -> list[tuple[str, str]]:
    """Return (name, module that has it) of public names that come from torch."""
    if not module.startswith("fsdpc.torch"):
        return []
    found = set(_imports(module))
    if module == "fsdpc.torch":  # hands these on when they are used
        policies = ("size_based_auto_wrap_policy", "transformer_auto_wrap_policy")
        found |= set(_imports("fsdpc.torch.fully_sharded_data_parallel"))
        found |= {("torch.distributed.fsdp.wrap", name) for name in policies}
    return sorted((name, where) for where, name in found if where.startswith("torch."))


def _commands() -> str:
    """Return the page of commands, as each prints it."""
    from fsdpc.cli import main

    text = "# Commands\n\nWhat `--help` prints.\n"
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "96"
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            with contextlib.suppress(SystemExit):
                main.main([*command.split(), "--help"])
        text += f"\n## fsdpc {command}\n\n```text\n{printed.getvalue().rstrip()}\n```\n"
    if columns is None:
        del os.environ["COLUMNS"]
    else:
        os.environ["COLUMNS"] = columns
    return text


def _examples(files: Files, config: Any) -> None:
    """Add a page for each script, and their list."""
    rows = ["# Examples", "", "Each of these runs in a test.", "", "| script | what it shows |",
            "|---|---|"]  # fmt: skip
    paths = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")]
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        name = path.relative_to(ROOT).as_posix()
        page = str(Path(name).with_suffix(".md"))
        about, code = _notebook(path) if path.suffix == ".ipynb" else _script(path)
        ELSEWHERE[name] = page
        ELSEWHERE.setdefault(posixpath.dirname(name), page)
        _source_of[page] = name
        content = f"# {name}\n\n{code}\n"
        # Named by their list, not by the navigation.
        files.append(File.generated(config, page, content=content,
                                    inclusion=InclusionLevel.NOT_IN_NAV))
        rows.append(f"| [{name}](../{page}) | {about} |")
    files.append(File.generated(config, "examples/index.md", content="\n".join(rows) + "\n"))


def _script(path: Path) -> tuple[str, str]:
    text = path.read_text(encoding="utf-8")
    about = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    return " ".join(about.split()), f"```python\n{text}```"


def _notebook(path: Path) -> tuple[str, str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    parts = [
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, texts)
    ]
    return texts[0].splitlines()[0].lstrip("# "), "\n\n".join(parts)


# ---- links --------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between files of the tree into links of the site."""
    source = _source_of.get(page.file.src_uri)
    if source is None:
        return markdown
    in_program, lines = False, []
    for line in markdown.split("\n"):
        in_program ^= line.lstrip().startswith("```")
        lines.append(line if in_program else LINK.sub(_rewrite(source, page.file.src_uri), line))
    return "\n".join(lines)


def _rewrite(source: str, page: str) -> Any:
    def rewrite(found: re.Match[str]) -> str:
        picture, text, link = found.groups()
        name, _, anchor = link.partition("#")
        if not name or re.match(r"\w+:", link):
            return found.group()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        to = ELSEWHERE.get(target)
        if to is None and target.startswith("docs/"):
            to = target.removeprefix("docs/")
        if to is None:
            return text
        relative = posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"{picture}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return rewrite


# ---- docstrings ---------------------------------------------------------------------------------


class PlainDocstrings(griffe.Extension):
    """Turns what docstrings have of reStructuredText into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstrings of a package, once all of it is known."""
        seen: set[str] = set()
        rest: list[Any] = [pkg]
        while rest:
            node = rest.pop()
            if node.is_alias or node.path in seen:
                continue
            seen.add(node.path)
            rest += node.members.values()
            if node.docstring:
                node.docstring.value = _markdown(node.docstring.value, node)


def _markdown(text: str, node: Any) -> str:
    text = re.sub(r":(?:py:)?[a-z]+:`(~?)([^`]+)`", lambda found: _link(found, node), text)
    text = re.sub(r"`*docs/([\w./-]+)\.md`*", r"[docs/\1.md](../\1.md)", text)
    if "\nNotes\n" not in text:  # a source after the parameters is not one of them
        text = re.sub(r"^Source: ", r"Notes\n-----\nSource: ", text, flags=re.M)
    return re.sub(r"::$", ":", text, flags=re.M)


def _link(found: re.Match[str], node: Any) -> str:
    name = found[2].removesuffix("()")
    shown = f"<code>{name.split('.')[-1] if found[1] else name}</code>"
    scope = node if node.is_module or node.is_class else node.parent
    try:
        path = name if name.startswith("fsdpc.") else scope.resolve(name)
    except griffe.NameResolutionError:
        return shown
    return f'<autoref identifier="{path}" optional>{shown}</autoref>'
