"""What some tests need beside the package itself."""

from __future__ import annotations

import os
from types import ModuleType

import pytest


def need_torch() -> ModuleType:
    """Return torch; without it the test is skipped, and in CI fails."""
    if "CI" not in os.environ:
        pytest.importorskip("torch", reason="needs torch")
    import torch

    return torch
