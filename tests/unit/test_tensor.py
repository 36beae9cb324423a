"""The Tensor type: making, reading, sharing memory, changing in place, errors."""

from __future__ import annotations

import copy
import gc
import importlib.util
import math
import pickle
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from tests.needs import need_torch

import fsdpc
from fsdpc import _core, nn
from fsdpc import functional as F
from fsdpc._core import Tensor

DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64", "uint8", "bool")
NUMPY = [d for d in DTYPES if d != "bfloat16"]


def test_dtypes_are_single_objects():
    for name in DTYPES:
        dtype = _core.as_dtype(name)
        assert dtype is _core.as_dtype(dtype) and dtype.name == name
        assert dtype is getattr(_core, "bool_" if name == "bool" else name)
        assert pickle.loads(pickle.dumps(dtype)) is dtype and copy.deepcopy(dtype) is dtype
    for name in NUMPY:
        assert _core.as_dtype(np.dtype(name)) is _core.as_dtype(name)
        assert _core.as_dtype(name).itemsize == np.dtype(name).itemsize
    assert _core.as_dtype(np.float32) is _core.as_dtype(float) is _core.float32
    assert _core.as_dtype(int) is _core.int64 and _core.as_dtype(bool) is _core.bool_
    assert _core.bfloat16.is_floating_point and not _core.int64.is_floating_point
    assert repr(_core.bfloat16) == "fsdpc.bfloat16"
    with pytest.raises(TypeError, match="complex64"):
        _core.as_dtype("complex64")
    with pytest.raises(TypeError, match="not a dtype"):
        _core.as_dtype(3)
    with pytest.raises(TypeError):
        type(_core.float32)()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (3, 5), (1, 2, 3, 4, 5, 1, 1, 2)])
def test_attributes(shape, dtype):
    t = _core.ones(shape, dtype=dtype)
    assert t.shape == shape and t.ndim == t.dim() == len(shape) and t.size() == shape
    assert t.numel() == math.prod(shape) and t.nbytes == t.numel() * t.dtype.itemsize
    assert t.dtype.name == dtype and t.device == "cpu"
    assert t.is_leaf and not t.requires_grad and t.grad is None and t.grad_fn is None
    assert not t.is_deferred
    assert t.tolist() == np.ones(shape).astype(NUMPY[0] if dtype == "bfloat16" else dtype).tolist()
    if shape:
        assert len(t) == shape[0] and t.size(-1) == shape[-1]
    else:
        with pytest.raises(TypeError, match="len"):
            len(t)


def test_making():
    assert _core.zeros(2, 3).tolist() == [[0.0] * 3] * 2
    assert _core.zeros((2, 3)).shape == _core.zeros([2, 3]).shape == (2, 3)
    assert _core.full((2,), 2.5).tolist() == [2.5, 2.5]
    assert _core.full(2, 7, dtype="int32").tolist() == [7, 7]
    assert _core.full((), math.inf, dtype="bfloat16").item() == math.inf
    assert _core.empty(3, dtype="int64").shape == (3,)
    assert _core.arange(4).tolist() == [0, 1, 2, 3] and _core.arange(4).dtype is _core.int64
    assert _core.arange(1, 2, 0.25).tolist() == [1.0, 1.25, 1.5, 1.75]
    assert _core.arange(5, 0, -2).tolist() == [5, 3, 1] and _core.arange(3, 1).tolist() == []
    for bad in ((-1,), (2, -3)):
        with pytest.raises(ValueError, match="negative"):
            _core.zeros(*bad)
    with pytest.raises(ValueError, match="dimensions"):
        _core.zeros(*[1] * 9)
    with pytest.raises(ValueError, match="memory"):
        _core.zeros(2**40, 2**40)
    with pytest.raises(ValueError, match="step"):
        _core.arange(0, 3, 0)
    with pytest.raises(TypeError, match="cannot require grad"):
        _core.zeros(2, dtype="int64", requires_grad=True)
    with pytest.raises(TypeError, match="unexpected argument 'dtyp'"):
        _core.zeros(2, dtyp="int64")


