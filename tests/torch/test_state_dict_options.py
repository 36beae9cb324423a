"""Each option of torch's get_state_dict() and set_state_dict() does what it does over FSDP2."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdpc.torch import fully_shard, optim

from .common import Net, batch, join_gloo, loss_of

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"full_state_dict": True},
    "host": {"cpu_offload": True},
    "full on rank 0": {"full_state_dict": True, "cpu_offload": True},
    "trained": {"ignore_frozen_params": True, "strict": False},
    "trained, full": {"ignore_frozen_params": True, "full_state_dict": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "flat, full": {"flatten_optimizer_state_dict": True, "full_state_dict": True},
    "flat, full on rank 0": {
        "flatten_optimizer_state_dict": True, "full_state_dict": True, "cpu_offload": True,
    },
    "renamed": {"dsd_fqn_modifiers": "_fqn_modifiers"},
    "loose": {"strict": False},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "flat, from rank 0": {
        "full_state_dict": True, "broadcast_from_rank0": True, "flatten_optimizer_state_dict": True,
    },
}  # fmt: skip
#: What torch itself cannot load again, over FSDP2 either, and the error.
NOT_LOADED = {
    "flat, full": "KeyError",
    "flat, full on rank 0": "KeyError",
    "flat, from rank 0": "KeyError",
}


class Inside(nn.Module):
    """A linear layer whose names in state dicts, by hooks, leave ``linear`` out."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self._register_state_dict_hook(self._rename)
        self.register_load_state_dict_pre_hook(lambda m, s, p, *_: rename(s, p, p + "linear."))

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        rename(state, prefix + "linear.", prefix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "linear", "bias": "linear"}


def rename(state: Any, prefix: str, to: str) -> None:
    for name in ("weight", "bias"):
        state[to + name] = state.pop(prefix + name)


class Renamed(Net):
    """A net with a layer of other names; torch saves only with the modifier of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = Inside(self.first)


def made(kind: str, steps: int, seed: int = 3, cls: type[Net] = Net) -> tuple[Any, Any]:
    """A model with frozen parameters; a kind is a frontend and an optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model: Any = cls()
    for p in (model.blocks[1].linear.bias, model.last.weight):
        p.requires_grad_(False)
    how = fsdp.fully_shard if kind == "FSDP2" else fully_shard
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        how(block, mesh=mesh)
    how(model, mesh=mesh)
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": params[:2], "lr": 1e-3}, {"params": params[2:]}]
    optimizer = (optim.AdamW if kind == "ours" else torch.optim.AdamW)(groups, lr=1e-2)
    for step in range(steps):
        loss_of(model, batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_alike(found: Any, expected: Any, at: str = "") -> None:
    """The same names, types, devices and placements; values agree."""
    assert isinstance(found, dict) == isinstance(expected, dict), at
    if isinstance(expected, dict):
        assert set(found) == set(expected), at
        for key, value in expected.items():
            assert_alike(found[key], value, f"{at}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), at
        for k, value in enumerate(expected):
            assert_alike(found[k], value, f"{at}.{k}")
    elif isinstance(expected, torch.Tensor):
        assert isinstance(found, DTensor) == isinstance(expected, DTensor), at
        assert found.shape == expected.shape and found.dtype == expected.dtype, at
        assert found.device == expected.device, at
        if isinstance(expected, DTensor):
            assert found.placements == expected.placements, at
            found, expected = found.to_local(), expected.to_local()
        torch.testing.assert_close(found, expected, msg=lambda m: f"{at}: {m}")
    else:
        assert found == expected, at


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, kind: str, tmp_path: Any) -> None:
    join_gloo(tmp_path)
    options = StateDictOptions(**OPTIONS[name])
    cls = Renamed if name == "renamed" else Net
    states = {}
    for each in ("FSDP2", kind):
        model, optimizer = made(each, 3, cls=cls)
        got = get_state_dict(model, optimizer, options=options)
        assert_alike(got[0], get_model_state_dict(model, options=options))
        assert_alike(got[1], get_optimizer_state_dict(model, optimizer, options=options))
        states[each] = got
    assert_alike(states[kind], states["FSDP2"])
    loaded = {each: load(each, cls, options, *states[each]) for each in states}
    assert NOT_LOADED.get(name, loaded[kind]) == loaded[kind]
    assert_alike(loaded[kind], loaded["FSDP2"])
    dist.destroy_process_group()


def load(kind: str, cls: type[Net], options: Any, model_state: Any, optim_state: Any) -> Any:
    """Return the states after loading, or the kind of error."""
    model, optimizer = made(kind, 1, seed=5, cls=cls)
    model_state, optim_state = copy.deepcopy((model_state, optim_state))
    on_rank_0 = options.full_state_dict and options.cpu_offload
    options = replace(options, broadcast_from_rank0=options.broadcast_from_rank0 or on_rank_0)
    if options.broadcast_from_rank0 and dist.get_rank():
        model_state, optim_state = {}, {}
    if not options.strict:
        model_state.pop("first.bias", None)
    try:
        set_model_state_dict(model, model_state, options=options)
        set_optimizer_state_dict(model, optimizer, optim_state, options=options)
    except Exception as error:
        return type(error).__name__
    loss_of(model, batch(9, dist.get_rank())).backward()
    optimizer.step()
    return list(get_state_dict(model, optimizer))


@pytest.mark.ranks(2, init=False)
def test_submodules_and_their_prefixes(tmp_path: Any) -> None:
    join_gloo(tmp_path)
    found = {}
    for kind in ("FSDP2", "torch"):
        model, _ = made(kind, 1)
        found[kind] = [
            get_model_state_dict(
                model, submodules={model.blocks[1]},
                options=StateDictOptions(keep_submodule_prefixes=keeps, full_state_dict=full),
            )
            for keeps in (True, False) for full in (True, False)
        ]  # fmt: skip
    assert "norm.weight" in found["torch"][2] and "blocks.1.norm.weight" in found["torch"][0]
    assert_alike(found["torch"], found["FSDP2"])
    dist.destroy_process_group()


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("writer", ["FSDP2", "torch", "ours"])
def test_saved_meanwhile(writer: str, tmp_path: Any) -> None:
    """async_save() of what the options give; each frontend and optimizer reads it."""
    join_gloo(tmp_path)
    model, optimizer = made(writer, 3)
    whole = StateDictOptions(full_state_dict=True)
    expected = copy.deepcopy(get_state_dict(model, optimizer, options=whole))
    group = dist.new_group() if writer == "FSDP2" else None  # its units gather over the default
    for name in ("none", "host", "flat", "full"):
        options = StateDictOptions(**OPTIONS[name])
        found = get_state_dict(model, optimizer, options=options)
        state = dict(zip(("model", "optim"), found, strict=True))
        saved = dcp.async_save(state, checkpoint_id=str(tmp_path / name), process_group=group)
        loss_of(model, batch(7, dist.get_rank())).backward()
        optimizer.step()  # what is saved no longer changes
        optimizer.zero_grad()
        saved.result()
        for reader in ("FSDP2", "torch", "ours"):
            fresh, states = made(reader, 1, seed=5)
            found = get_state_dict(fresh, states, options=options)
            state = dict(zip(("model", "optim"), found, strict=True))
            dcp.load(state, checkpoint_id=str(tmp_path / name))
            set_state_dict(
                fresh, states, model_state_dict=state["model"],
                optim_state_dict=state["optim"], options=options,
            )  # fmt: skip
            found = get_state_dict(fresh, states, options=whole)
            assert_alike(found, expected)
        expected = copy.deepcopy(get_state_dict(model, optimizer, options=whole))
    dist.destroy_process_group()
