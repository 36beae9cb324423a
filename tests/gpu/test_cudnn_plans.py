"""Graphs of attention, as the plugin describes them, are plans of cuDNN's; no GPU is needed.

cuDNN builds plans for a device that is described to it: an H100, here. Its driver is a library
whose functions load nothing. Needs nvcc and pip's nvidia-cudnn-frontend, nvidia-cudnn-cu13 and
nvidia-cuda-nvrtc, beside a shared CUDA runtime.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600

sys.path.insert(0, str(ROOT / "tools"))
import cuda_build  # noqa: E402
import native  # noqa: E402

TOOLKIT = cuda_build.find_toolkit()
COMMANDS = cuda_build.cudnn_commands(TOOLKIT) if TOOLKIT else []
LIBRARIES = [path.parent for folder in cuda_build.pip_folders()
             for path in (folder / "lib").glob("libcudnn.so.9")]

pytestmark = [
    pytest.mark.skipif(not COMMANDS, reason="there is no toolkit with cudnn_frontend.h"),
    pytest.mark.skipif(not LIBRARIES, reason="there is no libcudnn.so.9 of pip's"),
]

H100 = """{"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],
"regsPerBlock":65536,"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,
"maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,
"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,
"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":85000000000,
"smClockRateKHz":1980000,"memClockRateKHz":2619000,"memoryBusWidth":5120,"l2CacheSize":52428800,
"cudaDeviceId":0,"deviceVer":900,"driverVer":13000,"deviceName":"NVIDIA H100"}"""

# Answers each line of numbers by the workspace's bytes, or by why there is no plan.
PROGRAM = r"""
#include "cudnn_plan.cpp"

#include <iostream>

int main(int argc, char **argv)
{
    size_t version;
    char why[FSDPC_CUDNN_WHY_BYTES];
    if (argc != 2 || !fsdpc_cudnn_table.open(&version, why, sizeof why)) {
        std::cerr << why << "\n";
        return 1;
    }
    std::vector<uint8_t> text(argv[1], argv[1] + strlen(argv[1]) + 1);
    auto device = std::make_shared<fe::DeviceProperties>();
    std::string said = said_by(device->deserialize(text));
    if (!said.empty()) {
        std::cerr << said << "\n";
        return 1;
    }
    fsdpc_cudnn_shape s = {};
    std::string dtype, way;
    while (std::cin >> dtype >> s.batch >> s.tokens_q >> s.tokens_k >> s.heads >> s.kv_heads >>
           s.dim >> s.causal >> way) {
        s.backward = way != "forward";
        s.any_order = way == "any_order";
        s.dtype = dtype == "fp16" ? FSDPC_F16 : FSDPC_BF16;
        double scale = 0.125;
        memcpy(&s.scale_bits, &scale, sizeof scale);
        s.stride_q[0] = s.stride_out[0] = s.tokens_q * s.heads * s.dim;
        s.stride_k[0] = s.stride_v[0] = s.tokens_k * s.kv_heads * s.dim;
        s.stride_q[1] = s.stride_out[1] = s.heads * s.dim;
        s.stride_k[1] = s.stride_v[1] = s.kv_heads * s.dim;
        s.stride_q[2] = s.stride_out[2] = s.stride_k[2] = s.stride_v[2] = s.dim;
        fe::graph::Graph graph;
        describe(&graph, s, 90);
        graph.set_device_properties(device);
        int64_t bytes = -1;
        said = said_by(build(&graph, nullptr));
        if (said.empty())
            said = said_by(graph.get_workspace_size(bytes));
        std::cout << (said.empty() ? std::to_string(bytes) : said) << std::endl;
    }
    return 0;
}
"""

# batch, tokens of queries and keys, heads, heads of keys, elements, causal
SHAPES = ["2 1024 1024 16 16 64 1", "2 1024 1024 16 4 128 1", "2 512 1024 16 4 64 1",
          "1 65 200 2 2 128 0", "2 70 70 4 2 32 1"]
LARGE = "32 2048 2048 32 4 64 1"  # LLaMA 1B's, over 32 rows


def driver(folder: Path) -> None:
    """Put a libcuda.so.1 into a folder: no device, and kernels that load but are not there."""
    assert TOOLKIT is not None
    header = next(path for each in TOOLKIT.includes if (path := each / "cuda.h").is_file())
    names = {*re.findall(r"\b(cu[A-Z]\w*)\s*\(", header.read_text()),
             *re.findall(r"#define\s+cu\w+\s+(cu\w+)", header.read_text())}
    loads = {"cuLibraryLoadData", "cuLibraryGetKernel", "cuLibraryGetModule", "cuKernelGetFunction",
             "cuModuleGetFunction", "cuModuleLoadData", "cuModuleLoadDataEx"}
    lines = [f"int {name}(void **out) {{ *out = (void *)8; return 0; }}" for name in loads]
    for name in names - loads:
        result = 0 if re.match("cu(Library|Kernel|Module|Func)", name) else 100
        lines.append(f"int {name}(void) {{ return {result}; }}")
    source = folder / "driver.c"
    source.write_text("\n".join(lines) + "\n")
    native.run_command([*native.default_compiler(), "-shared", "-fPIC", str(source), "-o",
                        str(folder / "libcuda.so.1")])


def test_every_shape_has_a_plan_both_ways(tmp_path: Path) -> None:
    assert TOOLKIT is not None
    driver(tmp_path)
    source, program = tmp_path / "plans.cpp", tmp_path / "plans"
    source.write_text(PROGRAM)
    command = [each for each in COMMANDS[0][1] if each != "-O1"]
    native.run_command([*command, f"-I{cuda_build.KERNELS}", "-cudart=static", str(source), "-o",
                        str(program), "-ldl"])
    asked = [f"{dtype} {shape} {way}" for shape in SHAPES
             for way in ("forward", "backward", "any_order")
             for dtype in (("bf16", "fp16") if shape == SHAPES[0] else ("bf16",))]
    asked.append(f"bf16 {LARGE} any_order")
    places = [tmp_path, *LIBRARIES, *(folder / "lib" for folder in cuda_build.pip_folders()),
              *(each.parent / "lib" for each in TOOLKIT.includes)]
    done = subprocess.run([program, H100], input="\n".join(asked), capture_output=True, text=True,
                          timeout=TIMEOUT_S, env={**os.environ, "LD_LIBRARY_PATH":
                                                  os.pathsep.join(map(str, places))})
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == len(asked)
    for line, answer in zip(asked, answers, strict=True):
        batch, tokens, _, heads, _, dim = map(int, line.split()[1:7])
        most = max(1 << 30, 6 * batch * tokens * heads * dim * 2)
        assert re.fullmatch(r"\d+", answer), f"{line}: {answer}"
        assert int(answer) < most, f"{line}: more than the plugin gives"
    assert int(answers[-1]) > 1 << 30
