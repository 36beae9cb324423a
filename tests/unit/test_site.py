"""The site (mkdocs.yml, tools/docs_site.py) builds without a warning, and is whole."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.lint.tree import ROOT, label

import fsdpc

PACKAGE = ROOT / "python" / "fsdpc"
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page links to and fetches, and the ids that links may name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := of.get(name))}
        if tag == "a" and of.get("href") is not None:
            self.links.append(of["href"] or "")
        elif tag in FETCHED and of.get(FETCHED[tag]) and of.get("rel") != "canonical":
            self.fetched.append(of[FETCHED[tag]] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of the site, built as `make docs` does."""
    pytest.importorskip("mkdocs", reason='the site needs pip install ".[docs]"')
    pytest.importorskip("mkdocstrings", reason='the site needs pip install ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


def test_links_and_anchors_resolve(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("/"):  # of the page for errors, from the root
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert to.exists(), f"{path.name}: {link}: no such file"
            if parts.fragment and to in site and parts.fragment != "__skip":
                found = unquote(parts.fragment) in site[to].ids
                assert found, f"{path.name}: {link}: no such anchor"


def test_the_front_page_is_the_readme_and_colours_can_be_chosen(site: dict[Path, Page]) -> None:
    (front,) = (path for path in site if path.parent / "reference" in {p.parent for p in site}
                and path.name == "index.html")  # fmt: skip
    page = site[front]
    assert "pictures/sharding.svg" in page.fetched and "twenty-lines" in page.ids
    assert {f"__palette_{i}" for i in range(3)} <= page.ids


def test_nothing_is_fetched_from_elsewhere(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        away = [link for link in page.fetched if urlsplit(link).netloc]
        assert not away, f"{path.name}: {away}"


def test_the_site_names_no_machine(site: dict[Path, Page]) -> None:
    for path in site:
        text = path.read_text()
        assert str(ROOT) not in text and str(Path.home()) + "/" not in text, path.name


def public_names() -> list[str]:
    """Return each name of each `__all__` of a public module, with its module."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if any(part.startswith("_") for part in module.split(".")):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found += [f"{module}.{name}" for name in ast.literal_eval(node.value)]
    return found


def test_the_reference_has_every_public_name(site: dict[Path, Page]) -> None:
    pages = [page for path, page in site.items() if path.parent.name == "reference"]
    ids = set().union(*(page.ids for page in pages))
    names = public_names()
    assert len(names) > 300 and {"fsdpc.fully_shard", "fsdpc.torch.fully_shard"} <= set(names)
    shown = {name for name in names if name in ids}
    for name in set(names) - shown:  # on the page of a package that hands it on, or its module's
        *package, _, last = name.split(".")
        public = getattr(fsdpc, last, None)
        pages_of = {".".join([*package, last]), getattr(public, "__name__", "")}
        if public is getattr(sys.modules.get(name.rpartition(".")[0]), last, pages_of):
            pages_of.add(f"fsdpc.{last}")
        if ids & pages_of:
            shown.add(name)
    missing = sorted(set(names) - shown)
    assert not missing, f"no page of mkdocs.yml shows {missing}: see {label(Path(__file__))}"


def test_the_commands_are_those_of_the_program(site: dict[Path, Page]) -> None:
    (text,) = [path.read_text() for path in site if path.name == "commands.html"]
    for option in ("--max-restarts", "--init-from", "--tokenizer", "--ranks-per-host", "convert"):
        assert option in text
