"""fully_shard: what becomes a unit, what is refused, and what a sharded module can do."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest

import fsdpc
from fsdpc import nn


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x).mean()


class Holder(nn.Module):
    """One parameter of any kind."""

    def __init__(self, value: object, requires_grad: bool = True) -> None:
        super().__init__()
        self.value = nn.Parameter(value, requires_grad=requires_grad)

    def forward(self) -> fsdpc.Tensor:
        return self.value


def ones(width: int = 8) -> fsdpc.Tensor:
    return fsdpc.tensor(np.ones((2, width), np.float32))


def sharded() -> Net:
    model = Net()
    for block in model.blocks:
        fsdpc.fully_shard(block)
    return fsdpc.fully_shard(model)


def unit_of(p: nn.Parameter) -> str | None:
    return p._unit and p._unit.name


# ---- what becomes a unit


@pytest.mark.ranks([1, 2])
def test_each_parameter_goes_to_its_innermost_unit() -> None:
    model = sharded()
    model(ones())
    units = {name: unit_of(p) for name, p in model.named_parameters()}
    assert units == {
        "blocks.0.weight": "blocks.0",
        "blocks.0.bias": "blocks.0",
        "blocks.1.weight": "blocks.1",
        "blocks.1.bias": "blocks.1",
        "head.weight": "Net",
        "head.bias": "Net",
    }
    assert isinstance(model, Net) and isinstance(model, fsdpc.FSDPModule)
    assert type(model).__name__ == "FSDPNet"


@pytest.mark.ranks([1, 2, 3])
def test_shapes_stay_and_rows_are_shared_out() -> None:
    model = sharded()
    values = {name: fsdpc.full_tensor(p).numpy() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        assert p.shape == values[name].shape
        rows = fsdpc.all_reduce(p.local.shape[0])
        assert rows == p.shape[0], name


def tied() -> Net:
    fsdpc.manual_seed(3)
    model = Net()
    model.blocks[1].weight = model.blocks[0].weight
    return model


@pytest.mark.ranks([1, 2])
def test_tied_parameters_of_one_unit_stay_tied() -> None:
    model, plain = fsdpc.fully_shard(tied()), tied()
    assert model.blocks[1].weight is model.blocks[0].weight
    assert len(list(model.parameters())) == 5
    model(ones()).backward()
    plain(ones()).backward()
    grad = fsdpc.full_grad(model.blocks[0].weight).numpy()
    assert grad.any() and (grad == plain.blocks[0].weight.grad.numpy()).all()


@pytest.mark.ranks([1, 2])
def test_ignored_parameters_are_left_alone() -> None:
    model = Net()
    ignored = [model.head.weight]
    fsdpc.fully_shard(model, ignored_params=ignored)
    assert model.head.weight._unit is None and model.head.bias._unit is not None
    before = model.head.weight.detach().numpy().copy()
    model(ones()).backward()
    assert model.head.weight.grad.shape == (1, 8)
    norm = float(fsdpc.clip_grad_norm_(model, 1.0))
    squares = sum(
        float((fsdpc.full_grad(p).numpy() ** 2).sum()) for p in model.parameters() if p._unit
    )
    assert min(norm, 1.0) == pytest.approx(squares**0.5, rel=1e-5)  # scaled: at most 1 now
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    assert (model.head.weight.detach().numpy() != before).all()


@pytest.mark.ranks([1, 2])
def test_modules_without_parameters_are_units_too() -> None:
    class Double(nn.Module):
        def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
            return x * 2

    model = fsdpc.fully_shard(nn.Sequential(fsdpc.fully_shard(Double()), nn.Linear(8, 1)))
    model(ones()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.ranks([1, 2])
def test_parameters_that_forward_does_not_use_have_no_gradient() -> None:
    class Half(Net):
        def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
            return self.head(x).mean()

    model = fsdpc.fully_shard(Half())
    model(ones()).backward()
    assert model.blocks[0].weight.grad is None
    assert fsdpc.full_grad(model.head.weight).numpy().any()


@pytest.mark.ranks(2)
def test_fewer_rows_than_ranks() -> None:
    model = fsdpc.fully_shard(nn.Linear(3, 1))
    before = fsdpc.full_tensor(model.weight).numpy().copy()
    model(ones(3)).sum().backward()
    fsdpc.optim.AdamW(model.parameters(), lr=0.1).step()
    assert (fsdpc.full_tensor(model.weight).numpy() != before).all()


# ---- what is refused


@pytest.mark.ranks(1)
def test_twice() -> None:
    model = fsdpc.fully_shard(Net())
    with pytest.raises(ValueError, match="FSDPNet is sharded already.*called twice"):
        fsdpc.fully_shard(model)
    model(ones()).backward()


@pytest.mark.ranks(1)
def test_a_child_after_its_parent() -> None:
    model = fsdpc.fully_shard(Net())
    with pytest.raises(ValueError, match="'weight' already belongs to unit 'Net' as 'blocks.0.wei"):
        fsdpc.fully_shard(model.blocks[0])
    model(ones()).backward()


@pytest.mark.ranks(1)
def test_a_parameter_tied_across_units() -> None:
    model = Net()
    model.blocks[1].weight = model.blocks[0].weight
    fsdpc.fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match="'weight' already belongs to unit 'Linear'.*together"):
        fsdpc.fully_shard(model.blocks[1])
    with pytest.raises(ValueError, match="'blocks.1.weight' already belongs to unit 'Linear' as"):
        fsdpc.fully_shard(model)


@pytest.mark.parametrize(
    ("value", "requires_grad", "error", "text"),
    [
        (np.float32(1), True, ValueError, "'value' is a scalar.*shape \\(1,\\)"),
        (np.arange(4), False, TypeError, "'value' is int64; only floating point"),
        (np.array([True]), False, TypeError, "'value' is bool"),
    ],
)
@pytest.mark.ranks([1, 2])
def test_parameters_that_cannot_be_cut(
    value: object, requires_grad: bool, error: type[Exception], text: str
) -> None:
    module = Holder(value, requires_grad)
    with pytest.raises(error, match=text):
        fsdpc.fully_shard(module)
    assert type(module) is Holder and module.value._unit is None


def test_complex_parameters() -> None:
    with pytest.raises(TypeError, match="complex64"):
        nn.Parameter(np.ones(3, np.complex64))


def test_integer_parameters_that_want_gradients() -> None:
    with pytest.raises((TypeError, RuntimeError), match="int64"):
        nn.Parameter(np.arange(4))


@pytest.mark.ranks(1)
def test_containers_and_strangers() -> None:
    with pytest.raises(ValueError, match="ModuleList has no forward of its own"):
        fsdpc.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(TypeError, match="takes an fsdpc.nn.Module, got int"):
        fsdpc.fully_shard(3)


@pytest.mark.ranks(1)
def test_copies_and_pickles() -> None:
    model = fsdpc.fully_shard(Net())
    with pytest.raises(TypeError, match="does not support deepcopy: copy a module before"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match="not pickled: save its state_dict"):
        pickle.dumps(model)


@pytest.mark.ranks(1)
def test_a_child_called_before_the_outermost_module() -> None:
    fsdpc.manual_seed(0)
    model = sharded()
    model.blocks[0](ones())
    model.blocks[1].unshard()
    model.blocks[1].reshard()
    early = model(ones()).numpy()
    fsdpc.manual_seed(0)
    np.testing.assert_array_equal(sharded()(ones()).numpy(), early)


@pytest.mark.ranks(1)
def test_a_child_that_outlives_what_was_around_it() -> None:
    model = sharded()
    child = model.blocks[0]
    del model
    gc.collect()
    assert child(ones()).shape == ones().shape


@pytest.mark.ranks(1)
def test_integers_are_no_compute_dtype() -> None:
    with pytest.raises(TypeError, match="param_dtype must be a floating point dtype, got int32"):
        fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.int32)


@pytest.mark.ranks(2)
def test_meshes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"mesh \(3,\) has 3 ranks; the world has 2"):
        fsdpc.init_device_mesh("cpu", (3,))
    with pytest.raises(ValueError, match=r"1 names \('a',\) for 2 dimensions \(1, 2\)"):
        fsdpc.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a",))
    with pytest.raises(ValueError, match="one or two dimensions of at least 1, got \\(2, 1, 1\\)"):
        fsdpc.init_device_mesh("cpu", (2, 1, 1))
    with pytest.raises(NotImplementedError, match="'tpu'"):
        fsdpc.init_device_mesh("tpu", (2,))
    with pytest.raises(KeyError, match="no mesh dimension 'x'"):
        fsdpc.init_device_mesh("cpu", (2,))["x"]


@pytest.mark.ranks([1, 2])
def test_fulls_exist_inside_forward_alone() -> None:
    model = sharded()
    uses = [
        lambda: model.head.weight + 1,
        lambda: model.head.weight.numpy(),
        lambda: np.asarray(model.head.weight),
        lambda: model.head.forward(ones()),
        lambda: model.blocks[0].weight.sum(),
    ]
    for _ in range(2):
        for use in uses:
            with pytest.raises(RuntimeError, match="weight' of unit '.*' is sharded here: .*local"):
                use()
        model(ones()).backward()


@pytest.mark.ranks([1, 2])
def test_unshard_holds_fulls() -> None:
    model = fsdpc.fully_shard(nn.Linear(8, 8))
    model.unshard()
    held = model.weight.detach().numpy().copy()
    model.reshard()
    assert (held == fsdpc.full_tensor(model.weight).numpy()).all()
    with pytest.raises(RuntimeError, match="is sharded here"):
        model.weight.sum()


@pytest.mark.ranks([1, 2])
def test_gradients_are_not_assigned() -> None:
    model = fsdpc.fully_shard(nn.Linear(8, 8))
    model(ones()).sum().backward()
    with pytest.raises(ValueError, match="written only by reductions"):
        model.weight.grad = ones()
    model.weight.grad = None
    assert model.weight.grad is None


@pytest.mark.ranks(1)
def test_divide_factors() -> None:
    model = fsdpc.fully_shard(nn.Linear(8, 8))
    for factor in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="must be above 0"):
            model.set_gradient_divide_factor(factor)


@pytest.mark.ranks([1, 2])
def test_options_of_another_kind_are_named() -> None:
    layer = nn.Sequential(nn.Linear(2, 2))
    for options, error, text in (
        ({"mesh": 4}, TypeError, "mesh must be a DeviceMesh, got 4"),
        ({"mp_policy": "bf16"}, TypeError, "mp_policy must be a MixedPrecisionPolicy, got 'bf16'"),
        ({"ignored_params": layer[0].weight}, TypeError, "put the one into a list"),
        ({"plan": {"layers.*": {}}}, ValueError, r"plan's 'layers.\*' fits no submodule; .* are 0"),
    ):
        with pytest.raises(error, match=text):
            fsdpc.fully_shard(layer, **options)
    fsdpc.fully_shard(layer, plan={"0": {}})