def test_tensor_takes_lists_arrays_scalars_and_tensors():
    assert _core.tensor([1.0, 2]).dtype is _core.float32
    assert _core.tensor([1, 2]).dtype is _core.int64
    assert _core.tensor(True).dtype is _core.bool_
    assert _core.tensor(np.float64([1])).dtype is _core.float64
    assert _core.tensor(np.uint16([7])).dtype is _core.int64
    assert _core.tensor(3.5).item() == 3.5 and _core.tensor(np.float32(3.5)).shape == ()
    assert _core.tensor([1.5], dtype="bfloat16").dtype is _core.bfloat16
    assert _core.tensor([], dtype=_core.int32).shape == (0,)
    source = np.arange(6.0).reshape(2, 3)
    t = _core.tensor(source)
    source[:] = 0
    assert t.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    other = _core.tensor(t)
    other.fill_(0)
    assert t[0, 1].item() == 1.0
    for bad in ("text", [1 + 2j], [None], [[1], [1, 2]]):
        with pytest.raises((TypeError, ValueError)):
            _core.tensor(bad)


def test_random_numbers_depend_on_the_seed_alone():
    a, b = _core.randn(1000, seed=3), _core.randn(1000, seed=3)
    assert _core.array_equal(a, b) and not _core.array_equal(a, _core.randn(1000, seed=4))
    # 1000 draws: mean and deviation within five standard errors
    assert abs(a.numpy().mean()) < 5 / math.sqrt(1000) and abs(a.numpy().std() - 1) < 5 / 44
    _core.manual_seed(5)
    x, y = _core.randn(10), _core.randn(10)
    _core.manual_seed(5)
    assert _core.initial_seed() == 5 and _core.array_equal(_core.randn(10), x)
    assert _core.next_stream() == 1 and _core.next_stream() == 2
    assert not _core.array_equal(x, y)


def test_init_gives_any_slice_of_the_whole():
    whole = _core.init_(_core.empty(100), "normal", 0.0, 0.02, 7, 3)
    part = _core.init_(_core.empty(30), "normal", 0.0, 0.02, 7, 3, first=50)
    assert _core.array_equal(whole[50:80], part)
    uniform = _core.init_(_core.empty(1000), "uniform", -1, 2, 7, 3).numpy()
    assert -1 <= uniform.min() < -0.9 and 1.9 < uniform.max() < 2
    assert _core.init_(_core.empty(3), "constant", 4, 0, 0, 0).tolist() == [4.0] * 3
    with pytest.raises(ValueError, match="'xavier'"):
        _core.init_(_core.empty(3), "xavier", 0, 0, 0, 0)


def test_deferred():
    t = _core.empty_deferred((3, 4), dtype="bfloat16", requires_grad=True)
    assert t.is_deferred and t.shape == (3, 4) and t.dtype is _core.bfloat16 and t.requires_grad
    assert "deferred" in repr(t)
    for use in (lambda: t + 1, lambda: t.numpy(), lambda: t.sum(), t.tolist, lambda: t[0]):
        with pytest.raises((RuntimeError, BufferError), match="deferred"):
            use()
    huge = _core.empty_deferred((2**31, 2**20))
    assert huge.numel() == 2**51
    assert t.materialize_() is t and not t.is_deferred
    with pytest.raises(RuntimeError, match="no_grad"):
        t.zero_()
    assert _core.init_(t, "constant", 1, 0, 0, 0).float().sum().item() == 12.0


# ---- numbers, text ----


def test_item_and_conversions():
    for dtype in DTYPES:
        t = _core.ones(1, 1, dtype=dtype)
        assert t.item() == 1 and float(t) == 1.0 and int(t) == 1 and bool(t) is True
    assert isinstance(_core.ones((), dtype="int64").item(), int)
    assert not _core.zeros(())
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        _core.zeros(2).item()
    with pytest.raises(ValueError):
        bool(_core.zeros(2))


def test_format():
    t = _core.tensor(0.123456, dtype="float64")
    assert f"{t:.3f} {t}" == "0.123 0.123456" and f"{_core.tensor(3):>4d}" == "   3"
    assert f"{_core.tensor([1.0])}" == "tensor([1.], dtype=float32)"
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{_core.tensor([1.0, 2.0]):.3f}"


def test_repr():
    assert repr(_core.tensor([1.0, 2.5])) == "tensor([1. , 2.5], dtype=float32)"
    t = _core.tensor([1.0], dtype="bfloat16", requires_grad=True)
    assert repr(t) == "tensor([1.], dtype=bfloat16, requires_grad=True)"
    assert repr(_core.zeros(0, 3)) == "tensor([], shape=(0, 3), dtype=float32)"
    assert repr(_core.tensor(3)) == "tensor(3, dtype=int64)"
    assert len(repr(_core.zeros(1000, 1000))) < 2000


