"""Dictionaries and lists of modules and parameters."""

from __future__ import annotations

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
