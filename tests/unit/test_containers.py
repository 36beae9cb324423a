"""Dictionaries and lists of modules and parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn


def test_module_dict() -> None:
    layers = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.ReLU()})
    layers["c"] = nn.Linear(3, 1, bias=False)
    assert list(layers) == list(layers.keys()) == ["a", "b", "c"] and len(layers) == 3
    assert "b" in layers and isinstance(layers["b"], nn.ReLU)
    assert [name for name, _ in layers.items()] == ["a", "b", "c"]
    assert list(layers.values())[0] is layers["a"]
    assert list(layers.state_dict()) == ["a.weight", "a.bias", "c.weight"]
    del layers["b"]
    assert layers.pop("c").weight.shape == (1, 3) and list(layers) == ["a"]
    with pytest.raises(TypeError, match="modules by names"):
        layers["x.y"] = nn.ReLU()
    with pytest.raises(TypeError, match="'x' of int"):
        layers["x"] = 3


def changed(lib: Any) -> list[Any]:
    """Names and indices after each change of a list and of a sequence."""
    seen: list[Any] = []
    for make in (lib.nn.ModuleList, lambda layers: lib.nn.Sequential(*layers)):
        layers = [lib.nn.Linear(i + 1, 1) for i in range(5)]
        model = make(layers)

        def note(part: Any) -> None:
            seen.append(type(part).__name__)
            seen.append([(name, tuple(p.shape)) for name, p in part.named_parameters()])  # noqa: B023

        for part in (model[:2], model[1:4:2], model[-2:], model[9:]):
            note(part)
        assert model[:2][0] is layers[0]
        del model[1]
        note(model)
        assert model.pop(-1) is layers[4]
        note(model)
        model.insert(1, layers[4])
        note(model)
        model.insert(0, lib.nn.ReLU())
        model.insert(len(model), lib.nn.Linear(9, 1))
        note(model)
        del model[1:3]
        note(model)
        model[-1] = lib.nn.Linear(7, 1)
        model.append(lib.nn.Linear(8, 1)).extend([lib.nn.Linear(6, 1)])
        note(model)
    return seen


def test_lists_and_sequences_change_as_in_torch() -> None:
    assert changed(fsdpc) == changed(pytest.importorskip("torch"))


def test_lists_refuse_what_they_do_not_hold() -> None:
    for layers in (nn.ModuleList([nn.ReLU()]), nn.Sequential(nn.ReLU())):
        for change, error in (
            (lambda: layers.pop(1), IndexError),  # noqa: B023
            (lambda: layers.__delitem__(-2), IndexError),  # noqa: B023
            (lambda: layers.insert(3, nn.ReLU()), IndexError),  # noqa: B023
            (lambda: layers.insert(0, 3), TypeError),  # noqa: B023
            (lambda: layers.insert("0", nn.ReLU()), TypeError),  # noqa: B023
        ):
            with pytest.raises(error):
                change()
        assert len(layers) == 1


def test_a_sequence_keeps_the_names_of_a_slice() -> None:
    part = nn.Sequential(*[nn.Linear(i + 1, 1) for i in range(4)])[1:3]
    assert list(part.state_dict()) == ["1.weight", "1.bias", "2.weight", "2.bias"]
    part[0] = nn.Linear(8, 1)
    part.append(nn.ReLU())  # torch would put it in the place of '2'
    assert [name for name, _ in part.named_children()] == ["1", "2", "3"]
    assert part[0].weight.shape == (1, 8) and part[1].weight.shape == (1, 3)


@pytest.mark.ranks(1)
def test_a_slice_of_a_sharded_sequence_is_a_plain_one() -> None:
    model = fsdpc.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert type(model[:1]) is nn.Sequential and model[:1][0] is model[0]


def test_parameter_list() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.ParameterList([fsdpc.ones(2), nn.Parameter(np.zeros(2, np.float32))])

        def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
            for p in self.factors:
                x = x * p
            return x

    net = Net()
    net.factors.append(fsdpc.full((2,), 3.0))
    assert len(net.factors) == 3 and net.factors[-1].tolist() == [3.0, 3.0]
    assert [name for name, _ in net.named_parameters()] == [f"factors.{i}" for i in range(3)]
    net.factors[1] = nn.Parameter(fsdpc.full((2,), 2.0))
    assert net(fsdpc.ones(2)).tolist() == [6.0, 6.0] and len(net.factors[:2]) == 2
    net(fsdpc.ones(2)).sum().backward()
    assert net.factors[0].grad.tolist() == [6.0, 6.0]
    assert "float32 (2,)" in repr(net)
