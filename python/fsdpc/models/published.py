"""Convert between published models' ``config.json`` and our configuration.

An unknown key that may affect results raises an error that names it, so every loaded model computes
the same results as in transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from fsdpc.models.config import ModelConfig
from fsdpc.models.rope import RopeScaling

#: model_type -> transformers' class.
FAMILIES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "smollm3": "SmolLM3ForCausalLM", "gpt2": "GPT2LMHeadModel",
}  # fmt: skip

#: transformers' defaults for missing keys.
_OF_ALL = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "max_position_embeddings": 32768,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8,
                "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False,
              "max_window_layers": 28, "layer_types": None},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False,
              "max_window_layers": 28, "layer_types": None, "head_dim": 128,
              "attention_bias": False},
    "smollm3": {"num_key_value_heads": 4, "sliding_window": None, "use_sliding_window": False,
                "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 4,
                "attention_bias": False, "mlp_bias": False, "rope_theta": 2e6,
                "tie_word_embeddings": True},
    "gpt2": {"n_positions": 1024, "n_inner": None, "activation_function": "gelu_new",
             "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
             "tie_word_embeddings": True},
}  # fmt: skip

_SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "num_hidden_layers": "layers",
    "num_attention_heads": "heads", "intermediate_size": "inner",
}  # fmt: skip
_GPT2_SIZES = {
    "vocab_size": "vocab_size", "n_embd": "dim", "n_layer": "layers", "n_head": "heads",
}  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
#: transformers' default only in this family; lookups do not train its embedding row.
_SMOLLM3_PAD = 128004

#: Keys that do not affect the results of a forward.
_SILENT = frozenset("""
    architectures attn_implementation auto_map chunk_size_feed_forward cls_token_id
    decoder_start_token_id do_sample dtype finetuning_task gradient_checkpointing id2label
    initializer_range is_llama_config keys_to_ignore_at_inference label2id length_penalty loss_type
    max_length max_window_layers min_length model_type n_ctx num_beams output_attentions
    output_hidden_states prefix pretraining_tp problem_type reorder_and_upcast_attn
    repetition_penalty return_dict sep_token_id task_specific_params temperature tokenizer_class
    top_k top_p torch_dtype transformers.js_config transformers_version use_cache
""".split())
#: Keys that have no effect at one specific value.
_ONLY = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "is_decoder": False,
}  # fmt: skip
_ROPE = {
    "factor": "factor", "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor", "original_max_position_embeddings": "original_max_seq",
}  # fmt: skip


def read_config(found: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that a published model's file describes.

    Parameters
    ----------
    found : mapping
        The content of ``config.json``.

    Raises
    ------
    ValueError
        The ``model_type`` is unknown, a size is missing, or a key requires a computation that is
        not supported; the error names it.
    """
    family = found.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"model_type {family!r} is not known to fsdpc.models; there are {', '.join(FAMILIES)}"
        )
    defaults = _DEFAULTS[family] if family == "gpt2" else {**_OF_ALL, **_DEFAULTS[family]}
    sizes = _GPT2_SIZES if family == "gpt2" else _SIZES
    rope = () if family == "gpt2" else ("rope_scaling", "rope_parameters", "num_key_value_heads",
                                        "head_dim")  # fmt: skip
    _refuse_others(found, {*defaults, *sizes, *rope, *_TOKENS})
    missing = sorted(set(sizes) - set(found))
    if missing:
        raise ValueError(f"the configuration of a {family} needs {', '.join(missing)}")
    own = {ours: found[theirs] for theirs, ours in sizes.items()}
    own |= {name: _token(found[name]) for name in _TOKENS if found.get(name) is not None}
    if family == "smollm3" and "pad_token_id" not in found:
        own["pad_token_id"] = _SMOLLM3_PAD
    values = {name: found.get(name, default) for name, default in defaults.items()}
    of_family = _gpt2 if family == "gpt2" else _llama
    return ModelConfig(family=family, **own, **of_family(family, found, values, own))


