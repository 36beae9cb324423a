"""The pytest plugin: what a test on ranks sees, and what its user sees when it fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest


@pytest.fixture
def value() -> dict[str, int]:
    return {"seven": 7}


@pytest.mark.ranks(2, init=False)
def test_every_rank_has_its_own_number(tmp_path: Path) -> None:
    (tmp_path / os.environ["RANK"]).write_text(os.environ["WORLD_SIZE"])
    deadline = time.monotonic() + 10
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline, "the ranks do not run at the same time"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.ranks([1, 3], init=False)
def test_sizes_become_parameters() -> None:
    assert os.environ["WORLD_SIZE"] in ("1", "3")
    assert int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"])


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.ranks((1, 2), init=False)
def test_fixtures_and_parameters_come_by_value(value: dict[str, int], number: int) -> None:
    assert value == {"seven": 7}
    assert number in (1, 2)


class TestInClass:
    @pytest.mark.ranks(2, init=False)
    def test_method(self, value: dict[str, int]) -> None:
        assert isinstance(self, TestInClass) and value["seven"] == 7


@pytest.fixture
def changed_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_TEST_SETS_THIS", "yes")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("changed_environment")
@pytest.mark.ranks(1, init=False)
def test_environment_and_folder_are_the_tests(tmp_path: Path) -> None:
    assert os.environ["A_TEST_SETS_THIS"] == "yes"
    assert Path.cwd() == tmp_path


def run_inner(pytester: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile("import os, sys, time\nimport pytest\n" + body)
    return pytester.runpytest_subprocess("-p", "fsdpc.testing", *options)


def test_failures_show_all_tracebacks_and_stop_the_others(pytester: pytest.Pytester) -> None:
    result = run_inner(
        pytester,
        """
@pytest.mark.ranks(3, init=False)
def test_it(tmp_path):
    rank = int(os.environ["RANK"])
    print("a line of rank", rank)
    if rank == 1:
        assert rank == 41, "said by one"
    if rank == 2:
        raise ValueError("said by two")
    import subprocess
    subprocess.run(["sleep", "100"])
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines_random(
        ["*a line of rank 0", "--- rank 1*---", "*AssertionError: said by one*", "*assert 1 == 41*"]
    )
    result.stdout.fnmatch_lines_random(["--- rank 2*---", "*ValueError: said by two*"])
    result.stdout.fnmatch_lines(["--- rank 0 ---", "ended by the launcher 5 s after the first"])
    assert result.duration < 60  # the sleep was not waited for


def test_hosts_have_equal_numbers_of_ranks(pytester: pytest.Pytester) -> None:
    result = run_inner(
        pytester,
        """
@pytest.mark.ranks([3, 4], hosts=2, init=False)
def test_it():
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert int(os.environ["LOCAL_RANK"]) == int(os.environ["RANK"]) % 2
""",
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*ValueError: 3 ranks on 2 hosts: every host must have as many"])


def test_a_hang_shows_every_ranks_stack(pytester: pytest.Pytester) -> None:
    result = run_inner(
        pytester,
        """
def where_it_hangs():
    time.sleep(100)

@pytest.mark.ranks(2, timeout=0.5, init=False)
def test_it():
    where_it_hangs()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the ranks did not end within 0.5 s*"])
    assert result.stdout.str().count("in where_it_hangs") >= 2


def test_skips_deaths_and_bad_fixtures(pytester: pytest.Pytester) -> None:
    result = run_inner(
        pytester,
        """
@pytest.fixture
def handle():
    return open(os.devnull)

@pytest.mark.ranks(2, init=False)
def test_skip():
    pytest.skip("not today")

@pytest.mark.ranks(2, init=False)
def test_death():
    if os.environ["RANK"] == "1":
        os._exit(3)

@pytest.mark.ranks(2, init=False)
def test_unpicklable(handle):
    pass

@pytest.mark.ranks(0, init=False)
def test_none():
    pass

@pytest.mark.ranks(1, init=False)
def test_after_all_that():
    pass
""",
        "-rs",
    )
    result.assert_outcomes(skipped=1, failed=3, passed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*not today*",
            "*--- rank 1 ---*",
            "*exit code 3*",
            "*'handle'*TextIOWrapper*cannot be handed to ranks by value*",
            "*the number of ranks must be at least 1, got 0*",
        ]
    )
