"""Build libfsdpc_cuda.so: host code in C, kernels by nvcc.

    python tools/cuda_build.py [--out build/libfsdpc_cuda.so] [--archs 80,90,100] [--emulate]

The toolkit is the first found of $CUDA_HOME, pip's nvidia packages, the nvcc on PATH, and
/usr/local/cuda. NCCL and cuBLASLt need no headers: csrc/cuda/nccl_abi.h and cublaslt_abi.h declare
what is used of them. CUDA's runtime is linked statically and everything else is opened at run
time, so that the library loads anywhere; pip's nvidia packages, beside which pip installs it, are
where it looks first. One that stays where it is built, in the source tree, looks in those of the
Python that builds it.
Attention by cuDNN is compiled in where the headers of cuDNN and of its frontend (pip's
nvidia-cudnn-frontend) are found.

setup.py calls :func:`install`, which builds the plugin if FSDPC_CUDA=1 and else writes how to get
it into a file that stands in the library's place.

With --emulate it builds the plugin and the tests of tests/gpu for this processor instead
(tests/emu, by clang) and prints their paths; with --tests, the tests for the GPU. With --sanitizer
the tests alone, or, with --streams too, those of the engine's streams, which is quick.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ctest
import native

KERNELS = native.ROOT / "kernels"
TESTS = native.ROOT / "tests" / "gpu"
BENCHMARKS = native.ROOT / "benchmarks" / "gpu"
EMULATION = native.ROOT / "tests" / "emu"
ALIASES = EMULATION / "emu_alias.c"
# What the emulated tests open in the place of NVIDIA's libraries.
FAKES = {"libnccl.so.2": ("fake_nccl", "fake_stream", "fake_join", "fake_register"),
         "libcublasLt.so.13": ("fake_cublaslt",)}
PLUGIN = "libfsdpc_cuda.so"
REASON = "libfsdpc_cuda.txt"  # why there is no plugin beside it
DEFAULT_OUT = native.ROOT / "build" / PLUGIN
ARCHS = ("80", "90", "100")

# A toolkit of pip's packages; the build asks for them where FSDPC_CUDA=1 finds no other.
TOOLKIT_PACKAGES = ("nvidia-cuda-nvcc>=13,<14", "nvidia-cuda-runtime>=13,<14",
                    "nvidia-cuda-cccl>=13,<14")
SYSTEM_TOOLKIT = Path("/usr/local/cuda")
LEFT_OUT = "install again with FSDPC_CUDA=1 to have it (it takes minutes to compile)"
NO_TOOLKIT = f"no nvcc in $CUDA_HOME/bin, pip's nvidia packages, on PATH or in {SYSTEM_TOOLKIT}/bin"

# Kernels whose results are promised to have the CPU's bits: a fused multiply-add only where it is
# written. The others may be contracted, as nvcc does by default.
EXACT = {"binary", "block_code", "cast", "embedding", "extremum", "factored",
         "gate", "global_norm", "init",
         "magnitude", "scale", "step", "step_coded", "step_f64", "sumpow", "tree", "weight_code"}

# Tests in which several streams share memory, and the kernels that run there.
STREAM_TESTS = ("test_streams", "test_engine_windows")
ENGINE_KERNELS = {"block_code", "cast", "init", "magnitude", "scale", "step", "step_coded",
                  "step_f64", "sumpow", "tree"}

HOST_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-g", *native.WARNINGS, "-fvisibility=hidden",
              "-fPIC", f"-I{native.CSRC}")
KERNEL_FLAGS = ("-std=c++17", "-O3", f"-I{native.CSRC}", f"-I{KERNELS}")
# The one C++ file of host code, what it needs, and how it is compiled.
CUDNN_PLAN = KERNELS / "cudnn_plan.cpp"
CUDNN_HEADERS = ("cudnn_frontend.h", "cudnn.h", "nvrtc.h", "cuda.h")
CUDNN_FLAGS = ("-std=c++17", "-O1", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wshadow",
               f"-I{native.CSRC}")
# Folders of pip's nvidia packages that hold what the plugin opens by name.
OPENED = ("nccl", "cu13", "cublas", "cudnn", "cuda_runtime")
# Beside its own folder, the plugin compiles in what every plugin has, and what of the core needs
# nothing else.
SHARED_WITH_CORE = ("guest/guest.c",
                    "base/crc32c.c", "base/dtype.c", "base/trace.c", "base/wait.c",
                    "comm/coll_math.c", "comm/comm.c", "ops/flat_check.c", "ops/gemm_gelu.c",
                    "ops/optim_table.c")


# Of the core, the tests link these, in a flavour of the C tests by what looks at them.
CORE_LAYERS = ("base", "tier", "device", "comm", "engine", "ops")
FLAVOURS = {"": "plain", "address": "asan", "thread": "tsan"}


@dataclass(frozen=True)
class Toolkit:
    """Where nvcc and the headers are."""

    nvcc: Path
    includes: tuple[Path, ...]


def pip_sites() -> list[Path]:
    """Folders that pip installs into.

    sys.path comes first: in an isolated build it names the packages that the build asked for, and
    sysconfig those of the environment around it.
    """
    sites = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return [Path(each) for each in dict.fromkeys(sites) if each]


def pip_folders() -> list[Path]:
    """Folders of pip's nvidia packages, whatever their version calls them."""
    folders: list[Path] = []
    for each in pip_sites():
        folders += sorted(each.glob("nvidia/*"), reverse=True)
    return [folder for folder in folders if folder.is_dir()]


