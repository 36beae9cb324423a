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


@pytest.mark.ranks(2, timeout=300)
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


@pytest.mark.ranks(2, timeout=300)
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


@pytest.mark.ranks(2, timeout=300)
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


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("kind", ["Llama", "SmolLM3", "Mixtral"])
def test_plans_of_transformers(kind: str) -> None:
    """SmolLM3 ties its head to its embedding: they are one unit."""
    plain = make(kind)
    ours = twin(plain)
    fully_shard(ours, plan=ours.fsdp_plan)
    units = {id(m._fsdpc_unit) for m in ours.modules() if hasattr(m, "_fsdpc_unit")}
    tied = kind == "SmolLM3"
    assert len(units) == (5 if tied else 6)  # two layers, norm, embedding, head, and the model
    assert (ours.lm_head._fsdpc_unit is ours.model.embed_tokens._fsdpc_unit) == tied
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (ours, plain)]
    for step in range(4):
        words = ids(step)
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            model(input_ids=words, labels=words).loss.backward()
            if model is plain:
                average_grads(plain)
            optimizer.step()
    assert_same_parameters(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(1)
def test_what_plans_can_say() -> None:
    model: Any = make("Llama")
    fully_shard(model, plan={("model.norm", "lm_head"): "keep_full_weight"})
    assert model.model.norm._fsdpc_unit is model.lm_head._fsdpc_unit
    assert not hasattr(model.model.layers[0], "_fsdpc_unit")
    loss = model(input_ids=ids(0), labels=ids(0)).loss
    loss.backward()
    alone: Any = make("SmolLM3")
    fully_shard(alone, plan={"model.embed_tokens": {}, "model.layers.0": {}})
    assert not hasattr(alone.model.embed_tokens, "_fsdpc_unit")  # tied to what is not in the plan
    assert hasattr(alone.model.layers[0], "_fsdpc_unit")
    with pytest.raises(ValueError, match=r"'whole' for 'lm_head': give a dict"):
        fully_shard(make("Llama"), plan={"lm_head": "whole"})
    with pytest.raises(ValueError, match="fits no module of GPT2LMHeadModel"):
        gpt2: Any = make("GPT2")
        fully_shard(gpt2, plan=gpt2.fsdp_plan)  # transformers gives it LLaMA's names


def trained(model: Any, optimizer: Any, steps: range) -> list[float]:
    """Losses and norms; drops out by the default generator, as a script does."""
    seen = []
    for step in steps:
        words = ids(step)
        optimizer.zero_grad()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        if not hasattr(model, "_fsdpc_unit"):
            average_grads(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += [float(loss.detach()), float(norm)]
    return seen


@pytest.mark.ranks(2, timeout=300)
def test_resumed_as_if_never_stopped() -> None:
    """20 Adam steps with a generator that is scrambled at step 10 and restored."""

    def start(seed: int) -> tuple[Any, Any]:
        model = make("Llama", attention_dropout=0.1)
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 0.01 * seed)
        model.train()
        fully_shard(model, plan=model.fsdp_plan)
        return model, torch.optim.Adam(model.parameters(), lr=1e-3)

    model, optimizer = start(0)
    torch.manual_seed(7 + fsdpc.rank())
    whole = trained(model, optimizer, range(20))
    expected = full_parameters(model)

    plain = make("Llama", attention_dropout=0.1).train()
    torch.manual_seed(7 + fsdpc.rank())
    theirs = trained(plain, torch.optim.Adam(plain.parameters(), lr=1e-3), range(20))
    assert whole == pytest.approx(theirs, rel=1e-4, abs=1e-5)

    model, optimizer = start(0)
    torch.manual_seed(7 + fsdpc.rank())
    first = trained(model, optimizer, range(10))
    saved = fsdpc.torch.get_model_state_dict(model)
    states = fsdpc.torch.get_optimizer_state_dict(model, optimizer)
    generator = torch.get_rng_state()

    torch.manual_seed(999)
    torch.rand(100)
    model, optimizer = start(3)
    model.load_state_dict(saved)
    fsdpc.torch.set_optimizer_state_dict(model, optimizer, states)
    torch.set_rng_state(generator)
    second = trained(model, optimizer, range(10, 20))
    assert first + second == pytest.approx(whole, rel=1e-5, abs=1e-5)
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 1e4}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scaled", [False, True])
def test_rotary_buffers_of_a_meta_model_compute_themselves(scaled: bool) -> None:
    options = {"rope_parameters": SCALED} if scaled else {}
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, max_position_embeddings=128, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    with torch.device("meta"):
        ours = transformers.LlamaForCausalLM(config)
    for layer in ours.model.layers:
        fully_shard(layer)
    fully_shard(ours).to_empty(device="cpu")
    ours.load_state_dict(plain.state_dict())
    drawn = torch.get_rng_state()
    words = torch.arange(48).view(1, 48)
    with torch.no_grad():
        assert torch.equal(ours(words).logits, plain(words).logits)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, buffer in plain.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name
