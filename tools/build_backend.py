"""The build backend: setuptools', which also asks for a CUDA toolkit where one is demanded.

FSDPC_CUDA=1 says that the plugin for GPUs must be built. Where no nvcc is found, pip's nvidia
packages bring one into the isolated environment of the build, and are gone with it.
"""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that stay as they are

import cuda_build

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What a wheel's build needs beside pyproject.toml's list."""
    needed = build_meta.get_requires_for_build_wheel(config_settings)
    return [*needed, *cuda_build.packages_needed()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """What an editable install's build needs beside pyproject.toml's list."""
    needed = build_meta.get_requires_for_build_editable(config_settings)
    return [*needed, *cuda_build.packages_needed()]
