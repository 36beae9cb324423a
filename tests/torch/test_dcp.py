"""torch.distributed.checkpoint saves and loads rows of parameters and of states as a whole's."""

from __future__ import annotations

import copy
import io
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

import fsdpc
from fsdpc.torch import (
    get_model_state_dict,
    get_optimizer_state_dict,
    optim,
    set_optimizer_state_dict,
)

from .common import batch, build, join_gloo, loss_of, shard

MAKERS = {"torch": torch.optim.AdamW, "ours": optim.AdamW}


def made(kind: str, steps: int) -> tuple[Any, Any]:
    ours = shard(build())
    optimizer = MAKERS[kind](ours.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(ours, batch(step, fsdpc.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours, optimizer


def whole_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def rows_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, sharded=True),
        "optim": get_optimizer_state_dict(model, optimizer, sharded=True),
    }


def assert_same(found: Any, expected: Any) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(torch.as_tensor(found[key]), value), key


@pytest.mark.ranks([2, 3])
def test_rows_are_saved_and_loaded_as_parts(tmp_path: Path) -> None:
    """By every way that torch describes, and by an unsharded process in between."""
    join_gloo(tmp_path)
    for kind in MAKERS:
        ours, optimizer = made(kind, 3)
        expected = whole_of(ours, optimizer)
        at = {name: str(tmp_path / kind / name) for name in ("rows", "numbers", "theirs", "later")}
        dcp.save(rows_of(ours, optimizer), checkpoint_id=at["rows"])
        numbers = {"model": dict(ours.named_parameters()), "optim": optimizer.state_dict()}
        dcp.save(numbers, checkpoint_id=at["numbers"])
        model_state, optim_state = theirs.get_state_dict(ours, optimizer)
        assert optimizer.state[ours.first.weight]["step"] == 3  # it makes a step where none was
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=at["theirs"])
        dcp.async_save(rows_of(ours, optimizer), checkpoint_id=at["later"]).result()

        for name in ("rows", "theirs", "later"):
            check_alone(at[name], expected)
            fresh, states = made(kind, 0)
            state = rows_of(fresh, states)
            dcp.load(state, checkpoint_id=at[name])
            set_optimizer_state_dict(fresh, states, state["optim"])
            assert_same(whole_of(fresh, states), expected)
        fresh, states = made(kind, 0)
        model_state, optim_state = theirs.get_state_dict(fresh, states)
        dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=at["rows"])
        theirs.set_state_dict(
            fresh, states, model_state_dict=model_state, optim_state_dict=optim_state
        )
        assert_same(whole_of(fresh, states), expected)
        fresh, states = made(kind, 1)
        numbers = {"model": dict(fresh.named_parameters()), "optim": states.state_dict()}
        dcp.load(numbers, checkpoint_id=at["numbers"])
        states.load_state_dict(numbers["optim"])
        assert_same(whole_of(fresh, states), expected)
        loss_of(fresh, batch(9, fsdpc.rank())).backward()  # reads what was loaded in place
    dist.destroy_process_group()


def check_alone(path: str, expected: dict[str, Any]) -> None:
    """Rank 0 reads by itself, into whole tensors; files have no row twice."""
    if fsdpc.rank():
        return
    found: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    for name, value in expected["model"].items():
        found["model"][name] = torch.full_like(value, float("nan"))
    for name, states in expected["optim"]["state"].items():
        found["optim"]["state"][name] = {k: torch.zeros_like(v) for k, v in states.items()}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    assert_same(found["model"], expected["model"])
    assert_same(found["optim"]["state"], expected["optim"]["state"])
    for name, one in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if isinstance(one, TensorStorageMetadata):
            numel = sum(chunk.sizes.numel() for chunk in one.chunks)
            assert numel == one.size.numel(), (name, one)


