"""Build libfsdpc_cuda.so: host code in C, kernels by nvcc.

    python tools/cuda_build.py [--out build/libfsdpc_cuda.so] [--archs 80,90,100] [--emulate]

The toolkit is the first found of $CUDA_HOME, pip's nvidia packages, and the nvcc on PATH.  Headers
of cuBLASLt come from the same places; without them products go to the plain kernel.  CUDA's runtime
is linked statically and everything else is opened at run time, so that the library loads anywhere.

With --emulate it builds the tests of tests/gpu for this processor instead (tests/emu, by clang) and
prints their paths; with --tests, for the GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import native

KERNELS = native.ROOT / "kernels"
TESTS = native.ROOT / "tests" / "gpu"
EMULATION = native.ROOT / "tests" / "emu"
DEFAULT_OUT = native.ROOT / "build" / "libfsdpc_cuda.so"
ARCHS = ("80", "90", "100")

# Kernels whose results are promised to have the CPU's bits: a fused multiply-add only where it is
# written.  The others may be contracted, as nvcc does by default.
EXACT = {"adamw", "cast", "init", "scale", "sumsq", "tree", "gate", "binary", "embedding"}

HOST_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-g", *native.WARNINGS, "-fvisibility=hidden",
              "-fPIC", f"-I{native.CSRC}")
KERNEL_FLAGS = ("-std=c++17", "-O3", f"-I{native.CSRC}", f"-I{KERNELS}")
# Of the core, the plugin compiles in what needs nothing else.
SHARED_WITH_CORE = ("base/dtype.c",)


@dataclass(frozen=True)
class Toolkit:
    """Where nvcc and the headers are."""

    nvcc: Path
    includes: tuple[Path, ...]
    cublaslt: bool


def pip_folders() -> list[Path]:
    """Folders of pip's nvidia packages, whatever their version calls them."""
    folders = []
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        folders += sorted(Path(site).glob("nvidia/*"), reverse=True)
    return [folder for folder in folders if folder.is_dir()]


def find_toolkit() -> Toolkit | None:
    """The toolkit to build with, or None."""
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    homes += pip_folders()
    on_path = shutil.which("nvcc")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
        homes.append(Path("/usr/local/cuda"))
    compilers = [home / "bin" / "nvcc" for home in homes]
    found = next((path for path in compilers if os.access(path, os.X_OK)), None)
    if found is None:
        return None
    includes = tuple(home / "include" for home in homes if (home / "include").is_dir())
    cublaslt = any((folder / "cublasLt.h").is_file() for folder in includes)
    return Toolkit(found, includes, cublaslt)


def newest(paths: Iterable[Path]) -> int:
    """The latest change of these files, in nanoseconds."""
    return max(path.stat().st_mtime_ns for path in paths)


class Builder:
    """Compiles C and CUDA sources of one flavour into one folder, in parallel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        headers = [*native.CSRC.rglob("*.h"), *KERNELS.glob("*.cuh"), *EMULATION.glob("*.h")]
        self.headers = newest([*headers, *TESTS.glob("*.h"), Path(__file__)])

    def compile(self, source: Path, command: Sequence[str]) -> Path:
        """Run `command` on a source if it, or any header, is newer than its object."""
        target = self.folder / (source.relative_to(native.ROOT).as_posix().replace("/", "_") + ".o")
        stamp = target.with_suffix(".cmd")
        line = " ".join(command)
        fresh = target.exists() and stamp.exists() and stamp.read_text() == line
        if fresh and target.stat().st_mtime_ns >= max(self.headers, source.stat().st_mtime_ns):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        native.run_command([*command, "-c", str(source), "-o", str(target)])
        stamp.write_text(line)
        return target

    def compile_all(self, work: Sequence[tuple[Path, Sequence[str]]]) -> list[Path]:
        """Compile these (source, command) pairs."""
        with ThreadPoolExecutor(native.usable_cores()) as pool:
            return list(pool.map(lambda item: self.compile(*item), work))


def cuda_sources() -> list[Path]:
    """The plugin's C sources."""
    return sorted((native.CSRC / "cuda").glob("*.c"))


def kernel_commands(toolkit: Toolkit, archs: Sequence[str]) -> list[tuple[Path, list[str]]]:
    """What compiles each kernel file: machine code for every arch, and PTX of the last."""
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    base = [str(toolkit.nvcc), *KERNEL_FLAGS, *targets,
            "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"]
    return [(path, [*base, "-fmad=false"] if path.stem in EXACT else base)
            for path in sorted(KERNELS.glob("*.cu"))]


def host_command(toolkit: Toolkit) -> list[str]:
    """What compiles a C file against the toolkit."""
    command = [*native.default_compiler(), *HOST_FLAGS]
    for folder in toolkit.includes:
        command += ["-isystem", str(folder)]
    return [*command, "-DFSDPC_CUBLASLT"] if toolkit.cublaslt else command


