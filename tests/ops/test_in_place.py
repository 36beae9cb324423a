"""Writes in place, ``x += y`` and their gradients, beside torch's, on the same program of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fsdpc

Make = Callable[..., Any]  # of an array a tensor; of True behind it one that requires grad


def torch_tensor(values: Any, grad: bool = False) -> Any:
    return torch.tensor(values, requires_grad=grad)


def fsdpc_tensor(values: Any, grad: bool = False) -> Any:
    return fsdpc.tensor(values, requires_grad=grad)


def zeros(make: Make, *shape: int) -> Any:
    return make(np.zeros(shape, np.float32))


def outcome(program: Callable[..., Any], make: Make) -> list[Any]:
    """What a program returns, and the gradients of its two leaves under random weights."""
    w = make(np.float32([1.5, -2.0, 3.0]), True)
    v = make(np.float32([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), True)
    y = program(make, w, v)
    weights = np.random.default_rng(7).standard_normal(tuple(y.shape)).astype(np.float32)
    (y * make(weights)).sum().backward()
    return [y.detach().numpy(), *(None if p.grad is None else p.grad.numpy() for p in (w, v))]


def same(program: Callable[..., Any]) -> None:
    for ours, theirs in zip(
        outcome(program, fsdpc_tensor), outcome(program, torch_tensor), strict=True
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)


# ---- values that require grad ----


def rows(make: Make, w: Any, v: Any) -> Any:
    x = zeros(make, 5, 3)
    x[0:1] = w * 2
    x[1] = w
    x[2:4] = v * w
    x[-1] = 7
    return x


def columns_and_steps(make: Make, w: Any, v: Any) -> Any:
    x = zeros(make, 5, 3)
    x[:, 1] = w[0]
    x[::2] = w
    x[1:3, 1:] = v[:, :2]
    x[..., 0] = v[0, 0]
    x[None, 0] = w
    return x


def over_and_over(make: Make, w: Any, v: Any) -> Any:
    x = v * w
    x[0] = w * w
    x[0] = w
    x[1, 1] = 0
    x[0:0] = w
    return x


def numbers(make: Make, w: Any, v: Any) -> Any:
    """Written over, what was there before has no gradient."""
    x, y, z = v * w, v * w, v * w
    x.zero_()
    y.fill_(2)
    z[0] = 3.0
    return x + y + z


def masks(make: Make, w: Any, v: Any) -> Any:
    x, y, z = zeros(make, 3), w * 2, v * 1
    x[make([True, False, True])] = w[:2]
    y[make([True, False, True])] = 7.0
    z[z > 2] = w[0]
    return x * y + z


def arrays(make: Make, w: Any, v: Any) -> Any:
    x = zeros(make, 4, 3)
    x[make([2, 0])] = v * w
    x[make([1]), make([2])] = w[1]
    y = v * w
    y[make([1])] = w
    return x[:2] * y


def copies(make: Make, w: Any, v: Any) -> Any:
    x, y, wide = zeros(make, 2, 3), v * w, make(np.zeros((2, 3)))
    x.copy_(w)
    y.copy_(w)
    wide.copy_(v)
    return x * y * (wide * 1)


def rows_of_itself(make: Make, w: Any, v: Any) -> Any:
    x = v * w
    x[0] = x[1]
    x[1] = x[0] * 2
    x[1] = x[0]
    return x


def a_loop(make: Make, w: Any, v: Any) -> Any:
    x, state = zeros(make, 6, 3), w
    for i in range(6):
        state = state * w
        x[i] = state
    return x


def leading_ones(make: Make, w: Any, v: Any) -> Any:
    x = zeros(make, 3)
    x[...] = w.reshape(1, 1, 3)
    return x


# ---- x += y ----


def every_operator(make: Make, w: Any, v: Any) -> Any:
    x = v * 1
    x += w
    x *= w
    x -= v
    x /= w
    x **= 2
    x += 1
    x /= 3
    return x


def into_what_had_no_gradient(make: Make, w: Any, v: Any) -> Any:
    x = zeros(make, 2, 3)
    y = x
    x += w
    x *= x + 1
    return y * x


def rows_in_place(make: Make, w: Any, v: Any) -> Any:
    x = zeros(make, 2, 3) + 1
    x[0] += w
    x[1] *= w * w
    x[:, 1] += w[0]
    y = v * w
    y[0] += w
    y[1] *= w
    y[1] -= 1
    return x * y


def views_in_place(make: Make, w: Any, v: Any) -> Any:
    x, y = v * w, zeros(make, 2, 3)
    row = x[0]
    row += w
    row *= w
    part = row * w
    del row
    y[1] = part
    for i in range(2):
        row = y[i]
        row += w
        row[1] = part[0]
        del row
    return x * y


def other_shapes_in_place(make: Make, w: Any, v: Any) -> Any:
    x, y = zeros(make, 2, 3), v * w
    x.reshape(-1)[1:4] = w
    x.view(3, 2)[:, 1] += w
    flat = y.flatten()
    flat *= 2
    flat[0] = w[2]
    part = flat * 3
    del flat
    y.unsqueeze(0)[0, :, 1] = w[:2]
    return x * y + part.reshape(2, 3)


def before(make: Make, x: Any) -> Any:
    """What overlaps the written memory: ours reads it first, torch refuses it."""
    return x.clone() if make is torch_tensor else x


def an_operand_of_the_same_memory(make: Make, w: Any, v: Any) -> Any:
    y = v * w
    y[1] += y[0]
    y[0] -= y[1]
    y[0] += y[0]
    y += before(make, y[1])
    y[:, 1] += y[:, 0]
    row = y[0]
    y[1] += row
    row += y[1]
    z = y + row * 1.0  # both names have the new history
    del row
    y[0, 1:] += before(make, y[0, :2])
    y[0].copy_(y[1])
    flat = y.reshape(6)
    flat[:3] += flat[3:]
    y[1] = flat[:3]
    flat += y.reshape(6)
    return z * y + flat.reshape(2, 3)


def an_operand_that_keeps_its_history(make: Make, w: Any, v: Any) -> Any:
    y = v * w
    upper = y[0]
    y[1] += upper
    z = y + upper * 2.0
    y += before(make, upper)
    z = z * w + y + upper * 3.0
    del upper
    constant = y[0].detach()
    y[1] += constant
    return z * y * constant


def a_base_without_a_name(make: Make, w: Any, v: Any) -> Any:
    y = (v * w).reshape(3, 2)
    y[0] += 1
    y[1] += y[0]
    y += w[0]
    z = (v * w)[0:2].reshape(-1).reshape(3, 2)
    z[0] = w[:2]
    z[2] *= w[2]
    x = v * 1
    x = x.reshape(6)
    x = x.reshape(3, 2)
    x[1] += y[1]
    x[0][1] += w[0]
    x[2][0:1][0] = w[1]
    return x * y + z


def views_of_views(make: Make, w: Any, v: Any) -> Any:
    x = zeros(make, 2, 2, 3)
    half = x[1]
    row = half[0]
    part = row[1:]
    part += w[:2]
    z = x[0] + half * 2.0 + part[0] + row * 3.0
    del part
    row += half[1] + 3
    z = z * z + half + row * 4.0
    del row
    half[1] = z[0] * w
    half[0][0:2] += half[1][1:3]
    return (x * w).sum(0) + half * z


def lower_precision(make: Make, w: Any, v: Any) -> Any:
    half = "bfloat16" if make is fsdpc_tensor else torch.bfloat16
    x = make(np.ones(3, np.float32)).to(half)
    x += w
    return x * 1.0 * w


def under_no_grad(make: Make, w: Any, v: Any) -> Any:
    library = fsdpc if make is fsdpc_tensor else torch
    with library.no_grad():
        w += 1
        w[0] *= 2
        v -= w
        v /= 2
        w[make([True, False, False])] = 9.0
    return v * w


PROGRAMS = [
    rows, columns_and_steps, over_and_over, numbers, masks, arrays, copies, rows_of_itself, a_loop,
    leading_ones, every_operator, into_what_had_no_gradient, rows_in_place, views_in_place,
    other_shapes_in_place, an_operand_of_the_same_memory, an_operand_that_keeps_its_history,
    a_base_without_a_name, views_of_views, lower_precision, under_no_grad,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_go_through_writes(program: Callable[..., Any]) -> None:
    same(program)


# ---- what is refused ----


def leaf(write: Callable[[Any], Any], match: str = "leaf that requires grad") -> None:
    w = fsdpc.ones(2, 2).requires_grad_()
    with pytest.raises(RuntimeError, match=match):
        write(w)
    assert w.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_leaves_are_written_inside_no_grad_only() -> None:
    def in_place(w: Any) -> None:
        w += 1

    def rows_in_place(w: Any) -> None:
        w[0] += 1

    def view_in_place(w: Any) -> None:
        row = w[0]
        row.fill_(3)

    leaf(in_place, match=r"\+= changes a leaf .* no_grad")
    for write in (
        rows_in_place,
        view_in_place,
        lambda w: w.copy_(3),
        lambda w: w.zero_(),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.__setitem__(fsdpc.tensor([1]), 1.0),
        lambda w: w.__setitem__(w > 0, 1.0),
    ):
        leaf(write)


def test_memory_that_others_share_takes_no_gradient() -> None:
    """They would go on with their old history, without a word."""
    w = fsdpc.ones(3).requires_grad_()

    def row(x: Any) -> Any:
        kept = x[0]
        x[0] = w
        return kept

    def reshaped(x: Any) -> Any:
        kept = x.reshape(-1)
        x[0] = w
        return kept

    def detached(x: Any) -> None:
        d = x.detach()
        x[0] = w
        d[1] = 0

    def not_an_operand(x: Any) -> Any:
        kept = x[1]
        x[0] += kept * w
        return kept

    def below(x: Any) -> Any:
        half = x[0]
        kept = half[1]
        half += w
        return kept

    def leaf(x: Any) -> Any:
        kept = x[0].requires_grad_()
        x[0] += kept
        return kept

    for write in (row, reshaped, detached, not_an_operand, below, leaf):
        x = fsdpc.zeros(2, 3)
        with pytest.raises(RuntimeError, match="another tensor shares.*clone"):
            write(x)
        assert x.tolist() == fsdpc.zeros(2, 3).tolist()


def test_rows_of_a_leaf_that_was_frozen_since() -> None:
    p = fsdpc.ones(2, 3).requires_grad_()
    row = p[0]
    p.requires_grad = False
    row.fill_(3)
    assert p.tolist() == [[3.0] * 3, [1.0] * 3] and not p.requires_grad


def test_what_a_backward_needs_is_not_overwritten_in_silence() -> None:
    def program(make: Make, change: Callable[[Any], Any]) -> None:
        w, x = make(np.float32([1.0, 2.0]), True), make(np.float32([3.0, 4.0]), True) * 1
        z = x * w
        change(x)
        z.sum().backward()

    def add(x: Any) -> None:
        x += 1

    for change in (add, lambda x: x.zero_(), lambda x: x.__setitem__(0, 1.0)):
        for make in (torch_tensor, fsdpc_tensor):
            with pytest.raises(RuntimeError, match="in.?place"):
                program(make, change)


def test_a_result_may_be_changed_after_its_node_kept_it() -> None:
    """torch refuses the backward: the memory of exp's result, which that needs, is overwritten."""
    w = fsdpc.tensor([0.5, 1.0], requires_grad=True)
    x = w.exp()
    x += w
    x *= 2
    x.sum().backward()
    np.testing.assert_allclose(x.detach().numpy(), 2 * (np.exp([0.5, 1.0]) + [0.5, 1.0]), rtol=1e-6)
    np.testing.assert_allclose(w.grad.numpy(), 2 * (np.exp([0.5, 1.0]) + 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "operator", "error", "match"),
    [
        (lambda: fsdpc.ones(3), "x += fsdpc.ones(2, 3)", ValueError, r"\(2, 3\).*x = x \+ y"),
        (lambda: fsdpc.ones(2, 2), "x @= fsdpc.ones(2, 3)", ValueError, r"\(2, 3\).*x = x @ y"),
        (lambda: fsdpc.tensor([1, 2]), "x += 0.5", TypeError, r"float32.*int64.*x = x \+ y"),
        (lambda: fsdpc.tensor([1, 2]), "x /= 2", TypeError, r"float32.*int64.*x = x / y"),
        (lambda: fsdpc.tensor([1, 2]), "x += 'a'", TypeError, "unsupported operand"),
        (lambda: fsdpc.tensor([True]), "x &= fsdpc.tensor([1])", TypeError, "for tensors of bool"),
    ],
)
def test_results_that_do_not_fit(make: Any, operator: str, error: type, match: str) -> None:
    x = make()
    before = x.tolist()
    with pytest.raises(error, match=match):
        exec(operator, {"fsdpc": fsdpc}, {"x": x})
    assert x.tolist() == before


