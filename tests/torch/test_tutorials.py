"""FSDP1's tutorials with another import: the same numbers as under torch's own classes.

Two run under torch's FSDP1 as well. Its state dicts do not work without an accelerator (full ones
on rank 0 raise, optimizer states come back wrong), so the other two run under DDP with the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
from torch.nn.parallel import DistributedDataParallel

import fsdpc

FOLDER = Path(__file__).parent / "tutorials"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("fsdp1_*.py"))

# bf16 keeps 8 bits, and the reductions of gloo round at another place than ours.
TOLERANCE: dict[str, dict[str, float]] = {"fsdp1_wrap_mixed": {"rel": 0.05, "abs": 0.02}}


class OnCpu(Theirs):
    """torch's class wants to be told that the CPU is meant, and broadcasts on GPUs alone."""

    def __init__(self, module: Any, **options: Any) -> None:
        if options.pop("sync_module_states", False):
            for t in (*module.parameters(), *module.buffers()):
                dist.broadcast(t.detach(), 0)
        super().__init__(module, device_id=torch.device("cpu"), **options)


class Replicated(DistributedDataParallel):
    """DDP with the calls that FSDP1 has for state dicts."""

    rank0_only = False

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module)  # broadcasts rank 0's values in any case

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        keep = not Replicated.rank0_only or dist.get_rank() == 0
        return self.module.state_dict() if keep else {}

    def load_state_dict(self, state_dict: Any, *args: Any) -> Any:  # type: ignore[override]
        return self.module.load_state_dict(state_dict)

    @staticmethod
    @contextmanager
    def state_dict_type(model: Any, kind: Any, config: Any = None) -> Iterator[None]:
        Replicated.rank0_only = bool(config and config.rank0_only)
        yield
        Replicated.rank0_only = False

    @staticmethod
    def set_state_dict_type(*args: Any) -> None: ...

    @staticmethod
    def optim_state_dict(model: Any, optim: Any) -> Any:
        return optim.state_dict()

    @staticmethod
    def optim_state_dict_to_load(model: Any, optim: Any, optim_state_dict: Any) -> Any:
        return optim_state_dict


def run(source: str, folder: Path, replace: Any = None) -> list[float]:
    names: dict[str, Any] = {"__name__": "tutorial"}
    exec(compile(source, "tutorial", "exec"), names)
    if replace is not None:
        names["FSDP"] = replace
    folder.mkdir(exist_ok=True)
    return names["fsdp_main"](dist.get_rank(), dist.get_world_size(), str(folder))


def test_there_are_four() -> None:
    assert len(SCRIPTS) == 4


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.filterwarnings("ignore")
def test_an_fsdp1_tutorial(script: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{tmp_path}/store", rank=fsdpc.rank(), world_size=fsdpc.world_size()
    )
    source = (FOLDER / f"{script}.py").read_text()
    changed = source.replace("from torch.distributed.fsdp", "from fsdpc.torch")
    assert changed != source
    ours = run(changed, tmp_path / "ours")
    reference = Replicated if "state" in script else OnCpu
    theirs = run(source, tmp_path / "theirs", reference)
    assert ours == pytest.approx(theirs, **TOLERANCE.get(script, {"rel": 1e-4, "abs": 1e-6}))
    dist.destroy_process_group()
