"""NCCL through the plugin's loader, without a GPU: an identity for a group, never two copies.

Needs nvcc and pip's nvidia-nccl-cu13.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsdpc

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900

sys.path.insert(0, str(ROOT / "tools"))
import cuda_build  # noqa: E402
import native  # noqa: E402

TOOLKIT = cuda_build.find_toolkit()
LIBRARY = next((path for folder in cuda_build.pip_folders()
                if (path := folder / "lib" / "libnccl.so.2").is_file()), None)

pytestmark = [
    pytest.mark.skipif(TOOLKIT is None, reason="there is no nvcc"),
    pytest.mark.skipif(LIBRARY is None, reason="pip's nvidia-nccl-cu13 is not installed"),
]


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/gpu/test_nccl_load.c as a program."""
    folder = tmp_path_factory.mktemp("nccl")
    builder = native.Builder(folder)
    flags = [f"-I{ROOT / 'tests' / 'c'}", *cuda_build.host_command(TOOLKIT)[1:]]
    files = [ROOT / "csrc/cuda/nccl_load.c", ROOT / "csrc/cuda/nccl_env.c",
             ROOT / "tests/gpu/test_nccl_load.c"]
    objects = builder.compile(files, flags) + builder.compile(native.sources(("base",)))
    return builder.link(objects, folder / "test_nccl_load")


