"""Every public name of torch's fully_shard and FSDPModule is here, and stands in the table."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp as theirs
from torch import nn

import fsdpc.torch as ours
from fsdpc.torch import _fsdp2

DOCS = Path(__file__).resolve().parents[2] / "docs"
FSDP2 = (DOCS / "coming-from-fsdp2.md").read_text()
FSDP1 = (DOCS / "coming-from-fsdp1.md").read_text()

REFUSED = {
    "DataParallelMeshDims",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
}


def public(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_")]


def fates() -> dict[str, str]:
    """Return what the page's tables say of each name: honoured, no effect or refused."""
    found = {}
    for names, what in re.findall(r"^\| (`.*`.*) \| (\S+(?: effect)?).*\|$", FSDP2, re.M):
        found.update(dict.fromkeys(re.findall(r"`(\w+)`", names), what.strip(":;,")))
    return found


def test_the_page_tells_the_fate_of_every_name() -> None:
    """Fails when torch adds one."""
    functions = {"register_fsdp_forward_method", "share_comm_ctx"}
    arguments = set(inspect.signature(theirs.fully_shard).parameters)
    assert set(fates()) - {"fully_shard"} == {*public(theirs.FSDPModule), *functions, *arguments}
    assert {what for name, what in fates().items() if name != "fully_shard"} == {
        "honoured", "no effect", "refused",
    }  # fmt: skip


@pytest.mark.ranks(1)
def test_sharded_modules_are_torchs_and_refuse_by_name() -> None:
    model = ours.fully_shard(nn.Linear(2, 2))
    assert isinstance(model, theirs.FSDPModule) and type(model).__name__ == "FSDPLinear"
    for name in public(theirs.FSDPModule):
        if fates()[name] == "refused":
            with pytest.raises(NotImplementedError, match=name):
                getattr(model, name)(None)
    theirs.share_comm_ctx([model, ours.fully_shard(nn.Linear(2, 2))])
    with pytest.raises(ValueError, match="share_comm_ctx takes sharded modules, got a Linear"):
        ours.share_comm_ctx([nn.Linear(2, 2)])
    with pytest.raises(AttributeError, match="'_pre_forward' of the state .* internals are not"):
        _ = model._get_fsdp_state()._pre_forward


@pytest.mark.ranks(1)
def test_methods_of_a_newer_torch_refuse(monkeypatch: Any) -> None:
    monkeypatch.setattr(theirs.FSDPModule, "set_new", lambda self: None, raising=False)
    _fsdp2.torch_bases.cache_clear()
    model = ours.fully_shard(nn.Bilinear(2, 2, 2))
    _fsdp2.torch_bases.cache_clear()
    with pytest.raises(NotImplementedError, match="set_new: .* newer than fsdpc"):
        model.set_new()


def test_fully_shard_takes_every_argument() -> None:
    expected = inspect.signature(theirs.fully_shard).parameters
    found = inspect.signature(ours.fully_shard).parameters
    for name, parameter in expected.items():
        assert name in found and found[name].kind is parameter.kind, name


def test_every_method_exists_with_its_arguments() -> None:
    for name in public(theirs.FSDPModule):
        expected = inspect.signature(getattr(theirs.FSDPModule, name)).parameters
        found = inspect.signature(getattr(ours.FSDPModule, name)).parameters
        assert list(found)[: len(expected)] == list(expected), name
        for argument in expected:
            assert found[argument].kind is expected[argument].kind, f"{name}({argument})"


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
