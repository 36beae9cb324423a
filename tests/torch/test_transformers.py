"""Models of transformers under fully_shard, against the same model on averaged gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, fully_shard

from .common import assert_same_parameters, average_grads, full_parameters, twin

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def make(kind: str, **options: Any) -> Any:
    """A tiny model with random weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if kind == "GPT2":
        config: Any = transformers.GPT2Config(
            vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    extra = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "Mixtral" else {}
    if kind == "Qwen3":
        extra = {"head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **extra, **options})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def layers(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def ids(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + fsdpc.rank())
    return torch.randint(3, 61, (2, 12), generator=generator)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen3", "SmolLM3", "Mixtral"])
def test_ten_adam_steps(kind: str) -> None:
    plain = make(kind)
    ours = twin(plain)
    for layer in layers(ours):
        fully_shard(layer)
    fully_shard(ours)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (ours, plain)]
    for step in range(10):
        words = ids(step)
        losses = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            losses.append(loss.detach())
            if model is plain:
                average_grads(plain)
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    # Adam divides by sqrt(v): where v is nearly nothing the order of sums decides the step.
    assert_same_parameters(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_llama_in_bf16(checkpointing: bool) -> None:
    """bf16 compute with fp32 masters and reductions, against the plain model cast to bf16."""
    plain = make("Llama")
    ours = twin(plain)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if checkpointing:
        ours.gradient_checkpointing_enable()
        ours.train()
    fully_shard(ours, plan={"model.layers.*": {}}, mp_policy=policy)
    assert ours.model.layers[1].mlp.up_proj.weight.fsdpc.name == (
        "LlamaDecoderLayer.mlp.up_proj.weight"
    )
    words = ids(0)
    optimizer = fsdpc.torch.optim.AdamW(ours.parameters(), lr=1e-3)
    ours(input_ids=words, labels=words).loss.backward()
    low = twin(plain).to(torch.bfloat16)
    low(input_ids=words, labels=words).loss.backward()
    for name, p in ours.named_parameters():
        mine = fsdpc.torch.full_grad(p)
        mean = fsdpc.all_reduce(fsdpc.from_dlpack(low.get_parameter(name).grad.float()), "mean")
        expected = torch.from_dlpack(mean)
        # Rounded to bf16 once on each rank; the layers' sums are the same kernels' in both.
        torch.testing.assert_close(
            mine, expected, rtol=0.05, atol=2e-3, msg=lambda m, n=name: f"{n} {m}"
        )
    optimizer.step()
    assert torch.isfinite(ours(input_ids=words, labels=words).loss)


@pytest.mark.ranks(2, timeout=120)
def test_strategies_and_checkpointing_agree_to_the_bit() -> None:
    results = []
    for reshard, checkpointing in ((True, False), (False, False), (True, True)):
        model = make("Llama")
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        for layer in layers(model):
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for step in range(3):
            optimizer.zero_grad()
            model(input_ids=ids(step), labels=ids(step)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        results.append(full_parameters(model))
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name
