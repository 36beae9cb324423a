"""A pytest plugin that runs tests on new ranks, and a function that compares two models.

    @pytest.mark.ranks(2)
    def test_sum():
        assert fsdpc.all_reduce(1.0) == 2.0

Every rank is a new process; the plugin calls :func:`fsdpc.init` before the body and
:func:`fsdpc.shutdown` after it. ``ranks([1, 2, 3])`` runs the test at each of these sizes.
``ranks(4, hosts=2)`` makes the ranks pretend to be on two hosts, which share no memory; local
sockets replace the network.

If a rank fails, all ranks' tracebacks are shown and the other ranks are stopped. If a test exceeds
its timeout (``ranks(2, timeout=10)`` or, by default, ``--ranks-timeout``), every rank's stack is
shown.

Installing fsdpc registers the plugin. The module also provides :func:`compare`, which trains
two models side by side and returns the first difference:

    assert compare(native, Side(model=theirs, loss=their_loss), batches, steps=20) is None
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpc.distributed.environment import check_ranks
from fsdpc.launching.forked import Report
from fsdpc.launching.forkserver import ForkServer, Job
from fsdpc.testing.compare import Difference, Side, Tolerance, compare

if TYPE_CHECKING:
    import pytest

__all__ = ["Difference", "Side", "Tolerance", "compare"]

_SIZE = "ranks_size"  # parameter name for tests that run at several sizes
_SERVER = "_fsdpc_fork_server"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line option for the default timeout."""
    parser.getgroup("fsdpc").addoption(
        "--ranks-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds after which a test on ranks is stopped and its stacks are shown (60)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        "ranks(n, timeout=None, init=True, hosts=1): run the test's body on n fresh ranks, once "
        "for each of several n if a list is given; init=False leaves fsdpc.init() to the body; "
        "the ranks pretend to be on so many hosts",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Expand a list of sizes into one test per size."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker and isinstance(_sizes(marker), (list, tuple)):
        metafunc.fixturenames.append(_SIZE)
        metafunc.parametrize(_SIZE, _sizes(marker), ids=[f"{n}ranks" for n in _sizes(marker)])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server after importing all tests and before running any."""
    marked = {item.nodeid: item for item in session.items if item.get_closest_marker("ranks")}
    if marked and not session.config.option.collectonly:
        server = ForkServer(functools.partial(_call_on_rank, marked))
        setattr(session.config, _SERVER, server)
        session.config.add_cleanup(server.close)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test on ranks, not in this process."""
    import pytest

    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    params = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
    job = Job(
        name=pyfuncitem.nodeid,
        ranks=check_ranks(params.get(_SIZE, _sizes(marker))),
        timeout=marker.kwargs.get("timeout") or pyfuncitem.config.getoption("--ranks-timeout"),
        init=marker.kwargs.get("init", True),
        hosts=marker.kwargs.get("hosts", 1),
        arguments={
            name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames
        },
        environment=dict(os.environ),
        folder=os.getcwd(),
    )
    output, outcome = getattr(pyfuncitem.config, _SERVER).run(job)
    if output:
        print(output, end="")
    if outcome.timed_out:
        headline = f"the ranks did not end within {job.timeout:g} s"
        pytest.fail(f"{headline}\n{outcome.describe()}", pytrace=False)
    if outcome.failures:
        pytest.fail(outcome.describe(), pytrace=False)
    for report in outcome.reports:
        if report is not None and report.kind == "skip":
            pytest.skip(str(report.value))
    return True


def _sizes(marker: pytest.Mark) -> object:
    if not marker.args:
        raise TypeError("pytest.mark.ranks needs the number of ranks: ranks(2), or ranks([1, 2])")
    return marker.args[0]


def _call_on_rank(items: dict[str, pytest.Function], job: Job) -> Report:
    """Run the test's body on this rank, in a process that the fork server created."""
    import pytest

    from fsdpc import distributed
    from fsdpc.distributed import pretend

    try:
        if job.hosts != 1:
            pretend.on_hosts(job.hosts)
        if job.init:
            distributed.init()
        items[job.name].obj(**job.arguments)
        # Do not shut down after a failure: peers that wait for this rank must see it exit at once.
        if job.init:
            distributed.shutdown()
    except pytest.skip.Exception as skipped:
        return Report("skip", str(skipped))
    except BaseException as error:
        return Report("error", _describe(error, items[job.name].path))
    return Report("ok", None)


def _describe(error: BaseException, test_file: Path) -> str:
    """Return the traceback as pytest would print it, starting at the test's file."""
    import pytest

    info = pytest.ExceptionInfo.from_exception(error)
    info.traceback = info.traceback.cut(path=test_file)
    return str(info.getrepr(style="short", funcargs=False))
