"""Attention inside documents on the emulated device: the numbers of the CPU."""

from __future__ import annotations

import json

import pytest
from processes import printed

PROGRAM = """
import json, sys
import numpy as np
import fsdpc
from fsdpc import functional as F

fsdpc.set_default_device(sys.argv[1])
rng = np.random.default_rng(0)
found = []
for dtype, dim in (("float32", 5), ("bfloat16", 32)):
    leaves = [fsdpc.tensor(rng.standard_normal((2, 9, heads, dim)).astype(np.float32)).to(dtype)
              for heads in (4, 2, 2)]
    for leaf in leaves:
        leaf.requires_grad = True
    y = F.varlen_attention(*leaves, [4, 5, 9], layout="bthd")
    (y * y).float().sum().backward()
    found.append([np.ravel(t.detach().float().numpy()).tolist()
                  for t in (y, *(leaf.grad for leaf in leaves))])
print(json.dumps(found))
"""


def test_documents_have_the_numbers_of_the_cpu(environment: dict[str, str]) -> None:
    cpu, cuda = (json.loads(printed(environment, "-c", PROGRAM, device))
                 for device in ("cpu", "cuda"))
    for ours, theirs, within in zip(cpu, cuda, (1e-5, 0.1)):
        for left, right in zip(ours, theirs):
            assert left == pytest.approx(right, rel=within, abs=within)
