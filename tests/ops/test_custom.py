"""custom(): docs/custom.md is true, its script runs, and its kernels in C build and train."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import _core, nn
from fsdpc import functional as F

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "custom.md"
EXAMPLE = ROOT / "examples" / "custom_op"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def script() -> tuple[dict[str, Any], str]:
    """Run the script of the page: its names, and what it printed."""
    names: dict[str, Any] = {"__name__": "page"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(blocks("python")[0], str(PAGE), "exec"), names)
    return names, printed.getvalue()


def leaf(*values: float, dtype: str = "float32") -> fsdpc.Tensor:
    return fsdpc.tensor(np.array(values), dtype=dtype).requires_grad_()


# ---- the page ----


def test_the_script_prints_what_it_says() -> None:
    (promised,) = re.findall(r"print\(.*\)  # (.*)", blocks("python")[0])
    assert script()[1] == promised + "\n"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_script_has_the_gradients_of_composed_operations(dtype: str) -> None:
    x, twin = (leaf(-2, -0.5, 0, 0.25, 3, dtype=dtype) for _ in range(2))
    weights = fsdpc.tensor([1.0, 2, 3, 4, -5], dtype=dtype)
    y = script()[0]["squared_relu"](x)
    positive = F.relu(twin)
    composed = positive * positive
    y.backward(weights)
    composed.backward(weights)
    assert y.dtype == x.grad.dtype == x.dtype and F.array_equal(y.detach(), composed.detach())
    assert F.array_equal(x.grad, twin.grad)


def test_the_signature_is_the_stubs() -> None:
    """Written on the page as in _core.pyi."""
    stub = (Path(fsdpc.__file__).parent / "_core.pyi").read_text()
    signature = re.search(r"^def (custom\(.*?\) -> [^\n]*):\n", stub, re.DOTALL | re.MULTILINE)
    assert signature and signature[1] + "\n" == blocks("python")[1]


# ---- what it takes and returns ----


def test_results_share_memory_and_integers_have_no_gradient() -> None:
    x, seen = leaf(1, 2), []
    values, ids, unused = x.detach() * 3, fsdpc.tensor([1, 2]), fsdpc.ones(3, dtype="float64")

    def backward(dvalues: Any, dids: Any, dunused: Any) -> list[Any]:
        seen.append((dids, dunused, fsdpc.is_grad_enabled()))
        return [dvalues * 3]

    results = F.custom((x,), (values, ids, unused), backward)
    assert [y.requires_grad for y in results] == [True, False, True]
    assert all(y.data_ptr == given.data_ptr for y, given in zip(results, (values, ids, unused)))
    results[0].sum().backward(retain_graph=True)
    results[0].sum().backward()
    assert x.grad.tolist() == [6, 6] and seen == [(None, None, False)] * 2


@pytest.mark.parametrize("returned", [lambda d: (d, None), lambda d: [d, fsdpc.zeros(7)]])
def test_a_gradient_that_nothing_wants_is_ignored(returned: Callable[..., Any]) -> None:
    x, constant = leaf(1, 2), fsdpc.ones(2)
    F.custom([x, constant], [x.detach() + constant], returned)[0].sum().backward()
    assert x.grad.tolist() == [1, 1] and constant.grad is None


def test_none_is_no_gradient_at_all() -> None:
    x = leaf(1, 2)
    F.custom([x], [x.detach() * 2], lambda d: None)[0].sum().backward()
    assert x.grad is None


# ---- errors ----

X = [1.0, 2, 3]
CASES = {  # message -> its type, and what is returned by backward
    "a sequence of tensors is needed": (TypeError, lambda d: 3),
    "a Tensor is needed, not numpy.ndarray": (TypeError, lambda d: [d.numpy()]),
    "backward returned 2 gradients for 1 inputs": (ValueError, lambda d: (d, d)),
    "the gradient of input 0 has shape (2,) of float32, the input has shape (3,) of float32": (
        ValueError, lambda d: d[:2],
    ),
    "the gradient of input 0 has shape (3,) of float64, the input has shape (3,) of float32": (
        ValueError, lambda d: d.double(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", CASES)
def test_wrong_gradients(message: str) -> None:
    error, backward = CASES[message]
    x = leaf(*X)
    (y,) = F.custom([x], [x.detach() * 2], backward)
    with pytest.raises(error, match=re.escape(message)):
        y.sum().backward()
    assert x.grad is None
    F.custom([x], [x.detach() * 2], lambda d: d)[0].sum().backward()  # the tape goes on
    assert x.grad.tolist() == [1, 1, 1]


def test_wrong_arguments() -> None:
    x, y, array = leaf(*X), fsdpc.ones(3), np.ones(3, np.float32)
    for inputs, outputs, message in [
        (x, [y], "a sequence of tensors is needed"),
        ([x], y, "a sequence of tensors is needed"),
        ([array], [y], "a Tensor is needed, not numpy.ndarray"),
        ([x], [array], "a Tensor is needed, not numpy.ndarray"),
        ([x], [None], "every output is a tensor"),
    ]:
        with pytest.raises(TypeError, match=message):
            F.custom(inputs, outputs, lambda d: d)


def test_the_page_has_these_messages() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| [^|]* \| `", PAGE.read_text(), re.M)
    assert {*rows} == {*CASES, "every output is a tensor"}


def test_an_exception_in_backward_comes_out() -> None:
    x = leaf(*X)
    (y,) = F.custom([x], [x.detach()], lambda d: d / {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        y.sum().backward()
    assert fsdpc.is_grad_enabled()


# ---- no_grad, checkpointing, what is kept ----


def test_without_gradients_backward_is_dropped_at_once() -> None:
    class Held:
        pass

    freed: list[str] = []

    def use(x: fsdpc.Tensor, name: str) -> fsdpc.Tensor:
        held = Held()
        weakref.finalize(held, freed.append, name)
        return F.custom([x], [x.detach() * 2], lambda d: (held, d)[1])[0]

    with fsdpc.no_grad():
        first = use(leaf(1), "in no_grad")
    second = use(fsdpc.ones(1), "no input requires grad")
    assert not first.requires_grad and not second.requires_grad
    assert freed == ["in no_grad", "no input requires grad"]
    third = use(leaf(1), "kept")
    assert third.requires_grad and len(freed) == 2
    third.sum().backward()
    del third
    assert freed[2:] == ["kept"]


def test_a_result_that_backward_holds_is_freed_once_it_ran() -> None:
    numel = 1 << 16

    def use() -> fsdpc.Tensor:
        x, holds = fsdpc.zeros(numel, requires_grad=True), []
        (y,) = F.custom([x], [x.detach() * 2], lambda d: (holds, d)[1])
        holds.append(y)
        return y.sum()

    gc.collect()
    before = _core.memory_stats()["activation_bytes"]
    use().backward()
    assert _core.memory_stats()["activation_bytes"] - before < 4 * numel


def test_checkpointing_runs_forward_twice_and_backward_once() -> None:
    calls: list[str] = []

    class Double(nn.Module):
        def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
            calls.append("forward")
            with fsdpc.no_grad():
                y = x * 2
            return F.custom([x], [y], lambda d: (calls.append("backward"), d * 2)[1])[0]

    x, block = leaf(1, 2), Double()
    F.checkpoint(block, x).sum().backward()
    assert x.grad.tolist() == [2, 2] and calls == ["forward", "forward", "backward"]
    calls.clear()
    assert fsdpc.checkpoint_activations([block]) == 1
    block(x).sum().backward()
    assert x.grad.tolist() == [4, 4] and calls == ["forward", "forward", "backward"]


class Scale(nn.Module):
    """x * weight, by custom or by the built-in operation."""

    def __init__(self, custom: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(np.arange(1, 9, dtype=np.float32))
        self.custom = custom

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        weight = self.weight
        if not self.custom:
            return x * weight
        assert x.dtype == weight.dtype == fsdpc.bfloat16
        with fsdpc.no_grad():
            y = x * weight
        backward = lambda d: (d * weight, (d * x).sum(0))  # noqa: E731
        return F.custom([x, weight], [y], backward)[0]


@pytest.mark.ranks(2)
def test_parameters_of_sharded_modules() -> None:
    found = []
    for custom in (True, False):
        policy = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16)
        model = nn.Sequential(Scale(custom), Scale(custom))
        for layer in model:
            fsdpc.fully_shard(layer, mp_policy=policy)
        fsdpc.fully_shard(model, mp_policy=policy)
        x = fsdpc.full((3, 8), float(fsdpc.rank() + 1))
        model(x).sum().backward()
        found.append([fsdpc.full_grad(layer.weight).tolist() for layer in model])
    assert found[0] == found[1] and found[0][0][0] == 4.5  # the mean of 3 and 6


def test_a_plan_runs_it() -> None:
    operation = script()[0]["squared_relu"]

    class Activation(nn.Module):
        def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
            return operation(x).sum()

    with fsdpc.deferred_init():
        model = nn.Sequential(nn.Linear(4, 4), Activation())
    assert fsdpc.memory_plan(model, 2, batch_shape=(5, 4)).activation > 0


# ---- kernels in C ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, built by the command on the page."""
    (commands,) = blocks("sh")
    (build,) = re.findall(r"^cc .*", commands, re.M)
    assert all(build in (EXAMPLE / name).read_text() for name in ("bias_gelu.c", "bias_gelu.py"))
    if not shutil.which("cc"):
        pytest.skip("there is no cc")
    copy = tmp_path_factory.mktemp("example") / "custom_op"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    subprocess.run(build + " -Wall -Wextra -Werror", shell=True, cwd=copy, check=True)
    return copy


