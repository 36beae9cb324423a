"""An operation with C kernels: gelu(x + bias), with one pass each for forward and backward.

Build the kernels in this folder first:

    cc -O3 -fPIC -shared -o libbias_gelu.so bias_gelu.c -lm
"""

import ctypes
from pathlib import Path

import numpy as np

import fsdpc
from fsdpc import functional as F

LIBRARY = Path(__file__).resolve().with_name("libbias_gelu.so")
if not LIBRARY.exists():
    raise ImportError(f"{LIBRARY} is missing: build it with the command in {__file__}")

# ndpointer checks dtype and layout in each call, and passes the array's address.
READ = np.ctypeslib.ndpointer(np.float32, flags="C_CONTIGUOUS")
WRITE = np.ctypeslib.ndpointer(np.float32, flags=["C_CONTIGUOUS", "WRITEABLE"])
KERNELS = ctypes.CDLL(str(LIBRARY))  # CDLL releases the GIL while C runs
KERNELS.bias_gelu_forward.argtypes = [ctypes.c_size_t, ctypes.c_size_t, READ, READ, WRITE]
KERNELS.bias_gelu_forward.restype = None
KERNELS.bias_gelu_backward.argtypes = [
    ctypes.c_size_t, ctypes.c_size_t, READ, READ, READ, WRITE, WRITE,
]  # fmt: skip
KERNELS.bias_gelu_backward.restype = None


def memory(tensor: fsdpc.Tensor) -> np.ndarray:
    """Return an array over a tensor's own memory; raises BufferError on a GPU and for bfloat16."""
    return np.asarray(memoryview(tensor))


def bias_gelu(x: fsdpc.Tensor, bias: fsdpc.Tensor) -> fsdpc.Tensor:
    """Return gelu(x + bias), by erf, of float32 tensors x (rows, cols) and bias (cols)."""
    if x.dtype != fsdpc.float32 or bias.dtype != fsdpc.float32:
        raise TypeError(f"bias_gelu of {x.dtype} and {bias.dtype}: cast both to float32")
    if x.ndim != 2 or bias.shape != x.shape[1:]:
        raise ValueError(f"bias_gelu of shapes {x.shape} and {bias.shape}: give (n, m) and (m,)")
    rows, cols = x.shape
    y = fsdpc.empty(rows, cols)
    KERNELS.bias_gelu_forward(rows, cols, memory(x), memory(bias), memory(y))

    def backward(dy: fsdpc.Tensor) -> tuple[fsdpc.Tensor, fsdpc.Tensor]:
        dx, dbias = fsdpc.empty(rows, cols), fsdpc.empty(cols)
        KERNELS.bias_gelu_backward(
            rows, cols, memory(dy), memory(x), memory(bias), memory(dx), memory(dbias)
        )
        return dx, dbias

    return F.custom([x, bias], [y], backward)[0]
