"""``fsdpc ckpt``: tables, verification, differences, other formats."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as stn

import fsdpc
from fsdpc import checkpoint
from fsdpc.cli.ckpt import main

from .common import Odd, hooked
from .test_resume import Run

# One rank as a process of its own: nothing of fsdpc runs in pytest's, which forks.
alone = pytest.mark.ranks(1)


def output(*arguments: object) -> tuple[int, str]:
    """The exit code, and all that was printed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = main([str(a) for a in arguments])
    return code, text.getvalue()


@alone
def test_ls_and_verify(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", Run("plain").train(1).state)
    code, text = output("ls", tmp_path / "c")
    assert code == 0 and "transformer.wte.weight" in text and "61 x 48" in text
    assert "[optimizer] transformer.wte.weight.exp_avg" in text
    assert "\nwritten by: 1 ranks" in text and "\noptimizer: AdamW\n" in text
    code, text = output("verify", tmp_path / "c")
    assert code == 0 and "verified in" in text
    path = tmp_path / "c" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, text = output("verify", tmp_path / "c")
    assert code == 1 and "is damaged" in text and "model.safetensors" in text
    code, text = output("ls", path)
    assert code == 0 and "transformer.wte.weight" in text
    code, text = output("verify", tmp_path)
    assert code == 1 and "never committed" in text


@pytest.mark.ranks([1, 2])
def test_inspect_says_what_ls_says(tmp_path: Path) -> None:
    model = fsdpc.fully_shard(fsdpc.nn.Linear(5, 3))
    optimizer = fsdpc.optim.AdamW(model.parameters())
    model(fsdpc.ones(2, 5)).sum().backward()
    optimizer.step()
    checkpoint.CheckpointManager(tmp_path).save(7, {"model": model, "optimizer": optimizer})
    found = checkpoint.inspect(tmp_path / "step-00000007")
    world = fsdpc.world_size()
    assert (found.step, found.world) == (7, world)
    assert (found.strategies, found.meshes) == (("FULL_SHARD",), ((1, world),))
    assert found.model is not None and found.model.endswith("Linear")
    assert (found.optimizer, found.states, found.extra) == ("AdamW", ("rng",), {"step": 7})
    kept = {(t.kind, t.name): t for t in found.tensors}
    weight = kept["model", "weight"]
    assert (weight.shape, weight.dtype, weight.nbytes) == ((3, 5), "F32", 60)
    assert ("optimizer", "weight.exp_avg") in kept and found.nbytes == 3 * (60 + 12)
    assert found.damaged() == []
    text = output("ls", found.path)[1]
    assert all(f"{name}: {words}\n" in text for name, words in found.facts().items())
    assert repr(found).split("\n  ")[1:] == text.splitlines()[-len(found.facts()) :]
    assert found._repr_html_().count("<tr>") == len(found.facts()) + 1 + len(kept)
    fsdpc.barrier()
    if fsdpc.rank() == 0:
        path = found.path / weight.file
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert len(found.damaged()) == 1


@alone
def test_inspect_reads_files_of_others(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    stn.save_file({"<b>": np.ones((), np.float32)}, file)
    found = checkpoint.inspect(str(file))
    assert (found.step, found.world, found.optimizer, found.states) == (None, None, None, ())
    assert found.facts() == {"tensors": "1, 4 B", "checksums": "of 0 of 1 tensors"}
    assert found.tensors[0].cells() == ("<b>", "F32", "scalar", "4 B", "-", file.name)
    assert "&lt;b&gt;" in found._repr_html_()
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        checkpoint.inspect(tmp_path)


@alone
def test_names_do_not_speak_to_the_terminal(tmp_path: Path) -> None:
    name = "a\x1b[2J\nb\u202e"
    file = tmp_path / "x.safetensors"
    stn.save_file({name: np.ones(3, np.float32)}, file)
    for text in (output("ls", file)[1], output("diff", file, file)[1],
                 output("convert", file, file / name / "c")[1]):
        assert all(line.isprintable() for line in text.splitlines()) and len(text) > 9, text
    assert "a\\x1b[2J\\nb\\u202e" in output("ls", file)[1]


@alone
def test_a_folder_of_checkpoints(tmp_path: Path) -> None:
    manager = checkpoint.CheckpointManager(tmp_path / "run")
    for step in (1, 2):
        manager.save(step, {"model": fsdpc.nn.Linear(3, 3)})
    (manager.path(1) / "manifest.json").write_text("{}")
    code, text = output("ls", tmp_path / "run")
    assert code == 0 and "valid" in text and "cut short or changed" in text
    assert output("verify", tmp_path / "run")[0] == 1


@pytest.mark.ranks([1, 2])
def test_looking_at_a_run_leaves_its_save_alone(tmp_path: Path) -> None:
    """Tables, checks and other processes' managers, while a save is half written."""
    manager = checkpoint.CheckpointManager(tmp_path)
    state = {"model": fsdpc.nn.Linear(3, 3)}
    manager.save(1, state)
    (tmp_path / ".step-00000009.saving").mkdir(exist_ok=True)  # of a run that was killed
    seen: list[int] = []

    def look(call: str, where: str) -> None:
        if call == "fsync" and fsdpc.rank() == 0 and not seen:
            with hooked(None):
                code, text = output("ls", tmp_path)
                assert code == 0 and "step-" not in text, text
                seen.append(output("verify", tmp_path)[0])

    with hooked(look):
        manager.save(2, state)
    assert seen == ([0] if fsdpc.rank() == 0 else [])
    (tmp_path / ".step-00000009.saving").mkdir(exist_ok=True)
    assert checkpoint.CheckpointManager(tmp_path).restore(state) == 2
    assert (tmp_path / ".step-00000009.saving").is_dir()
    fsdpc.barrier()
    manager.save(3, state)
    fsdpc.barrier()
    kept = [f"step-{s:08}" for s in (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", *kept]
    fsdpc.barrier()


@alone
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """``fsdpc ckpt ls PATH | head``: no words, whether it shows at a print or at the end."""
    checkpoint.save(tmp_path / "c", {"model": fsdpc.nn.Linear(3, 3)})
    command = [sys.executable, "-m", "fsdpc", "ckpt", "ls", str(tmp_path / "c")]
    for buffered in ("", "1"):
        ours, theirs = os.pipe()
        os.close(ours)  # nobody reads
        done = subprocess.run(
            command, stdout=theirs, stderr=subprocess.PIPE, timeout=300,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
        )  # fmt: skip
        os.close(theirs)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_ctrl_c_ends_a_verification(tmp_path: Path) -> None:
    """Of a terabyte, which is all hole: in the middle of reading."""
    terabyte = 1 << 40
    header = json.dumps({"a": {"dtype": "U8", "shape": [terabyte], "data_offsets": [0, terabyte]}})
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + terabyte)
    command = [sys.executable, "-m", "fsdpc", "ckpt", "verify", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        counters = Path(f"/proc/{process.pid}/io")
        while process.poll() is None and int(counters.read_text().split()[1]) < 256 << 20:
            time.sleep(0.01)  # until so much was read
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT


@alone
def test_diff(tmp_path: Path) -> None:
    model = Odd()
    checkpoint.save(tmp_path / "a", {"model": model})
    checkpoint.save(tmp_path / "b", {"model": model})
    assert output("diff", tmp_path / "a", tmp_path / "b")[0] == 0
    with fsdpc.no_grad():
        model.single.bias.fill_(7.0)
    checkpoint.save(tmp_path / "c", {"model": model})
    code, text = output("diff", tmp_path / "a", tmp_path / "c")
    assert code == 1 and "single.bias: values differ" in text and "1 differ" in text
    checkpoint.save(tmp_path / "d", {"model": fsdpc.nn.Linear(2, 2)})
    code, text = output("diff", tmp_path / "a", tmp_path / "d")
    assert code == 1 and "only in" in text