# ---- shared memory ----


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_numpy_shares_memory_both_ways(shape, dtype):
    array = np.ones(shape, dtype=dtype)
    t = _core.from_numpy(array)
    assert t.dtype.name == dtype and t.shape == shape
    back = t.numpy()
    assert back.dtype == array.dtype and back.shape == shape
    if array.size:
        back[...] = 0
        assert not array.any() and t.data_ptr == array.ctypes.data
    del array, t
    assert back.sum() == 0


def test_numpy_of_bfloat16():
    t = _core.tensor([1.0, -2.0], dtype="bfloat16")
    array = t.numpy()
    if importlib.util.find_spec("ml_dtypes"):
        assert array.dtype.name == "bfloat16" and array.ctypes.data == t.data_ptr
        assert _core.array_equal(_core.from_numpy(array), t)
    for values in (array, np.asarray(t), np.array(t), t.tolist()):
        assert np.asarray(values, np.float32).tolist() == [1.0, -2.0]
    assert t.bits().tolist() == [0x3F80, 0xC000] and t.bits().ctypes.data == t.data_ptr
    assert memoryview(t.bits()).format == "H"
    with pytest.raises(BufferError, match="bits"):
        memoryview(t)


def test_numpy_of_bfloat16_with_numpy_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    t = _core.tensor([[1.0, -2.0]], dtype="bfloat16", requires_grad=True)
    for array in (t.numpy(), np.asarray(t)):
        assert array.dtype == np.float32 and array.tolist() == [[1.0, -2.0]]
        assert not array.flags.writeable  # a copy: what is written would be lost
    assert t.bits().tolist() == [[0x3F80, 0xC000]]


def test_from_numpy_copies_what_it_cannot_share():
    array = np.arange(6.0).reshape(2, 3)
    for odd in (array.T, array[:, ::2], array[::-1]):
        assert _core.from_numpy(odd).tolist() == odd.tolist()
    array.flags.writeable = False
    t = _core.from_numpy(array)
    t.fill_(7)
    assert array[0, 1] == 1.0
    with pytest.raises(TypeError, match="astype"):
        _core.from_numpy(np.zeros(2, dtype=np.uint32))
    with pytest.raises(TypeError, match="astype"):
        _core.from_numpy(np.zeros(2, dtype=">f4"))
    with pytest.raises(TypeError, match="NumPy array"):
        _core.from_numpy([1, 2])


def test_array_protocol():
    t = _core.tensor([1.0, 2.0])
    assert np.asarray(t).tolist() == [1.0, 2.0] and np.asarray(t).ctypes.data == t.data_ptr
    assert np.asarray(t, dtype=np.float64).dtype == np.float64
    assert np.array(t).ctypes.data != t.data_ptr
    assert np.add(np.asarray(t), 1).tolist() == [2.0, 3.0]
    for sum_ in (np.ones(2) + t, t + np.ones(2)):  # the tensor's operators, NumPy's dtype
        assert isinstance(sum_, _core.Tensor) and sum_.dtype is _core.float64
        assert sum_.tolist() == [2.0, 3.0]
    assert (np.arange(2, dtype=np.float32) - t).dtype is _core.float32
    assert (np.array([1, 3]) < t).tolist() == [False, False]
    assert t[np.array([1, 0])].tolist() == [2.0, 1.0]
    assert t[np.array(1)].item() == 2
    with pytest.raises(TypeError, match="unsupported operand"):
        t + [1, 2]


def test_buffer_protocol():
    t = _core.tensor([[1, 2], [3, 4]], dtype="int32")
    view = memoryview(t)
    assert view.shape == (2, 2) and view.strides == (8, 4) and view.format == "i"
    assert not view.readonly and view.nbytes == 16
    view[1, 0] = 9
    assert t.tolist() == [[1, 2], [9, 4]]
    count = sys.getrefcount(t)
    view.release()
    assert sys.getrefcount(t) == count - 1


