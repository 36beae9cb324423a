"""The parallelize function for torchtitan, by the interface that its version 0.3 publishes.

The package needs Triton, which is as large as torch for CPUs; docs/torchtitan.md says what was run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.needs import need_torch

torch = need_torch()

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import fsdpc  # noqa: E402
from fsdpc.integrations import torchtitan  # noqa: E402
from fsdpc.torch import FSDPModule  # noqa: E402
from tests.torch.common import Block, assert_same_parameters, full, join_gloo  # noqa: E402


class Decoder(nn.Module):
    """What torchtitan's decoders have."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.enable_weight_tying = tied
        self.tok_embeddings = nn.Embedding(17, 12)
        self.layers = nn.ModuleDict({str(i): Block(12) for i in range(2)})
        self.norm = nn.LayerNorm(12)
        self.lm_head = nn.Linear(12, 17, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def init_weights(self, buffer_device: Any = None) -> None:
        if self.enable_weight_tying:  # which to_empty() undoes
            self.lm_head.weight = self.tok_embeddings.weight
        for name, p in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(p)
            elif p.dim() == 1:
                nn.init.zeros_(p)
            else:
                nn.init.normal_(p, std=p.shape[0] ** -0.5)

    def forward(self, tokens: Any) -> Any:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.lm_head(self.norm(h))


@dataclass
class Spec:
    name: str
    parallelize_fn: Callable[..., Any] | None


@dataclass
class Dims:
    dp_replicate_enabled: bool = False
    tp_enabled: bool = False
    cp_enabled: bool = False
    pp_enabled: bool = False
    ep_enabled: bool = False

    def get_mesh(self, names: list[str]) -> Any:
        sizes = (1, 2) if len(names) == 2 else (2,)
        return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names))


@dataclass
class Settings:
    """``training``, ``parallelism`` and ``compile`` in one."""

    mixed_precision_param: str = "float32"
    mixed_precision_reduce: str = "float32"
    fsdp_reshard_after_forward: str = "default"
    spmd_backend: str = "partial_dtensor"
    enable: bool = False
    components: list[str] = field(default_factory=lambda: ["model", "loss"])


class Recompute:
    """An ``ac_config``: builds itself, and says that it was applied."""

    applied = False

    def build(self, *, dump_folder: str) -> Recompute:
        return self

    def apply(self, model: nn.Module) -> None:
        self.applied = not any(isinstance(m, FSDPModule) for m in model.modules())


def made(spec: Spec | None, tied: bool = False, **changes: Any) -> Any:
    dims = Dims(**{k: v for k, v in changes.items() if hasattr(Dims, k)})
    settings = Settings(**{k: v for k, v in changes.items() if not hasattr(Dims, k)})
    with torch.device("meta"):
        model = Decoder(tied)
    if spec is not None:
        assert spec.parallelize_fn is not None
        again = Recompute()
        model = spec.parallelize_fn(
            model, parallel_dims=dims, training=settings, parallelism=settings,
            compile_config=settings, ac_config=again, dump_folder="",
        )  # fmt: skip
        assert again.applied
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


@pytest.mark.ranks(2, init=False)
def test_a_decoder_trains_as_unsharded(tmp_path: Path) -> None:
    """Losses are divided by the tokens of all ranks, as torchtitan's trainer does."""
    join_gloo(tmp_path)
    torch.set_num_threads(1)
    spec = torchtitan.use(Spec("decoder", None))
    cases = [{}, {"tied": True}, {"dp_replicate_enabled": True}]
    for case in (*cases, {"fsdp_reshard_after_forward": "never"}):
        ours, plain = made(spec, **case), made(None, case.get("tied", False))
        assert isinstance(ours.layers["0"], FSDPModule)
        assert_same_parameters(ours, plain, rtol=0, atol=0)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, plain)]
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 17, (4, 5), generator=generator)
            own = tokens[2 * fsdpc.rank() : 2 * fsdpc.rank() + 2]
            for model, batch in ((ours, own), (plain, tokens)):
                logits = model(batch).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, batch.flatten(), reduction="sum")
                (loss / tokens.numel()).backward()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (ours, plain)]
            torch.testing.assert_close(*map(full, norms))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(ours, plain, rtol=1e-4, atol=1e-5)
    half = made(spec, mixed_precision_param="bfloat16")
    assert half(tokens).dtype is torch.bfloat16
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp_enabled": True}, r"parallel dimensions \['tp'\]"),
        ({"spmd_backend": "spmd_types"}, "set parallelism.spmd_backend to 'partial_dtensor'"),
        ({"enable": True}, "compile.components has 'model'"),
    ],
)
def test_what_is_not_here_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        made(torchtitan.use(Spec("decoder", None)), **change)
