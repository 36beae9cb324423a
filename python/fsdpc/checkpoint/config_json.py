"""``config.json``, by which transformers' ``from_pretrained`` knows what model a folder holds."""

from __future__ import annotations

import json
from typing import Any

from fsdpc.fsdp_module import plain_class
from fsdpc.models.gpt2 import GPT2
from fsdpc.models.llama import Llama

NAME = "config.json"

# Transformers' defaults are words of its own vocabularies.
_NO_WORDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def of_model(model: Any) -> bytes | None:
    """Return the file's content for a model of transformers, or one of ours with its layout.

    Sharded or not. None for models that transformers does not know.
    """
    known = [(c.__module__, c.__name__) for c in type(model).__mro__]
    if ("transformers.modeling_utils", "PreTrainedModel") in known:
        name = plain_class(type(model)).__name__
        content = json.loads(model.config.to_json_string()) | {"architectures": [name]}
    elif isinstance(model, Llama):
        content = _of_llama(model)
    elif isinstance(model, GPT2):
        content = _of_gpt2(model)
    else:
        return None
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _of_llama(model: Llama) -> dict[str, Any]:
    """As a LlamaConfig, or a SmolLM3Config where some blocks know no positions."""
    c = model.config
    kind: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if c.no_rope_every:
        kind = {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "no_rope_layer_interval": c.no_rope_every,
            "no_rope_layers": [int((i + 1) % c.no_rope_every != 0) for i in range(c.layers)],
        }
    return {
        **kind,
        "hidden_act": "silu",
        "hidden_size": c.dim,
        "intermediate_size": c.inner,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_seq,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "tie_word_embeddings": c.tied,
        "attention_bias": False,
        "mlp_bias": False,
        **_NO_WORDS,
    }


def _of_gpt2(model: GPT2) -> dict[str, Any]:
    c = model.config
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": c.dim,
        "n_inner": c.inner,
        "n_layer": c.layers,
        "n_head": c.heads,
        "vocab_size": c.vocab_size,
        "n_positions": c.max_seq,
        "layer_norm_epsilon": model.transformer.ln_f.eps,
        "embd_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        **_NO_WORDS,
    }
