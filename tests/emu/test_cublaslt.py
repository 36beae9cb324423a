"""Training on the emulated device with products by a fake cuBLASLt, against the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import printed
from training import STEPS

HERE = Path(__file__).parent
LAYERS = 3  # of the perceptron, with gelu in each


@pytest.fixture(scope="module")
def trained(emulated: dict[str, Path], environment: dict[str, str]) -> dict[str, Any]:
    """What on_cublaslt.py prints."""
    fake = emulated["libfsdpc_cuda.so"].with_name("libcublasLt.so.13")
    return json.loads(printed(environment, HERE / "on_cublaslt.py", fake))


def test_it_is_named(trained: dict[str, Any]) -> None:
    assert ", products by cuBLASLt 13.0.0, " in trained["config"]
    assert trained["config"].endswith("attention by cuDNN 9.0.0")


# As in test_engine.py; in bf16 what lies between a product and gelu is not rounded.
@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-4), ("bf16", 2e-2)])
def test_training_agrees_with_the_cpu(trained: dict[str, Any], environment: dict[str, str],
                                      dtype: str, tolerance: float) -> None:
    program = f"import json, training; print(json.dumps(training.train('perceptron', '{dtype}')))"
    cpu, cuda = json.loads(printed(environment, "-c", program)), trained[dtype]
    for what in ("losses", "norms", "values"):
        np.testing.assert_allclose(cuda[what], cpu[what], rtol=tolerance, atol=tolerance)


def test_gelu_goes_with_the_products_both_ways(trained: dict[str, Any]) -> None:
    """A layer's step: two products forward, two for weights' gradients, two for inputs'."""
    counts = trained["counts"]  # of steps in fp32, where gelu stays apart, and in bf16
    assert counts["gelus"] == counts["slopes"] == LAYERS * STEPS
    assert counts["products"] == 6 * LAYERS * 2 * STEPS and counts["forbidden"] == 0
    assert 0 <= counts["heuristics"] - 6 * 2 < 4  # once by shape, and where addresses are aligned


ONE_PRODUCT = """
import ctypes, os
import numpy as np, fsdpc
from on_cublaslt import Seen

fsdpc.set_default_device("cuda")
fakes = [ctypes.CDLL(f"libcublasLt.so.{version}") for version in (13, 12)]
a = fsdpc.tensor(np.ones((8, 8), np.float32))
try:
    a @ a
except MemoryError as error:
    print(error)
    del os.environ["EMU_MEMORY_BYTES"]
assert (a @ a).tolist() == [[8.0] * 8] * 8
for fake in fakes:
    seen = (ctypes.c_char * 256)()
    fake.fake_cublaslt_look(seen)
    print(*(getattr(Seen.from_buffer(seen), name) for name in ("products", "forbidden")))
"""


@pytest.fixture
def beside(emulated: dict[str, Path], environment: dict[str, str],
           tmp_path: Path) -> dict[str, str]:
    """Where the loader finds a fake of each version."""
    fake = emulated["libfsdpc_cuda.so"].with_name("libcublasLt.so.13")
    for version in (13, 12):
        shutil.copy(fake, tmp_path / f"libcublasLt.so.{version}")
    return {**environment, "LD_LIBRARY_PATH": str(tmp_path)}


def test_a_newer_one_that_does_not_start(beside: dict[str, str]) -> None:
    out = printed(beside, "-c", ONE_PRODUCT, FAKE_CUBLASLT_REFUSES="libcublasLt.so.13")
    assert out.splitlines() == ["0 0", "2 0"]


def test_a_first_product_that_finds_no_memory(beside: dict[str, str]) -> None:
    """The next one is cuBLASLt's all the same, with a workspace."""
    out = printed(beside, "-c", ONE_PRODUCT, EMU_MEMORY_BYTES=str(16 << 20))
    message, *counts = out.splitlines()
    assert message.startswith("no device memory for 33554432 bytes (other)")
    assert counts == ["1 0", "0 0"]


def test_captured_steps_have_the_bits_of_steps_without(trained: dict[str, Any]) -> None:
    plain, graph = trained["graphs"]
    assert graph == plain