def find_toolkit() -> Toolkit | None:
    """The toolkit to build with, or None."""
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    homes += pip_folders()
    on_path = shutil.which("nvcc")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    homes.append(SYSTEM_TOOLKIT)
    home = next((home for home in homes if os.access(home / "bin" / "nvcc", os.X_OK)), None)
    if home is None:
        return None
    # The compiler's own headers first: pip's may be of another version.
    folders = dict.fromkeys(each / "include" for each in (home, *homes))
    return Toolkit(home / "bin" / "nvcc", tuple(each for each in folders if each.is_dir()))


class Builder:
    """Compiles C and CUDA sources of one flavour into one folder, in parallel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def compile(self, source: Path, command: Sequence[str]) -> Path:
        """Run `command` on a source if that, or anything it includes, is newer than its object."""
        target = self.folder / (source.relative_to(native.ROOT).as_posix().replace("/", "_") + ".o")
        depfile = target.with_suffix(".d")
        whole = [*command, "-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(target)]
        line = shlex.join(whole)
        if not native.up_to_date(target, line, depfile):
            target.parent.mkdir(parents=True, exist_ok=True)
            started = time.time_ns()
            native.run_command(whole)
            # Dated back, so that a source saved while the compiler ran counts as newer.
            os.utime(target, ns=(started, started))
            target.with_suffix(".cmd").write_text(line, encoding="utf-8")
        return target

    def compile_all(self, work: Sequence[tuple[Path, Sequence[str]]]) -> list[Path]:
        """Compile these (source, command) pairs."""
        with ThreadPoolExecutor(native.usable_cores()) as pool:
            return list(pool.map(lambda item: self.compile(*item), work))


def cuda_sources() -> list[Path]:
    """The plugin's C sources."""
    return sorted((native.CSRC / "cuda").glob("*.c"))