def run(*command: str | Path, **more: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run([str(word) for word in command], env={**os.environ, **more},
                          capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SAME_ABI = r"""
#include <stddef.h>
#include <string.h>
#include <nccl.h>
#include "cuda/nccl_abi.h"
#define SAME(ours, theirs) _Static_assert((long)(ours) == (long)(theirs), #theirs)
SAME(FSDPC_NCCL_SUCCESS, ncclSuccess);
SAME(FSDPC_NCCL_SYSTEM_ERROR, ncclSystemError);
SAME(FSDPC_NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
SAME(FSDPC_NCCL_INVALID_USAGE, ncclInvalidUsage);
SAME(FSDPC_NCCL_REMOTE_ERROR, ncclRemoteError);
SAME(FSDPC_NCCL_IN_PROGRESS, ncclInProgress);
SAME(FSDPC_NCCL_UINT8, ncclUint8);
SAME(FSDPC_NCCL_INT32, ncclInt32);
SAME(FSDPC_NCCL_INT64, ncclInt64);
SAME(FSDPC_NCCL_FLOAT16, ncclFloat16);
SAME(FSDPC_NCCL_FLOAT32, ncclFloat32);
SAME(FSDPC_NCCL_FLOAT64, ncclFloat64);
SAME(FSDPC_NCCL_BFLOAT16, ncclBfloat16);
SAME(FSDPC_NCCL_SUM, ncclSum);
SAME(FSDPC_NCCL_MAX, ncclMax);
SAME(FSDPC_NCCL_MIN, ncclMin);
SAME(FSDPC_NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_COLL_SYMMETRIC);
SAME(sizeof(fsdpc_nccl_id), sizeof(ncclUniqueId));
SAME(sizeof(fsdpc_nccl_result), sizeof(ncclResult_t));
SAME(sizeof(fsdpc_nccl_type), sizeof(ncclDataType_t));
SAME(sizeof(fsdpc_nccl_red), sizeof(ncclRedOp_t));
SAME(offsetof(fsdpc_nccl_config, magic), offsetof(ncclConfig_t, magic));
SAME(offsetof(fsdpc_nccl_config, version), offsetof(ncclConfig_t, version));
SAME(offsetof(fsdpc_nccl_config, blocking), offsetof(ncclConfig_t, blocking));
SAME(offsetof(fsdpc_nccl_config, shapes), offsetof(ncclConfig_t, cgaClusterSize));
SAME(offsetof(fsdpc_nccl_config, net), offsetof(ncclConfig_t, netName));
SAME(offsetof(fsdpc_nccl_config, split_share), offsetof(ncclConfig_t, splitShare));
SAME(offsetof(fsdpc_nccl_config, traffic_class), offsetof(ncclConfig_t, trafficClass));
SAME(offsetof(fsdpc_nccl_config, name), offsetof(ncclConfig_t, commName));
SAME(offsetof(fsdpc_nccl_config, collnet), offsetof(ncclConfig_t, collnetEnable));
SAME(offsetof(fsdpc_nccl_config, cta_policy), offsetof(ncclConfig_t, CTAPolicy));
SAME(offsetof(fsdpc_nccl_config, shrink_share), offsetof(ncclConfig_t, shrinkShare));
SAME(offsetof(fsdpc_nccl_config, nvls_ctas), offsetof(ncclConfig_t, nvlsCTAs));
SAME(offsetof(fsdpc_nccl_config, channels_per_peer), offsetof(ncclConfig_t, nChannelsPerNetPeer));
SAME(offsetof(fsdpc_nccl_config, graph_usage), offsetof(ncclConfig_t, graphUsageMode));
SAME(offsetof(fsdpc_nccl_config, rma_contexts), offsetof(ncclConfig_t, numRmaCtx));
SAME(offsetof(fsdpc_nccl_config, graph_ordering), offsetof(ncclConfig_t, graphStreamOrdering));
SAME(offsetof(fsdpc_nccl_config, launch_order), offsetof(ncclConfig_t, launchOrderImplicit));
SAME(offsetof(fsdpc_nccl_config, rma_signals), offsetof(ncclConfig_t, numRmaSig));
SAME(offsetof(fsdpc_nccl_config, host_cft), offsetof(ncclConfig_t, hostCftMode));
SAME(sizeof(fsdpc_nccl_config), offsetof(ncclConfig_t, nvlsHostMode));
/* All that NCCL reads but the first two fields, the version and `blocking`, is unset. */
static int differs(ncclConfig_t theirs, fsdpc_nccl_config ours, size_t size, int order)
{
    theirs.size = size;
    theirs.version = ours.version;
    theirs.blocking = 0;
    theirs.launchOrderImplicit = order;
    return memcmp(&theirs, &ours, size) != 0;
}
int main(void)
{
    const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
    fsdpc_nccl_config plain = fsdpc_nccl_nonblocking(23007);
    fsdpc_nccl_config ordered = fsdpc_nccl_nonblocking(23100);
    if (plain.version != 21700 || ordered.version != 23100)
        return 1;
    if (differs(theirs, plain, offsetof(ncclConfig_t, splitShare), NCCL_CONFIG_UNDEF_INT))
        return 2;
    return differs(theirs, ordered, offsetof(ncclConfig_t, nvlsHostMode), 1) ? 3 : 0;
}
"""


def test_what_is_declared_of_nccl_is_nccl_s(tmp_path: Path) -> None:
    source, program = tmp_path / "same.c", tmp_path / "same"
    source.write_text(SAME_ABI)
    folder = LIBRARY.parent.parent / "include"
    if "launchOrderImplicit" not in (folder / "nccl.h").read_text():
        pytest.skip("this NCCL is older than 2.31, whose fields are declared")
    headers = f"-I{folder}"
    run(*cuda_build.host_command(TOOLKIT), headers, source, "-o", program)
    run(program)


def test_identities_need_no_gpu(loader: Path) -> None:
    assert " 0 failed" in run(loader)  # what is refused
    printed = run(loader, LIBRARY)
    assert " 0 failed" in printed and f" at {LIBRARY}\n" in printed


def test_a_copy_that_the_process_has_is_taken_first(loader: Path, tmp_path: Path) -> None:
    theirs = Path(shutil.copy(LIBRARY, tmp_path))
    assert f" at {theirs}\n" in run(loader, LIBRARY, theirs)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, plugin: Path) -> Path:
    """A site-packages with fsdpc, its plugin, and pip's NCCL."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(fsdpc.__file__).parent, site / "fsdpc")
    shutil.copy2(plugin, site / "fsdpc")
    (site / "nvidia").mkdir()
    (site / "nvidia" / "nccl").symlink_to(LIBRARY.parent.parent)
    return site


DESCRIBE = """
import ctypes, sys
import fsdpc
if sys.argv[1:]:
    ctypes.CDLL(sys.argv[1])
print(fsdpc.show_config(print_=False)["nccl"])
print(len({line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line}))
"""


def describe(site: Path, *first: str | Path, **more: str) -> list[str]:
    """show_config()'s line, and how many copies of NCCL the process has then."""
    more = {"FSDPC_NCCL_LIB": "", "LD_LIBRARY_PATH": "", "PYTHONPATH": str(site), **more}
    printed = run(sys.executable, "-c", DESCRIBE, *first, **more)
    return printed.splitlines()


def test_pip_s_library_is_found_beside_the_plugin(installed: Path) -> None:
    line, copies = describe(installed)
    assert line.startswith("NCCL 2.") and copies == "1"
    assert Path(line.split(" at ")[1]).resolve() == LIBRARY.resolve()


@pytest.mark.parametrize("stays", [True, False], ids=["stays", "goes"])
def test_a_plugin_in_the_source_tree_finds_pip_s_library(
    tmp_path: Path, archs: list[str], stays: bool
) -> None:
    """Away from site-packages; one that was built to go there would find the system's at most."""
    plugin = cuda_build.build_plugin(tmp_path / cuda_build.PLUGIN, archs, stays=stays)
    line, _ = describe(Path(fsdpc.__file__).parents[1], FSDPC_CUDA_PLUGIN=str(plugin))
    found = " at " in line and Path(line.split(" at ")[1]).resolve() == LIBRARY.resolve()
    assert found == stays, line


def test_no_second_copy_beside_torch_s(installed: Path, tmp_path: Path) -> None:
    theirs = Path(shutil.copy(LIBRARY, tmp_path))  # torch brings its own by this name
    for named in ({}, {"FSDPC_NCCL_LIB": str(LIBRARY)}):
        line, copies = describe(installed, theirs, **named)
        assert line.endswith(f" at {theirs}") and copies == "1"


def test_the_environment_names_one(installed: Path, tmp_path: Path) -> None:
    named = Path(shutil.copy(LIBRARY, tmp_path))
    line, copies = describe(installed, FSDPC_NCCL_LIB=str(named))
    assert line.endswith(f" at {named}") and copies == "1"
    line, copies = describe(installed, FSDPC_NCCL_LIB="/nowhere/libnccl.so.2")
    assert line.startswith("none: cannot load NCCL: /nowhere/libnccl.so.2") and copies == "0"