@pytest.mark.parametrize("dtype", NUMPY)
def test_dlpack_with_numpy(dtype):
    t = _core.ones(2, 3, dtype=dtype)
    array = np.from_dlpack(t)
    assert array.dtype == np.dtype(dtype) and array.ctypes.data == t.data_ptr
    source = np.arange(6).reshape(2, 3).astype(dtype)
    back = _core.from_dlpack(source)
    assert back.data_ptr == source.ctypes.data and back.tolist() == source.tolist()
    assert t.__dlpack_device__() == (1, 0)


def test_dlpack_lifetime_and_versions():
    t = _core.tensor([1.0, 2.0], dtype="bfloat16")
    for version in (None, (0, 8), (1, 0), (1, 1)):
        capsule = t.__dlpack__(max_version=version)
        name = "dltensor_versioned" if version and version >= (1, 0) else "dltensor"
        assert f'"{name}"' in repr(capsule)
        other = _core.from_dlpack(capsule)
        assert other.dtype is _core.bfloat16 and other.data_ptr == t.data_ptr
        with pytest.raises((ValueError, BufferError)):
            _core.from_dlpack(capsule)  # taken already
    count = sys.getrefcount(t)
    unused = t.__dlpack__()
    assert sys.getrefcount(t) == count + 1
    del unused
    assert sys.getrefcount(t) == count
    copied = _core.from_dlpack(t.__dlpack__(copy=True))
    assert copied.data_ptr != t.data_ptr and _core.array_equal(copied, t)
    keeps = _core.from_dlpack(_core.tensor([5.0]))
    gc.collect()
    assert keeps.tolist() == [5.0]
    strided = _core.from_dlpack(np.arange(6.0).reshape(2, 3).T)
    assert strided.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    with pytest.raises(BufferError, match="detach"):
        _core.ones(2, requires_grad=True).__dlpack__()


def test_dlpack_with_torch():
    torch = need_torch()
    for dtype in ("float32", "bfloat16", "float16", "int64", "bool"):
        t = _core.ones(2, 3, dtype=dtype)
        u = torch.from_dlpack(t)
        assert u.dtype is getattr(torch, dtype) and u.data_ptr() == t.data_ptr
        back = _core.from_dlpack(u)
        assert back.data_ptr == t.data_ptr and back.dtype is t.dtype


# ---- views, copies, changes in place ----


def test_detach_and_views_share_and_clone_does_not():
    t = _core.zeros(2, 3, requires_grad=True)
    assert t.detach().data_ptr == t.data_ptr and not t.detach().requires_grad
    assert t.reshape(3, 2).data_ptr == t.data_ptr
    assert t.clone().data_ptr != t.data_ptr
    assert t.contiguous() is t and t.float() is t and t.to("float32") is t


def test_copy_fill_zero_setitem():
    t = _core.zeros(2, 3)
    assert t.copy_([[1, 2, 3]]) is t and t.tolist() == [[1.0, 2.0, 3.0]] * 2
    assert t.copy_(_core.tensor([5], dtype="int64")).tolist() == [[5.0] * 3] * 2
    assert t.copy_(np.float64(2)).fill_(4).tolist() == [[4.0] * 3] * 2
    assert t.zero_().tolist() == [[0.0] * 3] * 2
    t[0] = 1
    t[:, 2] = [7, 8]
    t[1, 0] = _core.tensor(9.0)
    t[..., 1:1] = 3
    assert t.tolist() == [[1.0, 1.0, 7.0], [9.0, 0.0, 8.0]]
    assert _core.zeros(3, dtype="bfloat16").copy_([1, 2, 3]).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match=r"\(2,\) do not broadcast to shape \(2, 3\)"):
        t.copy_([1, 2])
    with pytest.raises(TypeError, match="fill_: a number"):
        t.fill_("x")
    with pytest.raises(TypeError, match="deleted"):
        del t[0]


def test_set_data():
    t = _core.zeros(2, requires_grad=True)
    t.set_data_(_core.tensor([1.0, 2.0], dtype="bfloat16"))
    assert t.dtype is _core.bfloat16 and t.tolist() == [1.0, 2.0] and t.requires_grad
    with pytest.raises(ValueError, match=r"shape \(3,\) given for a tensor of shape \(2,\)"):
        t.set_data_(_core.zeros(3))
    with pytest.raises(RuntimeError, match="leaf"):
        (t * 2).set_data_(_core.zeros(2))


