"""The tree speaks of the project alone, and leaves nothing half done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .tree import ROOT, files, label

# Put together here, so that this file does not break its own rule.
OF_ELSEWHERE = [
    r"/(wo" r"rk|fa" r"rm)/",
    r"\.lib" r"rary\b",
    r"\bthis ses" r"sion\b",
    r"\bdeveloper'?s'? ses" r"sion",
    r"\bissue #?\d",
    r"\bpypi\.o" r"rg\b|pythonhos" r"ted|download\.pytor" r"ch",
]
HALF_DONE = [r"\bTO" r"DO\b", r"\bFIX" r"ME\b", r"\bX" r"XX\b"]
UNPUBLISHED = [r"pip install ['\"]?fsdpc\b"]  # there is no release: an extra's package is named
TEXT = files(".c", ".h", ".cu", ".cuh", ".py", ".pyi", ".md", ".toml", ".txt", ".ipynb", "run",
             "Makefile")


@pytest.mark.parametrize("path", TEXT, ids=label)
def test_words(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for pattern in OF_ELSEWHERE + HALF_DONE + UNPUBLISHED:
            found = re.search(pattern, line)
            assert not found, f"{label(path)}:{number}: {found and found.group()!r}"


@pytest.mark.parametrize("path", TEXT, ids=label)
def test_files_end_in_one_newline_and_lines_in_no_blank(path: Path) -> None:
    text = path.read_text()
    assert not text or (text.endswith("\n") and not text.endswith("\n\n")), label(path)
    blank = [n for n, line in enumerate(text.split("\n"), 1) if line != line.rstrip()]
    assert not blank, f"{label(path)}: blanks end lines {blank}"


@pytest.mark.parametrize("path", [path for path in TEXT if path.suffix == ".md"], ids=label)
def test_prose_is_wrapped(path: Path) -> None:
    """Tables and programs are as wide as they are."""
    in_program = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        in_program ^= line.lstrip().startswith("```")
        assert in_program or line.startswith("|") or len(line) <= 110, f"{label(path)}:{number}"


# Phrases that a native writer would not use. Error texts are not held: tests assert them.
NOT_ENGLISH = [
    r"\bfor good\b",
    r"\b[Ll]ikewise\b",
    r"\b(is|are) asked for\b",
    r"\bis said\b",
    r"\bof one's own\b",
]


def comments(path: Path) -> list[tuple[int, str]]:
    """Return the comments and docstrings of a source with their lines; all of a page."""
    text = path.read_text()
    if path.suffix == ".md":
        return [(1, text)]
    if path.suffix in {".py", ".pyi"}:
        pattern = r'"""(?:[^"\\]|\\.|"(?!""))*"""|(?<!["\'\w])#[^\n]*'
    else:
        pattern = r"//[^\n]*|/\*.*?\*/"
    return [(text.count("\n", 0, found.start()) + 1, found.group())
            for found in re.finditer(pattern, text, re.DOTALL)]


PLAIN = [path for path in TEXT if "lint" not in path.parts]


@pytest.mark.parametrize("path", PLAIN, ids=label)
def test_comments_are_plain_english(path: Path) -> None:
    for number, text in comments(path):
        for pattern in NOT_ENGLISH:
            found = re.search(pattern, text)
            line = number + text.count("\n", 0, found.start()) if found else 0
            assert not found, f"{label(path)}:{line}: {found and found.group()!r}: say it plainly"


# About 25 words are the rule; what has more than this is two sentences.
SENTENCE_WORDS = 32
# Kernels' essays, whose sentences are full of numbers, and pages that are lists.
LONG = r"csrc/(ops|bind|mpi)/.*|kernels/.*|docs/STATUS\.md|CHANGELOG\.md"
PROSE = [path for path in TEXT if path.suffix in {".c", ".h", ".md"}
         and path.parts[len(ROOT.parts)] in {"csrc", "kernels", "docs", "README.md",
                                             "CONTRIBUTING.md"}
         and not re.fullmatch(LONG, label(path))]


def paragraphs(path: Path) -> list[tuple[int, str]]:
    """Return (line, text) of each paragraph of prose: no programs, tables, headings, diagrams."""
    found: list[tuple[int, str]] = []
    for begin, text in comments(path):
        lines = text.splitlines()
        if path.suffix == ".md":
            text = re.sub(r"^```.*?^```", lambda m: "\n" * m.group().count("\n"), text,
                          flags=re.DOTALL | re.MULTILINE)
            lines = ["" if re.match(r"\||#|<|!|    ", line) else line for line in text.splitlines()]
            lines = [re.sub(r"^ *([-*]|\d+\.) ", "\n", line) for line in lines]
        else:
            lines = [re.sub(r"^\s*(/\*|\*/|\*|//)? ?|\s*\*/$", "", line) for line in lines]
            lines = ["" if line.startswith("   ") else line for line in lines]
        at = begin
        for block in "\n".join(lines).split("\n\n"):
            found.append((at, " ".join(block.split())))
            at += block.count("\n") + 2
    return found


@pytest.mark.parametrize("path", PROSE, ids=label)
def test_sentences_are_short(path: Path) -> None:
    for number, text in paragraphs(path):
        for sentence in re.split(r"[.!?][)*'\"`]*\s+", text):
            words = len(sentence.split())
            assert words <= SENTENCE_WORDS, f"{label(path)}:{number}: {words} words: {sentence}"
