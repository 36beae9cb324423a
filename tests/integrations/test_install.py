"""Frameworks that call FSDP2, after ``fsdpc.torch.install()`` and with torch's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs_fsdp
from torch import nn

import fsdpc
from fsdpc.cli.main import main as fsdpc_command
from fsdpc.torch import install, uninstall
from fsdpc.torch.__main__ import main as start_script
from tests.torch.common import join_gloo

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from .install_lightning import fit  # noqa: E402
from .install_runs import Accelerated, history, sharded_by, whole, words_trainer  # noqa: E402


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave torch's names, and what a started script sees, as they were."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    uninstall()


EXACT = {"rtol": 1e-6, "atol": 0}


def assert_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    for name, value in some.items():
        assert torch.equal(value, others[name]), name


def assert_close(some: Any, others: Any, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    assert some.keys() == others.keys()
    for name, value in some.items():
        torch.testing.assert_close(
            value, others[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.ranks(2, init=False, timeout=300)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True, "accumulate": 2, "efficient": True},
        {"kind": "SHARDED_STATE_DICT", "accumulate": 2, "efficient": True},
        {"kind": "SHARDED_STATE_DICT", "tied": True},
    ],
    ids=lambda o: "-".join(str(v) for v in o.values()) or "plain",
)
def test_accelerate(options: dict[str, Any], tmp_path: Path) -> None:
    """Both train alike, and each loads what the other has saved, in the middle of 20 steps."""
    join_gloo(tmp_path)
    steps = 20 * options.get("accumulate", 1)
    folders = [tmp_path / "theirs", tmp_path / "ours"]
    halves, saved, ends = [], [], []
    for ours, folder in enumerate(folders):
        run = Accelerated(bool(ours), **options)
        first = run.train(0, steps // 2)
        saved.append(run.values())
        run.save(folder)
        halves.append((first, run.train(steps // 2, steps)))
        ends.append(run.state_dict())
    for theirs, own in zip(*halves, strict=True):
        torch.testing.assert_close(own, theirs, **EXACT)
    assert halves[1][0][0] > halves[1][1][steps // 2 - 1] + 0.5
    assert_close(ends[1], ends[0])
    for ours in (True, False):
        other = int(not ours)
        run = Accelerated(ours, seed=5, **options)
        run.load(folders[other])
        assert_equal(run.values(), saved[other])
        torch.testing.assert_close(run.train(steps // 2, steps), halves[other][1], **EXACT)
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False, timeout=300)
def test_accelerate_in_bfloat16(tmp_path: Path) -> None:
    join_gloo(tmp_path)
    theirs, own = (Accelerated(ours, precision="bf16").train(0, 20) for ours in (False, True))
    torch.testing.assert_close(own, theirs, rtol=0.02, atol=0)
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False, timeout=300)
@pytest.mark.parametrize(
    "options",
    [{"tied": True}, {"kind": "SHARDED_STATE_DICT", "accumulate": 2, "efficient": True}],
    ids=["tied", "sharded"],
)
def test_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    """transformers' Trainer, as above."""
    join_gloo(tmp_path)
    folders = [tmp_path / "theirs", tmp_path / "ours"]
    ends = []
    for ours in (False, True):
        with sharded_by(ours):
            trainer = words_trainer(ours, folders[ours], **options)
            trainer.train()
        assert isinstance(trainer.model, fsdpc.torch.FSDPModule) == ours
        ends.append((trainer, {n: whole(p) for n, p in trainer.model.named_parameters()}))
    theirs, own = (history(trainer) for trainer, _ in ends)
    assert len(own) == 40 and own[0] > own[19] + 0.5
    torch.testing.assert_close(own, theirs, **EXACT)
    assert_close(ends[1][1], ends[0][1])
    for ours in (True, False):
        with sharded_by(ours):
            trainer = words_trainer(ours, tmp_path / "again", seed=5, **options)
            trainer.train(resume_from_checkpoint=str(folders[not ours] / "checkpoint-10"))
        torch.testing.assert_close(history(trainer, 10), history(ends[not ours][0], 10), **EXACT)
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False, timeout=300)
@pytest.mark.parametrize("sharded", [False, True])
def test_lightning(sharded: bool, tmp_path: Path) -> None:
    """Lightning's ModelParallelStrategy, which needs nothing forced on CPUs, as above."""
    join_gloo(tmp_path)
    halves = []
    for ours in (False, True):
        with sharded_by(ours):
            trainer, module = fit(tmp_path, sharded, 10, 0)
        assert isinstance(module.model, fsdpc.torch.FSDPModule) == ours
        trainer.save_checkpoint(tmp_path / f"{ours}.ckpt")
        halves.append(module.seen)
    torch.testing.assert_close(halves[1], halves[0], **EXACT)
    assert len(halves[1]) == 20 and halves[1][0] > halves[1][-1] + 0.5
    ends = []
    for ours in (False, True):
        with sharded_by(ours):
            _, module = fit(tmp_path, sharded, 20, 5, tmp_path / f"{not ours}.ckpt")
        ends.append(module.seen)
    torch.testing.assert_close(ends[1], ends[0], **EXACT)
    assert len(ends[1]) == 20 and ends[1][0] < halves[1][0] - 0.5
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