# ---- names and memory ----


def test_every_name_and_every_view_sees_it() -> None:
    x = fsdpc.zeros(2, 3)
    y, row, flat, array = x, x[1], x.reshape(-1), x.numpy()
    x += 1
    row *= 3
    x @= fsdpc.eye(3) * 2
    assert y is x
    want = [[2.0] * 3, [6.0] * 3]
    assert x.tolist() == array.tolist() == want
    assert row.tolist() == want[1] and flat.tolist() == sum(want, [])
    mask = same_mask = fsdpc.tensor([True, False, True])
    mask &= fsdpc.tensor([True, True, False])
    mask |= fsdpc.tensor([False, True, False])
    mask ^= fsdpc.tensor([True, True, True])
    assert same_mask.tolist() == [False, False, True]
    count = same_count = fsdpc.tensor([1, 2])
    count += 1
    count *= fsdpc.tensor([2, 3])
    assert same_count.tolist() == [4, 9] and same_count.dtype is fsdpc.int64


def test_memory_of_numpy_is_written_and_stays_alive() -> None:
    array = np.zeros(3, np.float32)
    x = fsdpc.from_numpy(array)
    w = fsdpc.ones(3).requires_grad_()
    x += 1
    x += w
    assert x.requires_grad and array.tolist() == [2.0] * 3
    y = fsdpc.ones(3)
    exported = memoryview(y)
    y += w
    assert y.requires_grad and exported.tolist() == [2.0] * 3
    del y
    assert exported.tolist() == [2.0] * 3


