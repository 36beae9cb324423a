"""The pages are true where a program can tell: links, names of files, numbers, words, sizes."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tools.code_lines import FOLDERS, code_lines, count

from .test_c_rules import ORDER
from .tree import ROOT, files, label

DESIGN = ROOT / "docs" / "design.md"
PAGES = files(".md")
# 2,050 for optimizers.md, 520 for fine-tuning.md, 850 for activations, losses, 3,400
# for compression.md, outer.md and their rows
PAGES_WORDS = 47_600
OVERVIEW_WORDS = 2000
PARAGRAPH_WORDS = 100

# Words of names that need no line in the glossary: plain English, or PyTorch's, NCCL's, MPI's, C's.
PLAIN = set("""
    abi abort access acts address adopted affine agree ahead algo amx args array atomic attention
    attentions attribute avx2 avx512 avx512bf16 backward base binary bits body boundary buffer
    call cast channel check checkpoint ckpt clip coll collect comm common compare compute concat
    config conv cumsum few flip
    control convert copy cpu crc32c cross cu cublaslt cuda cudnn custom desc device dlpack driver
    factor factored
    dropout dry dtype edge elementwise embedding end engine entropy entry env epilogue error
    event exact exp extremum f32 f64 fault file flag flush fn fork forward found frame fs fused gate
    gather gelu gemm glibc global gpu grad gradient grads graph guard handle head header hook hooks
    host hyper id import imports index init integer internal interrupt isa join json kernel kernels
    key kind level linear load local location log loss lt magnitude main make map mask math matmul
    mem memory mesh methods mma mode model module moved mpi name names nccl nn node norm null number
    numpy offload op open operand operator
    ops optim option order p2p pack pair pairs param parts peer philox
    pieces plan plugin pool portable post preference private product products properties py
    disk io list mover saved set
    queue random range read real red reduce reduction ref register registered registers registry
    remote rendezvous request result ring rotary round rows rule run runtime safetensors save
    scalar scalars scale sched schedule self settings shape shared shm
    signature size softmax sort spec st
    staged staging state stats status step storage stream sum sums sumsq swiglu table tables target
    tensor text thread tile tiles torch trace transport tree type unary value vec vector version
    view wait walk window windows work world write
    cover matrix orthogonal orthonormal low dequantize quantized scheme weight
    chunk left message micro phase segment stage tape team wanted words
    allocator block bytes code coded codes format kept patches prefetch progress record report
    scratch
