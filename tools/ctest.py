"""Build and run the C tests (tests/c) and benchmarks (benchmarks/c), tests under sanitizers too.

    python tools/ctest.py plain|asan|tsan|bench [--build] [name ...]

Every test is a program of its own, linked with all of csrc but csrc/bind. A name keeps the tests
whose file name contains it. Sanitized tests run in no-alias mode where threads stand for ranks,
since sanitizers know virtual addresses only: what is written through one mapping of a shared page
and read through another they cannot match.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import native

TESTS = native.ROOT / "tests" / "c"
BENCHMARKS = native.ROOT / "benchmarks" / "c"
TIMEOUT_S = 400


@dataclass(frozen=True)
class Flavour:
    """How to build, and what to run the programs with."""

    flags: tuple[str, ...] = ()
    kernel_flags: tuple[str, ...] = ()  # besides, for csrc/ops
    compilers: tuple[str, ...] = ()  # the first that exists; none: the default one
    environment: tuple[tuple[str, str], ...] = ()
    sanitized: bool = False


# -O1 keeps the stacks in reports readable and the kernels fast enough.
SANITIZED = ("-O1", "-fno-omit-frame-pointer")
FLAVOURS = {
    "plain": Flavour(),
    "bench": Flavour(),
    "asan": Flavour(
        # Checks as calls: in line they double the time to compile the kernels (20 s a file).
        flags=(
            *SANITIZED,
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            "-fsanitize-address-outline-instrumentation",
        ),
        # AddressSanitizer stops at such addresses too; these checks double a kernel's compilation.
        kernel_flags=("-fno-sanitize=alignment,null,object-size,pointer-overflow",),
        compilers=("clang",),
        environment=(
            ("ASAN_OPTIONS", "detect_stack_use_after_return=1:strict_string_checks=1"),
            ("UBSAN_OPTIONS", "print_stacktrace=1"),
        ),
        sanitized=True,
    ),
    # gcc 12's misses plain races of bytes that clang 14's reports.
    "tsan": Flavour(
        flags=(*SANITIZED, "-fsanitize=thread"),
        compilers=("clang",),
        environment=(
            ("TSAN_OPTIONS", "halt_on_error=1:second_deadlock_stack=1"),
            ("FSDPC_NO_ALIAS", "1"),
        ),
        sanitized=True,
    ),
}


def compiler_of(flavour: Flavour) -> list[str]:
    """The command to compile a flavour with."""
    found = next(filter(None, map(shutil.which, flavour.compilers)), None)
    if flavour.compilers and found is None:
        sys.exit(f"ctest: {' or '.join(flavour.compilers)} is needed and not installed")
    return [found] if found else native.default_compiler()


def fixed_addresses() -> list[str]:
    """A command in front that switches off address randomisation, where that is allowed.

    clang 14's sanitizers refuse the mappings that newer kernels choose at random.
    """
    command = ["setarch", "-R"]
    if not shutil.which("setarch"):
        return []
    works = subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if works else []


def selected(kind: str, names: Sequence[str]) -> list[Path]:
    """The sources of this kind (test, bench) whose name contains one of `names`."""
    folder = BENCHMARKS if kind == "bench" else TESTS
    found = sorted(folder.glob(f"{kind}_*.c"))
    return [path for path in found if not names or any(name in path.stem for name in names)]


def builder_of(flavour_name: str) -> native.Builder:
    """What compiles csrc for a flavour; whoever wants it in that one shares the objects."""
    flavour = FLAVOURS[flavour_name]
    objects = native.ROOT / "build" / "c" / flavour_name if flavour.flags else native.OBJECTS
    return native.Builder(objects, compiler_of(flavour), flavour.flags)


def compile_core(flavour_name: str, layers: Sequence[str] = native.LAYERS) -> list[Path]:
    """Objects of these layers of csrc in a flavour; the caller holds the builder's folder."""
    builder, kernels = builder_of(flavour_name), set(native.sources(["ops"]))
    flags = FLAVOURS[flavour_name].kernel_flags
    work = [(builder, path, flags if path in kernels else ()) for path in native.sources(layers)]
    return native.compile_all(work)


def build(flavour_name: str, programs: Sequence[Path]) -> list[Path]:
    """Compile csrc and these programs; returns the executables."""
    out = native.ROOT / "build" / "c" / flavour_name
    builder = builder_of(flavour_name)

    def link(main: Path) -> Path:
        return builder.link([main, *library], out / "bin" / main.stem)

    with native.building(builder.out), ThreadPoolExecutor(native.usable_cores()) as pool:
        library = compile_core(flavour_name)
        mains = builder.compile(programs, [f"-I{TESTS}"])
        return list(pool.map(link, mains))


@dataclass
class Result:
    """How one program ended."""

    name: str
    ok: bool
    seconds: float
    output: str


def run_one(program: Path, flavour: Flavour, prefix: Sequence[str]) -> Result:
    """Run one test program to its end or its timeout."""
    environment = {**os.environ, **dict(flavour.environment)}
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*prefix, str(program)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            env=environment,
        )
        ok, output = done.returncode == 0, done.stdout
        if done.returncode < 0:
            output += f"killed by signal {-done.returncode}\n".encode()
    except subprocess.TimeoutExpired as late:
        ok, output = False, (late.stdout or b"") + f"no end within {TIMEOUT_S} s\n".encode()
    return Result(program.name, ok, time.monotonic() - began, output.decode("utf-8", "replace"))


def run_all(name: str, programs: Sequence[Path]) -> int:
    """Run the programs; tests side by side, benchmarks one by one with their output shown."""
    flavour = FLAVOURS[name]
    prefix = fixed_addresses() if flavour.sanitized else []
    if name == "bench":
        for program in programs:
            subprocess.run([str(program)], check=True)
        return 0
    with ThreadPoolExecutor(native.usable_cores()) as pool:
        results = list(pool.map(lambda path: run_one(path, flavour, prefix), programs))
    for result in results:
        if not result.ok:
            print(f"--- {result.name} ---\n{result.output.rstrip()}")
    failed = [result.name for result in results if not result.ok]
    slowest = max(results, key=lambda result: result.seconds, default=None)
    tail = f", slowest {slowest.name} {slowest.seconds:.1f} s" if slowest else ""
    print(f"C tests ({name}): {len(results) - len(failed)} passed, {len(failed)} failed{tail}")
    return len(failed)


def main() -> int:
    """Build and run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawText)
    parser.add_argument("flavour", choices=sorted(FLAVOURS))
    parser.add_argument("names", nargs="*", metavar="name")
    parser.add_argument("--build", action="store_true", help="build, and run nothing")
    options = parser.parse_intermixed_args()
    programs = selected("bench" if options.flavour == "bench" else "test", options.names)
    if options.names and not programs:
        sys.exit(f"ctest: no test is named like {' or '.join(options.names)}")
    try:
        executables = build(options.flavour, programs)
    except native.CompileError as error:
        sys.exit(f"ctest: the C sources did not compile\n{error}")
    return 1 if not options.build and run_all(options.flavour, executables) else 0


RawText = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    sys.exit(main())
