"""``--elastic MIN:MAX``: a run whose rank is killed goes on with one rank fewer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpc.cli import main
from fsdpc.cli.train_config import as_toml, with_config
from fsdpc.cli.train_options import check, keep_global_batch, parser
from fsdpc.launching import process
from fsdpc.launching.elastic import Elastic, parse_elastic, share_batch
from fsdpc.launching.launcher import run

SMALL = ["--batch", "2", "--seq", "32", "--sample", "0", "--eval-bytes", "0", "--data", __file__]
RESTARTS = ["--checkpoint", "run", "--save-every", "1", "--max-restarts", "1"]

# Each start says how many ranks it has; the last rank of the first ones ends as it was told.
ENDS = """
import os, sys
start, world = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["WORLD_SIZE"]
print("start", start, "of", world, flush=True)
if int(start) < int(sys.argv[1]) and os.environ["RANK"] == str(int(world) - 1):
    {how}
"""


def train(*options: object, **variables: str) -> str:
    words = [sys.executable, "-m", "fsdpc", "train", *SMALL, *map(str, options)]
    environment = {**os.environ, **variables}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def crc(output: str) -> str:
    return re.findall(r"parameters crc32c (\w+)", output)[-1]


@pytest.mark.parametrize(("most", "micro", "then"), [(2, 1, 2), (3, 2, 3), (4, 3, 4)])
def test_a_killed_rank_leaves_a_run_of_one_fewer_with_its_bits(
    most: int, micro: int, then: int, tmp_path: Path
) -> None:
    folder, other, left = tmp_path / "run", tmp_path / "other", most - 1
    backward = 3 * micro + 1  # each is a step to the fault
    fault = {"FSDPC_FAULT": f"rank 1: kill at backward of model.layers.0 in step {backward}"}
    options, begun = ("--steps", 5, "--deterministic"), ("--accumulate", micro)
    said = train("--elastic", f"1:{most}", "--max-restarts", 2, "--checkpoint", folder,
                 "--save-every", 2, *begun, *options, **fault, FSDPC_FAULT_ENABLE="1")  # fmt: skip
    assert f"all ranks start again, {left} in the place of {most} (1 of 2)" in said
    assert "resumed after step 2" in said
    whole = 2 * most * micro
    assert f"the global batch of {whole} sequences: --batch 2 --accumulate {then}" in said
    shutil.copytree(folder / "step-00000002", other / "step-00000002")
    resumed = train("--ranks", left, "--accumulate", then, "--checkpoint", other, *options,
                    "--resume")  # fmt: skip
    assert "resumed after step 2" in resumed
    undisturbed = train("--ranks", most, *begun, *options)
    assert crc(said) == crc(resumed) == crc(undisturbed)
    text = (folder / "run.toml").read_text()  # as the run was begun
    assert f'elastic = "1:{most}"' in text and f"accumulate = {micro}\n" in text


def starts(out: str) -> list[int]:
    """How many ranks each start had, as its last rank was the first to say."""
    found = re.findall(r"start (\d+) of (\d+)", out)
    return [world for _, world in sorted({(int(start), int(world)) for start, world in found})]


@pytest.mark.parametrize(
    ("how", "times", "worlds"),
    [
        ("os.kill(os.getpid(), 9)", 3, [3, 2, 2, 2]),
        ("sys.exit(7)", 1, [3, 3]),
    ],
    ids=["killed", "an exit code"],
)
def test_ranks_of_each_start(
    how: str, times: int, worlds: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script.py"
    path.write_text(ENDS.format(how=how))
    words = ["run", "--elastic", "2:3", "--max-restarts", str(times), str(path), str(times)]
    assert main.main(words) == 0
    assert starts(capsys.readouterr().out) == worlds


def test_a_failed_fork_leaves_one_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, fork, forks = tmp_path / "script.py", os.fork, []
    path.write_text(ENDS.format(how="pass"))

    def third_fails() -> int:
        forks.append(0)
        if len(forks) == 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(process.os, "fork", third_fails)
    assert run([str(path), "0"], 3, max_restarts=1, least=1) == 0
    printed = capsys.readouterr()
    assert "start 1 of 2" in printed.out
    assert "rank 2 could not be started: Resource temporarily unavailable" in printed.err
    forks.clear()
    with pytest.raises(OSError, match="rank 2 could not be started"):
        run([str(path), "0"], 3, max_restarts=1)  # always as many


@pytest.mark.parametrize("text", ["3", "0:2", "3:2", "1:x", "-1:2", "1:2:3"])
def test_what_is_no_pair_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["run", f"--elastic={text}", "--max-restarts", "1", __file__])
    assert f"1 <= MIN <= MAX, as in 2:4, got '{text}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--elastic", "1:2", "x.py"], "--elastic 1:2 needs --max-restarts N"),
        (["--elastic", "1:2", "--max-restarts", "1", "--hosts", "a,b", "x.py"], "of one host"),
        (["--elastic", "1:2", "--ranks", "2", "x.py"], "not allowed with argument --elastic"),
    ],
)
def test_run_refuses(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["run", *words])
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--ranks", "2", *RESTARTS], "--elastic 1:2 says how many ranks: leave --ranks 2 out"),
        (["--checkpoint", "run", "--save-every", "1"], "--elastic 1:2 needs --max-restarts N"),
        (["--mesh", "1x2", *RESTARTS], "a --mesh is of one number of ranks"),
        (["--strategy", "hybrid_shard", *RESTARTS], "needs --mesh"),
        (["--reshard-after-forward", "2", *RESTARTS], "1"),
    ],
)
def test_train_refuses(words: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=re.escape(why)):
        check(parser().parse_args([*SMALL, "--elastic", "1:2", *words]))


def test_shares_of_the_global_batch() -> None:
    assert share_batch(16, 4, 2) == (2, 2) and share_batch(16, 2, 4) == (4, 2)
    assert share_batch(12, 2, 4) == (3, 2)  # six each: no rank takes more than four at a time
    assert share_batch(7, 1, 4) == (1, 7) and share_batch(2, 2, 8) == (1, 1)
    assert share_batch(8, 3, 2) is None


def test_a_global_batch_that_does_not_divide_is_named() -> None:
    options = parser().parse_args(["--elastic", "2:4", "--batch", "2"])
    assert keep_global_batch(options, 4) == ""
    assert keep_global_batch(options, 3) == (
        "a global batch of 8 sequences does not divide among 3 ranks: steps are of 6 from here"
    )
    assert (options.batch, options.accumulate) == (2, 1)
    assert "2 ranks keep the global batch of 8" in keep_global_batch(options, 2)
    assert (options.batch, options.accumulate) == (2, 2)


def test_micro_batches_of_another_size_are_named_in_deterministic_mode() -> None:
    for words, named in ((["--deterministic"], True), ([], False)):
        options = parser().parse_args(["--elastic", "2:4", "--batch", "3", *words])
        said = keep_global_batch(options, 3)
        assert (options.batch, options.accumulate) == (2, 2)
        assert ("sums of micro-batches of 2 sequences have other bits than of 3" in said) == named


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is Python 3.11's")
def test_a_configuration_has_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(as_toml(parser().parse_args(["--elastic", "2:4"])))
    again = parser().parse_args(with_config(["--config", str(path)]))
    assert again.elastic == Elastic(2, 4) == parse_elastic("2:4")
