"""Sharded models whose parameters are written by hand, and whose parts are replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fsdpc
from fsdpc import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)
        self.scale = nn.Parameter(fsdpc.ones(3))
        self.register_buffer("calls", fsdpc.zeros(1))

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        self.calls = self.calls + 1
        h = self.first(x)
        h += self.first(x * 2)
        y = fsdpc.zeros(x.shape[0], 3)
        y[:, :2] = self.last(h)[:, :2]
        y[:, 2] = h[:, 0]
        y *= self.scale
        return y


def make(sharded: bool) -> Net:
    fsdpc.manual_seed(3)
    model = Net()
    if sharded:
        fsdpc.fully_shard(model.first)
        fsdpc.fully_shard(model)
    return model


def train(model: Net, sharded: bool) -> dict[str, np.ndarray]:
    x = fsdpc.tensor(np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32))
    average = [p.local.detach().clone() for p in model.parameters()]
    for _ in range(3):
        model(x).sum().backward()
        with fsdpc.no_grad():
            for p, e in zip(model.parameters(), average, strict=True):
                p.grad *= 0.5
                if sharded:
                    p.local -= 0.1 * p.grad
                else:
                    p -= 0.1 * p.grad
                e *= 0.9
                e += 0.1 * p.local
        model.zero_grad()
    return {name: t.detach().numpy() for name, t in model.state_dict().items()}


@pytest.mark.ranks([1, 2, 3])
def test_shards_are_written_by_hand_and_the_engine_sees_it() -> None:
    want = train(make(False), False)
    got = train(make(True), True)
    assert list(got) == list(want) and got["calls"].tolist() == [3.0]
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.ranks([1, 2])
def test_a_sharded_parameter_names_its_rows() -> None:
    model = make(True)
    model(fsdpc.ones(2, 4)).sum().backward()
    weight = model.first.weight
    with fsdpc.no_grad(), pytest.raises(RuntimeError, match=r"p\.local|\.local"):
        weight -= 1.0
    with pytest.raises(AttributeError, match="in place"):
        weight.local = fsdpc.ones(1)
    with pytest.raises(ValueError, match="written only by reductions"):
        weight.grad = fsdpc.ones(1)
    weight.grad *= 0.0
    assert not weight.grad.any()


@pytest.mark.ranks([1, 2])
def test_parts_of_a_sharded_model_are_not_replaced() -> None:
    model = make(True)
    kept = model.scale
    for change, match in (
        (lambda: setattr(model, "scale", nn.Parameter(fsdpc.ones(3))), "'scale' .* of unit 'Net'"),
        (lambda: setattr(model, "scale", fsdpc.ones(3)), "as parameter 'scale'"),
        (lambda: setattr(model, "scale", None), "before fully_shard"),
        (lambda: delattr(model, "scale"), "before fully_shard"),
        (lambda: delattr(model, "last"), "'last.weight' of unit 'Net'"),
        (lambda: setattr(model, "last", nn.Linear(6, 3)), "'last.weight' of unit"),
        (lambda: setattr(model, "last", None), "'last.weight' of unit"),
        (lambda: setattr(model, "first", nn.Identity()), "'weight' of unit 'Linear'"),
        (lambda: setattr(model, "more", nn.Linear(2, 2)), "'more.weight' .* is a parameter"),
        (lambda: setattr(model.first, "more", nn.Parameter(fsdpc.ones(2))), "no unit holds"),
    ):
        with pytest.raises((RuntimeError, TypeError), match=match):
            change()
    model.scale = kept
    model.calls = fsdpc.ones(1)
    model.activation = nn.ReLU()
    with fsdpc.no_grad():
        model.calls += 1
    model(fsdpc.ones(2, 4)).sum().backward()
    names = ["scale", "calls", "first.weight", "first.bias", "last.weight", "last.bias"]
    assert list(model.state_dict()) == names
    assert model.state_dict()["calls"].tolist() == [3.0]


class Containers(nn.Module):
    """Containers without a parameter of their own, and of one unit's module only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
        self.heads = nn.ModuleDict()
        self.scales = nn.ParameterList()
        self.plain = nn.Module()

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        for layer in (*self.layers, *self.heads.values()):
            x = layer(x)
        return x


def containers() -> Containers:
    model = Containers()
    fsdpc.fully_shard(model.layers[0])
    return fsdpc.fully_shard(model)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("joined", [False, True])
def test_containers_of_a_sharded_model_take_no_parameter_that_no_unit_holds(joined: bool) -> None:
    model, name = containers(), "is a parameter that no unit holds"
    if joined:
        model(fsdpc.ones(2, 4))
    parts, fresh = [n for n, _ in model.named_modules()], nn.Linear(4, 4)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    for change, match in (
        (lambda: model.layers.append(fresh), f"ModuleList is sharded, and '2.weight' .* {name}"),
        (lambda: model.layers.append(frozen), f"ModuleList is sharded, and '2.weight' .* {name}"),
        (lambda: model.layers.extend([fresh]), f"'2.weight' .* {name}"),
        (lambda: model.layers.insert(2, fresh), f"'2.weight' .* {name}"),
        (lambda: model.layers.insert(1, nn.ReLU()), None),
        (lambda: model.layers.__setitem__(1, fresh), f"'1.weight' .* {name}"),
        (lambda: model.layers.insert(0, nn.ReLU()), "before fully_shard"),
        (lambda: model.layers.pop(0), "before fully_shard"),
        (lambda: model.layers.__delitem__(slice(0, 2)), "before fully_shard"),
        (lambda: model.layers.pop(1), None),
        (
            lambda: model.heads.update({"a": fresh}),
            f"ModuleDict is sharded, and 'a.weight' .* {name}",
        ),
        (lambda: model.scales.append(fsdpc.ones(2)), rf"ParameterList .* '0' \(2,\) {name}"),
        (lambda: setattr(model.plain, "deep", nn.Sequential(fresh)), f"'deep.0.weight' .* {name}"),
        (lambda: model.plain.register_parameter("p", fresh.weight), f"'p' .* {name}"),
    ):
        if match is None:
            change()
            continue
        with pytest.raises(RuntimeError, match=match):
            change()
    assert [n for n, _ in model.named_modules()] == parts
    model.heads["b"] = nn.ModuleList([nn.ReLU()])  # of the unit from here on
    with pytest.raises(RuntimeError, match=name):
        model.heads["b"].append(fresh)
    del model.heads["b"]
    model.layers.append(nn.Tanh())
    model(fsdpc.ones(2, 4)).sum().backward()


