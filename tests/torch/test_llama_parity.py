"""The native LLaMA against transformers' with the same weights: loss, gradients, training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

import fsdpc
from fsdpc.models import Llama, ModelConfig, preset
from fsdpc.testing import Side, Tolerance, compare


def twins(config: ModelConfig, seed: int = 0) -> tuple[Any, Any]:
    """A transformers model and ours with its weights."""
    torch.set_num_threads(1)  # OpenMP's threads spin: two on a busy machine take ten times as long
    torch.manual_seed(seed)
    options: dict[str, Any] = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.inner,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_seq,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tied,
        use_cache=False,
    )
    if config.no_rope_every:
        options["no_rope_layer_interval"] = config.no_rope_every
        options |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        theirs = SmolLM3ForCausalLM(SmolLM3Config(**options))
    else:
        theirs = LlamaForCausalLM(LlamaConfig(**options))
    ours = Llama(config)
    ours.load_state_dict({n: p.detach().numpy() for n, p in theirs.state_dict().items()})
    return theirs, ours


def batch(config: ModelConfig, rows: int, seq: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (rows, seq + 1))
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def torch_loss(model: Any, x: Any, y: Any) -> Any:
    logits = model(input_ids=x).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


GQA = ModelConfig(vocab_size=96, dim=64, layers=2, heads=4, kv_heads=2, inner=96, tied=True)
SMOL = GQA.with_(layers=5, no_rope_every=4, rope_theta=5e6)

# fp32 sums of thousands of terms in another order: 1e-4 of a value, and 1e-5 of its tensor's scale
# where terms cancel.
FP32 = {
    "loss": Tolerance(rtol=1e-5),
    "gradient": Tolerance(rtol=1e-4, scale=1e-5),
    "norm": Tolerance(rtol=1e-4),
}


@pytest.mark.parametrize("config", [preset("10M"), GQA, SMOL], ids=["10M", "grouped-tied", "smol"])
def test_loss_and_gradients_fp32(config: ModelConfig) -> None:
    theirs, ours = twins(config)
    reference = Side(model=theirs, loss=torch_loss)
    exact = {**FP32, "parameter": Tolerance()}
    assert compare(ours, reference, [batch(config, 2, 64, 1)], tolerance=exact) is None


def test_twenty_adamw_steps_fp32() -> None:
    """Adam divides by the gradient's own size, so that gradients of two runs drift apart where they
    are near 0; what is held to 1e-5 for 20 steps is the loss."""
    config = preset("10M")
    theirs, ours = twins(config)
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}
    found = compare(
        Side(model=ours, optimizer=fsdpc.optim.AdamW(ours.parameters(), **options)),
        Side(
            model=theirs,
            optimizer=torch.optim.AdamW(theirs.parameters(), **options),
            loss=torch_loss,
        ),
        [batch(config, 1, 64, step) for step in range(20)],
        20,
        tolerance={"loss": FP32["loss"], "norm": FP32["norm"]},
        max_norm=1.0,
    )
    assert found is None


@pytest.mark.ranks(1)
def test_bf16_stays_near_fp32() -> None:
    """bf16 keeps 8 bits: a mean of 128 losses near 5.5 is within 0.02 of the fp32 one, and every
    gradient within 4 % of its norm (measured: about 1 %)."""
    config = preset("10M")
    theirs, ours = twins(config)
    x, y = batch(config, 2, 64, 3)
    reference = torch_loss(theirs, torch.from_numpy(x), torch.from_numpy(y))
    reference.backward()
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)
    for block in ours.blocks():
        fsdpc.fully_shard(block, mp_policy=policy)
    fsdpc.fully_shard(ours, mp_policy=policy)
    loss = ours(x, y)
    loss.backward()
    assert abs(float(loss) - float(reference)) < 0.02
    grads = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        expected = grads[name].grad.numpy()
        distance = np.linalg.norm(p.grad.numpy() - expected) / np.linalg.norm(expected)
        assert distance < 0.04, f"{name}: {distance:.3f}"
