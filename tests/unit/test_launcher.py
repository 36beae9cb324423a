"""fsdpc run, python -m fsdpc and launch(): output, failures, and nothing left behind."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.needs import need_torch

import fsdpc as fsdpc_package
from fsdpc._core import engine_threads
from fsdpc.distributed.environment import rank_environments
from fsdpc.launching import forked
from fsdpc.launching.launcher import LaunchError, launch, run

pytestmark = pytest.mark.usefixtures("no_engine_threads")
PACKAGE_PARENT = str(Path(forked.__file__).parents[2])


def fsdpc(*arguments: str, **options: object) -> subprocess.Popen[str]:
    """Start the command as a shell would, importable wherever the tests' own package came from."""
    return subprocess.Popen(
        [sys.executable, "-m", "fsdpc", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PACKAGE_PARENT},
        **options,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def gone(pid: int, within: float = 30.0) -> bool:
    """Wait until no such process runs (a zombie that nobody has reaped yet does not run)."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], within)[0])
    finally:
        os.close(pidfd)


def own_children() -> set[int]:
    """Processes, zombies included, whose parent is this one."""
    children = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            children.add(int(stat.parent.name))
    return children


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text("import os, sys, time, signal\n" + text)
    return str(path)


# ---- launch


def test_results_come_in_rank_order_and_closures_work() -> None:
    factor = 10
    assert launch(lambda shift: shift + factor * int(os.environ["RANK"]), 3, 1) == [1, 11, 21]


def test_environment_is_torchruns() -> None:
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "FSDPC_LAUNCHER_PID")
    first, second = launch(lambda: [os.environ[name] for name in names], 2)
    assert first == ["2", "0", "2", "127.0.0.1", str(os.getpid())]
    assert second == ["2", "1", "2", "127.0.0.1", str(os.getpid())]
    ids = launch(lambda: os.environ["FSDPC_RUN_ID"], 2)
    assert ids[0] == ids[1] != launch(lambda: os.environ["FSDPC_RUN_ID"], 1)[0]
    assert "RANK" not in os.environ
    assert launch(lambda: os.environ["ADDED"], 1, env={"ADDED": "x"}) == ["x"]


@pytest.mark.parametrize("given", ["", "3"])
def test_openmp_gets_a_ranks_share_of_the_cores(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    text = "sys.exit(os.environ['OMP_NUM_THREADS'] != sys.argv[1])"
    share = given or str(max(1, fsdpc_package._core.usable_cores() // 2))
    assert finish(fsdpc("run", "--ranks", "2", script(tmp_path, text), share))[0] == 0
    assert launch(lambda: os.environ["OMP_NUM_THREADS"], 2) == [share, share]
    assert launch(lambda: os.environ["OMP_NUM_THREADS"], 1, env={"OMP_NUM_THREADS": "7"}) == ["7"]


def test_output_carries_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("one\ntwo")
        os.write(2, b"no newline")

    launch(speak, 2)
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] one", f"[{rank}] two", f"[{rank}] no newline"]


def test_live_lines_keep_their_carriage_returns(capsys: pytest.CaptureFixture[str]) -> None:
    launch(lambda: sys.stdout.write("step 1\rstep 2\r") and sys.stdout.flush(), 1)
    assert "[0] step 1\r[0] step 2" in capsys.readouterr().out


def test_ticks_come_while_ranks_run_and_after() -> None:
    seen: list[bool] = []
    before = own_children()
    ours, theirs = os.pipe()  # a rank ends when it was ticked

    def tick() -> None:
        seen.append(own_children() <= before)
        if len(seen) == 2:
            os.write(theirs, b"!")

    try:
        assert launch(lambda: os.read(ours, 1), 1, tick=tick) == [b"!"]
    finally:
        os.close(ours)
        os.close(theirs)
    assert len(seen) >= 3 and not seen[0] and seen[-1]
    with pytest.raises(ZeroDivisionError):
        launch(lambda: signal.pause(), 1, tick=lambda: 1 // 0)
    assert own_children() <= before


def test_large_results_and_output_do_not_block() -> None:
    def much() -> bytes:
        sys.stdout.write("x" * 300_000 + "\n")
        return b"y" * 5_000_000

    assert [len(result) for result in launch(much, 2, timeout=30)] == [5_000_000] * 2


def test_all_tracebacks_are_in_the_error() -> None:
    def fail() -> None:
        raise ValueError(f"rank {os.environ['RANK']} says no")

    with pytest.raises(LaunchError, match="ranks 0, 1 of 2 failed") as caught:
        launch(fail, 2)
    assert "ValueError: rank 0 says no" in caught.value.tracebacks[0]
    assert "ValueError: rank 1 says no" in caught.value.tracebacks[1]
    assert "in fail" in str(caught.value)
    assert "_launch/" not in str(caught.value)


def test_tracebacks_that_are_alike_are_shown_once() -> None:
    def fail() -> None:
        raise ValueError("the same" if os.environ["RANK"] != "1" else "another")

    with pytest.raises(LaunchError, match="ranks 0-3 of 4 failed") as caught:
        launch(fail, 4)
    text = str(caught.value)
    assert "--- ranks 0, 2, 3" in text and text.count("ValueError: the same") == 1
    assert "--- rank 1" in text and len(caught.value.tracebacks) == 4


def test_the_rank_that_blames_a_peer_is_not_the_first() -> None:
    class PeerError(RuntimeError):
        pass

    def fail() -> None:
        if os.environ["RANK"] == "0":
            raise PeerError("rank 1 left")
        time.sleep(0.3)
        os._exit(7)

    with pytest.raises(LaunchError) as caught:
        launch(fail, 2)
    assert caught.value.rank == 1
    assert caught.value.tracebacks[1] == "exit code 7"


def test_ranks_that_stay_are_killed_after_the_first_failure() -> None:
    def fail() -> None:
        if os.environ["RANK"] == "0":
            sys.exit("rank 0 gives up")
        subprocess.run(["sleep", "100"])

    began = time.monotonic()
    with pytest.raises(LaunchError, match="5 s after the first") as caught:
        launch(fail, 2)
    assert 4 < time.monotonic() - began < 60
    assert caught.value.rank == 0
    assert "rank 0 gives up" in caught.value.tracebacks[0]


def test_a_timeout_prints_every_stack(capsys: pytest.CaptureFixture[str]) -> None:
    def a_place_to_hang() -> None:
        time.sleep(100)

    for timeout in (0.3, 3, 30):  # until the ranks have come so far, which a busy machine delays
        with pytest.raises(LaunchError, match=f"did not end within {timeout} s") as caught:
            launch(a_place_to_hang, 2, timeout=timeout)
        assert caught.value.timed_out and caught.value.rank is None
        stacks = caught.value.tracebacks.values()
        if all("in a_place_to_hang" in text for text in stacks):
            return
    pytest.fail("\n".join(stacks))


def test_a_crash_is_named_with_its_stack() -> None:
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(LaunchError, match="killed by SIGSEGV") as caught:
        launch(crash, 1)
    assert "in crash" in caught.value.tracebacks[0]


def test_a_result_that_cannot_travel_is_named() -> None:
    with pytest.raises(LaunchError, match="result of type function cannot be pickled"):
        launch(lambda: (lambda: None), 1)


@pytest.mark.parametrize("ranks", [0, -3, 1_000_000])
def test_impossible_numbers_of_ranks(ranks: int) -> None:
    with pytest.raises(ValueError, match=str(ranks)):
        launch(print, ranks)


@pytest.mark.parametrize("ranks", [1.0, "2", True, None])
def test_numbers_of_ranks_that_are_none(ranks: object) -> None:
    with pytest.raises(TypeError, match="must be an integer"):
        launch(print, ranks)  # type: ignore[arg-type]


def meet_by_inherited_socket() -> tuple[str, bool, bool, float]:
    """Our socket's name, whether init() took the variable and the descriptor, and a sum."""
    fd = int(os.environ["FSDPC_RANK_SOCKET"])
    with socket.socket(fileno=os.dup(fd)) as listening:
        name = listening.getsockname().decode()
    fsdpc_package.init()
    taken = "FSDPC_RANK_SOCKET" not in os.environ
    total = fsdpc_package.all_reduce(1.0 + fsdpc_package.rank())
    fsdpc_package.shutdown()
    return name, taken, os.path.exists(f"/proc/self/fd/{fd}"), total


def test_ranks_inherit_the_socket_that_listens_for_them() -> None:
    # A rank that did not use it would find its name taken, by the launcher's socket.
    for rank, (name, taken, is_open, total) in enumerate(launch(meet_by_inherited_socket, 3)):
        assert name.startswith(f"\0fsdpc-{os.geteuid()}-127.0.0.1:")
        assert name.endswith(f"-{rank}")
        assert taken and not is_open and total == 6.0


def test_runs_at_one_time_have_ports_of_their_own() -> None:
    first = int(rank_environments(1)[0]["MASTER_PORT"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        assert rank_environments(1)[0]["MASTER_PORT"] != str(first)


def test_a_socket_of_another_name_is_not_used() -> None:
    def meet() -> float:
        os.environ["MASTER_PORT"] = "29501"  # a program that knows better
        fsdpc_package.init()
        return fsdpc_package.all_reduce(1.0)

    assert launch(meet, 2) == [2.0, 2.0]


def test_who_waits_for_a_rank_that_ends_before_it_joined_learns_it() -> None:
    def leave_or_wait() -> None:
        if os.environ["RANK"] == "0":
            select.select([int(os.environ["FSDPC_RANK_SOCKET"])], [], [])
            raise OSError("never joins")
        fsdpc_package.init()

    with pytest.raises(LaunchError) as caught:
        launch(leave_or_wait, 2, timeout=30)
    assert caught.value.rank == 0 and "never joins" in caught.value.tracebacks[0]
    assert "PeerError" in caught.value.tracebacks[1]
    # It hears of it by the closed connection or from the launcher, whichever comes first.
    assert re.search("listens as rank 0|rank 0 ended .exit code 1", caught.value.tracebacks[1])


def use_kernels() -> None:
    a = fsdpc_package.tensor(np.ones((256, 256), np.float32), requires_grad=True)
    (a @ a).sum().backward()


@pytest.mark.ranks(1, init=False)
def test_a_fork_beside_engine_threads_is_refused() -> None:
    assert engine_threads() == 0  # and asking starts nothing
    fsdpc_package.set_num_threads(3)
    use_kernels()
    assert engine_threads() == 2
    with pytest.raises(RuntimeError, match=r"2 engine threads run.*set_num_threads\(1\)"):
        launch(int, 1)
    fsdpc_package.set_num_threads(1)
    assert engine_threads() == 0
    use_kernels()
    assert launch(lambda: (use_kernels(), engine_threads())[1], 2) == [0, 0]


@pytest.mark.ranks(1, init=False)
def test_ranks_can_be_launched_beside_a_world_of_one() -> None:
    os.environ["FSDPC_THREADS"] = "1"
    fsdpc_package.init()
    use_kernels()
    assert fsdpc_package.all_reduce(2.0) == 2.0
    assert launch(lambda: os.environ["RANK"], 2) == ["0", "1"]


@pytest.mark.ranks(1, init=False)
def test_a_child_counts_none_of_its_parents_threads() -> None:
    fsdpc_package.set_num_threads(3)
    use_kernels()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(engine_threads()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 8) == b"0" and engine_threads() == 2


def test_torchs_pool_is_not_needed_in_ranks(tmp_path: Path) -> None:
    need_torch()
    script = tmp_path / "pool.py"
    script.write_text(
        "import torch\n"
        "from fsdpc.launching.launcher import launch\n"
        "torch.set_num_threads(4)\n"
        "def total():\n"
        "    return float(torch.ones(1 << 20).exp().max())\n"
        "here = total()\n"
        "assert launch(total, 2, timeout=30) == [here, here]\n"
    )
    environment = {**os.environ, "PYTHONPATH": PACKAGE_PARENT}
    assert subprocess.run([sys.executable, script], env=environment, timeout=300).returncode == 0


def test_a_fork_beside_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        class cuda:
            @staticmethod
            def is_initialized() -> bool:
                return True

    monkeypatch.setitem(sys.modules, "torch", Torch)
    with pytest.raises(RuntimeError, match="CUDA is initialised"):
        launch(print, 1)


def test_a_fork_beside_a_driver_that_the_plugin_started_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fsdpc.tensors.cuda._driver_runs", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA is initialised"):
        launch(print, 1)


def test_descriptors_and_processes_are_given_back() -> None:
    launch(int, 1)
    before, children = os.listdir("/proc/self/fd"), own_children()
    launch(int, 3)
    with pytest.raises(LaunchError):
        launch(lambda: 1 / 0, 2)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert own_children() == children


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    body = """
from fsdpc.launching.launcher import launch
def wait():
    print(os.getpid(), flush=True)
    time.sleep(100)
launch(wait, 2)
"""
    process = subprocess.Popen(
        [sys.executable, script(tmp_path, body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PACKAGE_PARENT},
    )
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0 and "KeyboardInterrupt" in err
    assert all(gone(pid) for pid in pids)


# ---- fsdpc run


@pytest.mark.parametrize("what", ["info", "run"])
def test_a_reader_that_goes_away_is_no_error(what: str, tmp_path: Path) -> None:
    """As `| head` does: no traceback, and no rank stays."""
    path = script(tmp_path, "while True:\n    print('line ' * 1000)")
    ours, theirs = os.pipe()
    os.close(ours)
    arguments = ["run", "--ranks", "2", path] if what == "run" else [what]
    environment = {**os.environ, "PYTHONPATH": PACKAGE_PARENT}
    environment.pop("PYTHONUNBUFFERED", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdpc", *arguments],
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    os.close(theirs)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGPIPE and err == ""


def test_run_passes_arguments_and_prefixes_lines(tmp_path: Path) -> None:
    path = script(tmp_path, "print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])")
    code, out, err = finish(fsdpc("run", "--ranks", "2", path, "--steps", "3"))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[0] 0 2 ['--steps', '3']",
        "[1] 1 2 ['--steps', '3']",
    ]


def test_run_takes_a_module(tmp_path: Path) -> None:
    (tmp_path / "some_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    process = fsdpc("run", "--ranks", "1", "-m", "some_module", "-x", cwd=tmp_path)
    assert finish(process)[:2] == (0, "[0] __main__ ['-x']\n")


def test_run_names_who_failed_first_with_the_traceback(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
class PeerError(Exception): pass
if os.environ["RANK"] == "0":
    raise PeerError("rank 1 died")
time.sleep(0.3)
raise ValueError("the cause")
""",
    )
    code, out, err = finish(fsdpc("run", "--ranks", "2", path))
    assert code == 1
    assert "rank 1 failed first (exit code 1)" in err
    assert "    ValueError: the cause" in err
    assert "rank 0: exit code 1" in err
    assert "[0] " in out and "PeerError: rank 1 died" in out


def test_run_gives_a_signals_code(tmp_path: Path) -> None:
    path = script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    code, _, err = finish(fsdpc("run", "--ranks", "1", path))
    assert code == 128 + signal.SIGKILL
    assert "rank 0 failed first (killed by SIGKILL)" in err


def test_run_times_out_with_stacks(tmp_path: Path) -> None:
    path = script(tmp_path, "def stuck():\n    time.sleep(100)\nstuck()")
    code, out, err = finish(fsdpc("run", "--ranks", "2", "--timeout", "0.5", path))
    assert code == 124
    assert "did not end within 0.5 s" in err
    assert out.count("in stuck") == 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_run_forwards_signals(tmp_path: Path, signum: signal.Signals) -> None:
    path = script(
        tmp_path,
        """
def stop(signum, frame):
    print("got", signal.Signals(signum).name)
    sys.exit(0)
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, stop)
print("ready")
time.sleep(100)
""",
    )
    process = fsdpc("run", "--ranks", "2", path)
    ready = [process.stdout.readline() for _ in range(2)]
    assert all(line.endswith("ready\n") for line in ready)
    process.send_signal(signum)
    code, out, err = finish(process)
    assert code == (128 + signum if signum == signal.SIGINT else 0)  # the others may have saved
    assert out.count(f"got {signum.name}") == 2
    assert f"ended by {signum.name}" in err


def test_a_second_ctrl_c_ends_ranks_that_ignored_the_first(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
signal.signal(signal.SIGINT, lambda signum, frame: print("no"))
print("ready")
while True:
    signal.pause()
""",
    )
    process = fsdpc("run", "--ranks", "2", path)
    for text in ("ready", "no"):
        assert all(process.stdout.readline().endswith(f"{text}\n") for _ in range(2))
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - began < 3  # the launcher's patience alone would be 5 s
    assert code == 128 + signal.SIGINT and "ended by SIGINT" in err


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
print(os.getpid(), child.pid)
time.sleep(1000)
""",
    )
    process = fsdpc("run", "--ranks", "2", path)
    lines = [process.stdout.readline().split() for _ in range(2)]
    pids = [int(word) for line in lines for word in line[1:]]
    assert len(pids) == 4
    process.kill()
    process.communicate(timeout=300)
    assert all(gone(pid) for pid in pids)


def test_what_a_rank_leaves_behind_is_killed(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)",
    )
    code, out, _ = finish(fsdpc("run", "--ranks", "1", path))
    assert code == 0
    assert gone(int(out.split()[1]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "0", "x.py"], "at least 1, got 0"),
        (["--ranks", "-1", "x.py"], "at least 1, got -1"),
        (["--ranks", "99999", "x.py"], "99999 ranks are more than this machine can hold"),
        (["--ranks", "two", "x.py"], "invalid int value: 'two'"),
        (["--ranks", "1", "missing.py"], "no such script: missing.py"),
        (["x.py"], "--ranks"),
        (["--ranks", "1", "--max-restarts", "-1", __file__], "at least 0, got -1"),
        (["--ranks", "2", "--hosts", "a,b", "--max-restarts", "1", "x.py"], "of one host"),
    ],
)
def test_run_refuses(arguments: list[str], text: str) -> None:
    code, out, err = finish(fsdpc("run", *arguments))
    assert code == 2 and out == ""
    assert text in err


def test_run_reports_a_script_that_goes_away(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such script"):
        run([str(tmp_path / "none.py")], 1)


def test_help_is_quick_and_names_the_commands() -> None:
    code, out, _ = finish(fsdpc("--help"))
    assert code == 0
    assert all(f"\n    {name} " in out for name in ("run", "train", "info"))
