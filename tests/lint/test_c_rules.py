"""Rules of the C sources that no compiler checks."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from .tree import CSRC, code, files, label

FILE_LINES = 600
FUNCTION_LINES = 100

# What each layer may include besides itself; engine, nn and ckpt never see each other.
COMMON = {"base", "tier", "device", "ops", "comm"}
MAY_INCLUDE = {
    "base": set(),
    "tier": {"base"},
    "device": {"base"},
    "ops": {"base", "device"},
    "comm": {"base", "tier", "device", "ops"},
    "engine": COMMON,
    "nn": COMMON,
    "ckpt": COMMON,
    "plugin": COMMON | {"engine", "nn", "ckpt"},
    "bind": COMMON | {"engine", "nn", "ckpt", "plugin"},
    "guest": COMMON | {"plugin"},
    "cuda": COMMON | {"plugin", "guest"},
    "mpi": COMMON | {"plugin", "guest"},
}

# Folders that are chains: a file includes and calls only what is listed before it.
ORDER = {
    "comm": """
        nap comm coll_math fork_guard rendezvous shm_segment shm_world shm_control shm_ring
        shm_internal shm_peers shm_coll shm_param_buffer shm_buffer shm_p2p comm_self comm_null
        comm_shm
        group transport transport_null transport_relay host_watch hosts_internal
        hosts_cross hosts_values hosts_gather hosts_reduce hosts_op hosts_param_buffer comm_hosts
    """,
    "cuda": """
        guest error driver_abi cublaslt_abi nccl_abi cudnn_plan kernels kernel_tables
        queue driver pool wait attention_cudnn gemm_cublaslt driver_memory graph
        host_result flat_cuda nn_cuda window device_cuda control nccl_env nccl_load nccl_internal
        nccl_call nccl_registry nccl_abort nccl_channel nccl_join nccl_coll nccl_ahead nccl_post
        nccl_register comm_nccl comm_cuda plugin_cuda
    """,
    "engine": """
        layout cover factors state_format slots norm plan low_rank_plan unit unit_internal
        loan root_internal codec_error acts grad_file micro order fill unsharded unsharded_shared
        unsharded_file unsharded_frontend grads collect clip agree low_rank reduce
        unsharded_slots unsharded_private gather epoch root plan_root optim_internal
        optim_arrays optim_graph optim_host optim_matrix optim_factored optim optim_outer
        optim_step optim_backward sched call step_graph
    """,
    "nn": """
        hook tensor node frame tape backward saved_tensors saved_host products scalar ops op
        op_elementwise op_scalar op_shape op_attention op_conv op_custom op_dropout op_embedding
        op_flip op_linear op_loss op_head op_matmul op_moments op_norm op_pool op_quantized
        op_reduce op_write
    """,
}

# How many files call each other in circles, in folders that have any; it only goes down.
KNOWN_CIRCLES = {
    "bind": 2,  # a type's module is found by the definition of the module
    "bind/tensor": 4,  # NumPy's values are cast by an operation
    "ops": 7,  # headers of the table, and the checks behind it
}

# Headers of others, and where alone they may be included.
HOMES = {
    r"Python\.h|structmember\.h|numpy/.*": {"bind"},
    r"cuda.*\.h|cublas.*\.h|nccl.*\.h": {"cuda"},
    r"mpi\.h": {"mpi"},
    r"immintrin\.h|x86intrin\.h|arm_neon\.h|cpuid\.h": {"base", "ops"},
}

MADE = ("bind/stub_docs.h", "bind/stub_args.h")  # by the build, from the stub

BANNED = {
    "sprintf": "snprintf",
    "vsprintf": "vsnprintf",
    "strcpy": "memcpy or snprintf",
    "strcat": "snprintf",
    "strncat": "snprintf",
    "gets": "fgets",
    "atoi": "strtol",
    "atol": "strtol",
    "atof": "strtod",
    "strtok": "strchr",
    "rand": "base/random.h",
    "alloca": "fsdpc_mem_alloc",
    "system": "nothing: a library starts no programs",
    "exit": "a status: a library does not end its process",
    "abort": "a status: a library does not end its process",
    "printf": "base/log.h",
    "puts": "base/log.h",
    "putchar": "base/log.h",
    "fprintf": "base/log.h",
    "vfprintf": "base/log.h",
    "perror": "fsdpc_fail_errno",
}
MAY_PRINT = {"csrc/base/log.c"}

# The documented mutable globals: the thread's error text, the plugin registry and a plugin's way
# back to it, and what handlers of faults and forks need, which get no argument of ours.
MAY_HOLD_GLOBALS = re.compile(
    r"csrc/base/status\.c|csrc/plugin/registry\.c|csrc/guest/guest\.c|csrc/\w+/\w*fault\w*\.c|"
    r"csrc/comm/fork_guard\.c"
)

SOURCES = files(".c", ".h", under="csrc")


def everywhere() -> list[Path]:
    return files(".c", ".h", ".cu", ".cuh", ".py")


@pytest.mark.parametrize("path", everywhere(), ids=label)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES, f"{label(path)} has {lines} lines: split it by concept"


@pytest.mark.parametrize("path", files(".c", ".h"), ids=label)
def test_functions_are_short(path: Path) -> None:
    begin = None
    for number, line in enumerate(code(path).splitlines(), 1):
        if line.startswith("{"):  # Linux braces: only a function's stands at the margin
            begin = number
        elif line.startswith("}") and begin is not None:
            length = number - begin - 1
            assert length <= FUNCTION_LINES, f"{label(path)}:{begin}: a function of {length} lines"
            begin = None


# Who may reach masters past fsdpc_unit_masters, also while a step goes on: their owner, the step.
REACH_MASTERS = {"unit_internal.h", "unit.c", "optim_step.c", "optim_matrix.c"}


@pytest.mark.parametrize("path", files(".c", ".h", under="csrc/engine"), ids=label)
def test_masters_are_reached_when_no_step_goes_on(path: Path) -> None:
    raw = re.findall(r"(?:->|\.)master\b(?! *=)", code(path))
    assert not raw or path.name in REACH_MASTERS, f"{label(path)}: use fsdpc_unit_masters()"


def test_scanner_sees_functions() -> None:
    """The rule above is worth nothing if functions are not found."""
    text = "".join(code(path) for path in SOURCES if path.suffix == ".c")
    assert len(re.findall(r"^\{", text, re.M)) > 100


def includes(path: Path) -> list[tuple[str, str]]:
    """The file's includes as (quote, name), but what the build makes."""
    found = re.findall(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', path.read_text(), re.M)
    return [each for each in found if each[1] not in MADE]


def read_by_kernels() -> list[Path]:
    """The headers of csrc that kernels include, but those that need CUDA's own."""
    found: dict[Path, None] = {}
    left = [path for path in files(".cu", ".cuh") if path.is_file()]
    while left:
        for quote, name in includes(left.pop()):
            path = CSRC / name
            if quote == '"' and path.suffix == ".h" and path.is_file() and path not in found:
                found[path] = None
                left.append(path)
    return [path for path in found if "_body" not in path.stem and path.parent.name != "cuda"]


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_headers_that_kernels_read_are_cxx() -> None:
    headers = read_by_kernels()
    assert CSRC / "device/device.h" in headers
    source = "".join(f'#include "{path.relative_to(CSRC)}"\n' for path in headers)
    command = ["g++", "-std=c++17", "-fsyntax-only", "-I", str(CSRC), "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_includes_keep_to_the_layers(path: Path) -> None:
    layer = path.relative_to(CSRC).parts[0]
    for quote, name in includes(path):
        if quote == '"':
            assert (CSRC / name).is_file(), f'{label(path)}: write "{name}" from csrc'
            other = name.split("/")[0]
            allowed = MAY_INCLUDE[layer] | {layer}
            assert other in allowed, f"{label(path)}: {layer} may not see {other} ({name})"


@pytest.mark.parametrize("path", [p for p in SOURCES if "bind" in p.parts], ids=label)
def test_rooms_of_the_bindings_do_not_see_each_other(path: Path) -> None:
    """What two of them share is in csrc/bind itself."""
    if path.parent == CSRC / "bind" and path.suffix == ".c":
        return  # they put the module together
    for _, name in includes(path):
        if name.startswith("bind/"):
            room = (CSRC / name).parent
            assert room in (CSRC / "bind", path.parent), f"{label(path)} may not see {name}"


FOLDERS = sorted({path.parent for path in SOURCES})
# What a file defines for others: functions, inline ones of headers included, and tables.
DEFINED = re.compile(
    r"^(?:static inline |(?!static|typedef|extern))[A-Za-z_][^;{}=#(]*?\b(fsdpc_\w+)"
    r"(?:\([^;{}]*\)\s*\n\{|(?:\[[^\]]*\])*\s*=)",
    re.M,
)


@cache
def uses(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Map each file of a folder, x.c with x.h, to the files it needs, with the reasons.

    A file needs those whose functions it calls; its header needs those that it includes. An
    x_internal.h is a file of its own, below x.
    """
    paths = [path for path in SOURCES if path.parent == folder]
    owner = {name: p.stem for p in paths for name in DEFINED.findall(code(p))}
    needed: dict[str, dict[str, list[str]]] = {p.stem: {} for p in paths}
    for path in paths:
        text, why = code(path), []
        if path.suffix == ".h":
            text = "".join(re.findall(r"^\{.*?^\}", text, re.M | re.S))  # not what it declares
            why = [(Path(n).stem, n) for _, n in includes(path) if (CSRC / n).parent == folder]
        why += [(owner[n], n) for n in re.findall(r"\bfsdpc_\w+", text) if n in owner]
        for other, reason in dict.fromkeys(why):
            if other not in (path.stem, path.stem.removesuffix("_internal")):
                needed[path.stem].setdefault(other, []).append(reason)
    return needed


def circles(needed: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, list[str]]]:
    """Return the files that need each other, directly or not."""
    while True:
        below = {other for reasons in needed.values() for other in reasons}
        kept = {f for f, reasons in needed.items() if reasons and f in below}
        if kept == set(needed):
            return needed
        needed = {f: {o: why for o, why in needed[f].items() if o in kept} for f in kept}


@pytest.mark.parametrize("folder", FOLDERS, ids=label)
def test_files_of_a_folder_do_not_call_each_other_in_circles(folder: Path) -> None:
    found = circles(uses(folder))
    known = KNOWN_CIRCLES.get(folder.relative_to(CSRC).as_posix(), 0)
    text = "\n".join(f"{f} needs {o} for {why}" for f in found for o, why in found[f].items())
    assert len(found) <= known, f"{label(folder)}: move a function, or call one back:\n{text}"
    assert len(found) == known, f"{label(folder)}: lower its ceiling to {len(found)}"


def test_circles_are_found() -> None:
    assert circles({"a": {"b": ["f"]}, "b": {"c": ["g"]}, "c": {}}) == {}
    needed = uses(CSRC / "engine")
    assert "fsdpc_unit_end_step" in needed["optim_step"]["unit_internal"]
    circle = circles(needed | {"unit_internal": {"optim_step": ["a call back up"]}})
    assert {"optim_step", "unit_internal"} <= set(circle)


CHAINED = [p for p in SOURCES if p.parent.parent == CSRC and p.parent.name in ORDER]


@pytest.mark.parametrize("path", CHAINED, ids=label)
def test_files_of_a_folder_are_a_chain(path: Path) -> None:
    folder = path.parent.name
    order = ORDER[folder].split()
    own = path.stem.removesuffix("_internal")  # what x_internal.h shows of x.h is declared there
    below = [*order[: order.index(path.stem) + 1], own, f"{own}_internal"]
    for _, name in includes(path):
        if name.startswith(f"{folder}/"):
            assert Path(name).stem in below, f"{label(path)} may not include {name}"
    for other, why in uses(path.parent)[path.stem].items():
        assert other in below, f"{label(path)} may not use {other}: {why}"


def reached(name: str) -> set[str]:
    """A header of csrc and all that it includes."""
    found, left = {name}, [name]
    while left:
        for quote, other in includes(CSRC / left.pop()):
            if quote == '"' and other not in found:
                found.add(other)
                left.append(other)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_the_engine_is_closed(path: Path) -> None:
    """Members of units and roots are the engine's: others see functions and settings alone."""
    if path.relative_to(CSRC).parts[0] == "engine":
        return
    for quote, name in includes(path):
        if quote == '"':
            inner = {h for h in reached(name) if re.fullmatch(r"engine/.*_internal\.h", h)}
            assert not inner, f"{label(path)}: {name} shows {sorted(inner)}"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_foreign_headers_stay_at_home(path: Path) -> None:
    layer = path.relative_to(CSRC).parts[0]
    for _, name in includes(path):
        for pattern, homes in HOMES.items():
            if re.fullmatch(pattern, name):
                assert layer in homes, f"{label(path)}: <{name}> belongs to {sorted(homes)}"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_banned_calls(path: Path) -> None:
    for match in re.finditer(r"(?<![\w.>])(\w+)\s*\(", code(path)):
        name = match.group(1)
        if name not in BANNED or ("print" in name and label(path) in MAY_PRINT):
            continue
        number = code(path).count("\n", 0, match.start()) + 1
        raise AssertionError(f"{label(path)}:{number}: {name}(): use {BANNED[name]}")


def test_headers_have_guards_of_their_own() -> None:
    guards: dict[str, str] = {}
    for path in files(".h", under="csrc"):
        if "_body" in path.stem or "_tile" in path.stem:
            continue  # included several times on purpose
        found = re.search(r"^#ifndef (FSDPC_\w+_H_?)\n#define \1$", path.read_text(), re.M)
        assert found, f"{label(path)} has no include guard"
        other = guards.setdefault(found.group(1), label(path))
        assert other == label(path), f"{label(path)} has the guard of {other}"


@pytest.mark.parametrize("path", files(".c", under="csrc"), ids=label)
def test_no_mutable_globals(path: Path) -> None:
    if MAY_HOLD_GLOBALS.fullmatch(label(path)):
        return
    for number, line in enumerate(code(path).splitlines(), 1):
        declares = re.match(r"(static\s+)?(?!typedef|extern|struct \w+;)[a-zA-Z_][\w\s*]*[\w\]]\s*"
                            r"(\[[^\]]*\]\s*)*(=|;)", line)
        # A pointer is constant by what stands behind its last star, not by what it points to.
        if declares and not re.search(r"\bconst\b", declares.group().rpartition("*")[2]):
            # PyType_Spec and its like are constant by convention; CPython's API takes them so.
            python = "bind" in path.parts and re.match(r"(static\s+)?(struct )?Py\w+ ", line)
            assert python, f"{label(path)}:{number}: a mutable global: {line.strip()}"
