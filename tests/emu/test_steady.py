"""What the host does in a steady training step of the engine on the emulated device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import printed

CASES = ["llama fp32", "llama bf16", "perceptron fp32", "perceptron bf16", "perceptron 1-norm",
         "perceptron inf-norm"]


@pytest.fixture(scope="module")
def counted(environment: dict[str, str]) -> dict[str, dict[str, int]]:
    """What steady.py prints."""
    return json.loads(printed(environment, Path(__file__).with_name("steady.py")))


@pytest.mark.parametrize("case", CASES)
def test_a_step_asks_for_no_memory(counted: dict[str, dict[str, int]], case: str) -> None:
    counts = counted[case]
    assert counts["allocations"] == 0 and counts["system_allocs"] == 0
    assert counts["made"] > 0, "the pool's calls are not counted"
    assert counts["read"] > 0, "a value was read without a wait: waits are not counted"


@pytest.mark.parametrize("case", CASES)
def test_a_step_does_not_wait(counted: dict[str, dict[str, int]], case: str) -> None:
    """Loss, backward, clipping, AdamW and zero_grad, until somebody reads a value."""
    counts = counted[case]
    assert counts["waits"] == 0 and counts["queries"] == 0