def _refuse_others(found: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for keys that may affect results, unless they are disabled or empty."""
    for name, value in found.items():
        if name in known or name in _SILENT or name.startswith(("_", "summary_")):
            continue
        if value != _ONLY[name] if name in _ONLY else value not in (None, False, 0, "", [], {}):
            raise ValueError(
                f"the key '{name}' ({value!r:.60}) may change the model's numbers and is not "
                "implemented: if it does not, remove it from config.json"
            )


def _token(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _gpt2(
    family: str, found: Mapping[str, Any], values: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    if not values["tie_word_embeddings"]:
        raise ValueError("a gpt2 with 'tie_word_embeddings' false is not implemented")
    if values["resid_pdrop"] != values["embd_pdrop"]:
        raise ValueError(
            f"'resid_pdrop' {values['resid_pdrop']} and 'embd_pdrop' {values['embd_pdrop']} "
            "differ, and fsdpc.models has one number for both: make them equal in config.json"
        )
    return {
        "inner": values["n_inner"] or 4 * own["dim"],
        "max_seq": values["n_positions"],
        "tied": True,
        "activation": values["activation_function"],
        "layer_norm_eps": values["layer_norm_epsilon"],
        "dropout": values["resid_pdrop"],
        "attention_dropout": values["attn_pdrop"],
    }


def _llama(
    family: str, found: Mapping[str, Any], values: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    theta, scaling = _rope(found, values)
    window, inside = _window(family, values, own["layers"])
    bias = family == "qwen2" or values.get("attention_bias", False)
    return {
        "kv_heads": found.get("num_key_value_heads", values.get("num_key_value_heads")),
        "head_dim": found.get("head_dim", values.get("head_dim")),
        "max_seq": values["max_position_embeddings"],
        "tied": values["tie_word_embeddings"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": values["rms_norm_eps"],
        "qkv_bias": bool(bias),
        "out_bias": bool(values.get("attention_bias", False)),
        "mlp_bias": bool(values.get("mlp_bias", False)),
        "qk_norm": family == "qwen3",
        "sliding_window": window,
        "window_layers": inside,
        "activation": values["hidden_act"],
        "attention_dropout": values["attention_dropout"],
        **_no_rope(values, own["layers"]),
    }


def _rope(found: Mapping[str, Any], values: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return theta and the scaling, read from the current or an older configuration format."""
    given = dict(found.get("rope_scaling") or found.get("rope_parameters") or {})
    theta = given.pop("rope_theta", values["rope_theta"])
    kind, old = given.pop("rope_type", None), given.pop("type", None)
    kind = kind or old or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope scaling '{kind}' is not implemented; there are linear and llama3")
    partial = given.pop("partial_rotary_factor", found.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"'partial_rotary_factor' {partial} is not implemented")
    others = sorted(name for name in set(given) - set(_ROPE) if given[name] is not None)
    if others:
        raise ValueError(f"rope scaling '{kind}' with {', '.join(others)} is not implemented")
    if kind == "default":
        return theta, None
    wanted = {"factor"} if kind == "linear" else set(_ROPE)
    if missing := sorted(name for name in wanted if given.get(name) is None):
        raise ValueError(f"rope scaling '{kind}' needs {', '.join(missing)}")
    own = {_ROPE[name]: given[name] for name in wanted}
    return theta, RopeScaling(kind=kind, **own)


def _window(
    family: str, values: dict[str, Any], layers: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the window and the blocks that use it; None for the blocks means all of them."""
    window = values.get("sliding_window")
    if window is None or not values.get("use_sliding_window", family == "mistral"):
        return None, None
    types = values.get("layer_types")
    if types is not None:
        if len(types) < layers or set(types) - {"full_attention", "sliding_attention"}:
            raise ValueError(f"'layer_types' {types!r:.80} is not implemented for {layers} layers")
        inside = tuple(i for i in range(layers) if types[i] == "sliding_attention")
    elif family == "smollm3":
        rotating = values["no_rope_layers"] or _interval(values["no_rope_layer_interval"], layers)
        inside = tuple(i for i in range(layers) if not rotating[i])
    else:
        inside = tuple(range(values.get("max_window_layers", 0), layers))
    if not inside:
        return None, None
    return window, None if len(inside) == layers else inside


def _interval(every: int, layers: int) -> list[int]:
    return [int((i + 1) % every != 0) for i in range(layers)]


def _no_rope(values: dict[str, Any], layers: int) -> dict[str, Any]:
    if "no_rope_layer_interval" not in values:
        return {}
    every, given = values["no_rope_layer_interval"], values["no_rope_layers"]
    if given is None or list(given) == _interval(every, layers):
        return {"no_rope_every": every}
    if len(given) < layers:
        raise ValueError(f"'no_rope_layers' has {len(given)} entries for {layers} layers")
    return {"no_rope_layers": tuple(i for i in range(layers) if not given[i])}


# ---- writing ----


def written_config(c: ModelConfig, family: str | None = None) -> dict[str, Any]:
    """Return a ``config.json`` from which transformers builds the same model.

    Parameters
    ----------
    c : ModelConfig
    family : str, optional
        A ``model_type``; by default the shape's own, or the first that supports the shape.

    Raises
    ------
    ValueError
        No known transformers model has this shape.
    """
    family = family or c.family or _family_of(c)
    content = _write_gpt2(c) if family == "gpt2" else _write_llama(c, family)
    content |= {"architectures": [FAMILIES[family]], "model_type": family}
    for name in _TOKENS:  # transformers' defaults are tokens of its own vocabularies
        value = getattr(c, name)
        content[name] = list(value) if isinstance(value, tuple) else value
    differ = differences(read_config(content), c, gpt2=family == "gpt2")
    if differ:
        raise ValueError(
            f"a {family} of transformers cannot be what this model is: {', '.join(differ)}"
        )
    return content


#: Fields that do not affect a forward in evaluation.
_QUIET = {"family", *_TOKENS, "dropout", "attention_dropout", "max_seq"}
#: Fields specific to GPT-2, or to LLaMA.
_GPT2_ONLY = {"layer_norm_eps"}
_LLAMA_ONLY = {
    "kv_heads", "tied", "rope_theta", "norm_eps", "rope_scaling", "no_rope_layers", "qkv_bias",
    "out_bias", "mlp_bias", "qk_norm", "sliding_window", "window_layers",
}  # fmt: skip


def differences(a: ModelConfig, b: ModelConfig, gpt2: bool) -> list[str]:
    """Return the differing fields that affect a model's results, with both values."""
    left_out = _QUIET | (_LLAMA_ONLY if gpt2 else _GPT2_ONLY)
    a, b = _plain(a, gpt2), _plain(b, gpt2)
    names = [f.name for f in fields(ModelConfig) if f.name not in left_out]
    return [
        f"{name} {getattr(a, name)!r} and {getattr(b, name)!r}"
        for name in names
        if getattr(a, name) != getattr(b, name)
    ]


def _plain(c: ModelConfig, gpt2: bool) -> ModelConfig:
    """Return the canonical form of a configuration."""
    still = () if gpt2 else tuple(i for i in range(c.layers) if not c.rotates(i))
    inside = tuple(i for i in range(c.layers) if c.window_of(i) is not None)
    tanh = {"gelu_pytorch_tanh": "gelu_new", None: "gelu_new" if gpt2 else "silu"}
    return replace(
        c,
        no_rope_every=0,
        no_rope_layers=still,
        window_layers=inside,
        sliding_window=c.sliding_window if inside else None,
        activation=tanh.get(c.activation, c.activation),
    )


def _family_of(c: ModelConfig) -> str:
    if any(not c.rotates(i) for i in range(c.layers)):
        return "smollm3"
    if c.qk_norm:
        return "qwen3"
    if c.qkv_bias and not c.out_bias:
        return "qwen2"
    return "mistral" if c.sliding_window is not None else "llama"


def _write_llama(c: ModelConfig, family: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling is not None:
        s = c.rope_scaling
        rope |= {"rope_type": s.kind, "factor": s.factor}
        if s.kind == "llama3":
            rope |= {theirs: getattr(s, ours) for theirs, ours in _ROPE.items()}
    content = {
        "hidden_act": c.activation or "silu",
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
        "rope_parameters": rope,
        "tie_word_embeddings": c.tied,
        "attention_dropout": c.attention_dropout,
    }
    if c.rope_scaling is not None:
        content["rope_scaling"] = rope  # for transformers 4
    known = _DEFAULTS[family]
    biases = {"attention_bias": c.qkv_bias and c.out_bias, "mlp_bias": c.mlp_bias}
    content |= {name: value for name, value in biases.items() if name in known}
    if "sliding_window" in known:
        content["sliding_window"] = c.sliding_window
    if "use_sliding_window" in known:
        content["use_sliding_window"] = c.sliding_window is not None
        content["layer_types"] = [
            "full_attention" if c.window_of(i) is None else "sliding_attention"
            for i in range(c.layers)
        ]
    if "max_window_layers" in known:
        content["max_window_layers"] = min(c.window_layers or (0,))
    if family == "smollm3":
        content["no_rope_layer_interval"] = c.no_rope_every or 4
        content["no_rope_layers"] = [int(c.rotates(i)) for i in range(c.layers)]
    return content


def _write_gpt2(c: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": c.activation or "gelu_new",
        "n_embd": c.dim,
        "n_inner": c.inner,
        "n_layer": c.layers,
        "n_head": c.heads,
        "vocab_size": c.vocab_size,
        "n_positions": c.max_seq,
        "layer_norm_epsilon": c.layer_norm_eps,
        "embd_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
        "attn_pdrop": c.attention_dropout,
        "tie_word_embeddings": True,
    }
