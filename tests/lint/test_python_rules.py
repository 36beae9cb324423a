"""Rules of the Python sources: short functions, docstrings, few parameters, torch in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .tree import ROOT, files, label

FUNCTION_LINES = 100
PARAMETERS = 7

PACKAGE = ROOT / "python" / "fsdpc"
MODULES = files(".py", under="python")

# What these do is PyTorch's to say.
HOOKS = {"forward", "extra_repr"}

#: Parameters that their function does not read, because no value of them changes what it does.
UNREAD = {
    # Hints on memory or communication, and PyTorch's arguments that it has deprecated.
    "FSDPModule.set_reduce_scatter_max_input_buffers": {"recurse"},
    "FSDPModule.set_separate_reduce_scatter_group": {"enable", "recurse"},
    "FSDPModule.set_force_sum_reduction_for_comms": {"enable"},
    "FSDPModule.set_post_optim_event": {"event"},
    "FSDPModule.set_unshard_in_backward": {"unshard_in_backward"},
    "DistributedDataParallel.__new__": {"output_device"},
    "FullyShardedDataParallel.__new__": {"use_orig_params"},
    "FullyShardedDataParallel.__init__": {"args", "kwargs"},
    "FullyShardedDataParallel.full_optim_state_dict": {"optim_input", "group"},
    "FullyShardedDataParallel.optim_state_dict": {"group"},
    "FullyShardedDataParallel.optim_state_dict_to_load": {"group"},
    "FullyShardedDataParallel.rekey_optim_state_dict": {"optim_input"},
    "FullyShardedDataParallel.scatter_full_optim_state_dict": {"optim_input", "group"},
    "FullyShardedDataParallel.shard_full_optim_state_dict": {"optim_input"},
    "FullyShardedDataParallel.sharded_optim_state_dict": {"group"},
    "ShardedGradScaler.__init__": {"process_group"},
    "init_distributed": {"_"},
    "summon_full_params": {"offload_to_cpu"},
    # Signatures that a base class or a caller gives.
    "WeightAveraging.setup": {"trainer", "pl_module"},
    "WeightAveraging.on_fit_start": {"trainer"},
    "WeightAveraging.on_exception": {"trainer", "exception"},
    "WeightAveraging.on_save_checkpoint": {"trainer", "pl_module"},
    "WeightAveraging.on_load_checkpoint": {"trainer"},
    "Identity.__init__": {"args", "kwargs"},
    "WarmupCosine.factor": {"group"},
    "WarmupDecayLR.factor": {"group"},
    "WarmupStableDecay.factor": {"group"},
}

# Calls that mirror PyTorch's, or DeepSpeed's, keep their signatures.
MIRRORS = {
    "fully_shard", "memory_plan", "AdamW", "Adam", "RMSprop", "SGD", "Muon", "Adafactor",
    "linear_cross_entropy",
    "FullyShardedDataParallel",
    "initialize", "Conv1d", "Conv2d", "TransformerEncoderLayer",
}  # fmt: skip

# Calls named `open` that open no file of text.
ELSEWHERE = ("os.open", "self.progress.open")

Function = ast.FunctionDef | ast.AsyncFunctionDef


INSIDE = {"cli", "display", "launching"}  # rooms whose modules users do not import


def is_public_module(path: Path) -> bool:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[0] in INSIDE and parts != ("launching", "launcher"):
        return False
    return all(not part.startswith("_") or part == "__init__" for part in parts)


def public(path: Path) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Public functions and classes of a module, and the public methods of the latter."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, (Function, ast.ClassDef)) or node.name.startswith("_"):
            continue
        yield node.name, node
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            shown = isinstance(member, Function) and not member.name.startswith("_")
            if shown and not is_overload(member) and not is_setter(member):
                if member.name in HOOKS:
                    continue
                yield f"{node.name}.{member.name}", member


def is_overload(node: Function) -> bool:
    return any(ast.unparse(each).endswith("overload") for each in node.decorator_list)


def is_setter(node: Function) -> bool:
    return any(ast.unparse(each).endswith((".setter", ".deleter")) for each in node.decorator_list)


def unread(node: Function) -> set[str]:
    """Parameters of a function that it never reads; none of one that only raises."""
    body = [each for each in node.body if not isinstance(each, ast.Expr)]
    if [type(each) for each in body] == [ast.Raise]:
        return set()
    a = node.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    read = {n.id for each in node.body for n in ast.walk(each) if isinstance(n, ast.Name)}
    return {each.arg for each in named} - read - {"self", "cls"}


def test_no_option_is_taken_and_dropped() -> None:
    """A parameter is read, or is listed here because it may mean nothing."""
    found: dict[str, set[str]] = {}
    for path in files(".py", under="python/fsdpc"):
        if not is_public_module(path) and path.name != "_module.py":
            continue
        for name, node in public(path):
            if not isinstance(node, ast.ClassDef):
                found |= {name: unread(node)} if unread(node) else {}
                continue
            for made in node.body:
                if isinstance(made, Function) and made.name in ("__init__", "__new__", "__call__"):
                    found |= {f"{name}.{made.name}": unread(made)} if unread(made) else {}
    assert found == UNREAD


@pytest.mark.parametrize("path", files(".py"), ids=label)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            length = (node.end_lineno or 0) - body[0].lineno + 1
            assert length <= FUNCTION_LINES, f"{label(path)}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", [p for p in MODULES if is_public_module(p)], ids=label)
def test_public_names_have_docstrings(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{label(path)} does not say what it is"
    for name, node in public(path):
        text = ast.get_docstring(node)
        assert text, f"{label(path)}:{node.lineno}: {name} has no docstring"
        first = text.split("\n")[0]
        assert first.endswith((".", ":")), f"{label(path)}:{node.lineno}: {name}: {first!r} is cut"


@pytest.mark.parametrize("path", [p for p in MODULES if is_public_module(p)], ids=label)
def test_public_functions_take_few_parameters(path: Path) -> None:
    for name, node in public(path):
        makers = [
            member
            for member in getattr(node, "body", ())
            if isinstance(node, ast.ClassDef)
            and isinstance(member, Function)
            and member.name == "__init__"
        ]
        for function in [node] if isinstance(node, Function) else makers:
            given = function.args
            names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            count = len([each for each in names if each not in ("self", "cls")])
            assert count <= PARAMETERS or name in MIRRORS, f"{label(path)}: {name} takes {count}"


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_only_the_adapters_import_torch(path: Path) -> None:
    if {"torch", "integrations"} & set(path.relative_to(PACKAGE).parts):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] != "torch", f"{label(path)}:{node.lineno} imports torch"


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


TEXT = files(".py", under="python") + files(".py", under="examples")


@pytest.mark.parametrize("path", TEXT, ids=label)
def test_files_of_text_say_their_encoding(path: Path) -> None:
    """The locale's may be ASCII."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        if name not in ("open", "read_text", "write_text") or called in ELSEWHERE:
            continue
        mode = node.args[1:2] if called == "open" else node.args[:1]
        binary = name == "open" and "b" in "".join(map(ast.unparse, mode))
        keywords = [each.arg for each in node.keywords]  # None: **options
        assert binary or "encoding" in keywords or None in keywords, (
            f"{label(path)}:{node.lineno}: {called}() without encoding="
        )
