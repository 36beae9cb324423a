"""Habits of English that read as translated; CONTRIBUTING.md has each with its cure.

Their counts only go down: `python -m tests.lint.test_habits` prints them.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from .tree import files

WHERE = "it|they|there|that|this|he|none|no|nothing|one|both|its|ranks?|nobody"
OPENS = r"(?:^|[.;:] |/?\*\*? |# |\"\"\")"

#: habit -> (pattern, how often it may occur in csrc, kernels, python and docs)
HABITS = {
    "a clause of place for a condition": (rf"\bwhere ({WHERE})\b", 30),
    '"alone" for only': (r"\balone\b", 1),
    '"beside" for besides, with, next to': (r"\bbeside\b", 3),
    '"is no X" for is not an X': (r"\b(is|are|was|were) no (?!longer|more)[a-z]", 50),
    "no actor": (r"\b([Ss]omebody|[Nn]obody|[Ww]hoever)\b", 3),
    "things that stand or lie": (r"\b(stands?|lies?)\b(?! for)", 35),
    "a fragment that opens with Of": (OPENS + r"Of (a|an|one|the|those|each|every)\b", 1),
    "a sentence that opens with So": (r"(?:^|[.] |\* |# )So [a-z]", 0),
}


def text() -> str:
    found = []
    for under in ("csrc", "kernels", "python", "docs"):
        for path in files(".c", ".h", ".cu", ".cuh", ".py", ".pyi", ".md", under=under):
            found.append(path.read_text(encoding="utf-8"))
    return "\n".join(found)


@cache
def counts() -> dict[str, int]:
    """Return how often each habit occurs."""
    whole = text()
    return {name: len(re.findall(pattern, whole, re.M)) for name, (pattern, _) in HABITS.items()}


@pytest.mark.parametrize("habit", HABITS)
def test_habits_only_get_rarer(habit: str) -> None:
    most = HABITS[habit][1]
    assert counts()[habit] <= most, f"{habit}: at most {most}; CONTRIBUTING.md has the cure"


if __name__ == "__main__":
    for name, number in counts().items():
        print(f"{number:5}  {name}")