@pytest.fixture
def bias_gelu(folder: Path) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bias_gelu", folder / "bias_gelu.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


@pytest.mark.parametrize(("rows", "cols"), [(0, 3), (1, 1), (5, 7), (33, 64)])
def test_kernels_agree_with_built_in_operations(
    bias_gelu: ModuleType, rows: int, cols: int
) -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(shape).astype(np.float32) * 2 for shape in ((rows, cols), cols)]
    cotangent = fsdpc.tensor(rng.standard_normal((rows, cols)).astype(np.float32))
    operations = bias_gelu.bias_gelu, lambda x, bias: F.gelu(x + bias)
    results = []
    for operation in operations:
        x, bias = (fsdpc.tensor(array).requires_grad_() for array in arrays)
        y = operation(x, bias)
        y.backward(cotangent)
        results.append([y.detach().numpy(), x.grad.numpy(), bias.grad.numpy()])
    for ours, theirs in zip(*results):
        # A few roundings of float32 each; the bias adds one a row.
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6 * max(1, rows))


def test_kernels_are_given_the_tensors_own_memory(
    bias_gelu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    class Watched:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __call__(self, rows: int, cols: int, *arrays: np.ndarray) -> None:
            given.extend(array.ctypes.data for array in arrays)
            self.kernel(rows, cols, *arrays)

    kernels = bias_gelu.KERNELS
    watched = type("Kernels", (), {"bias_gelu_forward": Watched(kernels.bias_gelu_forward)})
    monkeypatch.setattr(bias_gelu, "KERNELS", watched)
    x, bias = fsdpc.ones(2, 3), fsdpc.ones(3)
    y = bias_gelu.bias_gelu(x, bias)
    assert given == [x.data_ptr, bias.data_ptr, y.data_ptr]


def test_wrong_tensors_never_reach_the_kernels(bias_gelu: ModuleType) -> None:
    x = fsdpc.ones(2, 3)
    with pytest.raises(TypeError, match="bfloat16: cast both to float32"):
        bias_gelu.bias_gelu(x, fsdpc.ones(3, dtype="bfloat16"))
    for bad in (fsdpc.ones(2), fsdpc.ones(1, 3)):
        with pytest.raises(ValueError, match=r"shapes \(2, 3\) and .*: give \(n, m\) and \(m,\)"):
            bias_gelu.bias_gelu(x, bad)


def test_ranks_train_with_the_kernels(folder: Path) -> None:
    command = [sys.executable, "-m", "fsdpc", "run", "--ranks", "2", "--timeout", "200"]
    done = subprocess.run(
        [*command, "train.py", "61"], cwd=folder, capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^\[0\] step \d+: loss (.*)", done.stdout, re.M)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 10


def test_without_the_library_the_example_says_how_to_build_it(tmp_path: Path) -> None:
    copy = shutil.copy(EXAMPLE / "bias_gelu.py", tmp_path)
    done = subprocess.run([sys.executable, copy], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert f"{tmp_path}/libbias_gelu.so is missing: build it with the command" in done.stderr