@pytest.mark.ranks([1, 2])
def test_a_sharded_layer_may_come_into_a_sharded_model() -> None:
    fsdpc.manual_seed(4)
    model, layer = containers(), nn.Linear(4, 4)
    twin = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for own, other in zip(twin, (model.layers[0], layer), strict=True):
        own.load_state_dict(other.state_dict())
    x = fsdpc.ones(2, 4) * (fsdpc.rank() + 1)
    model(x)
    model.heads["late"] = fsdpc.fully_shard(layer)
    model(x).sum().backward()
    every = [fsdpc.ones(2, 4) * (r + 1) for r in range(fsdpc.world_size())]
    for own in every:
        twin[1](twin[0](own).relu()).sum().backward()
    for p, q in zip(
        model.parameters(), (*twin[0].parameters(), *twin[1].parameters()), strict=True
    ):
        want = q.grad.numpy() / len(every)
        np.testing.assert_allclose(fsdpc.full_grad(p).numpy(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.ranks([1, 2])
def test_the_first_forward_looks_at_all_parameters() -> None:
    model = containers()
    model.layers._modules["2"] = nn.Linear(4, 4)  # past all that would refuse it
    with pytest.raises(
        RuntimeError, match=r"Containers is sharded, and 'layers.2.weight' \(4, 4\)"
    ):
        model(fsdpc.ones(2, 4))
    del model.layers._modules["2"]
    model(fsdpc.ones(2, 4)).sum().backward()


@pytest.mark.ranks([1, 2])
def test_a_model_whose_layers_are_sharded_is_built_further() -> None:
    model, left_out = Containers(), nn.Linear(4, 4)
    for _ in range(2):
        layer = fsdpc.fully_shard(nn.Sequential(nn.Linear(4, 4)))
        layer(fsdpc.ones(2, 4))  # a root of its own
        model.layers.append(layer)
    model = Containers()
    fsdpc.fully_shard(model.layers[0])
    model.layers.append(nn.Linear(4, 4))
    model.heads["ignored"] = left_out
    fsdpc.fully_shard(model, ignored_params=left_out.parameters())
    model(fsdpc.ones(2, 4)).sum().backward()
    model.heads["again"] = left_out
    model(fsdpc.ones(2, 4)).sum().backward()


@pytest.mark.ranks([1, 2, 3])
def test_the_padding_of_an_embedding_begins_as_zeros(tmp_path: Path) -> None:
    """Deferred, sharded, with masters on a disk: one row of zeros, all others alike."""

    def table(deferred: bool) -> nn.Embedding:
        fsdpc.manual_seed(5)
        if not deferred:
            return nn.Embedding(7, 4, padding_idx=-2)
        with fsdpc.deferred_init():
            return nn.Embedding(7, 4, padding_idx=5)

    want = table(False).weight.tolist()
    assert want[5] == [0.0] * 4 and all(any(row) for i, row in enumerate(want) if i != 5)
    assert table(True).materialize().weight.tolist() == want
    on_disk = fsdpc.OffloadPolicy(masters="disk", path=tmp_path)
    for policy in (None, on_disk):
        for deferred in (False, True):
            model = fsdpc.fully_shard(table(deferred), offload_policy=policy)
            assert model(fsdpc.tensor([5, 0])).tolist() == [want[5], want[0]]
            model(fsdpc.tensor([5, 1, 5])).sum().backward()
            grad = np.zeros((7, 4))
            grad[1] = 1
            assert fsdpc.full_grad(model.weight).tolist() == grad.tolist()
            assert fsdpc.full_tensor(model.weight).tolist() == want
    with pytest.raises(ValueError, match="padding_idx 7 is none of 7 rows"):
        nn.Embedding(7, 4, 7)
    assert repr(table(False)) == "Embedding(7, 4, padding_idx=5)"


@pytest.mark.ranks([1, 2])
def test_values_that_came_before_sharding_stay() -> None:
    """A deferred parameter that was filled since is not drawn again."""

    def filled(how: str) -> nn.Linear:
        with fsdpc.deferred_init():
            layer = nn.Linear(2, 3)
        if how == "load_state_dict":
            layer.load_state_dict({"weight": np.full((3, 2), 7.0), "bias": np.full(3, 7.0)})
            return layer
        layer.materialize()
        with fsdpc.no_grad():
            for p in layer.parameters():
                p.fill_(7)
        return layer

    for how in ("load_state_dict", "materialize"):
        layer = fsdpc.fully_shard(filled(how))
        assert all((t == 7).all() for t in layer.state_dict().values()), how