def test_training_by_hand() -> None:
    """An SGD and an average of weights, as they are written for torch."""

    def train(library: Any, model: Any, x: Any) -> list[Any]:
        average = [p.detach().clone() for p in model.parameters()]
        for _ in range(3):
            model(x).sum().backward()
            with library.no_grad():
                for p, e in zip(model.parameters(), average, strict=True):
                    p -= 0.1 * p.grad
                    p.grad *= 0.5
                    e *= 0.9
                    e += 0.1 * p
        return [*model.parameters(), *average, *(p.grad for p in model.parameters())]

    theirs = torch.nn.Linear(3, 2)
    ours = fsdpc.nn.Linear(3, 2)
    ours.load_state_dict({name: p.detach().numpy() for name, p in theirs.named_parameters()})
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    got = train(fsdpc, ours, fsdpc.tensor(x))
    want = train(torch, theirs, torch.tensor(x))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.detach().numpy(), b.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_overlapping_values_are_read_before() -> None:
    x = fsdpc.arange(6).float()
    x[1:] = x[:-1]
    assert x.tolist() == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    x[:-1] = x[1:]
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    y = fsdpc.arange(9).float().reshape(3, 3)
    y[:, 0] = y[1]
    y[:] = y[0]
    assert y.tolist() == [[3.0, 1.0, 2.0]] * 3


def test_broadcasts_as_numpy() -> None:
    for index in (0, slice(None), ..., (slice(None), 1), (0, slice(1, 2)), slice(0, 0)):
        for shape in ((), (1,), (1, 1), (1, 3), (1, 1, 3), (1, 2, 3), (2, 1), (1, 2, 1)):
            x, ours = np.zeros((2, 3), np.float32), fsdpc.zeros(2, 3)
            value = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
            try:
                x[index] = value
            except ValueError:
                with pytest.raises(ValueError, match="do not broadcast"):
                    ours[index] = fsdpc.tensor(value)
            else:
                ours[index] = fsdpc.tensor(value)
                assert ours.tolist() == x.tolist(), (index, shape)


@pytest.mark.parametrize("export", [lambda x: x.numpy(), lambda x: np.from_dlpack(x)])
def test_memory_that_others_see_stays_where_it_is(export: Any) -> None:
    """A recorded ``+=`` writes it, and does not leave it to the next tensor."""
    x, w = fsdpc.zeros((1000,)), fsdpc.ones(())
    w.requires_grad = True
    seen = export(x)
    x += w
    others = [fsdpc.full((1000,), 7.0) for _ in range(20)]
    assert (seen == 1).all() and len(others) == 20
