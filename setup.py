"""Build the extension ``fsdpc._core`` from csrc; everything else stands in pyproject.toml.

setuptools would compile one file after the other, all with the same flags, and all of them again
whenever one changed. The kernels need flags of their own for each instruction set, so the
compiling is done by tools/native.py and only the placing of the result is left to setuptools.

Beside the extension go the plugin for GPUs, by tools/cuda_build.py, if FSDPC_CUDA=1, and, by
tools/mpi_build.py, a plugin for each MPI whose mpicc is found, unless FSDPC_MPI=0.
"""

import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import cuda_build  # noqa: E402
import mpi_build  # noqa: E402
import native  # noqa: E402


class BuildCore(build_ext):
    """Compile in parallel, each file with its own flags, what changed only; then the plugins."""

    def run(self):
        """Build the extension, and the plugins beside where it ends up."""
        super().run()
        if self.inplace:
            folder = Path(self.get_finalized_command("build_py").get_package_dir("fsdpc"))
        else:
            folder = Path(self.build_lib) / "fsdpc"
        try:
            cuda_build.install(folder, in_place=bool(self.inplace))
        except RuntimeError as error:
            sys.exit(f"fsdpc: {cuda_build.PLUGIN} could not be built\n{error}")
        try:
            mpi_build.install(folder)
        except RuntimeError as error:
            sys.exit(f"fsdpc: the plugin for MPI could not be built\n{error}")

    def build_extension(self, ext):
        """Compile csrc and link it to where setuptools wants the extension."""
        try:
            native.build_core(Path(self.get_ext_fullpath(ext.name)))
        except native.CompileError as error:
            sys.exit(f"fsdpc: the C sources did not compile\n{error}")


def relative_sources():
    """Sources as setuptools lists them in a source distribution."""
    every = native.sources((*native.LAYERS, *native.BINDINGS))
    return [str(path.relative_to(ROOT)) for path in every]


# Older ones stumble over pyproject.toml's `license`, in forty lines that do not say so.
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"fsdpc: setuptools is {setuptools.__version__}; 77 or newer builds fsdpc: "
             "pip install --upgrade setuptools")

setup(
    ext_modules=[Extension("fsdpc._core", sources=relative_sources())],
    cmdclass={"build_ext": BuildCore},
)
