"""``fsdpc run`` and ``fsdpc train --hosts``: mpirun or mpiexec starts ranks, on two namespaces."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fsdpc
from fsdpc.distributed import hosts as fsdpc_hosts
from tests.needs import need_mpi

from .test_transport_mpi import COMPILERS, ROOT, mpi_build
from .test_two_hosts import HOSTS, LEAST_BYTES, PACKAGE, PROGRAM, TIMEOUT_S, net_hosts, sums_of

TRAIN = ["--ranks", "4", "--steps", "2", "--batch", "1", "--seq", "48", "--eval-bytes", "0"]
# A step after the other, until Ctrl-C.
TRAINS = """
import sys
sys.path.insert(0, {root!r})
import fsdpc
from tests.faults.common import build, step
fsdpc.init()
model = build()
optimizer = fsdpc.optim.AdamW(model.parameters())
step(model, optimizer)
sys.stderr.write("ready\\n")
while True:
    step(model, optimizer)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[net_hosts.Hosts]:
    with net_hosts.net_hosts() as made:
        yield made


@pytest.fixture(scope="module", params=mpi_build.FAMILIES)
def start(request: pytest.FixtureRequest, hosts: net_hosts.Hosts) -> Start:
    """Start ``fsdpc run``, or another command, with these words on the first host."""
    need_mpi(request.param)
    compiler = Path(COMPILERS[request.param])
    launcher = compiler.with_name(compiler.name.replace("mpicc", "mpiexec"))
    network = net_hosts.ADDRESSES[0].rpartition(".")[0] + ".0/24"
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_btl_tcp_if_include": network,
        "OMPI_MCA_oob_tcp_if_include": network,
        "HYDRA_IFACE": "v0",
        "OMP_NUM_THREADS": "1",
        "FSDPC_TIMEOUT_S": "60",
    }

    def run(*words: str, name: str = "run") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fsdpc", name, "--hosts", HOSTS]
        command += ["--launcher", str(launcher), "--agent", str(hosts.agent), *words]
        return subprocess.Popen([*hosts.inside[0], *command], env=environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                start_new_session=True)  # fmt: skip

    return run


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def test_bits_are_those_of_one_host(start: Start, hosts: net_hosts.Hosts) -> None:
    one_host = [sys.executable, "-m", "fsdpc", "run", "--ranks", "4", str(PROGRAM), "launcher"]
    expected = subprocess.run(one_host, capture_output=True, text=True, timeout=TIMEOUT_S)
    before = hosts.sent_bytes()
    done = finish(start("--ranks-per-host", "2", str(PROGRAM), "launcher"))
    assert hosts.sent_bytes() - before > LEAST_BYTES, "it did not take the wire"
    sums = [word.rpartition("crc:")[2] for word in sums_of(expected)]
    sums += [word.split()[0] for word in done.stdout.split("crc:")[1:]]
    assert len(sums) == 8 and len(set(sums)) == 1, (sums, done)
    line = done.stderr.partition("fsdpc: ")[2].partition("\n")[0]
    assert "mpiexec" in line and line.endswith(f"{PROGRAM} launcher"), done.stderr


