"""Every public name of torch's fully_shard and FSDPModule is here, and stands in the table."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch.distributed.fsdp as theirs

import fsdpc.torch as ours

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "torch.md").read_text()

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
        assert f"`{name}`" in PAGE, f"docs/torch.md does not say what {name} does"


def test_every_method_exists_with_its_arguments() -> None:
    for name in public(theirs.FSDPModule):
        expected = inspect.signature(getattr(theirs.FSDPModule, name)).parameters
        found = inspect.signature(getattr(ours.FSDPModule, name)).parameters
        assert list(found)[: len(expected)] == list(expected), name
        for argument in expected:
            assert found[argument].kind is expected[argument].kind, f"{name}({argument})"
        assert f"`{name}`" in PAGE, f"docs/torch.md does not say what {name} does"


def test_policies_take_the_same_fields() -> None:
    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        expected = inspect.signature(getattr(theirs, name)).parameters
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(expected), name


def test_fsdp1_takes_every_argument() -> None:
    expected = inspect.signature(theirs.FullyShardedDataParallel.__init__).parameters
    found = inspect.signature(ours.FullyShardedDataParallel.__new__).parameters
    assert list(found)[1:] == list(expected)[1:]
    for name in list(expected)[1:]:
        assert f"`{name}`" in PAGE, f"docs/torch.md does not say what {name} does"


def test_fsdp1_has_every_method() -> None:
    modules = {"forward", "named_parameters", "named_buffers"}  # the sharded module's own
    cls = theirs.FullyShardedDataParallel
    for name in [n for n in vars(cls) if not n.startswith("_") and n not in modules]:
        if name != "module":  # found by __getattr__
            expected = inspect.signature(getattr(cls, name)).parameters
            found = inspect.signature(getattr(ours.FullyShardedDataParallel, name)).parameters
            assert list(found)[: len(expected)] == list(expected), name
        assert f"`{name}`" in PAGE, f"docs/torch.md does not say what {name} does"


def test_every_name_is_there() -> None:
    missing = {name for name in theirs.__all__ if not hasattr(ours, name)}
    assert missing == REFUSED
    for name in missing:
        assert f"`{name}`" in PAGE, f"docs/torch.md does not say what became of {name}"
