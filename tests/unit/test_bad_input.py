"""What users give that cannot be: one clear error with names and values, and nothing else."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fsdpc
from fsdpc import nn
from fsdpc.optim import AdamW

PACKAGE_PARENT = str(Path(fsdpc.__file__).parents[1])


def ones() -> fsdpc.Tensor:
    return fsdpc.tensor(np.ones((2, 4), np.float32))


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


# ---- optimizers


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1}, "lr is out of range: -1"),
        ({"lr": float("nan")}, "lr is out of range: nan"),
        ({"betas": (0.9, 1.0)}, r"betas is out of range: \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps is out of range"),
        ({"weight_decay": -0.1}, "weight_decay is out of range: -0.1"),
    ],
)
def test_options_out_of_range(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AdamW(nn.Linear(2, 2).parameters(), **options)


def test_options_go_out_of_range_later() -> None:
    optimizer = AdamW(nn.Linear(2, 2).parameters())
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is out of range: nan"):
        optimizer.step()


def test_optimizers_of_nothing_and_of_other_things() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        AdamW([])
    with pytest.raises(TypeError, match=r"take Parameters, got ndarray \(group 0, place 1\)"):
        AdamW([nn.Parameter([1.0]), np.ones(3)])
    with pytest.raises(ValueError, match=r"group 0 has unknown options \['momentum'\]"):
        AdamW([{"params": [nn.Parameter([1.0])], "momentum": 0.9}])


def test_a_parameter_given_twice() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'weight' \(2, 2\) float32 was given before: number 0"):
        AdamW([{"params": [layer.weight]}, {"params": [("weight", layer.weight)]}])


@pytest.mark.ranks(1)
def test_a_sharded_parameter_given_twice() -> None:
    layer = fsdpc.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'weight' of unit 'Linear' is in two parameter groups"):
        AdamW([*layer.parameters(), layer.weight])


@pytest.mark.ranks([1, 2])
def test_an_optimizer_made_before_sharding() -> None:
    model = two_layers()
    optimizer = AdamW(model.parameters())
    fsdpc.fully_shard(model)
    before = fsdpc.full_tensor(model[0].weight).numpy().copy()
    model(ones()).sum().backward()
    with pytest.raises(RuntimeError, match="'0.weight' of unit 'Sequential' was sharded after the"):
        optimizer.step()
    assert (fsdpc.full_tensor(model[0].weight).numpy() == before).all()


@pytest.mark.ranks([1, 2])
def test_trainable_parameters_that_no_unit_holds() -> None:
    model = two_layers()
    AdamW(model.parameters())  # nothing is sharded: fine
    fsdpc.fully_shard(model[0])
    with pytest.raises(ValueError, match=r"2 trainable .*'1.weight' \(1, 4\).*'1.bias' \(1,\)"):
        AdamW(model.named_parameters())
    with pytest.raises(ValueError, match=r"number 2 of group 0 \(1, 4\) float32"):
        AdamW(model.parameters())
    model(ones()).sum().backward()
    with pytest.raises(ValueError, match="'1.weight', '1.bias': held by no unit"):
        fsdpc.clip_grad_norm_(model, 1.0)
    model[1].requires_grad_(False)
    AdamW(model.parameters())  # frozen: fine


@pytest.mark.ranks(1)
def test_states_of_strangers() -> None:
    layer = fsdpc.fully_shard(nn.Linear(2, 2))
    optimizer = AdamW([layer.weight])
    with pytest.raises(KeyError, match="not given parameter 'bias'"):
        optimizer.state(layer.bias)
    with pytest.raises(KeyError, match=r"not given this parameter \(3,\)"):
        optimizer.state(nn.Parameter(np.zeros(3)))


# ---- clipping


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.ranks([1, 2])
def test_gradients_that_are_not_finite(value: float) -> None:
    """They come from the last rank alone; all ranks name the same parameters."""
    model = two_layers()
    fsdpc.fully_shard(model[0])
    fsdpc.fully_shard(model)
    optimizer = AdamW(model.parameters())
    x = ones().numpy().copy()
    if fsdpc.rank() == fsdpc.world_size() - 1:
        x[0, 0] = value
    x = fsdpc.tensor(x)
    model(x).sum().backward()
    before = fsdpc.full_grad(model[1].bias).numpy().copy()
    with pytest.raises(
        FloatingPointError, match=r"norm is (nan|inf): .* in .*'0.weight'"
    ) as caught:
        fsdpc.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert "'1.bias'" not in str(caught.value)
    assert (fsdpc.full_grad(model[1].bias).numpy() == before).all()
    assert not np.isfinite(float(fsdpc.clip_grad_norm_(model, 1.0)))  # measured, no error
    optimizer.zero_grad()
    model(ones()).sum().backward()
    assert np.isfinite(float(fsdpc.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)))
    optimizer.step()


def test_plain_gradients_that_are_not_finite() -> None:
    model = two_layers()
    model(ones() * float("inf")).sum().backward()
    with pytest.raises(FloatingPointError, match="'0.weight'"):
        fsdpc.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    with pytest.raises(FloatingPointError, match="'number 0'"):
        fsdpc.clip_grad_norm_([model[0].weight], 1.0, error_if_nonfinite=True)


def test_norms_that_are_none() -> None:
    layer = nn.Linear(2, 2)
    for max_norm in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must be above 0"):
            fsdpc.clip_grad_norm_(layer, max_norm)
    for norm_type in (0, -1, float("-inf"), float("nan")):
        with pytest.raises(ValueError, match=r"norm_type .* give 1, 2, inf or another number"):
            fsdpc.clip_grad_norm_(layer, 1.0, norm_type=norm_type)
        with pytest.raises(ValueError, match=r"norm_type .* give 1, 2, inf or another number"):
            fsdpc.grad_norms(layer, norm_type)
    for value in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="clip_value must be at least 0"):
            fsdpc.clip_grad_value_(layer, value)


# ---- collectives of the user's own


REFUSED = {
    "text": (lambda: fsdpc.all_reduce("x"), TypeError, "got str"),
    "list": (lambda: fsdpc.all_reduce([1.0]), TypeError, "got list"),
    "none": (lambda: fsdpc.all_gather(None), TypeError, "got NoneType"),
    "complex": (lambda: fsdpc.all_reduce(np.ones(2, np.complex64)), TypeError, "complex64"),
    "large": (lambda: fsdpc.all_reduce(2**70), TypeError, "1180591620717411303424"),
    "op": (lambda: fsdpc.all_reduce(1.0, "prod"), ValueError, "got 'prod'"),
    "mean": (lambda: fsdpc.all_reduce(1, "mean"), TypeError, "mean of int64"),
    "root": (lambda: fsdpc.broadcast(1.0, 2), ValueError, "root 2 of world size 2"),
    "negative": (lambda: fsdpc.broadcast(1.0, -1), ValueError, "root -1 of world size 2"),
    "init": (fsdpc.init, RuntimeError, "already initialised as rank . of 2"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.ranks(2)
def test_calls_are_refused_before_anything_is_sent(what: str) -> None:
    call, error, text = REFUSED[what]
    if fsdpc.rank() == 0:
        with pytest.raises(error, match=text):
            call()
    assert fsdpc.all_reduce(1) == 2  # rank 1 came here at once: nothing of the above was posted


@pytest.mark.ranks([1, 2])
def test_calls_after_shutdown() -> None:
    model = fsdpc.fully_shard(two_layers())
    optimizer = AdamW(model.parameters())
    loss = model(ones()).sum()
    loss.backward()
    later = model(ones()).sum()
    fsdpc.barrier()
    fsdpc.shutdown()
    for call in (
        lambda: model(ones()),
        later.backward,
        optimizer.step,
        model.unshard,
        lambda: fsdpc.clip_grad_norm_(model, 1.0),
        lambda: fsdpc.full_tensor(model[0].weight),
    ):
        with pytest.raises(RuntimeError, match=r"shutdown\(\)"):
            call()


# ---- the environment


@pytest.mark.parametrize(
    ("variables", "error", "text"),
    [
        ({"RANK": "0"}, ValueError, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, ValueError, "RANK is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ValueError, "RANK must be an integer, got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ValueError, "rank 2 of world size 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ValueError, "rank -1 of world size 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ValueError, "rank 0 of world size 0"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            NotImplementedError,
            "4 ranks on 2 hosts",
        ),
        ({"FSDPC_TIMEOUT": "3"}, ValueError, "FSDPC_TIMEOUT is not known; did you mean FSDPC_TIM"),
        ({"FSDPC_SOMETHING_ELSE": "3"}, ValueError, "FSDPC_SOMETHING_ELSE is not known"),
        ({"FSDPC_TIMEOUT_S": "soon"}, ValueError, "FSDPC_TIMEOUT_S='soon': need a number"),
        ({"FSDPC_TIMEOUT_S": "0"}, ValueError, "FSDPC_TIMEOUT_S='0': need a number from 0.01"),
        ({"FSDPC_THREADS": "1.5"}, ValueError, "FSDPC_THREADS='1.5': need a whole number"),
        ({"FSDPC_NO_ALIAS": "yes"}, ValueError, "FSDPC_NO_ALIAS='yes': need 0 or 1"),
        (
            {"FSDPC_ISA": "mmx"},
            ValueError,
            "FSDPC_ISA='mmx': unknown instruction set 'mmx'; use auto, portable, avx2, avx512, "
            "avx512bf16 or amx",
        ),
        ({"FSDPC_TRACE": "-1"}, ValueError, "FSDPC_TRACE='-1'"),
    ],
)
@pytest.mark.ranks(1, init=False)
def test_variables(variables: dict[str, str], error: type[Exception], text: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    for _ in range(2):  # it does not pass by being asked again
        with pytest.raises(error, match=text):
            fsdpc.init()
    assert not fsdpc.is_initialized()
    for name in variables:
        del os.environ[name]
    fsdpc.init()  # and goes when the cause is gone
    assert fsdpc.world_size() == 1


@pytest.mark.ranks(1, init=False)
def test_arguments_of_init() -> None:
    with pytest.raises(ValueError, match="give both rank and world_size, or neither"):
        fsdpc.init(rank=0)
    with pytest.raises(ValueError, match="rank 3 of world size 2"):
        fsdpc.init(3, 2)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    with pytest.raises(ValueError, match="100000"):
        fsdpc.init(0, 100_000)


# ---- memory


@pytest.mark.ranks(2)
def test_more_memory_than_there_is() -> None:
    with fsdpc.deferred_init():
        model = nn.Linear(1 << 24, 1 << 24, bias=False)
    with pytest.raises(MemoryError, match="562949953421312 bytes of category 'master'.*more ranks"):
        fsdpc.fully_shard(model)
    assert fsdpc.all_reduce(1) == 2


@pytest.mark.ranks(2)
def test_less_shared_memory_than_a_model_needs() -> None:
    """All ranks hear of it, though one of them alone asks for the memory; and may go on."""
    model = fsdpc.fully_shard(nn.Linear(2048, 2048, bias=False))
    x = fsdpc.tensor(np.ones((1, 2048), np.float32))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # of shared memory, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, limits[1]))
    with pytest.raises(MemoryError, match=r"16781312 bytes \(16.0 MiB\) of shared memory for 'fsd"):
        model(x)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert fsdpc.all_reduce(1) == 2
    model(x)


# ---- fsdpc train


def train(*arguments: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fsdpc", "train", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": PACKAGE_PARENT},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("ranks", [(), ("--ranks", 2)], ids=["one", "two"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read data file {path}: No such file"),
        ("", "data file {path} is empty"),
        ("too short", "{path}: 9 tokens are fewer than one sequence needs (256 + 1"),
        ("x" * 300, "{path} (training part): 43 tokens are fewer"),
    ],
    ids=["missing", "empty", "short", "unsplit"],
)
def test_data_that_cannot_be_used(
    content: str | None, text: str, ranks: tuple[object, ...], tmp_path: Path
) -> None:
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_text(content)
    code, out, err = train(*ranks, "--data", path)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("fsdpc train: ") and text.format(path=path) in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_data_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("x" * 10_000)
    path.chmod(0)
    code, _, err = train("--ranks", 2, "--data", path)
    assert code == 2 and err.count("\n") == 1 and "Permission denied" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--ranks", 0), "at least 1, got 0"),
        (("--ranks", -2), "at least 1, got -2"),
        (("--ranks", 100_000), "100000 ranks are more than this machine can hold"),
        (("--batch", 0), "--batch must be at least 1, got 0"),
        (("--seq", -1), "--seq must be at least 1, got -1"),
        (("--accumulate", 0), "--accumulate must be at least 1, got 0"),
        (("--steps", -1), "--steps must be at least 0, got -1"),
        (("--lr", 0), "--lr must be above 0, got 0"),
        (("--clip", "nan"), "--clip must be above 0, got nan"),
        (("--checkpoint-activations", "some"), "got 'some'"),
        (("--ranks", 2, "--metrics", "/nowhere/m.jsonl"), "cannot write --metrics /nowhere/m.js"),
        (("--data", "/nowhere"), "cannot read data file /nowhere"),
    ],
)
def test_train_refuses(arguments: tuple[object, ...], text: str) -> None:
    code, out, err = train(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and text in err


@pytest.mark.parametrize(("name", "value"), [("FSDPC_THREAD", "2"), ("FSDPC_TRACE", "x")])
def test_train_in_a_bad_environment(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    code, _, err = train("--steps", 1)
    assert code == 2 and err.count("\n") == 1 and name in err