def test_a_model_is_trained_as_on_one_host(start: Start, tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    command = [sys.executable, "-m", "fsdpc", "train", *TRAIN, "--metrics", str(one)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
    done = finish(start(*TRAIN, "--metrics", str(two), name="train"))
    assert done.returncode == 0, done
    ends = [json.loads(each.read_text().splitlines()[-1]) for each in (one, two)]
    assert ends[0]["params_crc32c"] == ends[1]["params_crc32c"]


def test_a_rank_that_fails_is_the_outcome(start: Start) -> None:
    done = finish(start("--ranks", "4", str(PROGRAM), "launcher", "raise"))
    assert done.returncode != 0
    assert "rank 3 has enough" in done.stderr + done.stdout


def test_ctrl_c_ends_all(start: Start, tmp_path: Path) -> None:
    """In the middle of training."""
    trains = tmp_path / "trains.py"
    trains.write_text(TRAINS.format(root=str(ROOT)))
    process = start("--ranks", "4", str(trains))
    assert process.stderr is not None
    ready = 0
    for line in process.stderr:
        ready += "ready" in line
        if ready == 4:
            break
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)  # MPICH's mpiexec may say 0, if a rank ends while it passes Ctrl-C on
    assert done.returncode != 0 or "[mpiexec@" in done.stdout + done.stderr, done
    end = time.monotonic() + 30
    while left := subprocess.run(["pgrep", "-f", str(trains)], capture_output=True).stdout:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_a_time_limit(start: Start, tmp_path: Path) -> None:
    """Either launcher reads it from a variable; an option MPICH's refuses."""
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(100)\n")
    begin = time.monotonic()
    done = finish(start("--ranks", "4", "--timeout", "2.5", str(tmp_path / "sleeps.py")))
    assert 2.5 < time.monotonic() - begin < 60 and done.returncode != 0, done
    said = (done.stdout + done.stderr).lower()
    assert "fsdpc: mpiexec_timeout=3 " in said and re.search("timed out|time limit", said), done


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "a,a", "--ranks", "2"], "give every host once"),
        (["--hosts", "a,b", "--ranks", "3"], "3 ranks on 2 hosts: every host must have as many"),
        (["--hosts", "a,b"], "one of the arguments --ranks --ranks-per-host --elastic is required"),
        (["--hosts", "a,b", "--ranks-per-host", "0"], "must be at least 1, got 0"),
        (["--hosts", "a,b", "--ranks", "2", "--launcher", "no-such"], "there is no no-such"),
        (["--hosts", "a,b", "--ranks", "2", "--launcher", "true"], "an MPI that is not known"),
        (["--ranks", "2", "--agent", "ssh"], "--agent goes with --hosts"),
        (["--ranks-per-host", "0"], "--ranks-per-host goes with --hosts"),
        ([], "one of the arguments --ranks --ranks-per-host --elastic is required"),
    ],
)
def test_what_makes_no_sense_is_said(words: list[str], said: str) -> None:
    command = [sys.executable, "-m", "fsdpc", "run", *words, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_lines_of_both_families() -> None:
    """A line gives ranks the variables that are theirs, by name: values are in no argument."""
    given = {"FSDPC_RUN_ID": "a secret", "HOME": "/root", "OMP_NUM_THREADS": "2"}
    line = fsdpc_hosts.command_line(("/bin/mpirun", "openmpi"), ["a", "b"], 4, None, given)
    assert " ".join(line) == (
        "/bin/mpirun --tag-output --bind-to none -x FSDPC_RUN_ID -x OMP_NUM_THREADS "
        "--host a:4,b:4 -n 8"
    )
    line = fsdpc_hosts.command_line(("/bin/mpiexec", "mpich"), ["a", "b"], 4, "rsh", given)
    assert " ".join(line) == (
        "/bin/mpiexec -launcher ssh -launcher-exec rsh -prepend-rank -hosts a,b -ppn 4 -n 8"
    )


def test_a_launcher_beside_python_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "mpiexec-of-a-wheel"
    launcher.write_text("#!/bin/sh\necho HYDRA build details:\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(fsdpc_hosts, "families", lambda: ["mpich"])
    with pytest.raises(ValueError, match="there is no mpiexec-of-a-wheel"):
        fsdpc_hosts.find_launcher(launcher.name)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert fsdpc_hosts.find_launcher(launcher.name) == (str(launcher), "mpich")


def test_what_was_built_is_shown() -> None:
    there = [f for f in sorted(COMPILERS) if (PACKAGE / mpi_build.library_name(f)).exists()]
    assert fsdpc.show_config(print_=False)["mpi"].startswith(", ".join(there) or "none: ")
