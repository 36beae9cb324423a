"""%ranks and %%ranks: in an IPython shell of a process of its own, and in real kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fsdpc
from fsdpc.launching.channel import Channel
from fsdpc.notebook import _output

PACKAGE_PARENT = str(Path(fsdpc.__file__).parents[1])
LONG_S = 120  # for anything, on a busy machine

# Runs the cells that it is given in one shell, and says how each one ended.
PLAYER = """
import json, os, signal, sys, threading
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

shell = InteractiveShell.instance(colors="nocolor")
shell._showtraceback = lambda etype, error, lines: shown.extend(lines)
played = []
for cell in json.load(sys.stdin):
    shown = []
    with capture_output() as captured:
        result = shell.run_cell(cell, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    kinds = [sorted(each.data) for each in captured.outputs]
    played.append([captured.stdout, kinds, type(error).__name__, "\\n".join(shown), str(error)])
    shown = []
with open(sys.argv[1], "w") as file:
    json.dump(played, file)
"""

# For a cell of the notebook: Ctrl-C once every rank has made a file.
INTERRUPT = """
import os, signal, threading, time
def press(folder, ranks):
    def wait():
        while len(os.listdir(folder)) < ranks:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=wait).start()
"""
BEGUN = "import os; open(os.path.join(folder, os.environ['RANK']), 'w').close()"


class Played(NamedTuple):
    """What a cell printed and displayed, and the error that it ended with."""

    out: str
    kinds: list[list[str]]
    error: str
    shown: str
    text: str


def gone(pids: list[int]) -> bool:
    """Wait until there are no such processes."""
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


def pids(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)", text)]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def play(tmp_path: Path, *cells: str) -> list[Played]:
    """Run cells in a shell of a fresh process, after %load_ext."""
    answers = tmp_path / "played.json"
    done = subprocess.run(
        [sys.executable, "-c", PLAYER, str(answers)],
        input=json.dumps(["%load_ext fsdpc", *cells]), text=True, timeout=LONG_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    played = [Played(*each) for each in json.loads(answers.read_text())][1:]
    assert gone([pid for each in played for pid in pids(each.out)])
    return played


def test_names_live_on_and_travel(tmp_path: Path) -> None:
    how, first, last, sent, alone, read, checked, ended, _, unknown = play(
        tmp_path,
        "%ranks 2",
        "%%ranks\nimport fsdpc\nmine = fsdpc.rank()",
        "%%ranks\nfsdpc.all_reduce(mine + 1)",
        "lr = 3.5",
        "%%ranks -i lr -o both,mine\nboth = lr + mine",
        "%%ranks 1 -o one\none = mine",
        "assert both == [3.5, 4.5] and mine == [0, 1] and one == 1, (both, mine, one)",
        "%ranks 0",
        "%unload_ext fsdpc",
        "%ranks",
    )
    assert how.out.startswith("ranks 0, 1, forked\n  rank 0: pid ")
    assert first == Played("", [], "NoneType", "", "None")
    assert last.out == "[ranks 0, 1: the same output]\n" and last.kinds == [["text/plain"]]
    assert {each.error for each in (sent, alone, read, checked)} == {"NoneType"}, checked
    assert ended.out == "ended ranks 0, 1\n" and unknown.error == "UsageError"


def test_ranks_are_programs_of_their_own_beside_threads(tmp_path: Path) -> None:
    how, ran, _, asked = play(
        tmp_path,
        # Threads of the engine, which a fork would lack.
        "import fsdpc\nfsdpc.set_num_threads(2)\n"
        "a = fsdpc.randn(512, 512)\nb = a @ a\n%ranks 2",
        "%%ranks -o seen\nimport fsdpc\nseen = fsdpc.all_gather(fsdpc.rank()).tolist()",
        "assert seen == [[0, 1], [0, 1]]\nfsdpc.set_num_threads(1)",
        "%ranks 2 --spawn",
    )
    assert "ranks 0, 1, spawned: 1 engine threads run in this process" in how.out, how
    assert ran.error == "NoneType" and asked.out.startswith("ranks 0, 1, spawned: as asked\n")


def test_output_is_folded(tmp_path: Path) -> None:
    _, same, other, all_of_it, picture, bar, quiet = play(
        tmp_path,
        "%ranks 3",
        "%%ranks\nimport os\nmine = int(os.environ['RANK'])\nprint('hello')",
        "%%ranks\nprint('hello', mine // 2)",
        "%%ranks --all\nprint('hello', mine // 2)\nprint('end', end='')\n7",
        "%%ranks\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\n"
        "from IPython.display import HTML, display\nprint('between')\ndisplay(HTML('<b>x</b>'))",
        "%%ranks 0\nfrom tqdm.auto import tqdm\nfor each in tqdm(range(3)): pass",
        "%%ranks\nif mine == 0: print('alone')",
    )
    assert same.out == "hello\n[ranks 0-2: the same output]\n"
    assert other.out == (
        "hello 0\n[ranks 0, 1: the same output; rank 2: other output, shown by %%ranks --all]\n"
    )
    lines = all_of_it.out.splitlines()
    labels = {tuple(re.findall(r"\d", line.partition("]")[0])) for line in lines}
    assert labels <= {("0", "2"), ("0",), ("1",), ("2",), ("0", "1"), ("1", "2")}, lines
    assert {line.partition("] ")[2] for line in lines} >= {"hello 0", "hello 1", "end"}
    assert len([line for line in lines if line.endswith("hello 1")]) == 1 and all_of_it.kinds
    assert [("image/png" in kinds, "text/html" in kinds) for kinds in picture.kinds] == [
        (True, False), (False, True)
    ]  # fmt: skip
    assert picture.out.startswith("between\n")
    assert "\r" in bar.out and "100%" in bar.out and "3/3" in bar.out
    assert quiet.out == "alone\n"


def test_a_failure_is_shown_once(tmp_path: Path) -> None:
    _, all_fail, differ, syntax, one_fails, again, missing, wrong = play(
        tmp_path,
        "%ranks 2",
        "%%ranks\nimport fsdpc\nmine = fsdpc.rank()\n1 / 0",
        "%%ranks\nraise ValueError(f'of {mine}')",
        "%%ranks\n1 +",
        "%%ranks\nif mine == 1:\n    raise ValueError('mine')\nfsdpc.barrier()",
        "%%ranks\nfsdpc.all_reduce(1)",
        "%%ranks -o no_such\n1",
        "%%ranks 2\n1",
    )
    assert all_fail.error == "RankError" and all_fail.text.startswith("ranks 0, 1: ZeroDivision")
    assert all_fail.shown.startswith("ranks 0, 1:\n") and all_fail.shown.count("Traceback") == 1
    assert "line 4" in all_fail.shown and "_magics.py" not in all_fail.shown
    assert differ.shown.count("Traceback") == 1 and "rank 1: ValueError: of 1" in differ.shown
    assert "SyntaxError" in syntax.shown and syntax.error == "RankError"
    assert one_fails.shown.startswith("rank 1:\n") and one_fails.shown.count("Traceback") == 1
    assert "rank 0 in line 4: stopped" in one_fails.shown
    assert "join again" in one_fails.shown and again.error == "NoneType", again
    assert "no 'no_such'" in missing.shown
    assert wrong.error == "UsageError" and "ranks 0, 1" in wrong.text


def test_a_dead_rank_is_named(tmp_path: Path) -> None:
    _, before, died, after, how, fresh = play(
        tmp_path,
        "%ranks 2",
        "%%ranks\nimport fsdpc, os, signal\nfsdpc.barrier()",
        "%%ranks\nif fsdpc.rank() == 1:\n    print('last words')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nfsdpc.barrier()",
        "%%ranks\n1",
        "%ranks",
        "%ranks 1\nfsdpc_is_here = 'fsdpc' in globals()",
    )
    assert before.error == "NoneType"
    assert died.error == "RankError", died
    assert re.match(r"rank 1 \(pid \d+\): killed by SIGKILL, .* %ranks 2 starts", died.text)
    assert "rank 1 printed last:\n    last words" in died.shown
    assert after.error == "UsageError" and "killed by SIGKILL" in after.text
    assert "killed by SIGKILL" in how.out and "%ranks 2" in how.out
    assert fresh.out.startswith("rank 0, forked\n")


def test_ctrl_c_stops_all_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    _, _, stopped, kept, stubborn, lost = play(
        tmp_path,
        f"{INTERRUPT}\nfolder = {str(folders[0])!r}\n%ranks 2",
        "press(folder, 2)",
        f"%%ranks -i folder\nx = 5\n{BEGUN}\nwhile True:\n    pass",
        f"%%ranks\nassert x == 5\nfolder = {str(folders[1])!r}",
        f"press({str(folders[1])!r}, 2)\nshell = get_ipython()\nshell.run_cell_magic('ranks', '', "
        f"'''{BEGUN}\nimport time\nwhile True:\n    try:\n        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n        pass\n''')",
        "%%ranks\nassert 'x' not in globals()",
    )
    assert stopped.error == "KeyboardInterrupt" and "kept their names" in stopped.text, stopped
    assert "rank 0 in line" in stopped.text and "_magics.py" not in stopped.shown
    assert kept.error == "NoneType", kept
    assert "did not stop: ranks 0, 1 were started again" in stubborn.text, stubborn
    assert lost.error == "NoneType", lost


# ---- the pieces


def test_messages_arrive_whole() -> None:
    import socket

    left, right = (Channel(each.detach()) for each in socket.socketpair())
    left.send({"kind": "a", "data": b"x" * 1000})
    assert right.receive() == {"kind": "a", "data": b"x" * 1000}
    left.send({"kind": "b"})
    left.send({"kind": "c"})
    assert right.available() == ([{"kind": "b"}, {"kind": "c"}], True)
    os.close(left.fd)
    assert right.receive() is None and right.available() == ([], False)
    os.close(right.fd)


def test_progress_and_addresses_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    first = _output.First([0, 1, 2], None)
    for rank, text in enumerate(["10%\r50%\rdone <a at 0x7f01>\n", "done <a at 0x7f02>\n"]):
        first.text(rank, text)
    first.close()
    assert capsys.readouterr().out.endswith("\n[ranks 0, 1: the same output]\n")


# ---- real kernels


class Kernel:
    """A kernel of Jupyter's, and what a cell of it gives."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(
            startup_timeout=LONG_S, kernel_name="python3", env=environment()
        )
        self.restarted()

    def restarted(self) -> None:
        self.client.wait_for_ready(timeout=LONG_S)
        assert self.run("%load_ext fsdpc")["error"] is None

    def run(self, code: str, on_text: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = {"text": "", "data": [], "error": None}

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                found["text"] += content["text"]
                if on_text:
                    on_text(found["text"])
            elif message["msg_type"] in ("display_data", "execute_result", "update_display_data"):
                found["data"].append((message["msg_type"], content["data"]))
            elif message["msg_type"] == "error":
                found["error"] = content

        self.client.execute_interactive(code, output_hook=hook, timeout=LONG_S)
        return found

    def pid(self) -> int:
        return int(self.run("import os; print(os.getpid())")["text"])


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    one = Kernel()
    yield one
    one.client.stop_channels()
    one.manager.shutdown_kernel(now=True)


def test_an_interrupt_of_the_kernel(kernel: Kernel) -> None:
    pressed = []

    def press(text: str) -> None:
        if "begun" in text and not pressed:
            pressed.append(text)
            kernel.manager.interrupt_kernel()

    assert "ranks 0, 1, forked" in kernel.run("%ranks 2")["text"]  # a kernel always has threads
    found = kernel.run(
        "%%ranks\nimport fsdpc\nx, seen = 1, 'yes'\nfsdpc.distributed.barrier()\n"
        "print('begun')\nwhile True: x += 1",
        on_text=press,
    )
    assert pressed and found["error"]["ename"] == "KeyboardInterrupt", found
    after = kernel.run("%%ranks\nseen")
    assert after["error"] is None and after["data"] == [("display_data", {"text/plain": "'yes'"})]


def test_figures_and_plots_that_go_on(kernel: Kernel) -> None:
    kernel.run("%ranks 2")
    shown = kernel.run("%%ranks\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    assert [sorted(data) for _, data in shown["data"]] == [["image/png", "text/plain"]], shown
    live = kernel.run(
        "%%ranks\nfrom fsdpc.monitor.plots import LivePlot\nwith LivePlot(every=0) as plot:\n"
        "    for step in range(3):\n        plot.log(step, {'loss': 1.0})"
    )
    kinds = [kind for kind, data in live["data"] if "image/png" in data]
    assert kinds[0] == "display_data" and set(kinds[1:]) == {"update_display_data"}, live


def test_no_rank_outlives_its_kernel(kernel: Kernel) -> None:
    ranks = pids(kernel.run("%ranks 2")["text"])
    kernel.manager.restart_kernel(now=False)
    assert len(ranks) == 2 and gone(ranks)
    kernel.restarted()
    ranks = pids(kernel.run("%ranks 2 --spawn")["text"])
    os.kill(kernel.pid(), 9)
    assert len(ranks) == 2 and gone(ranks)
    kernel.manager.restart_kernel(now=True)
    kernel.restarted()
