"""Operations that are composed of others run on the GPU too, with the CPU's results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from processes import printed


def test_composed_operations_agree_with_the_cpu(environment: dict[str, str]) -> None:
    program = Path(__file__).with_name("operations.py")
    cpu, cuda = (json.loads(printed(environment, program, name)) for name in ("cpu", "cuda"))
    assert list(cpu) == list(cuda) and len(cpu) > 20
    for name, values in cpu.items():
        np.testing.assert_allclose(cuda[name], values, rtol=1e-5, atol=1e-5, err_msg=name)


def test_captured_steps_have_them(environment: dict[str, str]) -> None:
    """But what looks at values on the host, which is named."""
    program = Path(__file__).with_name("operations.py")
    found = json.loads(printed(environment, program, "cuda", "captured"))
    refused = found.pop("max")[1]
    assert "the host asks for a value of the GPU inside a captured step" in refused
    for name, (plain, replayed) in found.items():
        assert plain == replayed, name


def test_memory_of_the_gpu_is_no_buffer(environment: dict[str, str]) -> None:
    """So kernels of the host, as in examples/custom_op, never write to a copy."""
    program = """
import fsdpc
fsdpc.set_default_device("cuda")
try:
    memoryview(fsdpc.ones(3))
except BufferError as error:
    print(error)
"""
    assert "out of the host's reach" in printed(environment, "-c", program)