""".split())

# A number in a page -> the file and the constant (or default of a variable) that it stands for.
NUMBERS = [
    ("docs/design/gpu.md", r"by at most (\d+) operations of a group", "csrc/cuda/nccl_ahead.c",
     r"AHEAD_MAX = (\d+)"),
    ("docs/design/gpu.md", r"waits while (\d+) operations", "csrc/cuda/nccl_ahead.c",
     r"AHEAD_MAX = (\d+)"),
    ("docs/design/communication.md", r"a deadline \((\d+) s\)", "csrc/base/env.h",
     r'"FSDPC_TIMEOUT_S", (\d+)'),
    ("docs/design/communication.md", r"After (\d+) s it logs", "csrc/base/env.h",
     r'"FSDPC_NOTICE_S", (\d+)'),
    ("docs/design/engine.md", r"1/(\d+) of the masters", "csrc/engine/agree.c", r"ROUNDS = (\d+)"),
    ("docs/design/engine.md", r"within (\d+) backwards", "csrc/engine/agree.c", r"ROUNDS = (\d+)"),
    ("docs/reliability.md", r"within (\d+) backwards", "csrc/engine/agree.c", r"ROUNDS = (\d+)"),
    ("docs/design/engine.md", r"(\d+) int64 words", "csrc/ops/exact_sum.h",
     r"FSDPC_EXACT_SUM_DIGITS = (\d+)"),
    ("docs/design/engine.md", r"and ([\d,]+) elements \(fused", "csrc/engine/layout.c",
     r"PADDING_FLOOR = (\d+)"),
]


# Messages that pages show filled in -> what the source has of them.
PARTS = {
    "posted barrier of '...requires_grad=True'": ["posted", ".requires_grad="],
    "rank 0 has been waiting for 10 s in ...": ["has been waiting for %.3g s in"],
    "something wrote to parameter ...": ["wrote to", " parameter '"],
}


def prose(path: Path) -> list[tuple[int, str]]:
    """Return numbered lines of a page without its programs."""
    lines, in_program = [], False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        in_program ^= line.lstrip().startswith("```")
        if not in_program and not line.lstrip().startswith("```"):
            lines.append((number, line))
    return lines


@cache
def anchors(path: Path) -> set[str]:
    """Return the headings of a page as links name them."""
    found = re.findall(r"^#+ (.*)$", "\n".join(line for _, line in prose(path)), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_links_lead_somewhere(path: Path) -> None:
    for number, line in prose(path):
        for link in re.findall(r"\]\(([^)\s]+)\)", line):
            if re.match(r"\w+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), f"{label(path)}:{number}: {link}: no such file"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{label(path)}:{number}: {link}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_files_that_pages_name_exist(path: Path) -> None:
    for number, line in prose(path):
        for name in re.findall(r"`((?:csrc|kernels|python|tests|benchmarks|examples|docs|tools)/"
                               r"[\w./-]+)`", line):
            exists = (ROOT / name).exists()
            assert exists, f"{label(path)}:{number}: {name}: no such file"


def test_the_chain_of_the_engine_is_shown() -> None:
    text = (ROOT / "docs" / "design" / "engine.md").read_text()
    table = text.split("| files | what they do |\n")[1].split("\n\n")[0]
    names = [name for cell in re.findall(r"^\| (`[^|]*`) \|", table, re.M)
             for name in re.findall(r"`(\w+)`", cell)]
    assert names == ORDER["engine"].split(), "docs/design/engine.md: the table of files"


def test_the_tree_names_every_folder() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
    for folder in ("csrc", "tests"):
        inner = {label(path).split("/")[1] for path in files(".c", ".py", under=folder)
                 if label(path).count("/") > 1}
        missing = {name for name in inner if f"{folder}/{name}" not in tree}
        assert not missing, f"CONTRIBUTING.md: the tree has no {folder}/{sorted(missing)}"


def test_pages_are_short() -> None:
    """A word has a letter or a digit; programs and tables count, the changelog does not."""
    pages = [page for page in PAGES if page.name not in {"CHANGELOG.md", "page.md"}]
    words = sum(len(re.findall(r"\S*[^\W_]\S*", page.read_text())) for page in pages)
    assert words <= PAGES_WORDS, f"all pages have {words:,} words: say a thing once, on its page"


def test_overview_is_short() -> None:
    words = len(DESIGN.read_text().split())
    assert words <= OVERVIEW_WORDS, f"docs/design.md has {words} words: move details to docs/design"


@pytest.mark.parametrize("path", [DESIGN, *files(".md", under="docs/design")], ids=label)
def test_design_pages_ask_and_answer(path: Path) -> None:
    """A heading is a question; a paragraph has few words."""
    lines = [line for _, line in prose(path)]
    for heading in [line for line in lines if line.startswith("## ")]:
        assert heading.endswith("?"), f"{label(path)}: {heading}: ask a question"
    for block in map(str.strip, "\n".join(lines).split("\n\n")):
        if not block.startswith(("|", "#", "- ", "1. ")):
            words = len(block.split())
            begin = " ".join(block.split()[:6])
            assert words < PARAGRAPH_WORDS, f"{label(path)}: {words} words: {begin!r} ..."


@pytest.mark.parametrize(("page", "says", "source", "has"), NUMBERS)
def test_numbers_are_the_sources(page: str, says: str, source: str, has: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    said = re.findall(says, text)
    found = re.search(has, (ROOT / source).read_text())
    assert said, f"{page} no longer says {says!r}: change the table in {label(Path(__file__))}"
    assert found, f"{source} no longer has {has!r}: change the table in {label(Path(__file__))}"
    assert {number.replace(",", "") for number in said} == {found[1]}, f"{page}: {says}: {found[1]}"


def literals(path: Path) -> str:
    """Return a source's text with neighbouring string literals joined."""
    return re.sub(r'"\s*f?"', "", path.read_text())


def test_messages_that_are_explained_exist() -> None:
    """The first column of troubleshooting, but what stands for a rank's own numbers."""
    rows = re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    text = "".join(map(literals, files(".c", under="csrc") + files(".py", under="python")))
    for message in rows:
        assert all(part in text for part in PARTS.get(message, [message])), message


def test_functions_of_the_tour_are_where_it_says() -> None:
    tour = (ROOT / "docs" / "tour.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w/.]+)` \|", tour, re.M)
    assert len(rows) > 30
    for name, path in rows:
        method, text = name.split(".")[-1], (ROOT / path).read_text()
        defined = rf"^ *def {method}\(" if path.endswith(".py") else rf"^\w[\w \*]*\b{method}\("
        operation = name.removeprefix("op_").removeprefix("Tensor_")  # bind/tensor/ops.h
        made = re.search(rf"^FSDPC_PY_\w+\({operation}[,)]", text, re.M)
        assert made or re.search(defined, text, re.M), f"{path} has no {name}"


# ---- the glossary -------------------------------------------------------------------------------


