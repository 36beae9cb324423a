"""Compile the C sources: which files, which flags, what is out of date.

``setup.py`` builds the extension with it and ``tools/ctest.py`` the C tests, so that both compile
the same sources with the same flags. A file whose name ends in a suffix of ``csrc/isa_flags.txt``
(``_avx2``, ``_avx512``, ...) gets that line's flags as well, and is left out on processors other
than x86-64.

An object is compiled again when its command changed or when anything that its dependency file
(``-MMD``) names is newer than it.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import stub_args
import stub_docs

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
BINDINGS = ("bind", "bind/engine", "bind/tensor", "bind/torch")
OBJECTS = ROOT / "build" / "objects"  # of csrc without csrc/bind, for the extension and C tests
LAYERS = ("base", "tier", "device", "ops", "comm", "engine", "ckpt", "nn", "plugin")

WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wvla",
            "-Werror=implicit-function-declaration")
# Of files with paths, which the locale may not be able to say.
AS_NAMES = {"encoding": "utf-8", "errors": "surrogateescape"}

FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O3",
    "-g1",  # lines for stack traces; all of -g would be most of what is installed
    *WARNINGS,
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-pthread",
)
LIBRARIES = ("-pthread", "-lm", "-ldl")


class CompileError(RuntimeError):
    """A compiler or linker command failed; the text holds the command and its output."""


def isa_flags() -> dict[str, list[str]]:
    """Suffix of a source's stem -> the flags that file gets on top."""
    table = {}
    for line in (CSRC / "isa_flags.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            suffix, *flags = line.split()
            table[suffix] = flags
    return table


def isa_suffix(source: Path, table: Iterable[str]) -> str | None:
    """The suffix of `table` that this file's name ends in; the longest wins."""
    matches = [suffix for suffix in table if source.stem.endswith(suffix)]
    return max(matches, key=len, default=None)


def sources(layers: Sequence[str] = LAYERS) -> list[Path]:
    """The C files of these folders of csrc that this processor can compile, sorted."""
    found = sorted(path for layer in layers for path in (CSRC / layer).glob("*.c"))
    if platform.machine() in ("x86_64", "AMD64"):
        return found
    table = isa_flags()
    return [path for path in found if isa_suffix(path, table) is None]


def default_compiler() -> list[str]:
    """The command in $CC, else the system's C compiler."""
    fallback = next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")
    return shlex.split(os.environ.get("CC", fallback))


def base_flags() -> list[str]:
    """Flags of every file: ours, the tree's include folder, then the user's $CFLAGS."""
    werror = ["-Werror"] if os.environ.get("FSDPC_WERROR") == "1" else []
    first = ["-include", str(CSRC / "base" / "glibc.h")]
    return [*FLAGS, *werror, f"-I{CSRC}", *first, *shlex.split(os.environ.get("CFLAGS", ""))]


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def run_command(command: Sequence[str]) -> None:
    """Run one command; its warnings go to stderr, its failure into CompileError."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError as error:
        raise CompileError(
            f"there is no C compiler '{command[0]}': install one (apt install gcc, or dnf install "
            "gcc), or name it in CC"
        ) from error
    if done.returncode:
        raise CompileError(f"{shlex.join(command)}\n{done.stdout}")
    if done.stdout:
        sys.stderr.write(done.stdout)


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Keep other processes from building in this folder; they find what this one has built."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _dependencies(depfile: Path) -> list[str]:
    text = depfile.read_text(**AS_NAMES).replace("\\\n", " ")
    return text.split(":", 1)[1].split()


def up_to_date(target: Path, command_line: str, depfile: Path) -> bool:
    """Whether a target was made by this command and is as new as all that it was made of."""
    stamp = target.with_suffix(".cmd")
    try:
        if stamp.read_text(**AS_NAMES) != command_line:
            return False
        built = target.stat().st_mtime_ns
        return all(os.stat(name).st_mtime_ns <= built for name in _dependencies(depfile))
    except OSError:
        return False


def link(command: Sequence[str], target: Path, objects: Sequence[Path], libraries: Sequence[str],
         stamp: Path) -> Path:
    """Link objects and libraries by `command` unless `stamp` says that it made `target` of them.

    The target is put in place whole: another process may be running the old one.
    """
    made = target.with_name(target.name + ".new")
    whole = [*command, "-o", str(made), *map(str, objects), *libraries]
    line = shlex.join(whole)
    fresh = target.exists() and stamp.exists() and stamp.read_text(**AS_NAMES) == line
    built = target.stat().st_mtime_ns if fresh else 0
    if not fresh or any(path.stat().st_mtime_ns > built for path in objects):
        target.parent.mkdir(parents=True, exist_ok=True)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        run_command(whole)
        made.replace(target)
        stamp.write_text(line, **AS_NAMES)
    return target


class Builder:
    """Compiles C files of the tree into one folder, in parallel.

    Parameters
    ----------
    out : Path
        Where objects go; the tree's folders are mirrored below it.
    compiler : sequence of str, optional
        The command to compile and link with, default :func:`default_compiler`.
    extra : sequence of str
        Flags of every file and of every link, e.g. ``-fsanitize=address``.
    """

    def __init__(self, out: Path, compiler: Sequence[str] = (), extra: Sequence[str] = ()) -> None:
        self.out = Path(out)
        self.compiler = list(compiler) or default_compiler()
        self.extra = list(extra)
        self.isa = isa_flags()

    def object_path(self, source: Path) -> Path:
        """Where the object of this source goes."""
        return self.out / source.resolve().relative_to(ROOT).with_suffix(".o")

    def command(self, source: Path, flags: Sequence[str] = ()) -> list[str]:
        """The command that compiles one file."""
        target = self.object_path(source)
        suffix = isa_suffix(source, self.isa)
        per_file = self.isa[suffix] if suffix else []
        command = [*self.compiler, *base_flags(), *self.extra, *per_file, *flags]
        depfile = target.with_suffix(".d")
        return [*command, "-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(target)]

    def is_stale(self, source: Path, flags: Sequence[str] = ()) -> bool:
        """Whether a file has to be compiled."""
        target = self.object_path(source)
        line = shlex.join(self.command(source, flags))
        return not up_to_date(target, line, target.with_suffix(".d"))

    def compile_one(self, source: Path, flags: Sequence[str] = ()) -> None:
        """Compile one file."""
        target, command = self.object_path(source), self.command(source, flags)
        target.parent.mkdir(parents=True, exist_ok=True)
        started = time.time_ns()
        run_command(command)
        # Dated back, so that a source saved while the compiler ran counts as newer.
        os.utime(target, ns=(started, started))
        target.with_suffix(".cmd").write_text(shlex.join(command), **AS_NAMES)

    def compile(self, files: Iterable[Path], flags: Sequence[str] = ()) -> list[Path]:
        """Compile the files that are out of date; returns the objects of all."""
        return compile_all([(self, path, flags) for path in files])

    def link(self, objects: Iterable[Path], target: Path, flags: Sequence[str] = ()) -> Path:
        """Link objects into `target` unless it is newer than all of them."""
        libraries = [*shlex.split(os.environ.get("LDFLAGS", "")), *LIBRARIES]
        # A build folder cannot hold the stamp of a target elsewhere, so it is named by the target.
        return link([*self.compiler, *self.extra, *flags], Path(target), list(objects), libraries,
                    self.out / f"{Path(target).name}.link")


class Counter:
    """Says on stderr how many files there are to compile, and how many are done.

    A terminal has one line that is rewritten; elsewhere a line is printed every `EVERY_S` seconds.
    Builds of less than `LEAST` files are over at once and say nothing.
    """

    LEAST = 10
    EVERY_S = 10.0
    FILE_S = 1.1  # of one core, for an average file

    def __init__(self, files: int) -> None:
        self.files, self.done, self.said = files, 0, time.monotonic()
        self.lock = threading.Lock()
        if files >= self.LEAST:
            minutes = round(files * self.FILE_S / usable_cores() / 60)
            length = {0: "less than a minute", 1: "about a minute"}
            about = length.get(minutes, f"about {minutes} minutes")
            print(f"compiling {files} files, {about}", file=sys.stderr, flush=True)

    def count(self) -> None:
        """Take note of one more file; any thread may call this."""
        with self.lock:
            self.done += 1
            now, last = time.monotonic(), self.done == self.files
            if self.files < self.LEAST:
                return
            if sys.stderr.isatty():
                end = "\n" if last else ""
                print(f"\r{self.done}/{self.files} compiled", end=end, file=sys.stderr, flush=True)
            elif last or now - self.said >= self.EVERY_S:
                self.said = now
                print(f"{self.done}/{self.files} compiled", file=sys.stderr, flush=True)


def compile_all(files: Sequence[tuple[Builder, Path, Sequence[str]]]) -> list[Path]:
    """Compile the files, with their builders and flags, that are out of date, in parallel.

    Every failure is reported, not only the first.
    """
    stale = [each for each in files if each[0].is_stale(each[1], each[2])]
    counter = Counter(len(stale))

    def work(builder: Builder, source: Path, flags: Sequence[str]) -> None:
        builder.compile_one(source, flags)
        counter.count()

    with ThreadPoolExecutor(usable_cores()) as pool:
        pending = [pool.submit(work, *each) for each in stale]
    errors = dict.fromkeys(str(error) for job in pending if (error := job.exception()))
    if errors:
        raise CompileError("\n".join(errors))
    return [builder.object_path(source) for builder, source, _ in files]


def build_core(target: Path) -> Path:
    """Build the extension ``fsdpc._core`` of this Python as `target`; CompileError if that fails.

    Its objects stay between builds (setuptools' own folder is a new one every time for an editable
    install): the engine's, shared with the C tests, and those of each interpreter.
    """
    import numpy

    python = sysconfig.get_paths()
    if not Path(python["include"], "Python.h").is_file():
        version = "{}.{}".format(*sys.version_info)
        raise CompileError(
            f"Python.h is not in {python['include']}: install this Python's headers (apt install "
            f"python{version}-dev or python3-dev, dnf install python3-devel)"
        )
    flags = [f"-isystem{python['include']}", f"-isystem{python['platinclude']}"]
    flags += [f"-isystem{numpy.get_include()}", "-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION"]
    flags += ["-DNPY_TARGET_VERSION=NPY_1_25_API_VERSION"]
    python_side = Builder(ROOT / "build" / f"core-{sys.implementation.cache_tag}")
    made = [each.write(python_side.out / "made") for each in (stub_docs, stub_args)]
    engine, flags = Builder(OBJECTS), [f"-I{python_side.out / 'made'}", *flags]
    files = [(engine, path, ()) for path in sources()]
    files += [(python_side, path, flags) for path in (*sources(BINDINGS), *made)]
    with building(OBJECTS):
        objects = compile_all(files)
    return python_side.link(
        objects, target, ["-shared", "-Wl,--compress-debug-sections=zlib", "-Wl,-z,relro"]
    )


def core_in_place() -> Path:
    """The extension of this Python in the source tree."""
    return ROOT / "python" / "fsdpc" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
