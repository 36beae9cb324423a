"""Random models and scripts against an unsharded twin: random_cases draws, random_run compares.

A failure prints the shrunken model and script, and every rank's traceback. `make soak` runs ten
thousand cases more, from new seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from .random_cases import Case
from .random_draw import cases
from .random_world import World

QUICK = settings(
    deadline=None,
    database=None,
    derandomize=True,  # CI runs the same cases every time
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
SOAK = settings(QUICK, derandomize=False, print_blob=True)


def search(size: int, examples: int, profile: settings) -> None:
    """Run cases on ranks that stay."""
    with World(size) as world:

        @settings(profile, max_examples=examples)
        @given(cases())
        def check(case: Case) -> None:
            world.run(case)

        check()


def search_equal(size: int, examples: int, profile: settings, **environment: str) -> None:
    """Run cases as they are, and under these variables."""
    with World(size) as usual, World(size, **environment) as other:

        @settings(profile, max_examples=examples)
        @given(cases())
        def check(case: Case) -> None:
            assert usual.run(case) == other.run(case), case.describe()

        check()


@pytest.mark.parametrize(("size", "examples"), [(1, 150), (2, 250), (3, 100)])
def test_models_and_scripts(size: int, examples: int) -> None:
    search(size, examples, QUICK)


def test_no_alias_mode_has_the_same_bits() -> None:
    """With private unsharded parameters, which are NaN when given up."""
    search_equal(2, 60, QUICK, FSDPC_NO_ALIAS="1")


def test_a_disk_has_the_same_bits(disk: Path) -> None:
    search_equal(2, 40, QUICK, TEST_OFFLOAD=str(disk))


@pytest.mark.soak
@pytest.mark.parametrize(("size", "examples"), [(1, 2000), (2, 5000), (3, 2000), (4, 1000)])
def test_many_models_and_scripts(size: int, examples: int) -> None:
    search(size, examples, SOAK)


@pytest.mark.soak
def test_no_alias_mode_over_many_cases() -> None:
    search_equal(2, 2000, SOAK, FSDPC_NO_ALIAS="1")


@pytest.mark.soak
def test_a_disk_over_many_cases(disk: Path) -> None:
    search_equal(2, 2000, SOAK, TEST_OFFLOAD=str(disk))
