"""Frozen weights of bitsandbytes (NF4, int8): codes are sharded, adapters keep their bits."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict as torchs_state_dict

import fsdpc
from fsdpc.torch import fully_shard, get_model_state_dict, summon_full_params

from .common import join_gloo
from .test_late import Adapted as Merging

bnb = pytest.importorskip("bitsandbytes")
DIM, HIDDEN = 64, 128
KINDS: dict[str, Any] = {
    "nf4": partial(bnb.nn.Linear4bit, quant_type="nf4", compute_dtype=torch.float32),
    "int8": partial(bnb.nn.Linear8bitLt, has_fp16_weights=False),
}


class Adapted(nn.Module):
    """A quantised layer plus a product of two small matrices, as LoRA has it."""

    def __init__(self, inputs: int, outputs: int, kind: str) -> None:
        super().__init__()
        self.base = KINDS[kind](inputs, outputs, bias=True)
        self.base.requires_grad_(False)
        self.a = nn.Linear(inputs, 4, bias=False)
        self.b = nn.Linear(4, outputs, bias=False)
        nn.init.normal_(self.b.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def build(kind: str = "nf4") -> nn.Module:
    torch.manual_seed(5)
    layers = [Adapted(*shape, kind) for shape in ((DIM, HIDDEN), (HIDDEN, DIM), (DIM, HIDDEN))]
    return unpacked(nn.Sequential(*layers).to("cpu"))  # bitsandbytes quantises here


def unpacked(model: Any) -> Any:
    """Keep bitsandbytes from other kernels in evaluation, which processors with avx512_bf16 have.

    Sharded layers never use them.
    """
    for m in model.modules():
        if hasattr(m, "support_avx512bf16_for_cpu"):
            m.support_avx512bf16_for_cpu = False
    return model


def shard(model: nn.Module) -> Any:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def train(model: nn.Module, steps: int = 50) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    chance, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        loss = model(torch.randn(8, DIM, generator=chance)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_same(ours: Any, plain: nn.Module) -> None:
    assert train(ours) == train(plain)
    found = get_model_state_dict(ours)
    for name, p in plain.named_parameters():
        value = found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name]
        assert torch.equal(value.view(p.dtype), p.detach()), name
    ours.eval(), plain.eval()
    with torch.no_grad():
        x = torch.ones(2, DIM)
        assert torch.equal(ours(x), plain(x))
        with summon_full_params(ours, writeback=False):
            assert torch.equal(ours(x), plain(x))
        assert torch.equal(ours(x), plain(x))


@pytest.mark.ranks([1, 2])
def test_adapters_have_the_bits_of_an_unsharded_model(tmp_path: Path) -> None:
    """All ranks have the same data, and a mean over two equal gradients is exact."""
    torch.set_num_threads(1)
    join_gloo(tmp_path)
    ours, plain = shard(build()), build()
    codes = ours[0].base.weight
    assert codes.dtype == torch.uint8 and codes.shape == (DIM * HIDDEN // 2, 1)
    assert codes.to_local().numel() == codes.numel() // fsdpc.world_size()
    assert codes.quant_state is not None and not ours[0].base.support_avx512bf16_for_cpu
    check_same(ours, plain)
    assert get_model_state_dict(ours).keys() == plain.state_dict().keys()
    for saved in (ours.state_dict(), torchs_state_dict(ours)):  # scales would be unexpected
        assert saved.keys() == dict(plain.named_parameters()).keys()
    ours.load_state_dict(saved)
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("used", [False, True])
def test_int8_weights(tmp_path: Path, used: bool) -> None:
    """Rows of codes are sharded, scales are not; after a forward, the layer has both."""
    torch.set_num_threads(1)
    join_gloo(tmp_path)
    ours, plain = build("int8"), build("int8")
    if used:
        ours(torch.ones(1, DIM)), plain(torch.ones(1, DIM))
    shard(ours)
    layer: Any = ours[0].base
    codes = layer.weight
    assert codes.dtype == torch.uint8 and codes.shape == (HIDDEN, DIM)
    assert codes.to_local().shape[0] == HIDDEN // fsdpc.world_size()
    assert codes.SCB.shape == (HIDDEN,) and codes.CB is None and layer.state.CB is None
    ours(torch.ones(1, DIM))
    gathered = layer.state.CB.data_ptr()
    check_same(ours, plain)
    assert layer.state.CB.data_ptr() == gathered  # not of the copies that it computed with
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2)
def test_int8_layers_do_not_keep_old_biases(tmp_path: Path) -> None:
    """For inputs of another dtype, the layer replaces its bias by a copy, which would stay."""
    torch.set_num_threads(1)
    join_gloo(tmp_path)

    def narrow() -> Any:
        model: Any = build("int8")
        for layer in model:
            layer.a.bfloat16(), layer.b.bfloat16(), layer.base.bias.requires_grad_(True)
        return model

    ours, plain, x = shard(narrow()), narrow(), torch.ones(2, DIM, dtype=torch.bfloat16)
    before = ours[0].base.bias.full_tensor()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    for _ in range(2):
        ours(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(ours[0].base.bias.full_tensor(), before)
    plain.load_state_dict(get_model_state_dict(ours))
    assert torch.equal(ours(x), plain(x))
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks([1, 2])
def test_memory_is_planned() -> None:
    """Codes take half a byte per weight, once per host if several ranks share it."""
    before = fsdpc.memory_stats()
    model = shard(build())
    train(model, 1)
    plan, after = fsdpc.memory_plan(model), fsdpc.memory_stats()
    held = {kind: after[kind] - before[kind] for kind in after if kind.endswith("_bytes")}
    assert held["master_bytes"] == plan.master and held["grad_bytes"] == plan.grad
    assert fsdpc.all_reduce(float(held["unsharded_bytes"])) == plan.unsharded


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused() -> None:
    apart: Any = build("int8")
    apart[0].base.weight.SCB.mul_(1 + fsdpc.rank())
    with pytest.raises(fsdpc.MismatchError, match="scales crc32c"):
        fully_shard(apart)
    apart = build("nf4")
    apart[0].base.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(NotImplementedError, match=r"'0.base.weight'.*repacked in evaluation.*anew"):
        fully_shard(apart)
    foreign = Merging(nn.Linear(4, 4))
    codes = torch.ones(4, 4, dtype=torch.uint8)
    foreign.base_layer.weight = nn.Parameter(codes, requires_grad=False)
    fully_shard(foreign)
    with pytest.raises(NotImplementedError, match=r"Adapted.merge\(\) over 'weight'.*Save the"):
        foreign.merge()
    early = bnb.nn.Linear8bitLt(4, 4, has_fp16_weights=False)
    with pytest.raises(NotImplementedError, match=r"'weight'.*Int8Params, which is not quantised"):
        fully_shard(early)
    with pytest.raises(TypeError, match=r"'weight'.*torch.int8 cannot be sharded"):
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
        layer.weight.__class__ = type("Own", (nn.Parameter,), {})
        fully_shard(layer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "change",
    [{"blocksize": 128}, {"quant_type": "fp4"}, {"dtype": torch.bfloat16}, {"offset": 1.0}, None],
)
def test_ranks_have_the_same_scheme(change: dict[str, Any] | None) -> None:
    apart: Any = build("nf4")
    state = apart[1].base.weight.quant_state
    if fsdpc.rank() == 1 and change is None:
        state.state2, state.nested = None, False
    elif fsdpc.rank() == 1:
        state.__dict__.update(change)
        state.offset = torch.as_tensor(state.offset)
    with pytest.raises(fsdpc.MismatchError, match=r"base.weight .*Params4bit\(4096, 1\) nf4 of"):
        shard(apart)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}  # fmt: skip


@pytest.mark.ranks([1, 2], init=False, timeout=300)
@pytest.mark.parametrize(
    ("options", "whole"),
    [
        (NF4, False),
        ({**NF4, "bnb_4bit_quant_storage": torch.bfloat16}, True),
        ({"load_in_8bit": True}, False),
        ({"load_in_8bit": True}, True),
        ({}, False),
    ],
    ids=["nf4", "nf4 in bfloat16", "int8", "int8 whole", "torchao"],
)
def test_qlora_by_peft(tmp_path: Path, options: dict[str, Any], whole: bool) -> None:
    """A LLaMA that transformers quantises to NF4 with double-quantised scales or int8; PEFT's LoRA.

    Merging quantises anew, by itself or inside `summon_full_params`.
    """
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    join_gloo(tmp_path)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    folder = str(tmp_path / "base")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)  # only rank 0 writes
    torch.distributed.barrier()
    quantised = transformers.BitsAndBytesConfig(**options)
    if not options:
        torchao = pytest.importorskip("torchao.quantization")
        quantised = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())

    def adapted() -> Any:
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder, quantization_config=quantised, dtype=torch.float32, device_map="cpu"
        )
        targets = ["q_proj", "v_proj", "down_proj"]
        lora = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
        return peft.get_peft_model(unpacked(model), lora)

    def losses(model: Any) -> list[float]:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        chance, found = torch.Generator().manual_seed(2), []
        for _ in range(5):
            ids = torch.randint(0, 128, (2, 16), generator=chance)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    ours, plain = adapted(), adapted()
    for layer in ours.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(ours)
    assert losses(ours) == losses(plain)
    ours.train(), plain.train()
    assert losses(ours) == losses(plain)
    ours.eval(), plain.eval()
    ids = torch.arange(16).view(1, 16)
    before = logits(ours, ids)
    for merge in ("merge_adapter", "unmerge_adapter", "merge_adapter"):  # each rounds anew
        getattr(plain, merge)()
        with summon_full_params(ours) if whole else nullcontext():
            getattr(ours, merge)()
            if whole:
                assert torch.equal(logits(ours, ids), logits(plain, ids))
        assert torch.equal(logits(ours, ids), logits(plain, ids))
        assert not torch.equal(logits(ours, ids), before)
        before = logits(ours, ids)
    merged = ours.merge_and_unload()
    with summon_full_params(ours, writeback=False, rank0_only=True):
        if fsdpc.rank() == 0:
            merged.save_pretrained(tmp_path / "merged")
    torch.distributed.barrier()
    load = transformers.LlamaForCausalLM.from_pretrained
    again = unpacked(load(tmp_path / "merged", device_map="cpu"))
    assert again.is_quantized and torch.equal(logits(again, ids), before)
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()
