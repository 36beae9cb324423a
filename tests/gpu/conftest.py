"""What tests of the plugin that nvcc compiles share: that plugin, built once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "tools"))
import cuda_build  # noqa: E402


@pytest.fixture(scope="session")
def archs() -> list[str]:
    """One architecture, unless $FSDPC_CUDA_ARCHS asks for others."""
    return os.environ.get("FSDPC_CUDA_ARCHS", "90").split(",")


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory, archs: list[str]) -> Path:
    """libfsdpc_cuda.so for these."""
    return cuda_build.build_plugin(tmp_path_factory.mktemp("cuda") / cuda_build.PLUGIN, archs)
