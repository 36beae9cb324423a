"""What some tests need besides the package, NumPy, pytest and hypothesis.

A test is skipped if its need is missing. CI has all of it (.ci/run), and there the test fails.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fsdpc

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import mpi_build  # noqa: E402
import net_hosts  # noqa: E402

# Packages that tests import, and that the package does without.
PACKAGES = (
    "accelerate", "jinja2", "lightning", "matplotlib", "ml_dtypes", "peft", "psutil", "safetensors",
    "tokenizers", "torch", "tqdm", "transformers",
)  # fmt: skip


@functools.cache
def missing_packages() -> frozenset[str]:
    """Return the packages of `PACKAGES` whose absence skips tests: none in CI."""
    if "CI" in os.environ:
        return frozenset()
    return frozenset(name for name in PACKAGES if importlib.util.find_spec(name) is None)


def reason_to_skip(error: BaseException | None) -> str | None:
    """Return why a test is skipped if it failed to import a missing package, else None."""
    top = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and top in missing_packages():
        return f"needs {top}"
    return None


def need(missing: str | None) -> None:
    """Skip the test, or the module, that cannot run because of this (None: it can); in CI fail."""
    if missing and "CI" in os.environ:
        pytest.fail(f"CI has to run this, and cannot: {missing}")
    if missing:
        pytest.skip(missing, allow_module_level=True)


def need_torch() -> ModuleType:
    """Return torch; without it the test is skipped, and in CI fails."""
    if "CI" not in os.environ:
        pytest.importorskip("torch", reason="needs torch")
    import torch

    return torch


@functools.cache
def need_mpi(family: str) -> None:
    """A compiler of this MPI, and fsdpc built by it."""
    if family not in mpi_build.find_compilers():
        need(f"there is no mpicc of {family}: {mpi_build.INSTALL}")
    if not (ROOT / "python" / "fsdpc" / mpi_build.library_name(family)).exists():
        need(f"fsdpc was built without {family}")


def need_hosts() -> None:
    """What makes two hosts of this machine."""
    if os.geteuid() != 0:  # CI too: .ci/run may be a user's, and root's only where it installs
        pytest.skip(f"{net_hosts.missing()}", allow_module_level=True)
    need(net_hosts.missing())


def need_nccl(ranks: int) -> None:
    """An NCCL that serves this many ranks on this machine's GPUs; CI has neither."""
    found = fsdpc.cuda.describe_nccl()
    version = re.match(r"NCCL (\d+)\.(\d+)", found)
    if not version:
        pytest.skip(found)
    if ranks > fsdpc.cuda.device_count() and tuple(map(int, version.groups())) < (2, 30):
        pytest.skip(f"{found}: ranks share a GPU over 2.30 and newer alone")
