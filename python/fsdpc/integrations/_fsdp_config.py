"""Convert the keys of transformers' ``fsdp_config`` to options of ``shard_by_plan``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Accepted without effect; docs/transformers.md explains why.
_NOTHING = {
    "version", "cpu_offload", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
    "use_orig_params", "min_num_params", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt",
}  # fmt: skip

_REFUSED = {
    "xla": "there is no XLA here",
    "cpu_ram_efficient_loading": "each rank reads the files itself; give the Trainer a model that "
    "was sharded on the meta device and filled by fsdpc.checkpoint.load()",
    "activation_cpu_offload": "activations stay where they are",
}


def from_fsdp_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return options for ``shard_by_plan`` and whether to checkpoint activations.

    Raises
    ------
    ValueError
        A key is unsupported or unknown; the error names it.
    """
    options: dict[str, Any] = {}
    checkpointing = False
    for key, value in config.items():
        if key in _NOTHING:
            continue
        if key in _REFUSED:
            if _is_true(value):
                raise ValueError(f"fsdp_config['{key}']: {_REFUSED[key]}")
        elif key == "activation_checkpointing":
            checkpointing = _is_true(value)
        elif key == "sync_module_states":
            options[key] = _is_true(value)
        elif key == "reshard_after_forward":
            options |= _reshard(value)
        elif key == "transformer_layer_cls_to_wrap":
            if value:
                options["classes"] = [value] if isinstance(value, str) else list(value)
        elif key == "auto_wrap_policy":
            if str(value) == "NO_WRAP":
                options["classes"] = []
            elif str(value) != "TRANSFORMER_BASED_WRAP":
                raise ValueError(
                    f"fsdp_config['{key}']={value!r}: name classes in transformer_layer_cls_to_wrap"
                )
        elif key != "state_dict_type":
            raise ValueError(f"fsdp_config['{key}'] is not known: use shard_options instead")
        elif "FULL" not in str(value):
            raise ValueError(
                f"fsdp_config['{key}']={value!r}: checkpoints of the Trainer are whole; for each "
                "rank's rows call fsdpc.checkpoint.save() in a callback, with save_strategy='no'"
            )
    return options, checkpointing


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def _reshard(value: Any) -> dict[str, Any]:
    """Return the option that corresponds to FSDP2's flag or FSDP1's strategy name."""
    if str(value).lower() in ("true", "false"):
        return {} if _is_true(value) else {"reshard_after_forward": False}
    return {"strategy": str(value).upper()}
