"""LoRA: train small matrices alongside a frozen model's projections.

    from fsdpc import lora
    from fsdpc.models import from_pretrained

    model = from_pretrained("base")
    lora.apply(model, rank=16, targets=["q_proj", "v_proj"], alpha=32)
    ...                                   # shard it, train it: lora.parameters(model)
    lora.save(model, "adapter", base="base")

Adapters are in PEFT's format. The model's own parameters keep their names.

Source: Hu et al. 2021.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc import _core, distributed
from fsdpc._core import Tensor
from fsdpc.checkpoint.schema import FILE_DTYPES
from fsdpc.distributed.agree import agreed
from fsdpc.models.gpt2 import Expansion, Projection
from fsdpc.models.llama import activate
from fsdpc.nn import Linear, Module, Parameter, QuantizedLinear, init
from fsdpc.nn.parameter import full_tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
_PREFIX = "base_model.model."

#: Keys of PEFT's configuration that are read, or that do not affect the forward pass.
_KNOWN = frozenset("""
    auto_mapping base_model_name_or_path fan_in_fan_out inference_mode init_lora_weights lora_alpha
    lora_dropout megatron_core peft_type peft_version r revision target_modules task_type
""".split())


class _Adapted:
    """The attributes that :func:`apply` adds to a module."""

    lora_A: Parameter
    lora_B: Parameter
    lora_scale: float
    lora_dropout: float

    def _delta(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        if self.lora_dropout:
            x = _core.dropout(x, self.lora_dropout, self.training)  # type: ignore[attr-defined]
        return _core.linear(_core.linear(x, self.lora_A), self.lora_B) * self.lora_scale


class LoraLinear(_Adapted, Linear):
    """A linear layer with an adapter.

    Examples
    --------
    >>> from fsdpc import lora
    >>> from fsdpc.models import Llama, ModelConfig
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> names = lora.apply(model, rank=2, targets=["q_proj"])
    >>> layer = dict(lora.adapted(model))[names[0]]
    >>> type(layer).__name__
    'LoraLinear'
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        return Linear.forward(self, x) + self._delta(x)


class LoraQuantizedLinear(_Adapted, QuantizedLinear):
    """A linear layer over a quantised weight, with an adapter (QLoRA, Dettmers et al. 2023).

    Examples
    --------
    >>> from fsdpc import lora, nn
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    >>> names = nn.quantize_(model), lora.apply(model, rank=2)
    >>> type(model[0]).__name__, model[0].lora_A.dtype.name
    ('LoraQuantizedLinear', 'float32')
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        return QuantizedLinear.forward(self, x) + self._delta(x)


class LoraProjection(_Adapted, Projection):
    """GPT-2's projection with an adapter.

    Examples
    --------
    >>> from fsdpc import lora
    >>> from fsdpc.models import GPT2, ModelConfig
    >>> model = GPT2(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32, max_seq=8))
    >>> names = lora.apply(model, rank=2)
    >>> sum(isinstance(layer, lora.LoraProjection) for _, layer in lora.adapted(model))
    3
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        return Projection.forward(self, x) + self._delta(x)


