"""Backward hooks of modules, beside torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fsdpc
from fsdpc import functional as F
from fsdpc import nn


def plain(grads):
    """Gradients as nested lists, whose they are."""
    return [None if g is None else np.asarray(g.tolist()).round(5).tolist() for g in grads]


class Two:
    """A module of two inputs and two outputs, whichever engine it is of."""

    def forward(self, x, y, scale=1.0):
        return x * y, y * scale


class OursTwo(Two, nn.Module):
    pass


class TheirsTwo(Two, torch.nn.Module):
    pass


X, Y = np.array([[1.0, 2.0]], np.float32), np.array([[3.0, -4.0]], np.float32)


def run(engine, module, register, fixed=False, only=None):
    """What hooks saw, and the gradients of the leaves."""
    seen = []
    register(module, seen)
    x, y = (engine.tensor(a) for a in (X, Y))
    y.requires_grad_()
    if not fixed:
        x.requires_grad_()
    a, b = module(x, y, scale=2.0)
    (a * 3).sum().backward() if only else (a * 3 + b).sum().backward()
    return seen, plain([x.grad, y.grad])


def watching(module, seen):
    module.register_full_backward_hook(
        lambda m, gi, go: seen.append(("after", m is module, plain(gi), plain(go)))
    )
    module.register_full_backward_pre_hook(
        lambda m, go: seen.append(("before", m is module, plain(go)))
    )


def replacing(module, seen):
    module.register_full_backward_pre_hook(lambda m, go: (go[0] * 2, go[1]))
    module.register_full_backward_pre_hook(lambda m, go: (go[0] + 1, go[1]), prepend=True)
    module.register_full_backward_hook(lambda m, gi, go: (gi[0] * 10, -gi[1]))
    module.register_full_backward_hook(lambda m, gi, go: seen.append((plain(gi), plain(go))))


@pytest.mark.parametrize("register", [watching, replacing])
def test_hooks_see_and_replace_what_torchs_do(register):
    ours = run(fsdpc, OursTwo(), register)
    assert ours == run(torch, TheirsTwo(), register) and ours[0]


def test_an_argument_without_a_gradient():
    seen, grads = run(fsdpc, OursTwo(), watching, fixed=True)
    theirs = run(torch, TheirsTwo(), watching, fixed=True)
    assert grads == theirs[1] and seen[0] == theirs[0][0] and len(seen) == 2
    assert seen[1][2] == [None, theirs[0][1][2][1]]  # torch gives zeros where there is no gradient


def test_an_output_that_nothing_uses():
    seen, grads = run(fsdpc, OursTwo(), watching, only=True)
    theirs = run(torch, TheirsTwo(), watching, only=True)
    assert grads == theirs[1] and seen[0][2][0] == theirs[0][0][2][0]
    assert seen[0][2][1] is None


def linear(engine):
    layer = engine.nn.Linear(2, 3)
    for p, values in ((layer.weight, np.arange(6.0).reshape(3, 2)), (layer.bias, np.ones(3))):
        with engine.no_grad():
            p.copy_(engine.tensor(values.astype(np.float32)))
    return layer


@pytest.mark.filterwarnings("ignore:Full backward hook")  # torch's
def test_a_module_whose_input_needs_no_gradient():
    found = []
    for engine in (fsdpc, torch):
        layer, seen = linear(engine), []
        layer.register_full_backward_hook(lambda m, gi, go: seen.append((plain(gi), plain(go))))  # noqa: B023
        layer.register_full_backward_pre_hook(lambda m, go: (2 * go[0],))
        layer(engine.tensor(X)).sum().backward()
        found.append((seen, plain([layer.weight.grad, layer.bias.grad])))
    assert found[0] == found[1] and found[0][0][0][0] == [None]
    layer = linear(fsdpc)
    layer.register_full_backward_hook(lambda m, gi, go: (go[0],))
    with pytest.raises(RuntimeError, match="none of whose arguments requires one"):
        layer(fsdpc.tensor(X)).sum().backward()


def test_a_removed_hook_and_forwards_without_gradients():
    layer, seen = linear(fsdpc), []
    handle = layer.register_full_backward_hook(lambda m, gi, go: seen.append(1))
    with fsdpc.no_grad():
        assert not layer(fsdpc.tensor(X)).requires_grad
    x = fsdpc.tensor(X, requires_grad=True)
    y = layer(x)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    handle.remove()
    layer(x).sum().backward()
    assert seen == [1, 1]


def test_a_checkpointed_module_calls_them_once():
    layer, seen = linear(fsdpc), []
    layer.register_full_backward_pre_hook(lambda m, go: (2 * go[0],))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append(plain(gi)))
    x = fsdpc.tensor(X, requires_grad=True)
    layer(x).sum().backward()
    want = plain([x.grad, layer.weight.grad])
    x.grad = layer.weight.grad = None
    F.checkpoint(layer, x).sum().backward()
    assert plain([x.grad, layer.weight.grad]) == want and len(seen) == 2 and seen[0] == seen[1]


def test_what_is_refused():
    class Named(nn.Module):
        def forward(self, x):
            return {"y": x}

    x = fsdpc.tensor(X, requires_grad=True)
    named = Named()
    named.register_full_backward_hook(lambda m, gi, go: None)
    with pytest.raises(TypeError, match="Named has backward hooks.*not dict"):
        named(x)
    layer = linear(fsdpc)
    handle = layer.register_full_backward_hook(lambda m, gi, go: (gi[0], gi[0]))
    with pytest.raises(RuntimeError, match="returned 2 gradients for the 1 of grad_input"):
        layer(x).sum().backward()
    handle.remove()
    layer.register_full_backward_pre_hook(lambda m, go: go[0].sum())
    with pytest.raises(ValueError, match="shape"):
        layer(x).sum().backward()

    class Leaking(nn.Module):
        def forward(self, x):
            self.kept = x * 2
            return x * 3

    leaking = Leaking()
    leaking.register_full_backward_hook(lambda m, gi, go: None)
    leaking(x)
    with pytest.raises(RuntimeError, match="gradients reached the arguments of Leaking before"):
        leaking.kept.sum().backward()
