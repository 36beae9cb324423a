"""Build the extension ``fsdpc._core`` from csrc; everything else stands in pyproject.toml.

setuptools would compile one file after the other, all with the same flags, and all of them again
whenever one changed.  The kernels need flags of their own for each instruction set, so the
compiling is done by tools/native.py and only the placing of the result is left to setuptools.

Beside the extension goes the plugin for GPUs, by tools/cuda_build.py, where there is a toolkit.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import cuda_build  # noqa: E402
import native  # noqa: E402


class BuildCore(build_ext):
    """Compile in parallel, each file with its own flags, what changed only; then the plugin."""

    def run(self):
        """Build the extension, and the plugin beside where it ends up."""
        super().run()
        if self.inplace:
            folder = Path(self.get_finalized_command("build_py").get_package_dir("fsdpc"))
        else:
            folder = Path(self.build_lib) / "fsdpc"
        try:
            cuda_build.install(folder, in_place=bool(self.inplace))
        except RuntimeError as error:
            sys.exit(f"fsdpc: {cuda_build.PLUGIN} could not be built\n{error}")

    def build_extension(self, ext):
        """Compile csrc and link it to where setuptools wants the extension."""
        import numpy

        python = sysconfig.get_paths()
        flags = [f"-isystem{python['include']}", f"-isystem{python['platinclude']}"]
        flags += [f"-isystem{numpy.get_include()}", "-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION"]
        flags += ["-DNPY_TARGET_VERSION=NPY_1_25_API_VERSION"]

        # Folders that stay between builds (setuptools' own is a new one every time for an editable
        # install): the engine's objects, shared with the C tests, and those of each interpreter.
        engine = native.Builder(native.OBJECTS)
        python_side = native.Builder(ROOT / "build" / f"core-{sys.implementation.cache_tag}")
        try:
            objects = engine.compile(native.sources())
            objects += python_side.compile(native.sources(["py"]), flags)
            python_side.link(
                objects,
                Path(self.get_ext_fullpath(ext.name)),
                ["-shared", "-Wl,--compress-debug-sections=zlib", "-Wl,-z,relro"],
            )
        except native.CompileError as error:
            sys.exit(f"fsdpc: the C sources did not compile\n{error}")


def relative_sources():
    """Sources as setuptools lists them in a source distribution."""
    every = native.sources((*native.LAYERS, "py"))
    return [str(path.relative_to(ROOT)) for path in every]


setup(
    ext_modules=[Extension("fsdpc._core", sources=relative_sources())],
    cmdclass={"build_ext": BuildCore},
)
