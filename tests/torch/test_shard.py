"""``fully_shard``'s rules, which are the same under both frontends: errors, words, handles."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import fsdpc
import fsdpc.torch

DOORS = {"native": (fsdpc, fsdpc.nn), "torch": (fsdpc.torch, torch.nn)}


@pytest.fixture(params=list(DOORS))
def door(request: pytest.FixtureRequest) -> str:
    return request.param


def parameter(door: str, values: np.ndarray) -> Any:
    if door == "native":
        return fsdpc.nn.Parameter(values)
    return torch.nn.Parameter(torch.from_numpy(values))


def ones(door: str) -> Any:
    values = np.ones((2, 4), np.float32)
    return fsdpc.tensor(values) if door == "native" else torch.from_numpy(values)


def model(door: str) -> Any:
    nn = DOORS[door][1]
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))


@pytest.mark.ranks(1)
def test_what_cannot_be_one_unit(door: str) -> None:
    ours, nn = DOORS[door]
    net = model(door)
    linear = nn.Linear(4, 4)
    for modules, error, text in (
        (3, TypeError, "nn.Module, got int"),
        ([], ValueError, "got an empty list"),
        ([linear, linear], ValueError, "one Linear twice in a list"),
        ([net, net[1][0]], ValueError, r"a Sequential and its own '1.0' in one list"),
        (nn.ModuleList([linear]), ValueError, "has no .* not support containers that do not"),
    ):
        with pytest.raises(error, match=f"fully_shard .*{text}|{text}"):
            ours.fully_shard(modules)
    assert not any(isinstance(m, ours.FSDPModule) for m in (*net.modules(), linear))
    ours.fully_shard(linear)
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="Linear is sharded already: .* applied to a module once"):
            ours.fully_shard(linear)
    for kind in (TypeError, AssertionError):
        with pytest.raises(kind, match="does not support deepcopy: copy a module before"):
            copy.deepcopy(linear)


@pytest.mark.ranks(1)
def test_parameters_in_options(door: str) -> None:
    ours, nn = DOORS[door]
    linear = nn.Linear(4, 4)
    for given, text in (
        (linear.weight, "ignored_params takes an iterable of parameters, got Parameter: put the"),
        (3, "ignored_params takes an iterable of parameters, got int"),
        (["weight"], "ignored_params takes parameters, got str 'weight': pick them from"),
    ):
        with pytest.raises(TypeError, match=text):
            ours.fully_shard(linear, ignored_params=given)
    linear.scale = parameter(door, np.ones((), np.float32))
    with pytest.raises(ValueError, match=r"'scale' .* Change scale to a 1D tensor .* shape \(1,\)"):
        ours.fully_shard(linear)
    assert not isinstance(linear, ours.FSDPModule)


@pytest.mark.ranks([1, 2])
def test_plans(door: str) -> None:
    ours, nn = DOORS[door]
    with pytest.raises(ValueError, match=r"the plan has unknown options \['colour'\]"):
        ours.fully_shard(model(door), plan={"0": {"colour": 1}})
    net = model(door)
    ours.fully_shard(net[0])  # and left as it is by the plan, which asks for all

    def linears(name: str, module: Any) -> dict[str, Any] | None:
        return {} if type(module).__name__.endswith("Linear") else None

    ours.fully_shard(net, plan=linears)
    net(ones(door))
    names = [m._fsdpc_unit.name for m in net.modules() if isinstance(m, ours.FSDPModule)]
    assert names == ["Sequential", "0", "1.0"]


@pytest.mark.ranks([1, 2])
def test_flags_of_the_group_are_numbers_that_divide_it(door: str) -> None:
    ours, nn = DOORS[door]
    size = fsdpc.world_size()
    with pytest.raises(ValueError, match=f"reshard_after_forward=3: .*divides .* group's {size}"):
        ours.fully_shard(nn.Linear(4, 4), reshard_after_forward=3)
    assert ours.fully_shard(nn.Linear(4, 4), reshard_after_forward=1)(ones(door)).shape == (2, 4)


@pytest.mark.ranks(2)
def test_ranks_that_disagree(door: str) -> None:
    ours, nn = DOORS[door]
    rank = fsdpc.rank()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (nn.Linear(4, 4 + rank), {}, r"\[weight \(4, 4\) float32 .*\[weight \(5, 4\) float32"),
        (nn.Linear(4, 4), {"reshard_after_forward": rank == 0}, "forward=True, .*forward=False"),
    ]
    for module, options, text in cases:
        with pytest.raises(fsdpc.MismatchError, match=f"ranks disagree on the model: .*{text}"):
            for p in module.parameters():
                p.requires_grad_(False).fill_(0)
            ours.fully_shard(module, **options)


@pytest.mark.ranks([1, 2])
def test_other_methods_that_gather(door: str) -> None:
    ours, nn = DOORS[door]

    class Net(nn.Linear):
        def twice(self, x: Any) -> Any:
            """Run it again."""
            return self.forward(self.forward(x))

    net = Net(4, 4)
    ours.register_fsdp_forward_method(net, "decode")  # means nothing: it is not sharded
    ours.fully_shard(net)
    with pytest.raises(AttributeError, match="FSDPNet has no method 'decode'"):
        ours.register_fsdp_forward_method(net, "decode")
    ours.register_fsdp_forward_method(net, "twice")
    assert net.twice.__name__ == "twice" and net.twice.__doc__ == "Run it again."
    assert net.twice(ones(door)).shape == (2, 4)


@pytest.mark.ranks([1, 2])
def test_handles_of_gathers(door: str) -> None:
    ours, nn = DOORS[door]
    net = ours.fully_shard(nn.Linear(4, 4))
    handle = net.unshard(async_op=True)
    assert type(handle) is fsdpc.torch.UnshardHandle
    handle.wait()
    assert np.asarray(net.weight.detach()).shape == (4, 4)
    handle.wait()  # does nothing
    net.reshard()
    assert net.unshard() is None
    net.reshard()


@pytest.mark.ranks(1)
def test_prefetching_what_is_not_sharded(door: str) -> None:
    ours, nn = DOORS[door]
    net = ours.fully_shard(nn.Linear(4, 4))
    net(ones(door))
    for call in (net.set_modules_to_forward_prefetch, net.set_modules_to_backward_prefetch):
        for kind in (TypeError, ValueError):
            with pytest.raises(kind, match="Linear is not sharded, so it is not gathered"):
                call([nn.Linear(4, 4)])