class LoraExpansion(_Adapted, Expansion):
    """GPT-2's projection with an adapter, followed by its activation.

    Examples
    --------
    >>> from fsdpc import lora
    >>> from fsdpc.models import GPT2, ModelConfig
    >>> model = GPT2(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32, max_seq=8))
    >>> names = lora.apply(model, rank=2)
    >>> sum(isinstance(layer, lora.LoraExpansion) for _, layer in lora.adapted(model))
    1
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        return activate(Projection.forward(self, x) + self._delta(x), self.activation)


_ADAPTED: dict[type, type] = {
    Linear: LoraLinear, QuantizedLinear: LoraQuantizedLinear, Projection: LoraProjection,
    Expansion: LoraExpansion,
}  # fmt: skip
_PLAIN = {adapted: plain for plain, adapted in _ADAPTED.items()}
_PLAIN[LoraQuantizedLinear] = Linear  # merged weights are not quantised


def apply(
    model: Module,
    rank: int,
    targets: str | Sequence[str] = ALL_LINEAR,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
) -> list[str]:
    """Freeze a model and add adapters to some of its linear layers, in place.

    Call this before :func:`fsdpc.fully_shard`; the model's initialisation may be deferred.

    Parameters
    ----------
    model : Module
        A model with :class:`fsdpc.nn.Linear` layers, or a GPT-2.
    rank : int
        Rows of ``lora_A`` (rank, in) and columns of ``lora_B`` (out, rank). The first is
        initialised uniformly in +-1/sqrt(in), the second with zeros, so the model's outputs do not
        change at first.
    targets : "all-linear" or sequence of str
        Last components of layer names, such as "q_proj". "all-linear" selects every linear layer
        except the output layer.
    alpha : float, optional
        The adapters' outputs are multiplied by ``alpha / rank``; by default ``alpha`` is twice the
        rank.
    dropout : float, default 0
        Dropout probability for the adapters' inputs during training.

    Returns
    -------
    list of str
        Names of the layers that now have an adapter.

    Raises
    ------
    ValueError
        A number is out of range, a target matches no layer, or the model already has adapters.
    RuntimeError
        The model is already sharded.

    Examples
    --------
    >>> from fsdpc import lora
    >>> from fsdpc.models import Llama, ModelConfig
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> names = lora.apply(model, rank=2)
    >>> len(names), all(p.requires_grad == ("lora" in name) for name, p in model.named_parameters())
    (7, True)
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    if is_applied(model):
        raise ValueError("the model has adapters already: merge() them first")
    if any(p._unit is not None for p in model.parameters()):
        raise RuntimeError("the model is sharded: call lora.apply() before fully_shard()")
    layers = {name: m for name, m in model.named_modules() if type(m) in _ADAPTED}
    if targets != ALL_LINEAR:
        wanted = [targets] if isinstance(targets, str) else list(targets)
        for target in wanted:
            if not any(_ends(name, target) for name in layers):
                known = sorted({name.rsplit(".", 1)[-1] for name in layers})
                raise ValueError(f"no linear layer is called '{target}'; there are {known}")
        layers = {n: m for n, m in layers.items() if any(_ends(n, t) for t in wanted)}
    if not layers:
        raise ValueError("the model has no linear layers to add adapters to")
    model.requires_grad_(False)
    for layer in layers.values():
        out, into = layer.weight.shape
        dtype = layer.weight.dtype
        if isinstance(layer, Projection):
            out, into = into, out
        elif isinstance(layer, QuantizedLinear):
            into, dtype = layer.in_features, layer.dtype
        bound = 1 / math.sqrt(into)
        layer.lora_A = init.uniform_(Parameter.empty((rank, into), dtype), -bound, bound)
        layer.lora_B = init.zeros_(Parameter.empty((out, rank), dtype))
        layer.lora_scale = (2 * rank if alpha is None else alpha) / rank
        layer.lora_dropout = dropout
        object.__setattr__(layer, "__class__", _ADAPTED[type(layer)])
    return list(layers)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def adapted(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, layer) for each layer with an adapter, sharded or not.

    Examples
    --------
    >>> from fsdpc import lora
    >>> from fsdpc.models import Llama, ModelConfig
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> names = lora.apply(model, rank=2)
    >>> len(list(lora.adapted(model))) == len(names)
    True
    """
    return ((name, m) for name, m in model.named_modules() if isinstance(m, _Adapted))


def is_applied(model: Module) -> bool:
    """Return whether a model has adapters.

    Examples
    --------
    >>> from fsdpc import lora
    >>> from fsdpc.models import Llama, ModelConfig
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> lora.is_applied(model)
    False
    >>> names = lora.apply(model, rank=2)
    >>> lora.is_applied(model)
    True
    """
    return any(True for _ in adapted(model))


def parameters(model: Module) -> list[Parameter]:
    """Return the adapters' parameters, to pass to an optimizer.

    Examples
    --------
    >>> from fsdpc import lora
    >>> from fsdpc.models import Llama, ModelConfig
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> names = lora.apply(model, rank=2)
    >>> len(lora.parameters(model)) == 2 * len(names)
    True
    """
    return [p for _, layer in adapted(model) for p in (layer.lora_A, layer.lora_B)]


def merge(model: Module, dtype: Any = None) -> None:
    """Merge the adapters into an unsharded model's weights in place, and remove them.

    Parameters
    ----------
    model : Module
        A model with adapters. All quantised layers become linear layers, as serving needs.
    dtype : dtype, optional
        Of the whole model; by default that of the weights, or that before they were quantised.

    Raises
    ------
    ValueError
        The model has no adapters.
    RuntimeError
        The model is sharded: save the adapters and load them into an unsharded model.

    Notes
    -----
    Parameters remain frozen: ``model.requires_grad_(True)`` unfreezes them.

    Examples
    --------
    >>> from fsdpc import lora
    >>> from fsdpc.models import Llama, ModelConfig
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> names = lora.apply(model, rank=2)
    >>> lora.merge(model)
    >>> lora.is_applied(model)
    False
    """
    layers = [layer for _, layer in adapted(model)]
    if not layers:
        raise ValueError("the model has no adapters: call lora.apply() or lora.load()")
    if any(layer.lora_A._unit is not None for layer in layers):
        raise RuntimeError(
            "merge() is for models that are not sharded: lora.save() the adapters, then "
            "lora.load() them into a model that is not"
        )
    for layer in layers:
        a, b = (t.detach().float().numpy() for t in (layer.lora_A, layer.lora_B))
        delta = layer.lora_scale * (b @ a)
        if isinstance(layer, Projection):
            delta = delta.T
        coded = isinstance(layer, QuantizedLinear)
        before = layer.dequantized() if coded else layer.weight.detach().float()
        merged = _core.tensor(before.numpy() + delta)
        if coded or dtype is not None:
            own = dtype or (layer.dtype if coded else layer.weight.dtype)
            layer.weight = Parameter(merged.to(own), requires_grad=False)
        else:
            layer.weight.detach().copy_(merged)
        del layer.lora_A, layer.lora_B
        object.__setattr__(layer, "__class__", _PLAIN[type(layer)])
    for layer in (m for m in model.modules() if type(m) is QuantizedLinear):  # without an adapter
        layer.weight = Parameter(layer.dequantized(dtype or layer.dtype), requires_grad=False)
        object.__setattr__(layer, "__class__", Linear)
    if dtype is not None:
        model.to(dtype)


def save(model: Module, folder: str | os.PathLike[str], *, base: str | None = None) -> None:
    """Write the adapters in PEFT's format (collective for a sharded model).

    Parameters
    ----------
    model : Module
        A model with adapters.
    folder : path
        Created if it does not exist; the adapters' two files are overwritten.
    base : str, optional
        Name or folder of the base model, so that PEFT can find it.

    Raises
    ------
    ValueError
        The model has no adapters.
    OSError
        The folder cannot be written; raised on every rank.

    Examples
    --------
    >>> import tempfile
    >>> from fsdpc import lora
    >>> from fsdpc.models import Llama, ModelConfig
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> names = lora.apply(model, rank=2)
    >>> folder = tempfile.TemporaryDirectory()
    >>> lora.save(model, folder.name + "/adapter")
    >>> lora.read_config(folder.name + "/adapter")["r"]
    2
    """
    layers = list(adapted(model))
    if not layers:
        raise ValueError("the model has no adapters: call lora.apply() before save()")
    first = layers[0][1]
    names = sorted(name for name, _ in layers)
    alpha = round(first.lora_scale * first.lora_A.shape[0], 9)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": first.lora_A.shape[0],
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": first.lora_dropout,
        "target_modules": names,
        "fan_in_fan_out": isinstance(first, Projection),
        "bias": "none",
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    tensors = {}
    for name, layer in sorted(layers):
        for part in ("lora_A", "lora_B"):
            tensors[f"{_PREFIX}{name}.{part}.weight"] = full_tensor(getattr(layer, part))

    def write() -> None:
        if distributed.rank() == 0:
            place = Path(folder)
            place.mkdir(parents=True, exist_ok=True)
            _write(place / WEIGHTS, tensors)
            text = json.dumps(content, indent=2, sort_keys=True) + "\n"
            (place / CONFIG).write_text(text, encoding="utf-8")

    agreed(write)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    entries = [(name, FILE_DTYPES[t.dtype.name], t.shape) for name, t in tensors.items()]
    header, places = _core.safetensors_layout(entries)
    with open(path, "wb") as file:
        file.write(header)
        for tensor, (begin, _) in zip(tensors.values(), places, strict=True):
            file.seek(begin)
            file.write(np.ascontiguousarray(tensor.bits()).tobytes())


def load(model: Module, folder: str | os.PathLike[str]) -> list[str]:
    """Read PEFT adapters into a model (collective if there are several ranks).

    Parameters
    ----------
    model : Module
        If it has no adapters, they are added as the folder's configuration specifies. If it has,
        sharded or not, their values are read; each rank reads its own rows.
    folder : path
        A folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Returns
    -------
    list of str
        Names of the layers with an adapter.

    Raises
    ------
    ValueError
        The configuration has an unsupported key that affects results; the error names it.
    CheckpointError
        The tensors do not match the model's adapters.
    RuntimeError
        The model is deferred but not sharded, or is sharded without adapters.

    Examples
    --------
    >>> import tempfile
    >>> from fsdpc import lora
    >>> from fsdpc.models import Llama, ModelConfig
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> names = lora.apply(model, rank=2)
    >>> folder = tempfile.TemporaryDirectory()
    >>> lora.save(model, folder.name + "/adapter")
    >>> fresh = Llama(model.config)
    >>> lora.load(fresh, folder.name + "/adapter") == names
    True
    """
    from fsdpc import checkpoint

    content = read_config(folder)
    if any(p.is_deferred and p._unit is None for p in model.parameters()):
        raise RuntimeError("the model has no values yet: load_pretrained() or materialize() first")
    if not is_applied(model):
        apply(
            model,
            content["r"],
            content["target_modules"],
            alpha=content["lora_alpha"],
            dropout=content.get("lora_dropout", 0.0),
        )
    scale = content["lora_alpha"] / content["r"]
    layers = dict(adapted(model))
    if any(layer.lora_scale != scale for layer in layers.values()):
        raise ValueError(f"{folder} has alpha / rank {scale}, and the model another one")
    own = {f"{name}.{part}" for name in layers for part in ("lora_A", "lora_B")}
    names = {name: f"{_PREFIX}{name}.weight" if name in own else f"\0{name}"
             for name, _ in model.named_parameters()}  # fmt: skip
    report = checkpoint.load(
        Path(folder) / WEIGHTS, {"model": model}, names=names, strict=False
    )
    missing, unexpected = sorted(own & set(report.missing)), report.unexpected
    if missing or unexpected:
        raise checkpoint.CheckpointError(
            f"{folder} does not fit the model's adapters: missing {missing}, unexpected "
            f"{unexpected}"
        )
    return list(layers)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a folder's ``adapter_config.json``; raises the errors of :func:`load`.

    Examples
    --------
    >>> import tempfile
    >>> from fsdpc import lora
    >>> from fsdpc.models import Llama, ModelConfig
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> names = lora.apply(model, rank=2)
    >>> folder = tempfile.TemporaryDirectory()
    >>> lora.save(model, folder.name + "/adapter")
    >>> lora.read_config(folder.name + "/adapter")["peft_type"]
    'LORA'
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: it is no folder of PEFT's adapters")
    content = json.loads(path.read_text(encoding="utf-8"))
    for name, value in content.items():
        if name in _KNOWN or value in (None, False, [], {}) or (name, value) == ("bias", "none"):
            continue
        if name == "qalora_group_size" or name == "runtime_config":  # options for disabled features
            continue
        raise ValueError(f"{path}: the key '{name}' ({value!r:.60}) is not implemented")
    if content.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type {content.get('peft_type')!r} is not LORA")
    return content