@pytest.mark.ranks([2, 3])
def test_safetensors_storage(tmp_path: Path) -> None:
    """Torch's writer of safetensors files: parts of each rank, and the whole that it joins."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.hf_storage import (
        HuggingFaceStorageReader,
        HuggingFaceStorageWriter,
    )

    join_gloo(tmp_path)
    model, fresh = shard(build()), shard(build(1))
    expected = get_model_state_dict(model)
    writer = HuggingFaceStorageWriter(
        str(tmp_path / "parts"), save_distributed=True, enable_consolidation=True
    )
    dcp.save(get_model_state_dict(model, sharded=True), storage_writer=writer)
    dist.barrier()
    joined = load_file(next((tmp_path / "parts").glob("model-*.safetensors")))
    assert_same(joined, expected)
    state = get_model_state_dict(fresh, sharded=True)
    parts = next(path for path in (tmp_path / "parts").iterdir() if path.is_dir())
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(parts)))
    theirs.set_model_state_dict(fresh, state)
    assert_same(get_model_state_dict(fresh), expected)
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_what_a_plain_process_saved_is_loaded(tmp_path: Path) -> None:
    join_gloo(tmp_path)
    plain = build(seed=5)
    by_hand = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    loss_of(plain, batch(0, 0)).backward()
    by_hand.step()
    model_state, optim_state = theirs.get_state_dict(plain, by_hand)
    path = str(tmp_path / "plain")
    if fsdpc.rank() == 0:
        state = {"model": model_state, "optim": optim_state}
        dcp.save(state, checkpoint_id=path, no_dist=True)
    fsdpc.barrier()
    ours, optimizer = made("ours", 0)
    state = rows_of(ours, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(ours, optimizer, state["optim"])
    assert_same(get_model_state_dict(ours), dict(plain.state_dict()))
    found = get_optimizer_state_dict(ours, optimizer)["state"]
    assert_same(found, optim_state["state"])
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_whole_states_that_torch_gathers(tmp_path: Path) -> None:
    """As full_state_dict=True asks for them, with and without a move to host memory."""
    join_gloo(tmp_path)
    for kind in MAKERS:
        ours, optimizer = made(kind, 2)
        expected = whole_of(ours, optimizer)
        options = theirs.StateDictOptions(full_state_dict=True)
        model_state, optim_state = theirs.get_state_dict(ours, optimizer, options=options)
        assert_same(model_state, expected["model"])
        assert_same(optim_state["state"], expected["optim"]["state"])
        options = theirs.StateDictOptions(full_state_dict=True, cpu_offload=True)
        model_state, optim_state = theirs.get_state_dict(ours, optimizer, options=options)
        if fsdpc.rank() == 0:
            assert_same(model_state, expected["model"])
            assert_same(optim_state["state"], expected["optim"]["state"])
        else:
            assert not model_state and not optim_state
        fresh = shard(build(seed=8))
        states = MAKERS[kind](fresh.parameters(), lr=1e-3)
        options = theirs.StateDictOptions(full_state_dict=True)
        theirs.set_state_dict(
            fresh, states, options=options,
            **{f"{what}_state_dict": v for what, v in copy.deepcopy(expected).items()},
        )  # fmt: skip
        assert_same(whole_of(fresh, states), expected)
        assert states.param_groups[0]["lr"] == 1e-2
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_parameters_themselves_are_staged(tmp_path: Path) -> None:
    """An asynchronous save copies rows at once, and what is written later does not count."""
    join_gloo(tmp_path)
    ours, _ = made("torch", 1)
    expected = get_model_state_dict(ours)
    path = str(tmp_path / "step")
    saved = dcp.async_save(dict(ours.named_parameters()), checkpoint_id=path)
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    saved.result()
    fresh, _ = made("torch", 0)
    dcp.load(dict(fresh.named_parameters()), checkpoint_id=path)
    assert_same(get_model_state_dict(fresh), expected)
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_rows_go_to_other_processes_and_files(tmp_path: Path) -> None:
    """They still are rows there, as in the process of an asynchronous save."""
    join_gloo(tmp_path)
    ours, optimizer = made("torch", 1)
    for name in ("first.weight", "first.bias", "blocks.1.norm.weight", "blocks.0.linear.bias"):
        p = ours.get_parameter(name)
        for state in (p.detach(), optimizer.state[p]["exp_avg"]):
            file = io.BytesIO()
            torch.save(state, file)
            for sent in (
                ForkingPickler.loads(bytes(ForkingPickler.dumps(state))),
                torch.load(io.BytesIO(file.getvalue()), weights_only=True),
            ):
                assert isinstance(sent, DTensor) and sent.shape == p.shape
                assert sent.placements == p.placements and sent.device_mesh == p.device_mesh
                assert torch.equal(sent.to_local(), state.to_local())
                assert torch.equal(sent.full_tensor(), state.full_tensor())
    dist.destroy_process_group()
