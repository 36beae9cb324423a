"""Build the wheel fsdpc-cuda13, which holds the plugin that tools/cuda_build.py compiles.

    pip wheel --no-deps -w dist packages/cuda13      or: make cuda-wheel

Its version is fsdpc's, which it needs exactly; the libraries that it opens are fsdpc's own extra.
It holds no code for an interpreter, so that one wheel serves every Python.
"""

import re
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import cuda_build  # noqa: E402

FSDPC = (ROOT / "python" / "fsdpc" / "_version.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "(.*)"$', FSDPC, re.MULTILINE)[1]


class BuildPlugin(build_py):
    """Compile the plugin into the package."""

    def run(self):
        """Copy the package, then build the plugin beside it."""
        super().run()
        try:
            cuda_build.build_plugin(Path(self.build_lib) / "fsdpc_cuda13" / cuda_build.PLUGIN)
        except RuntimeError as error:
            sys.exit(f"fsdpc-cuda13: {cuda_build.PLUGIN} could not be built\n{error}")


class OfThisMachine(Distribution):
    """What holds machine code, though setuptools compiles none."""

    def has_ext_modules(self):
        """Tell setuptools to name the platform."""
        return True


class AnyPython(bdist_wheel):
    """A wheel for each Python of this platform."""

    def get_tag(self):
        """Return the wheel's tags: of Python, of its binary interface, of the platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    version=VERSION,
    install_requires=[f"fsdpc[cuda13]=={VERSION}"],
    distclass=OfThisMachine,
    cmdclass={"build_py": BuildPlugin, "bdist_wheel": AnyPython},
)
