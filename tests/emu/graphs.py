"""Trains small models on the emulated GPU with and without graphs; prints what came of it as JSON.

``argv[1]`` says what: ``replays`` compares training with replays, from a capture on, to training
without; ``refusals`` makes every mistake once, each followed by training that must come out as if
nobody had made it; ``trace`` lists what the host asked of the device in two steady steps.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from training import MAX_NORM, MODELS, Perceptron, build, rows

import fsdpc

WARM_UP, STEPS = 2, 7


class Dropping(Perceptron):
    """The same with dropout behind every block."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = fsdpc.nn.Dropout(0.3)

    def forward(self, x: Any, y: Any) -> Any:
        h = fsdpc.tensor(x)
        for norm, hidden in zip(self.norms, self.hidden, strict=True):
            h = h.to(norm.weight.dtype)
            h = h + self.drop(hidden(norm(h)))
        error = h.float() - fsdpc.tensor(y)
        return (error * error).mean()


MODELS["dropping"] = Dropping, rows


class Run:
    """A model that is trained on new data in every step, at a rate that a scheduler sets."""

    def __init__(self, name: str, dtype: str = "fp32",
                 make_optimizer: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self.model, self.batch_of = build(name, dtype, **options), MODELS[name][1]
        self.optimizer = (make_optimizer or adamw)(self.model.parameters())
        self.scheduler = fsdpc.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.rng = np.random.default_rng(fsdpc.rank())
        self.batch = tuple(fsdpc.tensor(array) for array in self.batch_of(self.rng))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def load(self) -> None:
        """Put new data into the batch."""
        for tensor, array in zip(self.batch, self.batch_of(self.rng), strict=True):
            tensor.copy_(fsdpc.tensor(array))

    def body(self) -> tuple[Any, Any]:
        """Make one step; its loss and norm."""
        loss = self.model(*self.batch)
        loss.backward()
        norm = fsdpc.clip_grad_norm_(self.model, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def note(self, loss: Any, norm: Any) -> None:
        """End a step outside of a graph."""
        self.losses.append(float(loss))
        self.norms.append(float(norm))
        self.scheduler.step()

    def eager(self, steps: int = 1) -> None:
        """Train without a graph."""
        for _ in range(steps):
            self.load()
            self.note(*self.body())

    def capture(self) -> Any:
        """Train one step, captured; what replays it."""
        self.load()
        with fsdpc.graph_step(self.model, self.optimizer) as step:
            self.made = self.body()
        self.note(*self.made)
        return step

    def replay(self, step: Any, steps: int = 1) -> None:
        """Train by replays."""
        for _ in range(steps):
            self.load()
            step.replay()
            self.note(*self.made)

    def outcome(self) -> dict[str, Any]:
        """Losses, norms, all weights, step counts and states, as numbers."""
        values, states, counts = [], [], []
        for p in self.model.parameters():
            values += fsdpc.full_tensor(p).numpy().ravel().tolist()
            state = self.optimizer.state(p)
            counts.append(state.pop("step"))
            states += [x for each in state.values() for x in each.float().numpy().ravel().tolist()]
        return {"losses": self.losses, "norms": self.norms, "values": values, "states": states,
                "counts": counts, "rate": self.optimizer.param_groups[0]["lr"]}


def adamw(params: Any) -> Any:
    """The optimizer of most runs."""
    return fsdpc.optim.AdamW(params, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam, amsgrad": lambda p: fsdpc.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "AdamW, bf16 states": lambda p: fsdpc.optim.AdamW(p, lr=1e-2, state_dtype="bfloat16", seed=3),
    "SGD, momentum": lambda p: fsdpc.optim.SGD(p, lr=0.1, momentum=0.9),
    "Lion": lambda p: fsdpc.optim.Lion(p, lr=1e-3),
}


def with_a_graph(run: Run) -> Run:
    """Train by all ways of making a step, one after another."""
    run.eager(WARM_UP)
    step = run.capture()
    run.replay(step, 2)
    run.eager()  # in between, steps without the graph
    run.model.eval()
    with fsdpc.no_grad():
        run.model(*run.batch)
    run.model.train()
    run.replay(step)
    return run


def with_dropout(run: Run) -> Run:
    """The same, behind a capture that was given up, and with another seed before a replay."""
    run.eager(WARM_UP)
    assert attempt(lambda: captured(run, raise_something)).startswith("KeyError")
    run.eager()
    step = run.capture()
    run.replay(step)
    run.eager()
    fsdpc.manual_seed(7)
    run.replay(step)
    return run


def drop(run: Run) -> Run:
    """The steps of with_dropout."""
    run.eager(WARM_UP + 4)
    fsdpc.manual_seed(7)
    run.eager()
    return run


def replays() -> dict[str, Any]:
    """Compare each training to itself without a graph."""
    cases = {f"{name} {dtype}": (name, dtype, adamw) for name in ("llama", "perceptron")
             for dtype in ("fp32", "bf16")}
    cases |= {key: ("weighted", "bf16", make) for key, make in OPTIMIZERS.items()}
    results = {}
    for key, case in cases.items():
        plain, graph = Run(*case), Run(*case)
        plain.eager(STEPS)
        results[key] = [plain.outcome(), with_a_graph(graph).outcome()]
    results["dropout"] = [train(Run("dropping", "bf16")).outcome() for train in
                          (drop, with_dropout)]
    return results


# -- refusals ----------------------------------------------------------------------------------


def read_the_loss(run: Run) -> None:
    float(run.model(*run.batch))


def read_it_after_backward(run: Run) -> None:
    loss = run.model(*run.batch)
    loss.backward()
    loss.numpy()


def read_it_after_the_step(run: Run) -> None:
    run.body()[0].item()


def raise_something(run: Run) -> None:
    run.model(*run.batch).backward()
    raise KeyError("the body's own")


def make_a_batch(run: Run) -> None:
    run.model(*(fsdpc.tensor(array) for array in run.batch_of(run.rng)))


def replace_a_buffer(run: Run) -> None:
    counter = fsdpc.nn.Module()
    counter.register_buffer("n", run.batch[0].detach())
    counter.n *= 1
    counter.n = counter.n + 1


def change_the_shape(run: Run) -> None:
    run.batch = LONGER
    run.body()


def keep_gradients(run: Run) -> None:
    run.model(*run.batch).backward()
    run.optimizer.step()


def run_another_model(run: Run) -> None:
    OTHERS[0].model(*OTHERS[0].batch)


def step_another_optimizer(run: Run) -> None:
    run.model(*run.batch).backward()
    OTHERS[1].step()


def step_a_plain_model(run: Run) -> None:
    layer, optimizer = OTHERS[2:]
    layer(run.batch[0]).sum().backward()
    optimizer.step()


def draw_a_tensor(run: Run) -> None:
    fsdpc.nn.Linear(2, 2)


def set_the_seed(run: Run) -> None:
    fsdpc.manual_seed(0)


def scale_the_loss(run: Run) -> None:
    fsdpc.amp.LossScaler().scale(run.model(*run.batch))


def capture_inside(run: Run) -> None:
    with fsdpc.graph_step(run.model, run.optimizer):
        run.body()


def drop_for_the_first_time(run: Run) -> None:
    fsdpc.functional.dropout(run.model(*run.batch), 0.5)


def cut_into_documents(run: Run) -> None:
    x = run.model(*run.batch).reshape((1, 1, 1, 1))
    fsdpc.functional.varlen_attention(x, x, x, [1])


OTHERS: list[Any] = []
LONGER: list[Any] = []
IN_THE_BODY = (read_the_loss, read_it_after_backward, read_it_after_the_step, raise_something,
               make_a_batch, replace_a_buffer, change_the_shape, keep_gradients, run_another_model,
               step_another_optimizer, step_a_plain_model, draw_a_tensor, set_the_seed,
               scale_the_loss, capture_inside, drop_for_the_first_time, cut_into_documents)


def attempt(act: Callable[[], Any]) -> str:
    """What it raises."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def captured(run: Run, body: Callable[[Run], None]) -> None:
    """Capture a body; the batch is as before."""
    batch, rng = run.batch, run.rng.bit_generator.state
    try:
        with fsdpc.graph_step(run.model, run.optimizer):
            body(run)
    finally:
        run.batch = batch
        run.rng.bit_generator.state = rng


def held(run: Run, step: Any) -> str:
    run.model.unshard()
    message = attempt(step.replay)
    run.model.reshard()
    return message


def with_gradients(run: Run, step: Any) -> str:
    run.model(*run.batch).backward()
    message = attempt(step.replay)
    run.optimizer.zero_grad()
    return message


def with_loaded_weights(run: Run, step: Any) -> str:
    run.model.load_state_dict(run.model.state_dict())
    return attempt(step.replay)


def with_a_frozen_weight(run: Run, step: Any) -> str:
    weight = next(iter(run.model.parameters()))
    weight.requires_grad_(False)
    message = attempt(step.replay)
    weight.requires_grad_(True)
    return message


def with_other_counts(run: Run, step: Any) -> str:
    weight = next(iter(run.model.parameters()))
    count = run.optimizer.step_count(weight)
    run.optimizer.set_step_count(weight, count + 2)
    message = attempt(step.replay)
    run.optimizer.set_step_count(weight, count)
    return message


def with_amsgrad(run: Run, step: Any) -> str:
    group = run.optimizer.param_groups[0]
    group["amsgrad"] = True
    message = attempt(step.replay)
    group["amsgrad"] = False
    return message


AT_A_REPLAY = (held, with_gradients, with_loaded_weights, with_a_frozen_weight, with_other_counts,
               with_amsgrad)


def refusals() -> dict[str, Any]:
    """Make mistakes; what training comes to in spite of them."""
    plain = Run("perceptron")
    other = Run("perceptron")
    other.eager()
    LONGER.extend(fsdpc.from_numpy(np.concatenate([t.numpy()] * 5)) for t in other.batch)
    run = Run("perceptron")
    layer = fsdpc.nn.Linear(24, 24)
    apart = fsdpc.optim.SGD(layer.parameters(), lr=0.1)
    messages = {"too early": attempt(run.capture),
                "not in a unit": attempt(lambda: fsdpc.graph_step(run.model, apart))}
    run = Run("perceptron")
    OTHERS.extend([other, fsdpc.optim.SGD(run.model.parameters(), lr=0.1), layer,
                   apart])
    step_a_plain_model(run)
    run.eager(WARM_UP)
    for body in IN_THE_BODY:
        messages[body.__name__] = attempt(lambda body=body: captured(run, body))
        # No whole step was made since.
        messages[f"{body.__name__}, again"] = attempt(lambda: captured(run, Run.body))
        run.eager()
    step = run.capture()
    for mistake in AT_A_REPLAY:
        messages[mistake.__name__] = mistake(run, step)
        run.eager()
        run.replay(step)
    messages["entered twice"] = attempt(step.__enter__)
    never = fsdpc.graph_step(run.model, run.optimizer)
    messages["never entered"] = attempt(never.replay)
    messages["not sharded"] = attempt(lambda: fsdpc.graph_step(layer, run.optimizer))
    assert run.model.norms[0].weight.local.shape == (24,)  # it is handed out
    messages["handed out"] = attempt(step.replay)
    run.eager()
    plain.eager(len(run.losses))
    return {"messages": messages, "outcomes": [plain.outcome(), run.outcome()]}


# -- legality ----------------------------------------------------------------------------------


def traced(act: Callable[[], Any]) -> list[str]:
    """What the host asks of the device meanwhile."""
    plugin = ctypes.CDLL(os.environ["FSDPC_CUDA_PLUGIN"])
    with tempfile.NamedTemporaryFile() as file:
        plugin.emu_set_trace(file.name.encode())
        act()
        plugin.emu_set_trace(None)
        return file.read().decode().splitlines()


def trace() -> dict[str, Any]:
    """Two steps, two replays; memory while there is a graph and after it."""
    results: dict[str, Any] = {}
    for name in ("llama", "perceptron"):
        run = Run(name)
        run.eager(WARM_UP + 1)
        results[name] = [traced(run.body) for _ in range(2)]
        before = fsdpc.memory_stats()["other_bytes"]
        step = run.capture()
        results[f"{name}, replayed"] = [traced(step.replay) for _ in range(2)]
        held = fsdpc.memory_stats()["other_bytes"]
        run.eager(2)
        allocations = fsdpc.memory_stats()["system_allocs"]
        run.eager(2)
        grown = fsdpc.memory_stats()["system_allocs"] - allocations
        del step
        gc.collect()
        results[f"{name}, memory"] = [before, held, fsdpc.memory_stats()["other_bytes"], grown]
    return results


if __name__ == "__main__":
    fsdpc.set_default_device("cuda")
    print(json.dumps({"replays": replays, "refusals": refusals, "trace": trace}[sys.argv[1]]()))
