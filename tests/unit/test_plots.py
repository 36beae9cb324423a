"""Pictures of runs: what is read, what is drawn, and live ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fsdpc
from fsdpc import plots
from fsdpc.cli import main

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n"


def metrics(path: Path, steps: int = 5, offset: float = 0.0) -> Path:
    """A file as ``fsdpc train --metrics`` writes it."""
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 5.0 / step + offset, "tokens_per_second": 100.0 + step}
        for step in range(1, steps + 1)
    ]
    lines.insert(2, {"step": 2, "val_loss": 3.5 + offset})
    lines.append({"val_loss": 3.0 + offset, "params_crc32c": "c0ffee"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_is_read(tmp_path: Path) -> None:
    path = metrics(tmp_path / "run.jsonl", steps=3)
    with path.open("a") as file:  # it was resumed, and is being written
        file.write('{"step": 3, "time": 1, "loss": 9, "grad_norm": null}\n{"step": 4, "lo')
    run = plots.read_run(path)
    assert run.name == "run"
    assert run.values["loss"] == {1: 5.0, 2: 2.5, 3: 9.0}
    assert run.values["val_loss"] == {2: 3.5, 3: 3.0}  # the last validation is of the last step
    assert "params_crc32c" not in run.values and "grad_norm" not in run.values


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", r"run.jsonl has no steps yet"),
        ('{"step": 1, "loss": 2}\nnothing\n', r"run.jsonl, line 2: Expecting value"),
        ("[1]\n", r"run.jsonl, line 1: it is no JSON object"),
        ('{"step": 1, "speed": 2}\n', "run have none of loss, val_loss, tokens_per_second"),
    ],
)
def test_what_is_no_run(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    with pytest.raises(ValueError, match=why):
        plots.plot_runs([tmp_path / "run.jsonl"])


def test_several_runs_are_in_one_picture(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    paths = [metrics(tmp_path / "run.jsonl"), metrics(tmp_path / "b" / "run.jsonl", offset=1.0)]
    figure = plots.plot_runs(paths, tmp_path / "both.svg")
    loss, speed = figure.axes
    assert (loss.get_ylabel(), speed.get_ylabel()) == ("loss", "tokens/s")
    assert speed.get_xlabel() == "step"
    first, validation, *_ = loss.lines
    assert list(first.get_xdata()) == [1, 2, 3, 4, 5] and first.get_ydata()[4] == 1.0
    assert list(validation.get_xdata()) == [2, 5]
    labels = loss.get_legend_handles_labels()[1]
    assert labels == [name for path in map(str, paths) for name in (path, f"{path} (validation)")]
    colours = [line.get_color() for line in loss.lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert (tmp_path / "both.svg").read_text().lstrip().startswith("<?xml")


def test_long_runs_have_a_mean_over_their_values() -> None:
    run = plots.Run("long", {"loss": {step: float(step % 2) for step in range(200)}})
    (axes,) = plots.plot_runs([run]).axes  # no rates, no panel
    values, mean = axes.lines
    assert len(values.get_xdata()) == 200 and len(mean.get_xdata()) == 191
    assert mean.get_ydata() == pytest.approx([0.5] * 191)
    run.values["loss"][7] = float("nan")
    (axes,) = plots.plot_runs([run]).axes
    assert len(axes.lines) == 1  # a gap would spread over the mean


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = metrics(tmp_path / "run.jsonl")
    assert main.main(["plot", str(path)]) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)
    assert f"wrote {tmp_path / 'run.png'}" in capsys.readouterr().out
    for arguments, why in (
        ([str(path), "-o", "x.gif"], "a plot is written as .png, .svg, .pdf, got 'x.gif'"),
        ([str(tmp_path / "none")], "No such file"),
    ):
        assert main.main(["plot", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.startswith("fsdpc plot: ") and why in said and said.count("\n") == 1


def test_a_live_plot_is_a_file_that_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "made" / "loss.png"
    with plots.LivePlot(path, every=1e9) as plot:
        plot.log(1, {"nothing": 1.0})
        assert not path.exists()
        plot.log(2, {"loss": fsdpc.tensor([2.0])})
        first = path.read_bytes()
        for step in range(3, 6):
            plot.log(step, {"loss": 1.0 / step})
        assert path.read_bytes() == first  # it is not time to draw again
    assert path.read_bytes().startswith(PNG) and path.read_bytes() != first
    assert [each.name for each in path.parent.iterdir()] == ["loss.png"]


def test_a_live_plot_follows_a_file(tmp_path: Path) -> None:
    path, picture = tmp_path / "run.jsonl", tmp_path / "loss.png"
    plot = plots.LivePlot(picture, every=0.0)
    tick = plot.follow(path)
    tick()
    path.write_text('{"step": 1, "loss": 4}\n{"step": 2, "lo')
    tick()
    first = picture.read_bytes()
    tick()
    with path.open("a") as file:
        file.write('ss": 3}\n')
    tick()
    assert picture.read_bytes() != first
    assert plot._run.values["loss"] == {1: 4.0, 2: 3.0}
    path.write_text('{"step": 1, "loss": 8}\n')  # begun anew
    tick()
    assert plot._run.values["loss"] == {1: 8.0, 2: 3.0}
    other = plots.LivePlot(tmp_path / "other.png")
    other.follow(path)()  # what was there is another run's
    assert not (tmp_path / "other.png").exists()
    other.add_file(path)
    assert other._run.values["loss"] == {1: 8.0}


def test_a_live_plot_needs_a_notebook_or_a_file() -> None:
    with pytest.raises(ValueError, match=r"LivePlot\('loss.png'\)"):
        plots.LivePlot()


def command(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = [variables.pop("first", ""), str(Path(fsdpc.__file__).parents[1])]
    return subprocess.run(
        [sys.executable, "-m", "fsdpc", *map(str, arguments)], capture_output=True, text=True,
        timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip


SMALL = ("train", "--steps", 2, "--batch", 1, "--seq", 16, "--sample", 0, "--eval-bytes", 400,
         "--data", ROOT / "docs")  # fmt: skip


def test_fsdpc_train_draws(tmp_path: Path) -> None:
    done = command(*SMALL, "--plot", tmp_path / "loss.svg")
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "loss.svg").read_text()
    assert "val_loss" in drawn and "tokens/s" in drawn  # matplotlib keeps the text in comments


def test_without_matplotlib_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    hiding = tmp_path / "hiding" / "matplotlib"
    hiding.mkdir(parents=True)
    (hiding / "__init__.py").write_text("raise ImportError('not here')\n")
    run = metrics(tmp_path / "run.jsonl")
    for arguments in (("plot", run), (*SMALL, "--plot", tmp_path / "loss.png")):
        done = command(*arguments, first=str(hiding.parent))
        sentence = f"fsdpc {arguments[0]}: plots need matplotlib: pip install matplotlib\n"
        assert (done.returncode, done.stderr) == (2, sentence)


def test_memory_by_strategy(tmp_path: Path) -> None:
    with fsdpc.deferred_init():
        model = fsdpc.nn.Linear(256, 256)
    names = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")
    plans = {name: fsdpc.memory_plan(model, 4, (8, 256), strategy=name) for name in names}
    figure = plots.plot_memory(plans, tmp_path / "memory.png", limit=4e6)
    assert (tmp_path / "memory.png").read_bytes().startswith(PNG)
    (ax,) = figure.axes
    tops: dict[int, float] = {}
    for bar in ax.patches:
        place = round(bar.get_x() + bar.get_width() / 2)
        tops[place] = max(tops.get(place, 0.0), bar.get_y() + bar.get_height())
    totals = [plan.total / 2**20 for plan in plans.values()]
    assert [tops[i] for i in range(3)] == pytest.approx(totals)
    assert ax.lines[0].get_ydata()[0] == pytest.approx(4e6 / 2**20)
    with pytest.raises(ValueError, match="give at least one memory plan"):
        plots.plot_memory({})
    with pytest.raises(ValueError, match="written as"):
        plots.plot_memory(plans, "memory.jpg")


def test_rates_by_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {1: 100.0, 2: 180.0, 4: 320.0}
    for ranks, rate in rates.items():
        lines = [{"step": s, "tokens_per_second": 1.0 if s == 1 else rate} for s in range(1, 21)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{ranks}.jsonl").write_text(text)
    runs = [str(tmp_path / f"{ranks}.jsonl") for ranks in rates]
    figure = plots.plot_scaling(dict(zip(rates, runs, strict=True)))
    ideal, measured = figure.axes[0].lines[:2]
    assert list(ideal.get_ydata()) == [100.0, 200.0, 400.0]
    assert list(measured.get_ydata()) == list(rates.values())
    shares = [each.get_text() for each in figure.axes[0].texts]
    assert shares == ["100%", "90%", "80%"]
    out = tmp_path / "rates.png"
    assert main.main(["plot", *runs, "--ranks", "1,2,4", "-o", str(out)]) == 0
    assert out.read_bytes().startswith(PNG)
    for given, why in (("1,2", "2 numbers for 3 runs"), ("1,2,2", "has one run"),
                       ("0,1,2", "has 0 ranks")):  # fmt: skip
        assert main.main(["plot", *runs, "--ranks", given, "-o", str(out)]) == 2
        assert why in capsys.readouterr().err
    with pytest.raises(ValueError, match="has no tokens_per_second"):
        plots.plot_scaling({1: plots.Run("one", {"loss": {1: 2.0}})})
