"""Every example runs as it stands, for a few steps, and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.needs import need_torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
HANGS_S = 900  # minutes on a busy machine


def run(name: str, *arguments: str, ranks: int = 2) -> str:
    """Run a script of examples/ on ranks and return what it printed."""
    script = EXAMPLES / name
    command = [sys.executable, "-m", "fsdpc", "run", "--ranks", str(ranks), "--timeout"]
    done = subprocess.run(
        [*command, str(HANGS_S), str(script), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    """Of rank 0, step by step."""
    return [float(loss) for loss in re.findall(r"^\[0\] step \d+: loss ([\d.]+)", output, re.M)]


def test_every_example_is_tested_here() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    names.remove("ray_train.py")  # tests/integrations/test_ray.py
    assert names == set(re.findall(r'"(\d\d_\w+\.(?:py|ipynb))"', Path(__file__).read_text()))


SCRIPTS = [path for path in sorted(EXAMPLES.rglob("*.py")) if path.name != "bias_gelu.py"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_example_shows_its_usage(script: Path) -> None:
    """Without ranks, and without torch or Ray, which need not be installed."""
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True,
                          timeout=HANGS_S)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert script.name in done.stdout and len(done.stdout.splitlines()) >= 1


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    without_folder = losses(run("01_train.py", "1"))
    seen = losses(run("01_train.py", "20", str(tmp_path)))
    seen += losses(run("01_train.py", "21", str(tmp_path)))
    assert len(seen) == 2 and seen[1] < seen[0] < 6
    assert without_folder == seen[:1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


@pytest.mark.parametrize("frontend", [0, 1])
def test_the_programs_of_the_readme(frontend: int, tmp_path: Path) -> None:
    """As they stand, for fewer steps."""
    if frontend:
        need_torch()
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(programs) == 2 and all(len(program.splitlines()) <= 24 for program in programs)
    script = tmp_path / "train.py"
    script.write_text(programs[frontend].replace("range(100)", "range(3)"))
    seen = losses(run(str(script)))
    assert len(seen) == 3 and seen[2] < seen[0]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_accumulation() -> None:
    output = run("02_bf16_accumulate.py", "11")
    seen = losses(output)
    assert len(seen) == 2 and seen[1] < seen[0] < 6
    peaks = re.findall(r"^\[(\d)\] peak MiB: unsharded ([\d.]+), master ([\d.]+)", output, re.M)
    assert sorted(rank for rank, _, _ in peaks) == ["0", "1"]
    counted = {unsharded for rank, unsharded, _ in peaks if rank == "1"}
    assert counted == {"0.0"}  # once per host


def test_own_module_and_loss() -> None:
    seen = losses(run("03_own_module_and_loss.py", "31"))
    assert seen == sorted(seen, reverse=True) and seen[-1] < 0.7 * seen[0]


def test_deferred_initialisation_is_the_same_at_any_world() -> None:
    printed = [run("04_deferred_init_big.py", "2M", ranks=ranks) for ranks in (1, 3)]
    norms = [re.findall(r"norm of the whole: ([\d.]+)", output) for output in printed]
    assert len(norms[0]) == 1 and norms[0] == norms[1]
    assert "a model of 68,976,648,192 parameters in 0.0 MiB" in printed[0]


def test_classification_with_accuracy_over_ranks() -> None:
    output = run("07_classify.py", "120")
    assert float(re.findall(r"accuracy ([\d.]+) of 600 points", output)[0]) > 0.9  # chance: 0.333
    assert output.count("accuracy") == 1  # rank 0 says it
    counts = re.findall(r"guessed x true: (.*)", output)[0]
    assert sum(map(int, re.findall(r"\d+", counts))) == 600


def test_evaluation_and_generation() -> None:
    output = run("05_evaluate_and_generate.py", "4")
    pattern = r"validation loss ([\d.]+) before, ([\d.]+) after 4 steps"
    before, after = re.findall(pattern, output)[0]
    assert float(after) < float(before) < 6
    assert "[0] def " in output
    (loss,) = re.findall(r"on rank 0 alone: loss ([\d.]+)", output)
    assert float(loss) == pytest.approx(float(after), abs=1.0)  # of one batch, not of all


def test_fine_tuning_by_lora(tmp_path: Path) -> None:
    output = run("08_finetune_lora.py", "--out", str(tmp_path))
    said = dict(re.findall(r"^\[0\] (before|after|read back): (.*)", output, re.M))
    assert said["before"].startswith("friday, saturday, sunday, monday")
    assert said["after"].startswith("friday, thursday, wednesday, tuesday")
    assert said["read back"] == said["after"]
    ((trained, total),) = re.findall(r"training ([\d,]+) of ([\d,]+) elements", output)
    assert 0 < int(trained.replace(",", "")) < 0.2 * int(total.replace(",", ""))
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}

    own_model_and_text(tmp_path / "base", tmp_path)


def own_model_and_text(folder: Path, place: Path) -> None:
    """Any folder, with a tokenizer, on any file."""
    tokenizers = pytest.importorskip("tokenizers")
    text = place / "text.txt"
    text.write_text("one two three four five six seven " * 400)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["?"], show_progress=False)
    words.train([str(text)], trainer)
    words.save(str(folder / "tokenizer.json"))
    output = run(
        "08_finetune_lora.py", "--model", str(folder), "--data", str(text), "--prompt", "one two",
        "--steps", "41", "--lr", "2e-2", "--out", str(place / "out"),
    )  # fmt: skip
    seen = losses(output)
    assert len(seen) == 3 and seen[-1] < 0.5 * seen[0]  # of tokens that this model never saw
    said = re.findall(r"^\[0\] (?:before|after|read back): one two(.*)", output, re.M)
    assert len(said) == 3 and said[0] != said[1] == said[2]
    assert [each.name for each in (place / "out").iterdir()] == ["adapter"]


def test_vision_transformer() -> None:
    output = run("09_vit.py", "150")
    assert float(re.findall(r"accuracy ([\d.]+) of 400 images", output)[0]) > 0.9  # chance: 0.25
    assert losses(output)[-1] < 0.5 * losses(output)[0]


def test_vision_transformer_by_another_strategy() -> None:
    """Gradients are summed elsewhere, and losses are the same."""
    found = [losses(run("09_vit.py", "26", each)) for each in ("FULL_SHARD", "NO_SHARD")]
    assert len(found[0]) == 2 and found[0] == found[1]


def test_optimizers_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.svg"
    output = run("12_optimizers.py", "24", str(picture))
    rows = re.findall(r"^\[0\] (\w+) +([\d.]+) +([\d.]+) +([\d.]+)$", output, re.M)
    names, *columns = zip(*rows)
    first, last, mib = ([float(number) for number in column] for column in columns)
    assert names == ("AdamW", "Muon", "Adafactor") and len(set(first)) == 1  # the same batches
    assert max(last) < 0.8 * first[0] and last[1] < last[0] and mib[2] < mib[1] < mib[0]
    assert all(name in picture.read_text() for name in names)  # matplotlib's comments have the text


def play(name: str, *changes: tuple[str, str]) -> tuple[str, list[dict[str, str]]]:
    """Run a notebook with other numbers in it; return what it printed, and what it displayed."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "clear the outputs"
    for old, new in changes:
        found = [cell for cell in cells if old in cell.source]
        assert found, old
        for cell in found:
            cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=HANGS_S, kernel_name="python3").execute()
    outputs = [each for cell in cells for each in cell.outputs]
    text = "".join(each.text for each in outputs if each.output_type == "stream")
    return text, [each.data for each in outputs if "data" in each]


