"""Attention of Python's tensors by the fake cuDNN, where FSDPC_CUDNN asks for it."""

from __future__ import annotations

import pytest
from processes import EMULATION_ALONE, run

PROGRAM = """
import numpy as np
import fsdpc
import fsdpc.functional as F

fsdpc.set_default_device("cuda")
x = fsdpc.tensor(np.ones((1, 8, 2, 32), np.float32)).to("bfloat16")
for scale in (0.5, 0.75):
    print(F.scaled_dot_product_attention(x, x, x, True, scale, "bthd").float().sum().item())
"""


@pytest.mark.parametrize("asked", ["0", *(pytest.param(asked, marks=EMULATION_ALONE)
                                          for asked in ("1", "2"))])
def test_it_is_asked_only_if_the_environment_says_so(environment: dict[str, str],
                                                     asked: str) -> None:
    done = run(environment, "-c", PROGRAM, FSDPC_CUDNN=asked)
    assert done.stdout.split()[0] == "512.0", done.stderr
    if asked != "0":  # the fake's way of showing itself
        assert "cuDNN failed on attention of 8 queries" in done.stderr
    else:
        assert done.returncode == 0 and done.stdout.split()[1] == "512.0", done.stderr


def test_deterministic_mode_refuses_sums_in_any_order(environment: dict[str, str]) -> None:
    program = "import fsdpc; fsdpc.init(deterministic=True)"
    assert run(environment, "-c", program, FSDPC_CUDNN="1").returncode == 0
    for asked in ("2", " 2"):
        refused = run(environment, "-c", program, FSDPC_CUDNN=asked).stderr.splitlines()[-1]
        assert refused.startswith("ValueError: deterministic=True and FSDPC_CUDNN=2"), refused
