"""Training steps as graphs on the emulated device: equal to steps without, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import printed


def output(environment: dict[str, str], what: str) -> Any:
    """Return what graphs.py prints."""
    return json.loads(printed(environment, Path(__file__).with_name("graphs.py"), what))


@pytest.fixture(scope="module")
def replays(environment: dict[str, str]) -> dict[str, list[Any]]:
    return output(environment, "replays")


@pytest.mark.parametrize("case", [
    "llama fp32", "llama bf16", "perceptron fp32", "perceptron bf16", "Adam, amsgrad",
    "AdamW, bf16 states", "SGD, momentum", "Lion", "dropout"])
def test_replays_are_the_steps_they_stand_for(replays: dict[str, list[Any]], case: str) -> None:
    """To the bit, on new data at a new rate each time, with other steps in between."""
    plain, graph = replays[case]
    assert graph == plain
    assert len(plain["losses"]) == 7 and len(set(plain["losses"])) == 7
    assert len(set(plain["norms"])) == 7 and max(plain["norms"]) > 0.5  # so clipped
    assert set(plain["counts"]) == {7} and any(plain["states"])


@pytest.fixture(scope="module")
def refusals(environment: dict[str, str]) -> dict[str, Any]:
    return output(environment, "refusals")


NOT_WHOLE = "RuntimeError: the last step of 'Perceptron' was not a whole one"
WAITS = "RuntimeError: the host asks for a value of the GPU inside a captured step"


@pytest.mark.parametrize("mistake, error", [
    ("too early", "RuntimeError: unit 'Perceptron' has made no step: run a step or two"),
    ("read_the_loss", WAITS),
    ("read_it_after_backward", WAITS),
    ("read_it_after_the_step", WAITS),
    ("raise_something", "KeyError: \"the body's own\""),
    ("make_a_batch", "RuntimeError: 1536 bytes of the host are copied to the GPU inside a"),
    ("replace_a_buffer", "RuntimeError: buffer 'n' of Module is replaced inside a captured step"),
    ("change_the_shape", "RuntimeError: a captured step asks for"),
    ("keep_gradients", "RuntimeError: unit 'Perceptron' has pending gradients when it ends"),
    ("run_another_model", "RuntimeError: 'Perceptron' runs inside the captured step of another"),
    ("step_another_optimizer", "RuntimeError: another optimizer steps inside a captured step"),
    ("step_a_plain_model", "RuntimeError: a parameter that no unit holds is stepped inside a"),
    ("not in a unit", "NotImplementedError: graph_step() takes steps of sharded parameters, and 2"),
    ("draw_a_tensor", "NotImplementedError: random tensors inside a captured step"),
    ("set_the_seed", "RuntimeError: manual_seed() inside a captured step"),
    ("scale_the_loss", "NotImplementedError: a loss scaler inside graph_step()"),
    ("capture_inside", "RuntimeError: a graph of a step inside another one: end that first"),
    ("drop_for_the_first_time", "RuntimeError: dropout inside a captured step, and in no step"),
    ("cut_into_documents", "RuntimeError: varlen_attention inside a captured step, whose replays"),
    ("held", "RuntimeError: unit 'Perceptron' is held by unshard(): call reshard()"),
    ("with_gradients", "RuntimeError: unit 'Perceptron' has pending gradients at this replay"),
    ("with_loaded_weights", "RuntimeError: the weights of unit 'Perceptron' were written since"),
    ("with_a_frozen_weight", "RuntimeError: settings of unit 'Perceptron' (requires_grad, set_..."),
    ("with_other_counts", "RuntimeError: step counts of the optimizer's group 0 were set since"),
    ("with_amsgrad", "RuntimeError: group 0 of the optimizer steps by another rule of AdamW"),
    ("entered twice", "RuntimeError: this step was captured already"),
    ("never entered", "RuntimeError: replay() of a step that was not captured"),
    ("not sharded", "TypeError: graph_step() takes a sharded model, got Linear: call"),
    ("handed out", "NotImplementedError: a local shard of unit 'Perceptron' was handed out"),
])
def test_what_a_graph_cannot_hold_is_named(refusals: dict[str, Any], mistake: str,
                                           error: str) -> None:
    assert refusals["messages"][mistake].startswith(error), refusals["messages"]


def test_a_capture_that_failed_is_no_step_to_capture_behind(refusals: dict[str, Any]) -> None:
    again = {name: message for name, message in refusals["messages"].items() if "again" in name}
    assert len(again) == 17
    for name, message in again.items():
        assert message.startswith(NOT_WHOLE), name


def test_training_goes_on_as_if_nobody_had_tried(refusals: dict[str, Any]) -> None:
    plain, graph = refusals["outcomes"]
    assert graph == plain


@pytest.fixture(scope="module")
def trace(environment: dict[str, str]) -> dict[str, Any]:
    return output(environment, "trace")


@pytest.mark.parametrize("name", ["llama", "perceptron"])
def test_steady_steps_ask_for_the_same(trace: dict[str, Any], name: str) -> None:
    """No allocation, no wait, and every launch, copy and fill at the addresses of the last step."""
    first, second = trace[name]
    assert first == second
    assert len(first) > 50 and {line.split()[0] for line in first} <= {"launch", "copy", "fill"}


@pytest.mark.parametrize("name", ["llama", "perceptron"])
def test_a_replay_is_one_copy_and_one_launch(trace: dict[str, Any], name: str) -> None:
    for replay in trace[f"{name}, replayed"]:
        assert [line.split()[0] for line in replay] == ["copy", "graph"]


@pytest.mark.parametrize("name", ["llama", "perceptron"])
def test_a_graph_gives_its_memory_back(trace: dict[str, Any], name: str) -> None:
    before, held, after, grown = trace[f"{name}, memory"]
    assert held > before and after == before and grown == 0


def test_the_cpu_has_no_graphs() -> None:
    import fsdpc

    layer = fsdpc.nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match="needs device 'cuda', and this process computes"):
        fsdpc.graph_step(layer, fsdpc.optim.AdamW(layer.parameters()))