class Head(nn.Module):
    """Reads its last layer's weight itself, as TRL's chunked losses do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, inside: bool) -> torch.Tensor:
        hidden = self.norm(self.body(x))
        self.read = [self.head.weight]
        return self.project(hidden) if inside else hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ whole_of(self.head.weight).t()


def whole_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@pytest.mark.ranks(2, init=False, timeout=300)
@pytest.mark.parametrize("listed", ["kept", "resharded", ""])
def test_a_weight_that_is_read_in_place_of_its_module(listed: str, tmp_path: Path) -> None:
    """Of a list whose last module never runs; and after the forward, where torch keeps it whole."""
    join_gloo(tmp_path)
    torch.set_num_threads(1)
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        result = model(x, bool(listed))
        return ((result if listed else model.project(result)) ** 2).mean()

    plain = Head()
    (sum(loss_of(plain, x) for x in inputs) / 2).backward()
    for ours in (False, True):
        with sharded_by(ours):
            model: Any = Head()
            theirs_fsdp.fully_shard(model.body)
            if listed:
                options = {"reshard_after_forward": listed == "resharded"}
                theirs_fsdp.fully_shard([model.norm, model.head], **options)
            theirs_fsdp.fully_shard(model, reshard_after_forward=False)
        for _ in range(2):
            model.zero_grad()
            fsdpc._core.trace_reset()
            loss_of(model, inputs[int(os.environ["RANK"])]).backward()
        for name, p in plain.named_parameters():
            grad = model.get_parameter(name).grad
            assert (grad is None) == (p.grad is None), name
            if grad is not None:
                torch.testing.assert_close(whole(grad), p.grad, msg=f"{name}, ours: {ours}")
    if listed == "kept":
        assert not hasattr(model.read[0], "full_tensor")
        assert hasattr(model.head.weight, "full_tensor")
        events = fsdpc._core.trace_events()
        gathers = [(unit, back) for kind, unit, *_, back in events if kind == "gather"]
        assert sorted(gathers) == [(1, False), (1, True), (2, False)]  # the list once
        with pytest.raises(TypeError):
            model(inputs[0])  # after reading
        model.norm.unshard()
        assert model.read[0] is model.head.weight
        loss_of(model, inputs[0]).backward()
        model.norm.reshard()
        assert hasattr(model.head.weight, "full_tensor")
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


NAMES = ("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy")


def test_install_replaces_copies_and_uninstall_reverts_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = {name: getattr(theirs_fsdp, name) for name in NAMES}
    user = ModuleType("a_users_module")
    exec(f"from torch.distributed.fsdp import {', '.join(NAMES)}", user.__dict__)
    exec("from torch.distributed._composable.fsdp import fully_shard as again", user.__dict__)
    monkeypatch.setitem(sys.modules, user.__name__, user)
    for _ in range(2):
        for _ in range(2):
            install()
        for name in NAMES:
            assert getattr(theirs_fsdp, name) is getattr(fsdpc.torch, name), name
            assert getattr(user, name) is getattr(fsdpc.torch, name), name
        for _ in range(2):
            uninstall()
        for name in NAMES:
            assert getattr(theirs_fsdp, name) is theirs[name], name
            assert getattr(user, name) is theirs[name], name
    said = "fsdpc: torch.distributed.fsdp.fully_shard is fsdpc's in this process"
    assert capsys.readouterr().err.splitlines() == [said] * 2
    monkeypatch.setenv("RANK", "1")
    install()
    uninstall()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    "text",
    [
        "torch.distributed.fsdp import fully_shard",
        "torch.distributed.fsdp import fully_shard as shard",
        "torch.distributed._composable.fsdp import fully_shard",
    ],
    ids=["public", "renamed", "old"],
)
def test_copies_made_before_install_or_after(
    text: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers and Lightning import from the old path."""
    theirs = theirs_fsdp.fully_shard
    user = ModuleType("a_users_module")
    monkeypatch.setitem(sys.modules, user.__name__, user)
    if before:
        exec(f"from {text}", user.__dict__)
    install()
    try:
        if not before:
            exec(f"from {text}", user.__dict__)
        found = user.__dict__[text.split()[-1]]
    finally:
        uninstall()
    assert found is fsdpc.torch.fully_shard
    assert user.__dict__[text.split()[-1]] is theirs


