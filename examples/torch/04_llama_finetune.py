"""Fine-tune a transformers LLaMA (tiny, random weights) with its layers sharded by a plan.

    fsdpc run --ranks 2 examples/torch/04_llama_finetune.py [STEPS]

The plan is an FSDP plan of transformers: name patterns, in which a star matches one part.
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fsdpc
from fsdpc.torch import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    get_model_state_dict,
    optim,
)

STEPS = int(sys.argv[1]) if sys.argv[1:] else 30

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )
)  # fmt: skip
model.gradient_checkpointing_enable()
model.train()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, plan={"model.layers.*": {}}, mp_policy=policy)

decay = [p for p in model.parameters() if p.dim() >= 2]
plain = [p for p in model.parameters() if p.dim() < 2]
optimizer = optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}], lr=3e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 5))
generator = torch.Generator().manual_seed(fsdpc.rank())
for step in range(STEPS):
    start = torch.randint(0, 64, (4, 1), generator=generator)
    ids = (start + torch.arange(24)) % 64  # counting is easy to learn
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

weights = get_model_state_dict(model, rank0_only=True)
print(f"{len(weights)} tensors to save")
