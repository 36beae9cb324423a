"""Run a notebook in JupyterLab, in a browser without a window, and take a picture of it.

    pip install jupyterlab playwright psutil       # and Chromium, as by apt-get install chromium
    python tools/drive_notebook.py examples/06_first_model.ipynb

The picture is build/06_first_model.png. The exit code is 1 if a cell failed or a process was left.
JupyterLab has a folder of its own, which is deleted, and listens on 127.0.0.1 alone.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
START_S = 120.0
RUN_S = 300.0
WIDTH, HEIGHT, MOST = 1100, 1200, 12000  # of the picture, in pixels

RUN = "() => window.jupyterapp.commands.execute('notebook:run-all-cells')"
READY = "() => !!document.querySelector('.jp-Notebook .jp-InputPrompt')"
KERNEL = "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
IDLE = f"""() => {KERNEL} === 'idle'
    && ![...document.querySelectorAll('.jp-InputPrompt')].some(e => e.textContent.includes('*'))"""
TOP = "() => document.querySelector('.jp-WindowedPanel-outer').scrollTo(0, 0)"
TALL = """() => Math.max(...[...document.querySelectorAll('.jp-Notebook .jp-Cell')]
    .map(e => e.offsetTop + e.offsetHeight))"""
FAILED = """() => [...document.querySelectorAll(
    '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"], '
    + '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]')]
    .map(e => e.textContent)"""


def write_settings(folder: Path) -> None:
    """Have JupyterLab draw all cells, not those in view alone, and ask nothing."""
    settings = {
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false"},
    }
    for name, values in settings.items():
        at = folder / "config/lab/user-settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        at.parent.mkdir(parents=True)
        at.write_text(json.dumps(values), encoding="utf-8")


def write_kernel(folder: Path, python: str) -> None:
    """Let the kernel of the name python3 be this interpreter's."""
    spec = folder / "share" / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    text = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(text), encoding="utf-8")


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """Start JupyterLab in a folder; gives its address with a token, and ends all that it began."""
    token = secrets.token_hex(16)
    names = {"CONFIG": "config", "DATA": "data", "RUNTIME": "runtime"}
    environment = {**os.environ, "IPYTHONDIR": str(folder / "ipython")}
    environment |= {f"JUPYTER_{name}_DIR": str(folder / each) for name, each in names.items()}
    environment |= {"JUPYTER_PATH": str(folder / "share"), "JUPYTER_TOKEN": token}
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        "--port=0", "--LabApp.expose_app_in_browser=True",
        f"--ServerApp.root_dir={folder / 'books'}",
    ]  # fmt: skip
    log = (folder / "lab.log").open("w+", encoding="utf-8")
    lab = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_S
        while not (found := list((folder / "runtime").glob("jpserver-*.json"))):
            if lab.poll() is not None or time.monotonic() > end:
                said = (folder / "lab.log").read_text(encoding="utf-8")
                raise SystemExit(f"JupyterLab did not start:\n{said}")
            time.sleep(0.1)
        url = json.loads(found[0].read_text(encoding="utf-8"))["url"]
        yield f"{url}lab/tree/{{}}?token={token}"
    finally:
        begun = psutil.Process(lab.pid).children(recursive=True) if lab.poll() is None else []
        lab.terminate()
        try:
            lab.wait(30)
        except subprocess.TimeoutExpired:
            lab.kill()
            lab.wait()
        _, left = psutil.wait_procs(begun, timeout=10)
        for process in left:
            process.kill()
        log.close()
        if left:
            raise SystemExit(f"JupyterLab left processes: {left}")


def drive(page: Any, url: str, picture: Path) -> list[str]:
    """Run all cells and take the picture; returns the text of failed cells."""
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    page.goto(url)
    page.wait_for_function(READY, timeout=START_S * 1000)
    page.wait_for_function(IDLE, timeout=START_S * 1000)
    page.keyboard.press("Control+b")  # no list of files
    page.evaluate(RUN)
    page.wait_for_function(IDLE, timeout=RUN_S * 1000)
    page.set_viewport_size({"width": WIDTH, "height": min(MOST, int(page.evaluate(TALL)) + 120)})
    page.evaluate(TOP)
    page.wait_for_timeout(500)
    picture.parent.mkdir(exist_ok=True)
    page.screenshot(path=str(picture))
    return [str(text) for text in page.evaluate(FAILED)]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the kernel's; default this one")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="its path")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through finally
    from playwright.sync_api import sync_playwright

    picture = ROOT / "build" / f"{given.notebook.stem}.png"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "books").mkdir()
        shutil.copy(given.notebook, folder / "books")
        write_settings(folder)
        write_kernel(folder, given.python)
        with jupyterlab(folder) as url, sync_playwright() as playwright:
            # Chromium's own sandbox does not start for root, as in containers.
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=given.chromium, args=arguments)
            try:
                failed = drive(browser.new_page(), url.format(given.notebook.name), picture)
            finally:
                browser.close()
    sys.stdout.write(f"{picture}\n")
    for text in failed:
        sys.stderr.write(f"a cell failed:\n{text}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
