"""The protocol over its scenarios, and what each of its rules is for."""

from __future__ import annotations

import pytest

from .explore import outcomes
from .protocol import Rules
from .scenarios import SCENARIOS, Scenario

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario_ends_as_it_should_in_every_interleaving(scenario: Scenario) -> None:
    assert outcomes(scenario.programs) == set(scenario.ends)


# What is left out, a scenario that then goes wrong, and how.
NEEDED = [
    ("parity", "train", "named: epochs disagree"),
    ("wait_publications", "train", "wrong: stale read"),
    ("wait_publications", "train, another optimizer", "wrong: torn read"),
    ("wait_late", "train, late", "wrong: stale read"),
    ("wait_late", "train, late", "wrong: torn read"),
    ("wait_reductions", "a missing backward", "ok"),
    ("check_generation", "backward after our optimizer's step", "wrong: torn read"),
    (
        "check_generation", "backward after weights were written and published",
        "wrong: newer weights than were announced are read",
    ),
    ("compare_notes", "a child called on one rank", "ok"),
    ("refuse_held", "unshard held over a step of ours", "wrong: torn read"),
    (
        "close_interrupted_step", "Ctrl-C in our optimizer's step on one rank",
        "wrong: ranks took different steps",
    ),
]  # fmt: skip


@pytest.mark.parametrize("rule, name, end", NEEDED)
def test_every_rule_is_needed(rule: str, name: str, end: str) -> None:
    scenario = BY_NAME[name]
    assert end not in scenario.ends
    assert end in outcomes(scenario.programs, Rules(**{rule: False}))


def test_a_writer_must_wait_until_all_have_arrived() -> None:
    """The comparison of notes alone would find some of it, by luck."""
    programs = BY_NAME["averaged weights swapped in, evaluation, swapped out"].programs
    found = outcomes(programs, Rules(wait_arrivals=False, compare_notes=False))
    assert {"wrong: torn read", "wrong: newer weights than were announced are read"} <= found


def test_all_rules_are_in_the_table() -> None:
    assert {rule for rule, _, _ in NEEDED} | {"wait_arrivals"} == set(Rules._fields)
