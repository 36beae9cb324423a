"""What the plugin says of drivers that are not there, too old, or do not start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900

sys.path.insert(0, str(ROOT / "tools"))
import cuda_build  # noqa: E402
import native  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_build.find_toolkit() is None, reason="there is no nvcc")

# The few calls by which a runtime finds out that it cannot go on.
DRIVER = """
int cuInit(unsigned flags) { (void)flags; return INIT; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuGetErrorString(int error, const char **text)
{
    *text = "no CUDA-capable device is detected";
    return error == 0;
}
"""

ASK = """
import fsdpc

print(fsdpc.cuda.describe())
try:
    fsdpc.set_default_device("cuda")
except RuntimeError as error:
    print(error)
print(fsdpc.tensor([1.0]).sum().item(), fsdpc.get_default_device())
"""


def said(plugin: Path, folder: Path) -> list[str]:
    """Return what a process says whose first place to look for a driver is `folder`."""
    env = {**os.environ, "FSDPC_CUDA_PLUGIN": str(plugin), "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True,
                          timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("start, version, wanted", [
    (100, 13000, "NVIDIA's driver does not start: no CUDA-capable device is detected (100)"),
    (0, 11040, "the driver is for CUDA 11.4, this plugin needs "),
], ids=["broken", "old"])
def test_a_driver_that_cannot_be_used(plugin: Path, tmp_path: Path, start: int, version: int,
                                      wanted: str) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    native.run_command([*native.default_compiler(), "-shared", "-fPIC", f"-DINIT={start}",
                        f"-DVERSION={version}", str(source), "-o", str(library)])
    description, refusal, cpu = said(plugin, tmp_path)
    assert wanted in description and refusal == f"no device 'cuda': {description}"
    assert cpu == "1.0 cpu"


def test_a_library_that_is_no_driver(plugin: Path, tmp_path: Path) -> None:
    source = tmp_path / "driver.c"
    source.write_text("int nothing;\n")
    native.run_command([*native.default_compiler(), "-shared", "-fPIC", str(source), "-o",
                        str(tmp_path / "libcuda.so.1")])
    description, *_ = said(plugin, tmp_path)
    assert "libcuda.so.1 has no cuInit: it is not NVIDIA's driver" in description


def test_no_driver(plugin: Path, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library\n")  # found before any that is one
    description, refusal, cpu = said(plugin, tmp_path)
    assert ", no GPU: no NVIDIA driver: " in description and "run on device 'cpu'" in description
    assert refusal == f"no device 'cuda': {description}" and cpu == "1.0 cpu"
