"""``nn.Module``: the tree, its names, its modes and its state, as in PyTorch."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import fsdpc
from fsdpc import nn


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(np.arange(6, dtype=np.float32).reshape(2, 3))
        self.register_buffer("count", fsdpc.tensor([1.0]))
        self.register_buffer("scratch", fsdpc.tensor([2.0]), persistent=False)
        self.register_parameter("bias", None)

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        return x @ self.weight.transpose(0, 1)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.again = self.first
        self.rest = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Dropout(0.5)])
        self.tied = self.rest[0].weight

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        return self.rest[1](self.rest[0](self.first(x)))


def test_names_are_dotted_and_each_thing_comes_once() -> None:
    model = Outer()
    names = ["", "first", "rest", "rest.0", "rest.1"]
    assert [name for name, _ in model.named_modules()] == names
    assert [m for _, m in model.named_modules()] == list(model.modules())
    assert [name for name, _ in model.named_children()] == ["first", "again", "rest"]
    assert list(model.children())[0] is model.first
    assert [name for name, _ in model.named_parameters()] == ["tied", "first.weight"]
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert every == ["tied", "first.weight", "rest.0.weight"]
    assert [name for name, _ in model.named_parameters("net")][0] == "net.tied"
    assert [name for name, _ in model.named_buffers()] == ["first.count", "first.scratch"]
    assert model.num_parameters() == 10


def test_submodules_are_found_by_path() -> None:
    model = Outer()
    assert model.get_submodule("rest.0") is model.rest[0]
    assert model.get_submodule("") is model
    with pytest.raises(AttributeError, match="Outer has no submodule 'rest.7'"):
        model.get_submodule("rest.7")


def test_apply_goes_from_the_leaves_up() -> None:
    model, seen = Outer(), []
    assert model.apply(lambda m: seen.append(type(m).__name__)) is model
    assert seen[-1] == "Outer" and seen.index("Linear") < seen.index("ModuleList")


def test_train_and_eval_reach_every_module() -> None:
    model = Outer()
    x = fsdpc.tensor(np.ones((64, 3), np.float32))
    assert all(m.training for m in model.modules())
    assert (model(x).numpy() == 0).any()  # dropout
    assert model.eval() is model and not any(m.training for m in model.modules())
    assert (model(x).numpy() == model(x).numpy()).all()
    assert model.train().rest[1].training


def test_freezing_and_dropping_gradients() -> None:
    model = Outer().eval()
    model.requires_grad_(False)
    assert not model(fsdpc.tensor(np.ones((1, 3), np.float32))).requires_grad
    model.requires_grad_()
    model(fsdpc.tensor(np.ones((1, 3), np.float32))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_state_has_tied_names_and_persistent_buffers() -> None:
    state = Outer().state_dict()
    # a module under two names is walked once, under the first
    assert sorted(state) == ["first.count", "first.weight", "rest.0.weight", "tied"]
    assert (state["tied"].numpy() == state["rest.0.weight"].numpy()).all()


def test_states_go_from_model_to_model() -> None:
    model, other = Outer(), Outer()
    state = {name: value.numpy() + 1 for name, value in model.state_dict().items()}
    assert other.load_state_dict(state) == ([], [])
    assert all((v.numpy() == state[n]).all() for n, v in other.state_dict().items())
    wide = {name: value.astype(np.float64) for name, value in state.items()}
    other.load_state_dict(wide)
    assert other.first.weight.dtype is fsdpc.float32
    assert (other.first.weight.detach().numpy() == state["first.weight"]).all()


def test_states_that_do_not_fit_are_listed_whole() -> None:
    model = Outer()
    before = model.first.weight.detach().numpy().copy()
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    del state["tied"], state["first.count"]
    state["more"] = np.zeros(1)
    with pytest.raises(KeyError, match=r"missing \['tied', 'first.count'\], unexp.*\['more'\]"):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False) == (["tied", "first.count"], ["more"])
    state["first.weight"] = np.zeros((3, 2), np.float32)
    state["rest.0.weight"] = np.zeros((1, 1), np.float32)
    with pytest.raises(ValueError, match=r"first.weight: \(3, 2\) given, \(2, 3\).*rest.0.weight"):
        model.load_state_dict(state, strict=False)
    assert (model.first.weight.detach().numpy() == before).all()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("sharded", [False, True])
def test_values_of_other_dtypes(sharded: bool) -> None:
    """Real numbers are converted, others refused by name before anything changes."""
    model = fsdpc.fully_shard(nn.Linear(2, 1)) if sharded else nn.Linear(2, 1)
    before = fsdpc.full_tensor(model.bias).item()
    wrong = np.ones((1, 2), np.complex64)
    with pytest.raises(TypeError, match="no real numbers: weight: complex64; convert"):
        model.load_state_dict({"bias": np.ones(1), "weight": wrong})
    assert fsdpc.full_tensor(model.bias).item() == before
    for right in (np.array([[1, 2]]), np.array([[True, False]]), [[1.0, 2.0]]):
        model.load_state_dict({"bias": np.ones(1), "weight": right})
        assert fsdpc.full_tensor(model.weight).tolist() == np.asarray(right).tolist()


def test_attributes_move_between_tables() -> None:
    model = Outer()
    model.first = nn.Linear(1, 1)
    assert isinstance(model.get_submodule("first"), nn.Linear)
    model.first = None
    assert [name for name, _ in model.named_children()] == ["again", "rest"]
    del model.again
    with pytest.raises(AttributeError, match="'Outer' has no attribute 'again'"):
        model.again  # noqa: B018
    assert "rest" in dir(model)


def test_an_early_assignment_says_what_is_missing() -> None:
    class Hasty(nn.Module):
        def __init__(self) -> None:
            self.layer = nn.Linear(1, 1)

    with pytest.raises(AttributeError, match=r"call super\(\).__init__\(\) before .* 'layer'"):
        Hasty()


def test_repr_shows_the_tree() -> None:
    text = repr(Outer())
    assert text.startswith("Outer(\n  (first): Inner()")
    assert "    (1): Dropout(p=0.5)" in text


def test_repr_of_equal_blocks_is_one() -> None:
    layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), nn.Dropout(0.5), nn.Linear(1, 1)])
    assert repr(layers).split("\n") == [
        "ModuleList(",
        "  (0-1): 2 x Linear(1, 1, bias=True)",
        "  (2): Dropout(p=0.5)",
        "  (3): Linear(1, 1, bias=True)",
        ")",
    ]


def test_sequential_runs_in_order() -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = fsdpc.tensor(np.ones((1, 3), np.float32))
    assert (layers(x).numpy() == layers[1](layers[0](x)).numpy()).all()
    assert len(layers) == 2 and [type(m).__name__ for m in layers] == ["Linear", "Linear"]


def test_forward_hooks_see_and_change_what_goes_through() -> None:
    layer, seen = nn.Linear(2, 2, bias=False), []
    x = fsdpc.ones(1, 2)
    plain = layer(x).tolist()
    first = layer.register_forward_pre_hook(lambda m, args: seen.append(("before", m, args)))
    second = layer.register_forward_hook(lambda m, args, y: seen.append(("after", m, args)))
    assert layer(x).tolist() == plain
    assert [when for when, _, _ in seen] == ["before", "after"]
    assert all(m is layer and args == (x,) for _, m, args in seen)
    double = layer.register_forward_pre_hook(lambda m, args: args[0] * 2)
    minus = layer.register_forward_hook(lambda m, args, y: -y)
    assert layer(x).tolist() == [[-2 * v for v in plain[0]]]
    for handle in (first, second, double, minus, minus):
        handle.remove()
    assert layer(x).tolist() == plain and len(seen) == 4


def test_forward_hooks_with_keywords() -> None:
    class Scaled(nn.Module):
        def forward(self, x: fsdpc.Tensor, by: float = 1.0) -> fsdpc.Tensor:
            return x * by

    module = Scaled()
    module.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {"by": kwargs["by"] + 1}), with_kwargs=True
    )
    module.register_forward_hook(lambda m, args, kwargs, y: y + kwargs["by"], with_kwargs=True)
    assert nn.Sequential(module)[0](fsdpc.ones(1), by=2.0).tolist() == [6.0]


def test_another_dtype_in_place() -> None:
    model = Outer()
    model(fsdpc.ones(1, 3)).sum().backward()
    tied, grad = model.tied, model.tied.grad.tolist()
    assert model.to("bfloat16") is model
    assert {p.dtype for p in model.parameters()} == {fsdpc.bfloat16}
    assert model.tied is tied is model.rest[0].weight and tied.grad.dtype is fsdpc.bfloat16
    assert model.first.count.dtype is fsdpc.bfloat16
    np.testing.assert_allclose(tied.grad.float().numpy(), grad, rtol=2**-8)
    y = model(fsdpc.ones(1, 3, dtype="bfloat16"))
    assert y.dtype is fsdpc.bfloat16
    assert model.double().tied.dtype is fsdpc.float64 and model.half().tied.dtype is fsdpc.float16
    assert model.float().tied.dtype is fsdpc.float32
    with pytest.raises(TypeError, match="a dtype of floats, not int64"):
        model.to("int64")


def test_another_dtype_of_deferred_parameters() -> None:
    fsdpc.manual_seed(1)
    with fsdpc.deferred_init():
        late = nn.ModuleList([nn.Linear(2, 3)])
        late.append(late[0])
    late.to(fsdpc.float64)
    assert late[0].weight.is_deferred and late[0].weight.dtype is fsdpc.float64
    late.materialize()
    fsdpc.manual_seed(1)
    now = nn.Linear(2, 3, dtype="float64")
    assert fsdpc.functional.array_equal(late[1].weight, now.weight)


def test_names_of_methods_are_refused() -> None:
    """A parameter called `half` would be hidden by the method, without a word."""
    module = nn.Module()
    for add in (
        lambda: setattr(module, "half", nn.Parameter(fsdpc.tensor([1.0]))),
        lambda: setattr(module, "train", nn.Linear(2, 2)),
        lambda: module.register_parameter("forward", None),
    ):
        with pytest.raises(KeyError, match="already exists: a method of Module"):
            add()


def registered(library, make):
    module = library.nn.Module()
    module.weight = library.nn.Parameter(make([1.0]))
    module.register_buffer("count", make([0.0]))
    module.register_buffer("scratch", make([2.0]), persistent=False)
    module.child = library.nn.Linear(1, 1, bias=False)
    module.plain = 1
    return module


def assign(name, value):
    return lambda module, library, make: setattr(module, name, value(library, make))


ASSIGNMENTS = {
    f"{name} = {kind}": assign(name, value)
    for name in ("weight", "count", "scratch", "child", "plain", "new")
    for kind, value in {
        "tensor": lambda library, make: make([5.0]),
        "None": lambda library, make: None,
        "number": lambda library, make: 5,
        "parameter": lambda library, make: library.nn.Parameter(make([5.0])),
        "module": lambda library, make: library.nn.Identity(),
    }.items()
} | {
    f"del {name}": lambda module, library, make, name=name: delattr(module, name)
    for name in ("weight", "count", "scratch", "child", "plain")
} | {
    "buffer over parameter": lambda m, lib, make: m.register_buffer("weight", make([1.0])),
    "parameter over buffer": lambda m, lib, make: m.register_parameter(
        "count", lib.nn.Parameter(make([1.0]))
    ),
    "parameter over attribute": lambda m, lib, make: m.register_parameter("plain", None),
    "buffer over module": lambda m, lib, make: m.register_buffer("child", None),
    "buffer again": lambda m, lib, make: m.register_buffer("scratch", make([3.0])),
    "transient again": lambda m, lib, make: m.register_buffer("count", make([3.0]), False),
    "tensor as parameter": lambda m, lib, make: m.register_parameter("weight", make([1.0])),
    "number as buffer": lambda m, lib, make: m.register_buffer("count", 3),
    "dotted": lambda m, lib, make: m.register_buffer("a.b", make([3.0])),
    "empty": lambda m, lib, make: m.register_parameter("", None),
}  # fmt: skip


@pytest.mark.parametrize("what", ASSIGNMENTS)
def test_assignments_do_what_they_do_in_torch(what: str) -> None:
    torch = pytest.importorskip("torch")

    def after(library, make):
        module = registered(library, make)
        error = None
        try:
            ASSIGNMENTS[what](module, library, make)
        except (TypeError, KeyError, AttributeError) as e:
            error = type(e)
        kinds = {name: type(getattr(module, name, 0)).__name__ for name in
                 ("weight", "count", "scratch", "child", "plain", "new")}  # fmt: skip
        return (
            error,
            list(module.state_dict()),
            [name for name, _ in module.named_parameters()],
            [name for name, _ in module.named_buffers()],
            [name for name, _ in module.named_children()],
            kinds,
        )

    assert after(fsdpc, fsdpc.tensor) == after(torch, torch.tensor)


def test_a_counter_of_a_forward_stays_a_buffer() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", fsdpc.zeros(1))
            self.register_buffer("total", fsdpc.zeros(1))

        def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
            self.calls = self.calls + 1
            self.total += x.sum()
            return x

    model = Counter()
    for _ in range(2):
        model(fsdpc.ones(3))
    assert {n: t.tolist() for n, t in model.state_dict().items()} == {
        "calls": [2.0],
        "total": [6.0],
    }


def test_what_cannot_be_assigned_is_named() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"'Tensor' as parameter 'weight' \(Parameter or None exp"):
        layer.weight = fsdpc.ones(1, 1)
    with pytest.raises(TypeError, match="'int' as buffer 'running_mean'"):
        nn.BatchNorm1d(2).running_mean = 3
    with pytest.raises(TypeError, match="'Tensor' as child module '0'"):
        setattr(nn.Sequential(layer), "0", fsdpc.ones(1))
    with pytest.raises(TypeError, match="holds modules, not int"):
        nn.ModuleList([3])
    with pytest.raises(AttributeError, match=r"call super\(\).__init__\(\) before"):
        nn.Module.register_buffer(nn.Module.__new__(nn.Module), "x", None)


def test_properties_with_setters_run() -> None:
    class Scaled(nn.Module):
        @property
        def scale(self) -> float:
            return self._scale / 2

        @scale.setter
        def scale(self, value: float) -> None:
            self._scale = value * 2

        @property
        def fixed(self) -> int:
            return 5

    m = Scaled()
    m.scale = 3.0
    assert (m._scale, m.scale) == (6.0, 3.0)
    with pytest.raises(AttributeError, match="fixed"):
        m.fixed = 3  # type: ignore[misc]


def test_a_copied_module_has_parameters() -> None:
    m = nn.Linear(2, 2)
    m.bias.requires_grad = False
    copied = copy.deepcopy(m)
    assert [type(p) for p in copied.parameters()] == [nn.Parameter] * 2
    assert [p.requires_grad for p in copied.parameters()] == [True, False]
    with fsdpc.no_grad():
        copied.weight *= 0.5
    np.testing.assert_array_equal(copied.weight.numpy() * 2, m.weight.numpy())
    tied = nn.Sequential(m, nn.Linear(2, 2))
    tied[1].weight = m.weight
    again = copy.deepcopy(tied)
    assert again[0].weight is again[1].weight is not m.weight
