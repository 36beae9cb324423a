"""The tape from Python: backward, hooks, boundaries, recomputation, custom backwards."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import fsdpc
from fsdpc import _core
from fsdpc import functional as F


def leaf(*values, dtype="float32"):
    return _core.tensor(list(values), dtype=dtype, requires_grad=True)


# ---- leaves, modes ----


def test_leaves_and_nodes():
    x = leaf(1.0, 2.0)
    y = x * 2
    assert x.is_leaf and not y.is_leaf and y.requires_grad and y.grad_fn == "mul_scalar"
    assert x.grad_fn is None and y.grad is None
    assert not (_core.zeros(2) * 2).requires_grad
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0] and not x.grad.requires_grad


def test_requires_grad_can_change_on_leaves_only():
    x = leaf(1.0)
    x.requires_grad = False
    assert not (x * 2).requires_grad
    assert x.requires_grad_() is x and x.requires_grad
    with pytest.raises(RuntimeError, match="leaf"):
        (x * 2).requires_grad = False
    with pytest.raises(TypeError, match="cannot require grad"):
        _core.tensor([1]).requires_grad = True


def test_no_grad_and_enable_grad():
    x = leaf(1.0)
    with fsdpc.no_grad():
        assert not _core.is_grad_enabled() and not (x * 2).requires_grad
        with fsdpc.enable_grad():
            assert (x * 2).requires_grad
        assert not _core.is_grad_enabled()
    assert _core.is_grad_enabled()

    @fsdpc.no_grad()
    def frozen():
        return x * 2

    assert not frozen().requires_grad and _core.is_grad_enabled()
    with pytest.raises(ValueError), fsdpc.no_grad():
        raise ValueError
    assert _core.is_grad_enabled()


def test_detach_cuts_the_graph():
    x = leaf(3.0)
    (x * x.detach()).sum().backward()
    assert x.grad.item() == 3.0


def test_grad_can_be_set_and_checked():
    x = leaf(1.0, 2.0)
    x.grad = _core.tensor([5.0, 6.0])
    (x * 2).sum().backward()
    assert x.grad.tolist() == [7.0, 8.0]
    x.grad = None
    assert x.grad is None
    with pytest.raises(ValueError, match=r"shape \(3,\).*shape \(2,\)"):
        x.grad = _core.zeros(3)
    with pytest.raises(ValueError, match="float64"):
        x.grad = _core.zeros(2, dtype="float64")
    with pytest.raises(TypeError):
        x.grad = [1, 2]


# ---- backward ----


def test_backward_needs_a_scalar_or_a_gradient():
    x = leaf(1.0, 2.0)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        (x * 2).backward()
    (x * 2).backward(_core.tensor([1.0, 10.0]))
    assert x.grad.tolist() == [2.0, 20.0]
    with pytest.raises(ValueError, match=r"shape \(3,\).*shape \(2,\)"):
        (x * 2).backward(_core.zeros(3))
    with pytest.raises(ValueError, match="bfloat16"):
        (x * 2).backward(_core.zeros(2, dtype="bfloat16"))
    with pytest.raises(RuntimeError, match="does not require grad"):
        _core.zeros(()).backward()


def test_backward_of_a_leaf():
    x = _core.tensor(3.0, requires_grad=True)
    x.backward()
    x.backward()
    assert x.grad.item() == 2.0


def test_the_given_gradient_is_not_aliased():
    x, gradient = leaf(1.0, 2.0), _core.tensor([1.0, 1.0])
    y = x.clone()
    y.backward(gradient, retain_graph=True)
    y.backward(gradient)
    assert x.grad.tolist() == [2.0, 2.0] and gradient.tolist() == [1.0, 1.0]


def test_two_leaves_never_share_a_gradient():
    a, b = leaf(1.0), leaf(2.0)
    (a + b).backward(_core.tensor([1.0]))
    a.grad.fill_(7)
    assert b.grad.item() == 1.0


def test_a_second_backward_needs_retain_graph():
    x = leaf(2.0)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.item() == 8.0
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.backward()
    assert x.grad.item() == 8.0


def test_saved_tensors_changed_in_place_are_noticed():
    x, c = leaf(2.0), _core.tensor([3.0])
    y = x * c
    c.fill_(4)
    with pytest.raises(RuntimeError, match="'mul' needs.*changed in place"):
        y.sum().backward()
    assert x.grad is None
    z = F.exp(x)
    with fsdpc.no_grad():
        z.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_after_a_failed_backward_the_graph_starts_clean():
    x = leaf(2.0)
    y = x * 3

    def fail(gradient):
        raise KeyError("mine")

    handle = y.register_hook(fail)
    z = (y * 5).sum()
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            z.backward(retain_graph=True)
    handle.remove()
    z.backward()
    assert x.grad.item() == 15.0
    assert not _core.in_backward()


def test_several_roots_at_once():
    x = leaf(1.0, 2.0)
    y = x * 2
    _core.backward([y.sum(), (y * y).sum()])
    assert x.grad.tolist() == [2 + 8.0, 2 + 16.0]
    with pytest.raises(ValueError, match="1 tensors and 2 gradients"):
        _core.backward([(x * 2).sum()], [None, None])


def test_a_diamond_runs_every_node_once():
    x = leaf(3.0)
    runs = []
    y = _core.boundary(x * 1, lambda: runs.append(1))
    ((y * 2) + (y * 3) + y * y).sum().backward()
    assert x.grad.item() == 2 + 3 + 6 and runs == [1]


def test_gradients_that_alias_are_added_rightly():
    x = leaf(1.0, 2.0)
    y = x * 1
    z = y + y  # both edges are given the same tensor
    (z + y).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_long_chains_do_not_exhaust_the_stack():
    x = leaf(1.0)
    y = x
    for _ in range(200_000):
        y = y + 1
    y.sum().backward()
    assert x.grad.item() == 1.0
    y = F.exp(x * 0)
    for _ in range(100_000):
        y = y * y  # keeps its inputs
    del y


def test_graphs_are_freed():
    gc.collect()
    before = _core.memory_stats()["activation_bytes"]
    x = leaf(*range(1000))
    y = F.exp(x * 2)
    loss = (y * y).sum()
    del y
    loss.backward()
    x.grad = None
    del loss, x
    gc.collect()
    assert _core.memory_stats()["activation_bytes"] == before


def test_backward_in_another_thread_and_not_in_two():
    x = leaf(1.0)
    y = (x * 2).sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert x.grad.item() == 2.0

    errors = []

    def intrude(gradient):
        def run():
            try:
                (x * 1).sum().backward()
            except RuntimeError as error:
                errors.append(str(error))

        other = threading.Thread(target=run)
        other.start()
        other.join()

    z = x * 3
    z.register_hook(intrude)
    z.sum().backward()
    assert len(errors) == 1 and "another thread" in errors[0]


def test_operations_run_in_several_threads():
    w = [_core.randn(200, 200, seed=i, requires_grad=True) for i in range(4)]
    want = [(a @ a).sum().item() for a in w]
    got = [None] * 4

    def run(i):
        for _ in range(5):
            got[i] = (w[i] @ w[i]).sum().item()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want


# ---- hooks ----


def test_hooks_see_and_replace_gradients():
    x = leaf(1.0, 2.0)
    y = x * 2
    seen = []
    y.register_hook(lambda g: seen.append(g.tolist()))
    y.register_hook(lambda g: g * 10)
    (y * 3 + y).sum().backward()
    assert seen == [[4.0, 4.0]] and x.grad.tolist() == [80.0, 80.0]


def test_leaf_hooks_run_once_on_the_sum():
    x = leaf(1.0)
    seen = []
    handle = x.register_hook(lambda g: (seen.append(g.item()), g * 2)[1])
    (x * 2 + x * 3 + F.exp(x * 0)).sum().backward()
    assert seen == [5.0] and x.grad.item() == 10.0
    (x * 1).sum().backward()
    assert seen == [5.0, 1.0] and x.grad.item() == 12.0
    handle.remove()
    handle.remove()
    (x * 1).sum().backward()
    assert seen == [5.0, 1.0] and x.grad.item() == 13.0


def test_leaf_hooks_of_direct_targets():
    w = _core.ones(2, 3, requires_grad=True)
    seen = []
    w.register_hook(lambda g: seen.append(g.tolist()))
    x = _core.ones(4, 3)
    (F.linear(x, w) + F.linear(x, w)).sum().backward()
    assert seen == [[[8.0] * 3] * 2] and w.grad.tolist() == [[8.0] * 3] * 2


def test_a_leaf_hook_when_the_leaf_is_the_root_or_not_reached():
    x, y = _core.tensor(1.0, requires_grad=True), leaf(1.0)
    seen = []
    x.register_hook(lambda g: seen.append(g.item()))
    y.register_hook(lambda g: seen.append("unreached"))
    x.backward()
    assert seen == [1.0]


def test_hook_errors():
    x = leaf(1.0)
    x.register_hook(lambda g: _core.zeros(2))
    with pytest.raises(ValueError, match=r"hook returned shape \(2,\)"):
        (x * 1).sum().backward()
    with pytest.raises(RuntimeError, match="requires grad"):
        _core.zeros(1).register_hook(print)
    with pytest.raises(TypeError, match="cannot be called"):
        x.register_hook(3)
    y = leaf(1.0)
    y.register_hook(lambda g: "text")
    with pytest.raises(TypeError, match="Tensor"):
        (y * 1).sum().backward()


def test_a_hook_may_remove_itself():
    x = leaf(1.0)
    runs = []
    handle = x.register_hook(lambda g: (runs.append(1), handle.remove())[0])
    for _ in range(2):
        (x * 1).sum().backward()
    assert runs == [1] and x.grad.item() == 2.0


def test_a_hook_that_refers_to_its_tensor_is_collected():
    class Owner:
        pass

    owner, x = Owner(), leaf(1.0)
    owner.x = x
    x.register_hook(lambda g, owner=owner: None)
    alive = weakref.ref(owner)
    del owner, x
    gc.collect()
    assert alive() is None


# ---- boundaries ----


def test_boundaries_mark_the_begin_and_end_of_a_backward():
    order = []
    x = leaf(1.0)
    a = _core.boundary(x, lambda: order.append("end"))
    b = F.exp(a)
    b.register_hook(lambda g: order.append("inside"))
    c = _core.boundary(b, lambda: order.append("begin"))
    assert c.tolist() == b.tolist() and c.data_ptr == b.data_ptr
    (c * 2).sum().backward()
    assert order == ["begin", "inside", "end"]


def test_boundary_errors_and_inactive_boundaries():
    x = _core.zeros(2)
    assert not _core.boundary(x, print).requires_grad

    def fail():
        raise LookupError("from the boundary")

    y = _core.boundary(leaf(1.0), fail)
    with pytest.raises(LookupError, match="from the boundary"):
        y.sum().backward()
    with pytest.raises(TypeError, match="cannot be called"):
        _core.boundary(x, 3)


# ---- checkpoint ----


def _block(x, w):
    return F.dropout(F.gelu(F.linear(x, w)), 0.3) + x


def _mlp(x, w):
    return F.linear(F.linear_gelu(x, w), w) + x


@pytest.mark.parametrize("block", [_block, _mlp])
def test_checkpoint_gives_the_same_bits(block):
    results = []
    for use in (False, True):
        _core.manual_seed(3)
        w = [_core.randn(16, 16, seed=i, requires_grad=True) for i in range(3)]
        x = _core.randn(8, 16, seed=9, requires_grad=True)
        y = x
        for weight in w:
            y = _core.checkpoint(block, y, weight) if use else block(y, weight)
        y.sum().backward()
        results.append([y, x.grad, *(weight.grad for weight in w)])
        results[-1].append(_core.tensor(_core.next_stream()))
    assert all(_core.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_checkpoint_reaches_parameters_without_a_wanted_argument():
    w = leaf(2.0)
    x = _core.tensor([5.0])
    y = _core.checkpoint(lambda v: v * w, x)
    assert y.requires_grad and y.grad_fn == "custom"
    y.sum().backward()
    assert w.grad.item() == 5.0


def test_checkpoint_of_several_outputs_keywords_and_constants():
    a, b = leaf(2.0), leaf(3.0)
    calls = []

    def fn(x, factor, *, y):
        calls.append(_core.is_grad_enabled())
        return x * y, "text", x * factor, _core.tensor([7])

    p, text, q, ids = _core.checkpoint(fn, a, 4, y=b)
    assert text == "text" and ids.tolist() == [7] and not ids.requires_grad
    (p + 10 * q).sum().backward()
    assert a.grad.item() == 43.0 and b.grad.item() == 2.0
    assert calls == [False, True]
    p2, _, _, _ = _core.checkpoint(fn, a, 4, y=b)
    p2.sum().backward()  # the other output has no gradient
    assert a.grad.item() == 46.0


def test_checkpoint_nested_and_in_no_grad():
    x = leaf(0.5)
    inner = lambda v: F.tanh(v * 2)  # noqa: E731
    y = _core.checkpoint(lambda v: _core.checkpoint(inner, v) * v, x)
    y.sum().backward()
    t = np.tanh(1.0)
    assert x.grad.item() == pytest.approx(t + 0.5 * 2 * (1 - t * t), rel=1e-5)
    with fsdpc.no_grad():
        assert not _core.checkpoint(inner, x).requires_grad


def test_checkpoint_errors():
    x = leaf(1.0)
    with pytest.raises(TypeError, match="must return a tensor"):
        _core.checkpoint(lambda v: 3, x)
    with pytest.raises(TypeError, match="callable"):
        _core.checkpoint(3)
    with pytest.raises(ZeroDivisionError):
        _core.checkpoint(lambda v: 1 / 0, x)
    assert _core.is_grad_enabled()
    runs = []

    def unsteady(v):
        runs.append(1)
        return (v, v) if len(runs) == 1 else (v,)

    y, _ = _core.checkpoint(unsteady, x)
    with pytest.raises(RuntimeError, match="2 tensors at first and 1"):
        y.sum().backward()
    y = _core.checkpoint(lambda v: v * 2 if runs.append(1) or len(runs) < 4 else 1 / 0, x)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
        y.sum().backward()
    assert _core.is_grad_enabled() and not _core.in_backward()


def test_checkpoint_keeps_less():
    def chain(v):
        for _ in range(20):
            v = F.exp(v * 0.01)
        return v

    held = []
    for use in (False, True):
        x = _core.zeros(10_000, requires_grad=True)
        start = _core.memory_stats()["activation_bytes"]
        y = _core.checkpoint(chain, x) if use else chain(x)
        held.append(_core.memory_stats()["activation_bytes"] - start)
        y.sum().backward()
        assert x.grad is not None
    assert held[1] < held[0] / 10


def test_hooks_of_leaves_and_checkpoints():
    w, seen = leaf(2.0), []
    w.register_hook(lambda g: seen.append(g.item()))
    x = leaf(3.0)
    (w * _core.checkpoint(lambda v: v * w, x)).sum().backward()
    assert w.grad.item() == 12.0 and x.grad.item() == 4.0
    assert sum(seen) == 12.0


# ---- custom ----


def test_custom_backward():
    x, y = leaf(2.0), leaf(5.0)
    with fsdpc.no_grad():
        product, total = x * y, x + y
    calls = []

    def backward(dproduct, dtotal):
        calls.append((dproduct is None, dtotal is None))
        zero = _core.zeros(1)
        p, t = dproduct or zero, dtotal or zero
        return p * y.detach() + t, p * x.detach() + t

    product, total = _core.custom([x, y], [product, total], backward)
    (product * 10).sum().backward()
    assert x.grad.item() == 50.0 and y.grad.item() == 20.0 and calls == [(False, True)]


def test_custom_backward_errors():
    x = leaf(2.0)
    for returned, error, text in [
        (lambda d: _core.zeros(2), ValueError, r"input 0 has shape \(2,\)"),
        (lambda d: (d, d), ValueError, "2 gradients for 1 inputs"),
        (lambda d: 3, TypeError, "sequence"),
        (lambda d: 1 / 0, ZeroDivisionError, "division"),
    ]:
        (y,) = _core.custom([x], [x.detach() * 2], returned)
        with pytest.raises(error, match=text):
            y.sum().backward()
    (y,) = _core.custom([x], [x.detach() * 2], lambda d: None)
    y.sum().backward()
    assert x.grad is None
    (z,) = _core.custom([_core.zeros(1)], [_core.ones(1)], lambda d: d)
    assert not z.requires_grad