@pytest.mark.parametrize(
    ("start", "arguments", "said"),
    [
        (start_script, [], "usage: python -m fsdpc.torch (SCRIPT | -m MODULE) [ARGUMENT ...]"),
        (start_script, ["-m"], "usage: python -m fsdpc.torch"),
        (start_script, ["no.py"], "no such script: no.py"),
        (fsdpc_command, ["run", "--ranks", "2", "--fsdp2"], "arguments are required: SCRIPT"),
        (fsdpc_command, ["run", "--ranks", "2", "--fsdp2", "no.py"], "no such script: no.py"),
    ],
    ids=["nothing", "no module", "missing", "run nothing", "run missing"],
)
def test_what_a_command_misses(
    start: Any, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        start(arguments)
    code = stopped.value.code
    error = capsys.readouterr().err + (code if isinstance(code, str) else "")
    assert code != 0 and said in error


@pytest.mark.parametrize("module", [False, True])
def test_a_script_runs_as_if_started_itself(module: bool, tmp_path: Path) -> None:
    """With its arguments and its folder's modules: a path on ranks, a name in one process."""
    (tmp_path / "beside.py").write_text("from torch.distributed.fsdp import fully_shard\n")
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "import torch\n"
        "from beside import fully_shard\n"
        "torch.manual_seed(0)\n"
        "model = fully_shard(torch.nn.Linear(3, 2))\n"
        "model(torch.ones(1, 3)).sum().backward()\n"
        "grad = model.bias.grad.full_tensor().tolist()\n"
        "print(__name__, sys.argv, fully_shard.__module__, grad)\n"
    )
    path, root = str(tmp_path / "script.py"), Path(fsdpc.__file__).parents[1]
    command = (
        ["fsdpc.torch", "-m", "script", "a", "--b"]
        if module
        else ["fsdpc", "run", "--ranks", "2", "--fsdp2", path, "a", "--b"]
    )
    process = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=300, check=False,
        cwd=tmp_path if module else root, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    line = f"__main__ {[path, 'a', '--b']} fsdpc.torch._module [1.0, 1.0]"
    lines = [line] if module else [f"[{rank}] {line}" for rank in (0, 1)]
    assert set(lines) <= set(process.stdout.splitlines())


@pytest.mark.ranks(2, init=False, timeout=300)
def test_a_trainer_trains_again(tmp_path: Path) -> None:
    """It hands its sharded model and optimizer to Accelerate again, which matches them."""
    join_gloo(tmp_path)
    found = []
    for ours in (False, True):
        with sharded_by(ours):
            trainer = words_trainer(ours, tmp_path / str(ours))
            trainer.args.max_steps = 4
            trainer.train()
            trainer.args.max_steps = 8
            trainer.train()
        found.append(history(trainer))
    torch.testing.assert_close(found[1], found[0], **EXACT)
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()
