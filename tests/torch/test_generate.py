"""transformers' models of ranks that would run different forwards, under fully_shard."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fsdpc
from fsdpc.torch import fully_shard, summon_full_params

from .common import average_grads, full, join_gloo, twin
from .test_transformers import ids, layers, make


def generated(model: Any, length: int) -> torch.Tensor:
    return model.generate(ids(0), max_new_tokens=length, min_new_tokens=length, do_sample=False)


@pytest.mark.ranks(2, init=False)
def test_ranks_generate_different_lengths(tmp_path: Path) -> None:
    """Together if forwards communicate; each by itself with held, summoned or whole weights."""
    join_gloo(tmp_path)
    plain = make("Llama", use_cache=True)
    model = twin(plain)
    for layer in layers(model):
        fully_shard(layer)
    fully_shard(model)
    length = 3 + 4 * fsdpc.rank()
    wanted = generated(plain, length)
    for around, times in ((nullcontext, 2), (model.hold, length)):
        with around():
            for _ in range(times):
                assert torch.equal(generated(model, length), wanted)
    with summon_full_params(model, rank0_only=True, writeback=False):
        if fsdpc.rank() == 0:
            assert torch.equal(generated(model, length), wanted)
    with summon_full_params(model, recurse=False, writeback=False):
        assert torch.equal(generated(model, length), wanted)
    replica = fully_shard(twin(plain), strategy="NO_SHARD")
    for _ in range(2 + fsdpc.rank()):
        assert torch.equal(generated(replica, length), wanted)
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2)
def test_dropped_layers() -> None:
    """Each rank draws which layers it drops, and runs them all: as without drops."""
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 16,
        "intermediate_size": 48, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
        "final_dropout": 0.0, "apply_spec_augment": False,
    }  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**sizes, layerdrop=0.0)).train()
    model = twin(plain)
    model.config.layerdrop = 0.5
    for layer in model.wav2vec2.encoder.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(fsdpc.rank())
    for m in (plain, model):
        for sound in torch.ones(3, 2, 400).cumsum(0):
            m(sound * (1 + torch.arange(400) % 7)).logits.square().mean().backward()
    average_grads(plain)
    for (name, p), own in zip(plain.named_parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(full(own.grad), p.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.ranks(2, timeout=240)
def test_the_compiler_accepts_such_models() -> None:
    """It asks managed modules whether their parameters keep their shapes."""
    model = fully_shard(make("Llama", num_hidden_layers=1))
    torch.compile(model, backend="eager")(input_ids=ids(0))
    refused = torch._dynamo.utils.counters["unimplemented"]
    assert not [why for why in refused if "use_orig_params" in why]
    torch._dynamo.reset()
