"""The oldest torch is named where a torch is older."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from fsdpc.torch import _version

DOCS = Path(__file__).resolve().parents[2] / "docs" / "torch.md"


@pytest.mark.parametrize("found", ["2.4.1+cu121", "1.13.1", "2.4.0a0"])
def test_an_old_torch_is_named(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", found)
    oldest = ".".join(map(str, _version.OLDEST))
    match = f"needs torch {re.escape(oldest)} or newer, found {re.escape(found)}"
    with pytest.raises(ImportError, match=match):
        importlib.reload(_version)  # as importing fsdpc.torch does first


@pytest.mark.parametrize("found", ["2.5.0", "2.13.0+cpu", "3.0.1"])
def test_others_are_not(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", found)
    importlib.reload(_version)
    assert f"torch {'.'.join(map(str, _version.OLDEST))}" in " ".join(DOCS.read_text().split())