def pictures(shown: list[dict[str, str]]) -> int:
    return sum("image/png" in data for data in shown)


def test_notebook_of_a_first_model() -> None:
    text, shown = play("06_first_model.ipynb", ("steps = 100", "steps = 21"))
    seen = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", text, re.M)]
    assert len(seen) == 2 and seen[1] < seen[0] < 6
    assert {"[0] rank 0 of 2", "[1] rank 1 of 2"} <= set(text.splitlines())
    # The plot of a run that goes on is one picture, updated in place.
    assert pictures(shown) == 1 and shown[-1]["text/plain"] == "[30, 30]"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["06_first_model", "10_sharding", "11_beside_pytorch"])
def test_notebooks_in_jupyterlab(name: str) -> None:
    pytest.importorskip("jupyterlab")
    pytest.importorskip("playwright")
    tool = ROOT / "tools" / "drive_notebook.py"
    command = [sys.executable, str(tool), str(EXAMPLES / f"{name}.ipynb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.strip()).stat().st_size > 50_000


def test_notebook_of_sharding() -> None:
    text, shown = play("10_sharding.ipynb", ('preset("10M")', 'preset("2M")'))
    assert sum("<svg" in data.get("text/html", "") for data in shown) == 2 and pictures(shown) == 1
    assert len(re.findall(r" MiB held .* MiB planned$", text, re.M)) == 5
    assert re.search(r"^\d+ uses a step, gathered \d+ ahead$", text, re.M)


def test_notebook_beside_pytorch() -> None:
    text, shown = play("11_beside_pytorch.ipynb", ("steps = 15", "steps = 5"))
    assert "spawned: torch is imported here" in text and pictures(shown) == 1
    assert re.search(r"^\[0, 1\] [\d,]+ elements here$", text, re.M)
