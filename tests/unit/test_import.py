"""What ``import fsdpc`` costs: little time, nothing foreign, nothing started."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import fsdpc

PACKAGE = Path(fsdpc.__file__).parent

PROBE = """
import os, sys, time
begin = time.process_time()
import numpy
of_numpy = time.process_time() - begin
before = set(sys.modules), set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
begin = time.process_time()
import fsdpc.integrations
print((time.process_time() - begin) / of_numpy)
tops = {name.split(".")[0] for name in set(sys.modules) - before[0]}
print(sorted(tops - sys.stdlib_module_names - {"fsdpc", "numpy"}))
print(set(os.listdir("/proc/self/fd")) == before[1])
print(len(os.listdir("/proc/self/task")) == before[2])
"""


# What `import fsdpc` brings beyond NumPy, then what the use of every public name brings.
MODULES = """
import json, sys
import numpy
of_numpy = set(sys.modules)
import fsdpc
imported = set(sys.modules) - of_numpy
for name in fsdpc.__all__:
    getattr(fsdpc, name)
print(json.dumps([sorted(imported), sorted(set(sys.modules) - of_numpy - imported)]))
"""

#: Modules and packages of fsdpc that its import brings; the others come when they are used.
EAGER = set("""
    _core _version cli display distributed functional nn optim planning sharding tensors
""".split())

# Of the standard library, what takes long to import and only some users need.
HEAVY = set("""
    argparse asyncio concurrent csv email http importlib.metadata logging multiprocessing optparse
    sqlite3 ssl tarfile tempfile tkinter tomllib unittest urllib.request xml zipfile
""".split())
STANDARD = 100  # modules of the standard library beyond NumPy's; 52 of Python 3.11


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )
    return done.stdout


def probe() -> list[str]:
    return run(PROBE).splitlines()


@cache
def modules() -> list[Any]:
    """Return those imported by ``import fsdpc``, and those by using every public name."""
    return json.loads(run(MODULES))


def foreign(names: list[str]) -> set[str]:
    """Return the packages that are neither fsdpc, NumPy nor Python's own."""
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"fsdpc", "numpy"}


def test_it_imports_what_it_says() -> None:
    imported, _ = modules()
    own = {name.split(".")[1] for name in imported if name.startswith("fsdpc.")}
    assert own == EAGER, "import it when it is used (_MODULES, _FROM), or add it to EAGER"


def test_numpy_and_the_standard_library_are_enough() -> None:
    imported, used = modules()
    assert foreign(imported) == set()
    assert foreign(used) == set()  # no public name needs an extra


def test_it_brings_few_modules_of_the_standard_library() -> None:
    standard = [name for name in modules()[0] if name.split(".")[0] in sys.stdlib_module_names]
    assert HEAVY & set(standard) == set()
    assert 0 < len(standard) <= STANDARD, standard


def test_lazy_modules_come_when_they_are_used() -> None:
    imported, used = modules()
    names = {*fsdpc._MODULES.values(), *fsdpc._FROM.values()}
    names.remove("testing")  # needs pytest, and is no public name
    names.remove("sharding.wrap")  # memory_plan brings it
    lazy = {f"fsdpc.{name}" for name in names}
    assert lazy & set(imported) == set() and lazy <= set(used)


def test_it_takes_no_longer_than_numpy() -> None:
    # Processor time against NumPy's in the same process: the machine may be slow or busy.
    assert min(float(probe()[0]) for _ in range(5)) < 1


def test_it_brings_and_starts_nothing() -> None:
    _, foreign, same_descriptors, same_threads = probe()
    assert foreign == "[]"
    assert (same_descriptors, same_threads) == ("True", "True")


def test_it_is_small() -> None:
    files = [path for path in PACKAGE.rglob("*") if path.is_file()]
    plugins = set(PACKAGE.glob("libfsdpc_*.so"))  # built where there is a compiler for them
    ours = [path for path in files if path not in plugins and path.parent.name != "__pycache__"]
    assert sum(path.stat().st_size for path in ours) < 10 << 20