def kernel_commands(toolkit: Toolkit, archs: Sequence[str]) -> list[tuple[Path, list[str]]]:
    """What compiles each kernel file: machine code for every arch, and PTX of the last.

    An arch with "-virtual" behind it, as CMake has them, is compiled to PTX alone.
    """
    codes = [("compute", arch[:-8]) if arch.endswith("-virtual") else ("sm", arch)
             for arch in archs]
    codes.append(("compute", codes[-1][1]))
    targets = [f"-gencode=arch=compute_{arch},code={kind}_{arch}"
               for kind, arch in dict.fromkeys(codes)]
    base = [str(toolkit.nvcc), *KERNEL_FLAGS, *targets,
            "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-ffp-contract=off"]
    return [(path, [*base, "-fmad=false"] if path.stem in EXACT else base)
            for path in sorted(KERNELS.glob("*.cu"))]


def cudnn_commands(toolkit: Toolkit) -> list[tuple[Path, list[str]]]:
    """What compiles :data:`CUDNN_PLAN`; nothing where a header that it needs is missing."""
    folders = [*toolkit.includes, *(each / "include" for each in pip_sites())]
    if not all(any((folder / name).is_file() for folder in folders) for name in CUDNN_HEADERS):
        return []
    command = [str(toolkit.nvcc), *CUDNN_FLAGS]
    for folder in filter(Path.is_dir, folders):
        command += ["-isystem", str(folder)]
    return [(CUDNN_PLAN, command)]


def host_command(toolkit: Toolkit) -> list[str]:
    """What compiles a C file against the toolkit."""
    command = [*native.default_compiler(), *HOST_FLAGS]
    for folder in toolkit.includes:
        command += ["-isystem", str(folder)]
    return command


