"""What all tests share: the plugin that runs them on ranks, and how long hypothesis searches."""

import functools
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.needs import missing_packages, reason_to_skip

pytest_plugins = ["fsdpc.testing", "pytester"]

# A shell starts what it puts into the background with Ctrl-C ignored, and programs pass that on:
# those that tests interrupt would never notice.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a test's first example builds what later ones reuse, and machines are shared.
# The same examples every time where others wait for the answer (CI sets CI); new ones at a desk.
settings.register_profile("default", deadline=None)
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=5000)
settings.load_profile("default")
if os.environ.get("CI"):
    settings.load_profile("fixed")
    os.environ.setdefault("FSDPC_TEST_SEED", "1")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skip a test module that imports a package which is not installed."""
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None:
        reason = reason_to_skip(call.excinfo.value.__cause__)
        if reason:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {reason}")
    return report


def pytest_itemcollected(item):
    """Skip a test, on its ranks too, whose body imports a package which is not installed."""
    if not missing_packages() or not isinstance(item, pytest.Function):
        return
    body = item.obj

    @functools.wraps(body)
    def skipping(*args, **kwargs):
        try:
            return body(*args, **kwargs)
        except ModuleNotFoundError as error:
            reason = reason_to_skip(error)
            if reason is None:
                raise
        pytest.skip(reason)

    item.obj = skipping


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    """Refuse test modules that use the engine when they are imported.

    Ranks are forked from here, and the engine reads its variables once. What was imported is kept
    out of Python's collections: a full one would take 0.5 s, and many tests ask for one.
    """
    gc.freeze()
    fsdpc = sys.modules.get("fsdpc")
    if fsdpc is None or session.config.option.collectonly:
        return
    os.environ["FSDPC_UNKNOWN"] = "1"
    try:
        fsdpc.tensor([1.0])
    except ValueError:
        return  # it has read nothing yet
    finally:
        del os.environ["FSDPC_UNKNOWN"]
    pytest.exit("a test module makes tensors while it is imported: move them into its tests", 3)


@pytest.fixture(autouse=True)
def _left_alone():
    """Name a test that joins a world in pytest's own process, where later ones would find it."""
    yield
    joined = (fsdpc := sys.modules.get("fsdpc")) and fsdpc.is_initialized()
    assert not joined, "fsdpc is initialised in pytest's process: mark the test with ranks(1)"


@pytest.fixture
def no_engine_threads():
    """Other tests of this process have used kernels; launch() refuses beside their threads."""
    import fsdpc

    threads = fsdpc.num_threads()
    fsdpc.set_num_threads(1)
    yield
    fsdpc.set_num_threads(threads)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty folder on a disk of this host; pytest's own may lie in memory."""
    from fsdpc import _core

    build = Path(__file__).parents[1] / "build"
    for parent in (tmp_path, Path("/var/tmp"), build):
        if not parent.is_dir():
            continue
        with tempfile.TemporaryDirectory(prefix="fsdpc-test-", dir=parent) as folder:
            try:
                _core.Tier(folder, 0)
            except (OSError, ValueError):
                continue
            yield Path(folder)
            return
    pytest.skip(f"neither pytest's folder nor /var/tmp nor {build} is on a disk")
