"""Builds, installs and tries fsdpc with each Python, NumPy and compiler of this machine.

    python tools/matrix.py [--numpy 1.26.4 2] [--cc gcc clang] [--torch 2.5.1 ...] [--python 3.11]

Pythons of 3.10 and newer are those on PATH and of pyenv. Each builds a wheel, without plugins, from
a copy of the tree; a bare venv takes the wheel and NumPy, and trains 5 steps on 2 ranks. Each
version of torch is tried so with the first Python that has it. The table is printed, and kept in
build/matrix.md; the exit status is 1 if a row failed. A NumPy that a Python has no wheel of is no
failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)
HEADINGS = ("Python", "NumPy", "compiler", "torch", "5 steps on 2 ranks", "parameters' CRC-32C")
TORCH = """
import torch, fsdpc.torch
torch.manual_seed(0)  # every rank builds the same model
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
for layer in [*model, model]:
    fsdpc.torch.fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(torch.ones(4, 8)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print("trained", torch.__version__)
"""


class Row(NamedTuple):
    """One combination."""

    python: Path
    numpy: str
    compiler: str
    torch: str = ""


def pythons() -> list[Path]:
    """Return one interpreter of each version, the oldest first."""
    folders = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep)]
    folders += sorted(Path.home().glob(".pyenv/versions/*/bin"))
    found: dict[tuple[int, ...], Path] = {}
    for path in (p for folder in folders for p in sorted(folder.glob("python3.*"))):
        match = re.fullmatch(r"python(3)\.(\d+)", path.name)
        if match and (version := tuple(map(int, match.groups()))) >= OLDEST:
            look = "import sys, sysconfig as s; print(sys.executable, s.get_config_h_filename())"
            asked = subprocess.run([path, "-c", look], capture_output=True, text=True)
            words = asked.stdout.split()
            if len(words) == 2 and Path(words[1]).exists():  # it runs, and has its headers
                found.setdefault(version, Path(words[0]))
    return [found[version] for version in sorted(found)]


def rows(
    here: list[Path], numpys: list[str], compilers: list[str], torches: list[str]
) -> list[Row]:
    """Return what is tried: not every triple, but each Python, NumPy and compiler."""
    newest, first = numpys[-1], compilers[0]
    tried = [Row(python, numpy, first) for python in here for numpy in numpys]
    tried += [Row(here[-1], newest, compiler) for compiler in compilers[1:]]
    return tried + [Row(here[0], newest, first, torch) for torch in torches]


def run(
    command: list[object], *, cwd: Path | None = None, check: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program without this one's environment."""
    ours = ("FSDPC", "PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {"FSDPC_MPI": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    words = list(map(str, command))
    return subprocess.run(words, env=env, cwd=cwd, check=check, capture_output=True, text=True)


class Matrix:
    """Wheels, and the bare venvs that take them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = folder / "tree"
        kept = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        for name in filter(None, kept.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.tree / name)
        self.wheels: dict[tuple[Path, str], Path | str] = {}

    def wheel(self, python: Path, compiler: str) -> Path | str:
        """Build a wheel; a string says what went wrong."""
        if (python, compiler) not in self.wheels:
            out = self.folder / f"{python.name}-{compiler}"
            command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, self.tree]
            done = run(command, CC=compiler)
            made = list(out.glob("*.whl"))
            self.wheels[python, compiler] = made[0] if made else done.stderr.strip()[-2000:]
        return self.wheels[python, compiler]

    def attempt(self, row: Row) -> tuple[str, str]:
        """Return a row's result, which begins with "ok" or "no" if all is well, and checksum."""
        wheel = self.wheel(row.python, row.compiler)
        if isinstance(wheel, str):
            return f"failed to build: {wheel}", ""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            venv = Path(name) / "venv"
            run([row.python, "-m", "venv", venv], check=True)
            pip = [venv / "bin" / "pip", "install", "--quiet", "--only-binary", ":all:"]
            needed = [f"numpy=={row.numpy}.*" if row.numpy.isdigit() else f"numpy=={row.numpy}"]
            needed += [f"torch=={row.torch}"] if row.torch else []
            if run([*pip, *needed]).returncode:
                return f"no wheel of {' and '.join(needed)}", ""
            run([*pip, "--no-deps", wheel], check=True)
            return self.train(venv / "bin", Path(name), row)

    def train(self, programs: Path, folder: Path, row: Row) -> tuple[str, str]:
        """Train; the same text gives the same parameters in every row."""
        begin = time.monotonic()
        metrics = folder / "run.jsonl"
        command: list[object] = [programs / "fsdpc"]
        if row.torch:
            (folder / "train.py").write_text(TORCH, encoding="utf-8")
            command += ["run", "--ranks", 2, folder / "train.py"]
        else:
            text = self.tree / "docs" / "torch.md"
            command += ["train", "--ranks", 2, "--steps", 5, "--data", text, "--seq", 64]
            command += ["--eval-bytes", 512, "--sample", 0, "--metrics", metrics]
        done = run(command, cwd=folder)
        if done.returncode:
            return f"failed: {done.stderr.strip()[-2000:]}", ""
        seconds = f"ok, {time.monotonic() - begin:.1f} s"
        if row.torch:
            return seconds, ""
        last = metrics.read_text(encoding="utf-8").splitlines()[-1]
        return seconds, json.loads(last)["params_crc32c"]


def main() -> int:
    """Try all rows and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    compilers = [name for name in ("gcc", "clang") if shutil.which(name)]
    parser.add_argument("--numpy", nargs="+", default=["1.26.4", "2"], help="oldest first")
    parser.add_argument("--cc", nargs="+", default=compilers)
    parser.add_argument("--torch", nargs="*", default=[], help="versions of torch to try")
    parser.add_argument("--python", nargs="+", help="versions, such as 3.11; default: all found")
    options = parser.parse_args()
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        print("\n".join(lines), flush=True)
        here = [p for p in pythons() if not options.python or p.name[6:] in options.python]
        for row in rows(here, options.numpy, options.cc, options.torch):
            result, crc = matrix.attempt(row)
            failed = failed or not result.startswith(("ok", "no "))
            cells = (row.python.name, row.numpy, row.compiler, row.torch, result, crc)
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "matrix.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
