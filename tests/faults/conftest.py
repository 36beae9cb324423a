"""Prints, at the end of the tests, how long every fault took to be noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTES = pytest.StashKey[Path]()


@pytest.fixture(scope="session")
def notes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for every cell of the matrix that was run."""
    folder = tmp_path_factory.mktemp("faults")
    request.config.stash[NOTES] = folder
    return folder


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Fault x phase: seconds until the last survivor raised, and until the launcher had ended."""
    folder = config.stash.get(NOTES, None)
    rows = [json.loads(path.read_text()) for path in folder.iterdir()] if folder else []
    if not rows:
        return
    terminalreporter.section("seconds from a fault to the last survivor's error / launcher's end")
    places = list(dict.fromkeys((phase, waits) for _, phase, waits, *_ in sorted(rows, key=_place)))
    columns = sorted({(fault, ranks) for fault, _, _, ranks, *_ in rows})
    found = {(f, n, p, w): (noticed, ended) for f, p, w, n, noticed, ended in rows}
    head = "".join(f"{f'{fault}, {ranks} ranks':>22}" for fault, ranks in columns)
    terminalreporter.write_line(f"{'':28}{head}")
    for phase, waits in places:
        cells = [found.get((fault, ranks, phase, waits)) for fault, ranks in columns]
        text = "".join(f"{_cell(cell):>22}" for cell in cells)
        terminalreporter.write_line(f"{f'waits in {phase}' if waits else phase:28}{text}")


def _place(row: list[object]) -> tuple[object, int]:
    from .matrix import PHASES

    return row[2], PHASES.index(str(row[1]))


def _cell(cell: tuple[float | None, float] | None) -> str:
    if cell is None:
        return ""
    noticed, ended = cell
    return f"{'nobody' if noticed is None else f'{noticed:.3f}'} / {ended:.3f}"
