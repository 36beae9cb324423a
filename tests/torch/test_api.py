"""Every public name of torch's fully_shard and FSDPModule is here, and stands in the table."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp as theirs

import fsdpc.torch as ours

DOCS = Path(__file__).resolve().parents[2] / "docs"
FSDP2 = (DOCS / "coming-from-fsdp2.md").read_text()
FSDP1 = (DOCS / "coming-from-fsdp1.md").read_text()

REFUSED = {
    "DataParallelMeshDims",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "share_comm_ctx",
}


def public(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_")]


def test_fully_shard_takes_every_argument() -> None:
    expected = inspect.signature(theirs.fully_shard).parameters
    found = inspect.signature(ours.fully_shard).parameters
    for name, parameter in expected.items():
        assert name in found and found[name].kind is parameter.kind, name
        assert f"`{name}`" in FSDP2, f"its page does not say what {name} does"


def test_every_method_exists_with_its_arguments() -> None:
    for name in public(theirs.FSDPModule):
        expected = inspect.signature(getattr(theirs.FSDPModule, name)).parameters
        found = inspect.signature(getattr(ours.FSDPModule, name)).parameters
        assert list(found)[: len(expected)] == list(expected), name
        for argument in expected:
            assert found[argument].kind is expected[argument].kind, f"{name}({argument})"
        assert f"`{name}`" in FSDP2, f"its page does not say what {name} does"


def test_policies_take_the_same_fields() -> None:
    """First; our tiers come behind, by name alone."""
    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        expected = inspect.signature(getattr(theirs, name)).parameters
        fields = list(inspect.signature(getattr(ours, name)).parameters)
        assert fields[: len(expected)] == list(expected), name


def test_fsdp1_takes_every_argument() -> None:
    expected = inspect.signature(theirs.FullyShardedDataParallel.__init__).parameters
    found = inspect.signature(ours.FullyShardedDataParallel.__new__).parameters
    assert list(found)[1:] == list(expected)[1:]
    for name in list(expected)[1:]:
        assert f"`{name}`" in FSDP1, f"its page does not say what {name} does"


def test_fsdp1_has_every_method() -> None:
    modules = {"forward", "named_parameters", "named_buffers"}  # the sharded module's own
    cls = theirs.FullyShardedDataParallel
    for name in [n for n in vars(cls) if not n.startswith("_") and n not in modules]:
        if name != "module":  # found by __getattr__
            expected = inspect.signature(getattr(cls, name)).parameters
            found = inspect.signature(getattr(ours.FullyShardedDataParallel, name)).parameters
            assert list(found)[: len(expected)] == list(expected), name
        assert f"`{name}`" in FSDP1, f"its page does not say what {name} does"


def test_every_name_is_there() -> None:
    missing = {name for name in theirs.__all__ if not hasattr(ours, name)}
    assert missing == REFUSED
    for name in missing:
        assert f"`{name}`" in FSDP1, f"its page does not say what became of {name}"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_pages_name_what_exists(page: Path) -> None:
    text = page.read_text()
    for name in set(re.findall(r"\bfsdpc\.torch((?:\.\w+)+)", text)):
        found = ours
        for part in name.split(".")[1:]:
            found = getattr(found, part)
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (DOCS / path).exists(), f"{page.name} leads to {path}"


def test_the_deepspeed_page_names_what_exists() -> None:
    page = (DOCS / "coming-from-deepspeed.md").read_text()
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| `")]
    names = {n for row in rows for n in re.findall(r"`(?:model\.)?(\w+)\(?", row)}
    own = [n for n in names if n.startswith(("set_", "get_", "summon", "full_", "clip_", "fully"))]
    assert len(own) >= 10
    for name in own:
        assert hasattr(ours, name) or hasattr(ours.FSDPModule, name), name


def test_options_of_fsdp1_are_torchs_and_come_late() -> None:
    for name in ("CPUOffload", "FullStateDictConfig", "MixedPrecision", "StateDictType"):
        assert getattr(ours, name) is getattr(theirs, name)
    assert ours.wrap.ModuleWrapPolicy is theirs.wrap.ModuleWrapPolicy
    assert ours.size_based_auto_wrap_policy is theirs.wrap.size_based_auto_wrap_policy
    with pytest.raises(AttributeError, match="'fsdpc.torch' has no attribute 'nothing'"):
        ours.nothing  # noqa: B018
    late = "import sys, fsdpc.torch; assert 'torch.distributed.fsdp' not in sys.modules"
    subprocess.run([sys.executable, "-c", late], check=True, timeout=300)