def build_plugin(out: Path, archs: Sequence[str] = ARCHS) -> Path:
    """Build the plugin.

    Parameters
    ----------
    out : Path
        The library to write.
    archs : sequence of str
        Compute capabilities without the dot, ascending; PTX of the last serves later ones.

    Returns
    -------
    Path
        `out`.

    Raises
    ------
    RuntimeError
        If there is no nvcc; the message says where it was looked for.
    CompileError
        If a compiler failed.
    """
    toolkit = find_toolkit()
    if toolkit is None:
        raise RuntimeError("no nvcc in $CUDA_HOME/bin, in pip's nvidia packages or on PATH: install"
                           " a CUDA toolkit (12.4 or newer), or build without FSDPC_CUDA=1")
    builder = Builder(native.ROOT / "build" / "cuda" / "-".join(archs))
    command = host_command(toolkit)
    sources = [*cuda_sources(), *(native.CSRC / name for name in SHARED_WITH_CORE)]
    objects = builder.compile_all([*kernel_commands(toolkit, archs),
                                   *((path, command) for path in sources)])
    out.parent.mkdir(parents=True, exist_ok=True)
    native.run_command([str(toolkit.nvcc), "-shared", "-cudart=static", "-o", str(out),
                        *map(str, objects), "-Xlinker=--no-undefined,--exclude-libs=ALL",
                        "-ldl", "-lpthread", "-lrt"])
    return out


def core_objects(folder: Path) -> list[Path]:
    """Objects of the core's layers that the tests link, by the core's own build."""
    return native.Builder(folder).compile(native.sources(("base", "device", "ops")))


def test_sources() -> list[Path]:
    """Tests, and benchmarks, of tests/gpu."""
    return sorted(TESTS.glob("*.c"))


def without_border() -> list[Path]:
    """The plugin's C sources that tests link: all but those that speak across a border."""
    return [path for path in cuda_sources() if path.stem not in ("guest", "plugin_cuda")]


def build_tests(archs: Sequence[str]) -> list[Path]:
    """Build the tests of tests/gpu for the GPU."""
    toolkit = find_toolkit()
    if toolkit is None:
        raise RuntimeError("no nvcc: the GPU's tests need a CUDA toolkit")
    folder = native.ROOT / "build" / "cuda" / "tests"
    builder = Builder(folder)
    command = [*host_command(toolkit), f"-I{native.ROOT / 'tests' / 'c'}", f"-I{TESTS}"]
    objects = builder.compile_all([*kernel_commands(toolkit, archs),
                                   *((path, command) for path in without_border())])
    objects += core_objects(folder / "core")
    programs = []
    for path in test_sources():
        main = builder.compile(path, command)
        program = folder / path.stem
        native.run_command([str(toolkit.nvcc), "-cudart=static", "-o", str(program), str(main),
                            *map(str, objects), "-ldl", "-lpthread", "-lrt", "-lm"])
        programs.append(program)
    return programs


def build_emulated(sanitizer: str = "") -> list[Path]:
    """Build the tests of tests/gpu for this processor, with -fsanitize=`sanitizer` if given."""
    if not shutil.which("clang++"):
        raise RuntimeError("the emulated tests are compiled by clang++, which is not installed")
    extra = [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"] if sanitizer else []
    folder = native.ROOT / "build" / "emu" / (sanitizer.replace(",", "-") or "plain")
    builder = Builder(folder)
    common = [*extra, "-g", "-O1", "-ffp-contract=off", "-pthread", "-DFSDPC_EMU",
              f"-I{EMULATION}", f"-I{native.CSRC}", f"-I{KERNELS}"]
    cpp = ["clang++", "-std=c++17", "-Wall", "-Wextra", "-fno-strict-aliasing", *common]
    c = ["clang", "-std=c11", "-D_GNU_SOURCE", *native.WARNINGS, *common,
         f"-I{native.ROOT / 'tests' / 'c'}", f"-I{TESTS}"]
    emulated = [path for path in without_border() if path.stem != "cuda_driver"]
    objects = builder.compile_all(
        [*((path, [*cpp, "-x", "c++"]) for path in sorted(KERNELS.glob("*.cu"))),
         *((path, cpp) for path in sorted(EMULATION.glob("*.cpp"))),
         *((path, c) for path in emulated)])
    objects += core_objects(folder / "core")
    programs = []
    for path in sorted(TESTS.glob("test_*.c")):
        main, program = builder.compile(path, c), folder / path.stem
        native.run_command(["clang++", *extra, "-pthread", "-o", str(program), str(main),
                            *map(str, objects), "-lm", "-ldl"])
        programs.append(program)
    return programs


def main() -> int:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--archs", default=",".join(ARCHS), help="e.g. 90 or 80,90")
    parser.add_argument("--tests", action="store_true", help="build the GPU's tests")
    parser.add_argument("--emulate", action="store_true", help="build them for this processor")
    parser.add_argument("--sanitizer", default="", help="with --emulate: address or thread")
    args = parser.parse_args()
    try:
        if args.emulate:
            built = build_emulated(args.sanitizer)
        elif args.tests:
            built = build_tests(args.archs.split(","))
        else:
            built = [build_plugin(args.out, args.archs.split(","))]
    except RuntimeError as error:
        sys.exit(f"cuda_build: {error}")
    print("\n".join(map(str, built)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
