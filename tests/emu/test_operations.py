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
