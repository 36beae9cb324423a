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


BACKWARD = """
import numpy as np
import fsdpc
import fsdpc.functional as F

fsdpc.set_default_device("cuda")
if {early}:
    fsdpc.init(deterministic={deterministic})
x = fsdpc.tensor(np.ones((1, 8, 2, 32), np.float32)).to("bfloat16").requires_grad_()
if not {early}:
    fsdpc.init(deterministic={deterministic})
F.scaled_dot_product_attention(x, x, x, True, 0.625, "bthd").sum().backward()
fsdpc.shutdown()
F.scaled_dot_product_attention(x, x, x, True, 0.625, "bthd").sum().backward()
"""


@EMULATION_ALONE
@pytest.mark.parametrize("early", [True, False])
def test_deterministic_mode_has_an_order(environment: dict[str, str], early: bool) -> None:
    """The fake fails where it may add up in any order: here once the mode is over."""
    lines = run(environment, "-c", BACKWARD.format(deterministic=True, early=early)).stderr
    assert "line 14" in lines and "cuDNN failed on attention's backward of 8 queries" in lines


@EMULATION_ALONE
def test_an_order_is_asked_for(environment: dict[str, str]) -> None:
    program = BACKWARD.format(deterministic=False, early=True)
    assert "line 12" in run(environment, "-c", program).stderr
    assert run(environment, "-c", program, FSDPC_CUDNN="1").returncode == 0