def default_archs(toolkit: Toolkit) -> list[str]:
    """The archs of $FSDPC_CUDA_ARCHS, else those of :data:`ARCHS` that this nvcc knows."""
    asked = os.environ.get("FSDPC_CUDA_ARCHS")
    if asked:
        return asked.split(",")
    listed = subprocess.run([toolkit.nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    known = listed.stdout.split()
    return [arch for arch in ARCHS if f"compute_{arch}" in known] or list(ARCHS[:1])


def run_path(stays: bool) -> str:
    """Where the plugin looks for what it opens: from site-packages/fsdpc, its folder when it is
    installed, and, if it `stays` in the source tree, in this Python's own folders.

    Not in those of sys.path: an isolated build's are gone, and anybody's to make, after it.
    """
    sites = ["$ORIGIN/.."]
    if stays:
        sites += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        sites += site.getsitepackages()
        sites += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return ":".join(f"{each}/nvidia/{package}/lib" for each in dict.fromkeys(sites)
                    for package in OPENED)


def build_plugin(out: Path, archs: Sequence[str] = (), stays: bool = False) -> Path:
    """Build the plugin.

    Parameters
    ----------
    out : Path
        The library to write.
    archs : sequence of str, optional
        Compute capabilities without the dot, ascending; PTX of the last serves later ones.
        Default: :func:`default_archs`.
    stays : bool, optional
        Whether it will be used from the source tree, by this Python: :func:`run_path`.

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
        raise RuntimeError(f"{NO_TOOLKIT}: install a CUDA toolkit (12.4 or newer), or its packages"
                           f" ({' '.join(TOOLKIT_PACKAGES)}), or build without FSDPC_CUDA=1")
    archs = archs or default_archs(toolkit)
    folder = object_folder(archs)
    with native.building(folder):
        built = compile_plugin(toolkit, archs, folder, stays)
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = out.with_suffix(".new")  # put in place whole: a process may have the old one loaded
        shutil.copy2(built, fresh)
        fresh.replace(out)
    return out


def object_folder(archs: Sequence[str]) -> Path:
    """Where the objects for these archs are, of the plugin and of the GPU's tests."""
    return native.ROOT / "build" / "cuda" / "-".join(archs)


def to_linker(option: str, value: str | Path) -> str:
    """The word by which nvcc passes `option,value` on to the linker, through a shell."""
    return f"-Xlinker={option}," + str(value).replace(" ", r"\ ")


def link(command: Sequence[str], target: Path, objects: Sequence[Path]) -> Path:
    """Link objects by `command` unless it made `target` of them already."""
    return native.link(command, target, objects, ["-ldl", "-lpthread", "-lrt", "-lm"],
                       target.with_suffix(".link"))


def compile_plugin(toolkit: Toolkit, archs: Sequence[str], folder: Path, stays: bool) -> Path:
    """Build the plugin in `folder` if anything it is made of changed."""
    command = host_command(toolkit)
    sources = [*cuda_sources(), *(native.CSRC / name for name in SHARED_WITH_CORE)]
    objects = Builder(folder).compile_all([*cudnn_commands(toolkit),
                                           *kernel_commands(toolkit, archs),
                                           *((path, command) for path in sources)])
    script = folder / "plugin.map"  # C++ would export what it instantiates of its library
    script.write_text("{ global: fsdpc_plugin_open; local: *; };\n", encoding="utf-8")
    return link([str(toolkit.nvcc), "-shared", "-cudart=static",
                 "-Xlinker=--no-undefined,--exclude-libs=ALL",
                 to_linker("--version-script", script), to_linker("-rpath", run_path(stays))],
                folder / PLUGIN, objects)


def wanted() -> str:
    """What $FSDPC_CUDA says: "", "0" or "1"."""
    value = os.environ.get("FSDPC_CUDA", "")
    if value not in ("", "0", "1"):
        raise RuntimeError(f"FSDPC_CUDA={value} is neither 0 nor 1")
    return value


def packages_needed() -> list[str]:
    """Packages that the build has to ask for, so that there is a toolkit where one is demanded."""
    return list(TOOLKIT_PACKAGES) if wanted() == "1" and find_toolkit() is None else []


def install(folder: Path, in_place: bool) -> None:
    """Put the plugin into `folder`, or the reason why it is left out.

    Parameters
    ----------
    folder : Path
        The package's folder, where the extension goes too.
    in_place : bool
        Whether that is in the source tree. A plugin that is there already is kept up to date.

    Raises
    ------
    RuntimeError
        If the plugin is wanted and cannot be built.
    """
    plugin, note, choice = folder / PLUGIN, folder / REASON, wanted()
    if choice == "1" or (not choice and in_place and plugin.exists()):
        build_plugin(plugin, stays=in_place)
        note.unlink(missing_ok=True)
        return
    plugin.unlink(missing_ok=True)
    note.write_text(LEFT_OUT + "\n", encoding="utf-8")
    if not in_place:
        print(f"fsdpc: the plugin for GPUs is not built: {LEFT_OUT}", file=sys.stderr)


def core_objects(flavour: str = "plain", layers: Sequence[str] = CORE_LAYERS) -> list[Path]:
    """Objects of the core's layers that the tests link: those of the C tests.

    A sanitizer has to see the locks of the core too.
    """
    with native.building(ctest.builder_of(flavour).out):
        return ctest.compile_core(flavour, layers)


def test_sources() -> list[Path]:
    """Tests, and benchmarks, for GPUs."""
    return sorted([*TESTS.glob("*.c"), *BENCHMARKS.glob("*.c")])


def tests_folder() -> Path:
    """Where the programs for the GPU go."""
    return native.ROOT / "build" / "cuda" / "tests"


def without_border() -> list[Path]:
    """The plugin's C sources that tests link: all but those that speak across a border."""
    return [path for path in cuda_sources() if path.stem != "plugin_cuda"]


def build_tests(archs: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Build the tests of tests/gpu for the GPU, of the objects that the plugin is made of too.

    Returns
    -------
    programs : list of Path
        Those that were built.
    failed : dict of str to str
        The others' names, and what the compiler said.

    Raises
    ------
    RuntimeError
        If there is no nvcc, or what all of them link could not be built.
    """
    toolkit = find_toolkit()
    if toolkit is None:
        raise RuntimeError(f"{NO_TOOLKIT}: the GPU's tests need a CUDA toolkit")
    archs = archs or default_archs(toolkit)
    command, folder = host_command(toolkit), tests_folder()
    with native.building(object_folder(archs)):
        objects = Builder(object_folder(archs)).compile_all(
            [*cudnn_commands(toolkit), *kernel_commands(toolkit, archs),
             *((path, command) for path in without_border())])
        objects += core_objects()
    looks = [to_linker("-rpath", each / "lib") for each in pip_folders()]  # as the plugin does

    def build(source: Path) -> Path:
        main = Builder(folder).compile(source, [*command, f"-I{native.ROOT / 'tests' / 'c'}",
                                                f"-I{TESTS}"])
        return link([str(toolkit.nvcc), "-cudart=static", *looks], folder / source.stem,
                    [main, *objects])

    with native.building(folder), ThreadPoolExecutor(native.usable_cores()) as pool:
        jobs = {path.stem: pool.submit(build, path) for path in test_sources()}
    failed = {name: str(error) for name, job in jobs.items() if (error := job.exception())}
    for name in failed:
        (folder / name).unlink(missing_ok=True)  # an older one
    return [job.result() for name, job in jobs.items() if name not in failed], failed


def emulated_commands(sanitizer: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """What compiles C++ and C for the emulated device."""
    common = [*sanitizer, "-g1", "-O1", "-fPIC", "-ffp-contract=off", "-pthread", "-DFSDPC_EMU",
              f"-I{EMULATION}", f"-I{native.CSRC}", f"-I{KERNELS}"]
    return (["clang++", "-std=c++17", "-Wall", "-Wextra", "-fno-strict-aliasing", *common],
            ["clang", "-std=c11", "-D_GNU_SOURCE", *native.WARNINGS, *common,
             f"-I{native.ROOT / 'tests' / 'c'}", f"-I{TESTS}"])


def emulated_kernels(folder: Path, sources: Iterable[Path],
                     sanitizer: Sequence[str] = ()) -> list[Path]:
    """Objects of kernels, for this processor."""
    cpp = emulated_commands(sanitizer)[0]
    return Builder(folder).compile_all([(path, [*cpp, "-x", "c++"]) for path in sorted(sources)])


def build_emulated(sanitizer: str = "", streams: bool = False) -> list[Path]:
    """Build the tests of tests/gpu for this processor, with -fsanitize=`sanitizer` if given.

    The plugin comes last; not with a sanitizer, which the process that loads it would need too.
    With `streams` the tests that several streams share memory in are all: kernels that they do not
    run, and the CPU's, are then the ordinary ones.
    """
    if not shutil.which("clang++"):
        raise RuntimeError("the emulated tests are compiled by clang++, which is not installed")
    folder, plain = (native.ROOT / "build" / "emu" / name
                     for name in (sanitizer.replace(",", "-") + "-streams" * streams or "plain",
                                  "plain"))
    with native.building(folder):
        if not streams:
            return compile_emulated(folder, sanitizer, [], sorted(TESTS.glob("test_*.c")))
        with native.building(plain):
            others = {path for path in KERNELS.glob("*.cu") if path.stem not in ENGINE_KERNELS}
            ready = [*emulated_kernels(plain, others),
                     *core_objects(layers=("ops",))]
        return compile_emulated(folder, sanitizer, ready,
                                [TESTS / f"{name}.c" for name in STREAM_TESTS])


def compile_emulated(folder: Path, sanitizer: str, ready: Sequence[Path],
                     tests: Sequence[Path]) -> list[Path]:
    """Build them in `folder`; kernels that are `ready` are not compiled again."""
    extra = [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"] if sanitizer else []
    flavour = FLAVOURS[sanitizer]
    linking = [*extra, *ctest.FLAVOURS[flavour].flags]
    aliases = alias_flags() if "thread" in sanitizer else []
    if "address" in sanitizer:  # quicker to compile
        extra.append("-fsanitize-address-outline-instrumentation")
    builder = Builder(folder)
    cpp, c = emulated_commands(extra)
    kernels = {path for path in KERNELS.glob("*.cu") if not ready or path.stem in ENGINE_KERNELS}
    emulated = [path for path in without_border() if path != native.CSRC / "cuda" / "driver.c"]
    shared = [*emulated_kernels(folder, kernels, extra),
              *builder.compile_all([*((path, [*cpp, "-O2"])
                                      for path in sorted(EMULATION.glob("*.cpp"))),
                                    *((path, c) for path in emulated),
                                    (EMULATION / "emu_driver.c", c),
                                    (EMULATION / "fake_cudnn.c", c)])]
    layers = [layer for layer in CORE_LAYERS if not ready or layer != "ops"]
    objects = [*shared, *ready, *core_objects(flavour, layers)]
    for soname, files in FAKES.items():  # beside the programs, whose runtime they call
        if ready and soname != "libnccl.so.2":
            continue  # tests of streams multiply nothing
        fake = builder.compile_all([(EMULATION / f"{name}.c", [*c, "-fvisibility=hidden"])
                                    for name in files])
        link(["clang", *extra, "-shared", f"-Wl,-soname,{soname}"], folder / soname, fake)
    if aliases:
        objects.append(builder.compile(ALIASES, emulated_commands()[1]))
    mains = builder.compile_all([(path, c) for path in tests])
    command = ["clang++", *linking, *aliases, "-pthread", "-rdynamic"]
    with ThreadPoolExecutor(native.usable_cores()) as pool:
        programs = list(pool.map(
            lambda path, main: link(command, folder / path.stem, [main, *objects]), tests, mains))
    return programs if sanitizer else [*programs, link_emulated_plugin(builder, c, shared)]


def alias_flags() -> list[str]:
    """What has the linker put the functions of :data:`ALIASES` before those of their names."""
    text = ALIASES.read_text(encoding="utf-8")
    names = re.findall(r"^(?:TOLD|COPIED)\((\w+)\)", text, re.MULTILINE)
    return [f"-Wl,--wrap={name}" for name in (*names, "memset")]


def link_emulated_plugin(builder: Builder, c: Sequence[str], shared: Sequence[Path]) -> Path:
    """Link the emulated plugin from its border, compiled by `c`, and what the tests link too."""
    border = [native.CSRC / "cuda" / "plugin_cuda.c",
              *(native.CSRC / name for name in SHARED_WITH_CORE)]
    objects = [*shared, *builder.compile_all([(path, c) for path in border])]
    script = builder.folder / "plugin.map"
    # Beside the border, what tests call as another library of the process would.
    script.write_text("{ global: fsdpc_plugin_open; cuda*; emu_*; local: *; };\n", encoding="utf-8")
    return link(["clang++", "-shared", "-pthread", f"-Wl,--version-script={script},--no-undefined"],
                builder.folder / PLUGIN, objects)


def main() -> int:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--archs", default="", help="e.g. 90 or 80,90; default 80,90,100")
    parser.add_argument("--tests", action="store_true", help="build the GPU's tests")
    parser.add_argument("--emulate", action="store_true", help="build them, and the plugin, here")
    parser.add_argument("--sanitizer", default="", choices=FLAVOURS, help="with --emulate")
    parser.add_argument("--streams", action="store_true", help="with --sanitizer: tests of streams")
    args = parser.parse_args()
    archs = args.archs.split(",") if args.archs else []
    try:
        if args.emulate:
            built = build_emulated(args.sanitizer, args.streams)
        elif args.tests:
            built, failed = build_tests(archs)
            if failed:
                raise RuntimeError("\n".join(failed.values()))
        else:
            built = [build_plugin(args.out, archs, stays=True)]
    except RuntimeError as error:
        sys.exit(f"cuda_build: {error}")
    print("\n".join(map(str, built)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
