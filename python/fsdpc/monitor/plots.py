"""Plot losses and rates by step with matplotlib (``pip install matplotlib``).

:func:`plot_runs` draws the metrics of one or more runs in one picture. :class:`LivePlot` draws a
run in progress, either in a notebook cell, updated in place, or to a file. :func:`plot_memory` and
:func:`plot_scaling` are for papers: memory by strategy, and rates by number of ranks.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fsdpc.display.svg import CLASSES
from fsdpc.monitor.loggers import Logger, Value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fsdpc.planning.memory_plan import MemoryPlan

Panels = Sequence[tuple[str, Sequence[str]]]

#: What to draw: each panel has a label and value names; a run need not have all of them.
PANELS: Panels = (
    ("loss", ("loss", "val_loss")),
    ("tokens/s", ("tokens_per_second",)),
)
FORMATS = (".png", ".svg", ".pdf")
SMOOTH_FROM = 100  # a moving mean is also drawn from this many steps on
MISSING = "plots need matplotlib: pip install matplotlib"


class Run(NamedTuple):
    """A run's name and, for each of its values, the steps and numbers."""

    name: str
    values: dict[str, dict[int, float]]

    def add(self, step: int, values: Iterable[tuple[str, Value]]) -> None:
        """Add a step's numbers, replacing any earlier ones for the same step."""
        for name, value in values:
            if isinstance(value, (int, float)):
                self.values.setdefault(name, {})[step] = float(value)

    def add_line(self, line: str) -> None:
        """Add a line of JSON; a line without a step belongs to the most recent step.

        Raises
        ------
        ValueError
            The line is not a JSON object.
        """
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        newest = max((max(steps) for steps in self.values.values()), default=0)
        step = record.pop("step", newest)
        self.add(int(step), record.items())


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run's metrics from a file written by ``fsdpc train --metrics`` or ``JsonLines``.

    Parameters
    ----------
    path : path
        One JSON object per line, with a ``step``. A last line that is incomplete is ignored.

    Raises
    ------
    ValueError
        A line is not a JSON object, or there is no step.
    """
    run = Run(Path(path).stem, {})
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            run.add_line(line)
        except ValueError as error:
            if line.endswith("\n"):
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not run.values:
        raise ValueError(f"{path} has no steps yet")
    return run


def plot_runs(
    runs: Iterable[Run | str | os.PathLike[str]],
    path: str | os.PathLike[str] | None = None,
    panels: Panels = PANELS,
) -> Figure:
    """Draw several runs in one picture, each in its own colour.

    Parameters
    ----------
    runs : iterable of Run or path
        Paths are read by :func:`read_run`.
    path : path, optional
        Path of a file to write: ``.png``, ``.svg`` or ``.pdf``.
    panels : sequence of (str, sequence of str)
        Panel labels and value names. Panels without values are omitted.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        There is nothing to draw, or the file has another format.

    Examples
    --------
    ::

        fsdpc.plots.plot_runs(["first.jsonl", "second.jsonl"], "both.png")
    """
    check_format(path)
    given = list(runs)
    found = [run if isinstance(run, Run) else read_run(run) for run in given]
    paths = [run.name if isinstance(run, Run) else os.fspath(run) for run in given]
    if len({run.name for run in found}) < len(found):  # runs often have separate folders
        found = [Run(name, run.values) for name, run in zip(paths, found, strict=True)]
    figure = _draw(found, panels)
    if path is not None:
        figure.savefig(path)
    return figure


def plot_memory(
    plans: Mapping[str, MemoryPlan],
    path: str | os.PathLike[str] | None = None,
    *,
    limit: float | None = None,
) -> Figure:
    """Draw memory per rank by strategy, as a figure for papers: one bar per plan, stacked by class.

    Parameters
    ----------
    plans : mapping of str to MemoryPlan
        Labels and plans, from left to right.
    path : path, optional
        Path of a file to write: ``.png`` (300 dots per inch), ``.svg`` or ``.pdf``.
    limit : float, optional
        Bytes per rank, drawn as a line.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        There are no plans, or the file has another format.

    Examples
    --------
    ::

        names = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")
        plans = {name: fsdpc.memory_plan(model, 8, (4, 1024), strategy=name) for name in names}
        fsdpc.plots.plot_memory(plans, "memory.png", limit=16e9)
    """
    check_format(path)
    if not plans:
        raise ValueError("nothing to draw: give at least one memory plan, by its label")
    longest = max(map(len, plans))
    figure, ax = _paper(1.6 + max(0.6, 0.085 * longest) * len(plans))
    most = max([limit or 0, *(plan.total for plan in plans.values())])
    unit, name = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    below = np.zeros(len(plans))
    for each in CLASSES:
        heights = np.array([(getattr(plan, each) or 0) / unit for plan in plans.values()])
        if heights.any():
            ax.bar(list(plans), heights, 0.62, bottom=below, color=CLASSES[each], label=each,
                   edgecolor="white", linewidth=0.6)  # fmt: skip
            below += heights
    for x, total in enumerate(below):
        ax.annotate(f"{total:.3g}", (x, total), (0, 2), textcoords="offset points", ha="center")
    if limit is not None:
        ax.axhline(limit / unit, color="black", linestyle="--", linewidth=1)
        ax.annotate(
            f"limit {limit / unit:.3g} {name}", (1, limit / unit), (-2, 3), ha="right",
            xycoords=("axes fraction", "data"), textcoords="offset points",
            bbox={"boxstyle": "square,pad=0", "color": "white", "alpha": 0.85},
        )  # fmt: skip
    ax.set_ylim(0, 1.12 * most / unit)
    ax.set_ylabel(f"memory of a rank [{name}]")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    _save_paper(figure, path)
    return figure


def plot_scaling(
    runs: Mapping[int, Run | str | os.PathLike[str]],
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw tokens per second by number of ranks, next to perfect scaling, for papers.

    Parameters
    ----------
    runs : mapping of int to Run or path
        Each run's number of ranks, and its metrics as for :func:`read_run`. A point is the median
        over a run's steps, excluding the first tenth; the bar is the interquartile range.
    path : path, optional
        Path of a file to write: ``.png`` (300 dots per inch), ``.svg`` or ``.pdf``.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        There are no runs, a run has no rate, a number of ranks is below 1, or the file has another
        format.
    """
    check_format(path)
    if not runs:
        raise ValueError("nothing to draw: give at least one run, by its number of ranks")
    points = []
    for ranks, given in sorted(runs.items()):
        run = given if isinstance(given, Run) else read_run(given)
        rates = list(run.values.get("tokens_per_second", {}).values())
        if ranks < 1 or not rates:
            what = f"{ranks} ranks" if ranks < 1 else "no tokens_per_second"
            raise ValueError(f"run {run.name} has {what}: it cannot be drawn over ranks")
        points.append(np.percentile(rates[len(rates) // 10 :], (25, 50, 75)))
    low, middle, high = np.array(points).T
    ranks = np.array(sorted(runs))
    figure, ax = _paper(4.2)
    ax.plot(ranks, middle[0] * ranks / ranks[0], "--", color="#6b6b6b", linewidth=1,
            label=f"{ranks[0]} rank{'s' * bool(ranks[0] > 1)}, scaled")  # fmt: skip
    ax.errorbar(
        ranks, middle, (middle - low, high - middle), fmt="o-", color=CLASSES["unsharded"],
        ecolor="black", elinewidth=0.8, capsize=2, markersize=4, label="measured",
    )  # fmt: skip
    for x, y, share in zip(ranks, middle, middle * ranks[0] / (middle[0] * ranks), strict=True):
        ax.annotate(f"{share:.0%}", (x, y), (4, -10), textcoords="offset points", fontsize=7)
    ax.set_xticks(ranks)
    ax.set_xlabel("ranks")
    ax.set_ylabel("tokens/s of all ranks")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    _save_paper(figure, path)
    return figure


def _paper(width: float) -> tuple[Figure, Any]:
    """Return a figure one column wide, and its axes."""
    check_installed()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(3.4, width), 2.7), layout="constrained")
    ax = figure.subplots()
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def _save_paper(figure: Figure, path: str | os.PathLike[str] | None) -> None:
    for text in figure.findobj(lambda each: hasattr(each, "set_fontsize")):
        text.set_fontsize(min(8, text.get_fontsize()))
    if path is not None:
        figure.savefig(path, dpi=300)


class LivePlot(Logger):
    """A live plot of a run: a logger that draws its values on rank 0.

    Parameters
    ----------
    path : path, optional
        Path of a file to rewrite: ``.png``, ``.svg`` or ``.pdf``. Without one the plot appears in
        the notebook cell that created it, and is updated there.
    every : float, default 1.0
        Seconds between drawings, each of which takes a tenth of a second.
    panels : sequence of (str, sequence of str)
        As for :func:`plot_runs`.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        There is neither a path nor a notebook, or the file has another format.

    Notes
    -----
    Ranks of ``%%ranks`` draw in their cell. Ranks of :func:`fsdpc.launch` cannot: instead, rank 0
    writes JSON lines, and the notebook draws them with :meth:`follow`.

    Examples
    --------
    ::

        with fsdpc.plots.LivePlot() as plot:
            for step, (x, y) in enumerate(batches):
                loss = model(x, y)
                ...
                plot.log(step, {"loss": loss})
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: float = 1.0,
        panels: Panels = PANELS,
    ) -> None:
        check_format(path)
        check_installed()
        self._path = None if path is None else Path(path)
        if self._path is None and not _in_notebook():
            raise ValueError(
                "outside of a notebook's process a LivePlot needs a file: LivePlot('loss.png'); "
                "what ranks log is drawn by LivePlot().follow(file) in the notebook"
            )
        self._run, self._panels, self._every = Run("run", {}), panels, every
        self._drawn_at, self._is_new = -math.inf, False
        self._shown: Any = None  # the notebook's output

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Add a step's values, and redraw if a redraw is due."""
        self._run.add(step, values.items())
        self._is_new = True
        if self._is_due():
            self.draw()

    def follow(self, path: str | os.PathLike[str]) -> Callable[[], None]:
        """Return a function that reads new lines from a JSON lines file and plots them.

        Parameters
        ----------
        path : path
            A file from ``JsonLines`` or ``fsdpc train --metrics``. It need not exist yet; its
            current contents are skipped.

        Examples
        --------
        ::

            with fsdpc.plots.LivePlot() as plot:
                results = fsdpc.launch(train, 2, tick=plot.follow("run.jsonl"))
        """
        file = Path(path)
        done = file.stat().st_size if file.exists() else 0

        def tick() -> None:
            nonlocal done
            if not file.exists():
                return
            with file.open("rb") as opened:
                done = opened.seek(done if done <= os.fstat(opened.fileno()).st_size else 0)
                new = opened.read()
            new = new[: new.rfind(b"\n") + 1]  # whole lines
            done += len(new)
            for line in new.decode().splitlines():
                self._run.add_line(line)
            self._is_new |= bool(new)
            if self._is_new and self._is_due():
                self.draw()

        return tick

    def add_file(self, path: str | os.PathLike[str]) -> None:
        """Add the metrics that a run has written so far, for example before resuming it.

        Parameters
        ----------
        path : path
            As for :func:`read_run`.
        """
        for name, values in read_run(path).values.items():
            self._run.values.setdefault(name, {}).update(values)

    def draw(self) -> None:
        """Draw immediately, if there are any values."""
        if not any(name in self._run.values for _, names in self._panels for name in names):
            return
        figure = _draw([self._run], self._panels)
        self._drawn_at, self._is_new = time.monotonic(), False
        if self._path is not None:
            _replace(self._path, figure)
            return
        from IPython.display import Image, display

        data = io.BytesIO()
        figure.savefig(data, format="png")
        picture = Image(data=data.getvalue(), format="png")
        if self._shown is None:
            self._shown = display(picture, display_id=True)
        else:
            self._shown.update(picture)

    def _is_due(self) -> bool:
        return time.monotonic() - self._drawn_at >= self._every

    def close(self) -> None:
        """Draw the remaining values."""
        if self._is_new:
            self.draw()


def check_format(path: str | os.PathLike[str] | None) -> None:
    """Raise ValueError if the file name does not have the suffix of a picture format."""
    if path is not None and Path(path).suffix not in FORMATS:
        raise ValueError(f"a plot is written as {', '.join(FORMATS)}, got '{os.fspath(path)}'")


def check_installed() -> None:
    """Raise ImportError, with installation instructions, if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING) from error


def _in_notebook() -> bool:
    """Return whether this is a notebook kernel (but not a fork of one) or a %%ranks rank."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "shows_in_notebook", False):
        return True
    session = getattr(getattr(shell, "kernel", None), "session", None)
    return session is not None and getattr(session, "pid", None) == os.getpid()


def _draw(runs: list[Run], panels: Panels) -> Figure:
    """Draw all panels that have values, one below the other."""
    check_installed()
    from matplotlib.figure import Figure

    shown = [(label, names) for label, names in panels
             if any(name in run.values for run in runs for name in names)]  # fmt: skip
    if not shown:
        wanted = ", ".join(name for _, names in panels for name in names)
        raise ValueError(f"nothing to draw: {', '.join(run.name for run in runs)} have none of "
                         f"{wanted}")  # fmt: skip
    heights = [2.0] + [1.0] * (len(shown) - 1)
    figure = Figure(figsize=(7.5, 1.4 * sum(heights) + 0.6), dpi=110, layout="constrained")
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (label, names) in zip(axes, shown, strict=True):
        for number, run in enumerate(runs):
            for name in names:
                if name in run.values:
                    title = run.name if len(runs) > 1 else name
                    if len(runs) > 1 and name.startswith("val_"):
                        title += " (validation)"
                    _draw_values(ax, run.values[name], f"C{number}", name, title)
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
        if len(ax.get_legend_handles_labels()[1]) > 1:
            ax.legend(frameon=False)
    axes[-1].set_xlabel("step")
    return figure


def _draw_values(ax: Any, values: dict[int, float], colour: str, name: str, title: str) -> None:
    steps = np.array(sorted(values))
    heights = np.array([values[step] for step in steps.tolist()])
    if name.startswith("val_"):
        ax.plot(steps, heights, "o--", color=colour, markersize=4, label=title)
        return
    window = len(steps) // 20
    if len(steps) < SMOOTH_FROM or not np.isfinite(heights).all():
        ax.plot(steps, heights, color=colour, label=title)
        return
    ax.plot(steps, heights, color=colour, alpha=0.25, linewidth=0.8)
    mean = np.convolve(heights, np.full(window, 1 / window), "valid")  # of `window` last steps
    ax.plot(steps[window - 1 :], mean, color=colour, label=title)


def _replace(path: Path, figure: Figure) -> None:
    """Write a picture to a second file, then replace the first, which may be open in a viewer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format=path.suffix[1:])
    part.replace(path)