def test_in_place_changes_of_what_requires_grad():
    t = _core.zeros(2, requires_grad=True)
    for change in (t.zero_, lambda: t.fill_(1), lambda: t.copy_([1, 2])):
        with pytest.raises(RuntimeError, match="no_grad"):
            change()
    with pytest.raises(RuntimeError, match="no_grad"):
        t[0] = 1
    _core.set_grad_enabled(False)
    try:
        t.fill_(3)
    finally:
        _core.set_grad_enabled(True)
    assert t.tolist() == [3.0, 3.0]


def test_deepcopy():
    t = _core.tensor([1.0, 2.0], requires_grad=True)
    c = copy.deepcopy(t)
    assert c.requires_grad and c.is_leaf and c.data_ptr != t.data_ptr and c.tolist() == [1.0, 2.0]
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(t * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pickle(dtype):
    t = _core.tensor([[0.5, 3], [1, 0]]).to(dtype)
    assert _core.array_equal(pickle.loads(pickle.dumps(t)), t)
    if t.dtype.is_floating_point:
        t.requires_grad = True
        assert pickle.loads(pickle.dumps(t)).requires_grad
        with pytest.raises(RuntimeError, match="detach"):
            pickle.dumps(t * 2)


# ---- as a Python type ----


class Named(Tensor):
    """A subclass with attributes."""


def test_subclasses():
    t = Named([1.0, 2.0], requires_grad=True)
    t.name = "weight"
    assert isinstance(t, Tensor) and t.requires_grad and t.name == "weight"
    assert type(t * 2) is Tensor and (t * 2).tolist() == [2.0, 4.0]
    shared = Named(t)
    assert shared.data_ptr == t.data_ptr
    (t * t).sum().backward()
    assert t.grad.tolist() == [2.0, 4.0]
    with pytest.raises(AttributeError):
        _core.zeros(1).name = "no __dict__"
    with pytest.raises(TypeError):
        Tensor()


def test_weak_references_and_memory_goes_back():
    gc.collect()
    t = _core.zeros(1000)
    alive = weakref.ref(t)
    before = _core.memory_stats()["activation_bytes"]
    del t
    gc.collect()
    assert alive() is None
    assert _core.memory_stats()["activation_bytes"] == before - 4032  # whole cache lines


def test_hashable_by_identity():
    a, b = _core.zeros(2), _core.zeros(2)
    assert len({a, b, a}) == 2 and {a: 1}[a] == 1 and a in [a, b]
    with pytest.raises(ValueError, match=r"shape \(2,\) is neither true nor false"):
        assert a in [b]
    assert _core.array_equal(a, b) and not _core.array_equal(a, _core.zeros(1, 2))
    assert not _core.array_equal(a, a.bfloat16())


def test_steady_state_asks_the_system_for_nothing():
    x, w = _core.randn(64, 64, seed=1), _core.randn(64, 64, seed=2, requires_grad=True)

    def step():
        w.grad = None
        ((x @ w) * 2).sum().backward()

    for _ in range(3):
        step()
    before = _core.memory_stats()["system_allocs"]
    for _ in range(5):
        step()
    assert _core.memory_stats()["system_allocs"] == before


def test_threads_setting():
    before = _core.num_threads()
    assert before >= 1
    for bad in (0, -1, 5000):
        with pytest.raises(ValueError, match=str(bad)):
            _core.set_num_threads(bad)
    with pytest.raises(TypeError):
        _core.set_num_threads("2")
    _core.set_num_threads(before)
    config = _core.runtime_config()
    assert config["threads"] == before and config["device"] == "cpu"


# ---- iteration, and NumPy's integers ----


def test_iteration_gives_rows() -> None:
    x = fsdpc.arange(6).reshape(3, 2)
    assert [row.tolist() for row in x] == [[0, 1], [2, 3], [4, 5]]
    a, b, c = x
    assert (a.tolist(), c.tolist()) == ([0, 1], [4, 5]) and b.shape == (2,)
    assert [(i, row.tolist()) for i, row in enumerate(x[:1])] == [(0, [0, 1])]
    assert list(fsdpc.zeros(0, 3)) == []
    assert [float(number) for number in fsdpc.tensor([0.5, 1.5])] == [0.5, 1.5]
    assert 3 in x and 9 not in x and 0.5 not in x
    for row in x:
        row += 1
    assert x.tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(TypeError, match="without dimensions"):
        iter(fsdpc.tensor(1.0))
    w = fsdpc.ones(2, 2).requires_grad_()
    sum((i + 1) * row.sum() for i, row in enumerate(w)).backward()
    assert w.grad.tolist() == [[1.0, 1.0], [2.0, 2.0]]


INTEGERS = {
    "shapes": lambda n, x, images: [
        fsdpc.zeros(n(2), n(3)),
        fsdpc.full((n(2),), 1.0),
        fsdpc.eye(n(2)),
        fsdpc.arange(n(1), n(7), n(2)),
        fsdpc.linspace(0, 1, n(3)),
    ],
    "index": lambda n, x, images: [x[n(1)], x[n(0) : n(2), n(-1)], x[:: n(2)]],
    "reshape": lambda n, x, images: [
        x.reshape(n(2), n(-1)),
        x.reshape((n(6),)),
        x.permute(n(1), n(0)),
        x[:1].expand(n(4), n(2)),
        x.transpose(n(0), n(-1)),
    ],
    "cut": lambda n, x, images: [*x.split(n(2)), *x.split([n(1), n(2)]), *x.chunk(n(2), n(1))],
    "repeated": lambda n, x, images: [
        x.repeat(n(2), n(1)),
        x.repeat_interleave(n(2), n(0)),
        x.roll(n(1), n(0)),
        x.flip(n(1)),
        F.pad(x, (n(1), n(2))),
    ],
    "joined": lambda n, x, images: [F.cat([x, x], n(1)), F.stack([x, x], n(-1)), x.tril(n(-1))],
    "reduced": lambda n, x, images: [
        x.sum(n(0)),
        x.mean((n(0), n(1))),
        x.var(n(0)),
        x.std(n(1)),
        x.amax(n(0)),
        x.amin((n(0), n(1))),
        x.max(n(1)).values,
        x.argmax(n(0)),
        x.cumsum(n(1)),
        x.softmax(n(0)),
        x.logsumexp(n(0)),
        x.any(n(1)),
        x.sort(n(0))[0],
        x.topk(n(1), n(0))[0],
        x.norm(n(2)),
    ],
    "by index": lambda n, x, images: [
        x.gather(n(0), fsdpc.tensor([[1, 0]])),
        x.index_select(n(1), fsdpc.tensor([1])),
        F.one_hot(fsdpc.tensor([1]), n(3)),
    ],
    "windows": lambda n, x, images: [
        nn.MaxPool2d(n(2), n(1))(images),
        nn.AvgPool2d((n(2), n(3)))(images),
        F.conv2d(images, images[:, :, :2, :2], stride=n(2), padding=n(1)),
    ],
    "modules": lambda n, x, images: [
        nn.Conv2d(n(1), n(2), n(3), padding=n(1))(images).sum() * 0,
        nn.Linear(n(2), n(4))(x) * 0,
        nn.LayerNorm(n(2))(x),
        nn.Embedding(n(3), n(2), n(1))(fsdpc.tensor([1])),
        nn.Flatten(n(0))(x),
        nn.GroupNorm(n(1), n(1))(images),
    ],
}


@pytest.mark.parametrize("what", INTEGERS)
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_are_integers(what: str, kind: type) -> None:
    def number(n: int) -> Any:
        return kind(n) if n >= 0 or kind is not np.uint8 else n

    inputs = fsdpc.arange(6).float().reshape(3, 2), fsdpc.ones(1, 1, 5, 5)
    pairs = zip(INTEGERS[what](number, *inputs), INTEGERS[what](int, *inputs), strict=True)
    for got, want in pairs:
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.tolist() == want.tolist()


def test_rows_are_no_sequence_of_tensors() -> None:
    x = fsdpc.ones(2, 2)
    for call in (lambda: F.cat(x), lambda: F.stack(x), lambda: F.custom(x, [x], lambda d: d)):
        with pytest.raises(TypeError, match="a sequence of tensors is needed, not one tensor"):
            call()


def test_one_ellipsis() -> None:
    x = fsdpc.zeros(2, 2)
    with pytest.raises(IndexError, match="one ellipsis"):
        x[..., ...]
    with pytest.raises(IndexError, match="one ellipsis"):
        x[..., ...] = 1
    with pytest.raises(IndexError, match="one ellipsis|single ellipsis"):
        x[..., ..., [0]]