@cache
def glossary() -> set[str]:
    """Return the words in the first column of the table of words."""
    table = (ROOT / "docs" / "glossary.md").read_text().split("\n| word | meaning |\n")[1]
    cells = re.findall(r"^\| ([^|]+) \|", table, re.M)
    return {word for cell in cells for word in re.findall(r"[a-z]+", cell)}


def words_of_names() -> dict[str, str]:
    """Return the words in names of files of csrc and of types in its headers -> one such name."""
    found: dict[str, str] = {}
    for path in files(".c", ".h", under="csrc"):
        for word in path.stem.split("_"):
            found.setdefault(word, label(path))
        types = re.findall(r"^\}? ?(?:typedef )?(?:struct|enum|union)? ?(fsdpc_\w+)(?:;| \{)",
                           path.read_text(), re.M) if path.suffix == ".h" else []
        types += re.findall(r"^typedef .*\b(fsdpc_\w+);$", path.read_text(), re.M)
        for name in types:
            for word in name.split("_")[1:]:
                found.setdefault(word, f"{name} of {label(path)}")
    return found


def test_words_of_names_are_known() -> None:
    known = PLAIN | glossary()
    unknown = {
        word: name
        for word, name in words_of_names().items()
        if not {word, word.removesuffix("s")} & known
    }
    assert not unknown, (
        "take a word of PyTorch, NCCL or MPI (and name it in PLAIN, in "
        f"{label(Path(__file__))}), or give it a line in docs/glossary.md: {unknown}"
    )


def test_words_of_the_glossary_are_used() -> None:
    text = " ".join(path.read_text().lower() for path in files(".h", ".c", under="csrc"))
    used = set(re.findall(r"[a-z]+", text))
    assert not glossary() - used, f"no source says {sorted(glossary() - used)}"


# ---- exceptions ---------------------------------------------------------------------------------


def exceptions() -> dict[str, str]:
    """Return name -> docstring of the exceptions that users can meet by name."""
    found = {}
    for path in files(".py", ".pyi", under="python/fsdpc"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and re.search("(Error|Fault|Warning)$", node.name):
                if any(ast.unparse(base).endswith("Error") for base in node.bases):
                    found[node.name] = ast.get_docstring(node) or ""
    return found


def test_each_exception_has_an_entry_and_names_its_page() -> None:
    found = exceptions()
    assert len(found) >= 7 and {"PeerError", "CheckpointError"} <= set(found)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page.split("## Exceptions")[1].split("\n## ")[0], re.M)
    assert sorted(rows) == sorted(found)
    link = "docs/troubleshooting.md#exceptions"
    unlinked = [name for name, doc in found.items() if link not in doc]
    assert not unlinked, f"their docstrings do not name {link}: {unlinked}"


# ---- ceilings -----------------------------------------------------------------------------------

#: What the ceilings were before the rows that raise them; it only goes down.
BASE = {"csrc": 49350, "kernels": 4830, "python/fsdpc": 25850, "tests": 66330}


def ceilings() -> dict[str, int]:
    """Return folder -> lines of code at most, as docs/design.md has them."""
    rows = re.findall(r"^\| `([\w/]+)` \| ([\d,]+) \| [\d,]+ \|$", DESIGN.read_text(), re.M)
    return {folder: int(lines.replace(",", "")) for folder, lines in rows}


def raises() -> list[tuple[str, int]]:
    """Return (folder, lines) of the rows that say what a raise brings and what would pay for it."""
    pattern = r"^\| `([\w/]+)` \| \+([\d,]+) \| [^|]{12,} \| [^|]{12,} \|$"
    rows = re.findall(pattern, DESIGN.read_text(), re.M)
    return [(folder, int(lines.replace(",", ""))) for folder, lines in rows]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_ceiling_is_raised_by_a_row_that_says_why(folder: str) -> None:
    raised = sum(lines for name, lines in raises() if name == folder)
    assert ceilings()[folder] <= BASE[folder] + raised


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_keeps_to_its_ceiling(folder: str) -> None:
    lines = count(folder)
    assert lines <= ceilings()[folder], (
        f"{folder} has {lines} lines of code: delete what is not needed, or raise the ceiling in "
        "docs/design.md by a row that says what for, and what was looked at to pay for it"
    )


def test_lines_of_code_are_counted_without_comments(tmp_path: Path) -> None:
    python, c = tmp_path / "a.py", tmp_path / "a.c"
    python.write_text('"""Says\nwhat."""\n\nx = """a\nb"""  # two lines\n# none\n')
    c.write_text('/* An essay.\n */\nint a; /* one */\n// none\nchar *b = "/*";\n')
    assert (code_lines(python), code_lines(c)) == (2, 2)
