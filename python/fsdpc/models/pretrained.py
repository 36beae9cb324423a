"""Load and save published models, as folders for transformers or files for llama.cpp."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdpc import _core, checkpoint
from fsdpc.checkpoint import config_json
from fsdpc.models.config import ModelConfig
from fsdpc.models.gguf_file import save_gguf
from fsdpc.models.gpt2 import GPT2
from fsdpc.models.llama import Llama
from fsdpc.models.published import differences, read_config, written_config
from fsdpc.nn.module import Module, Parameter, deferred_init
from fsdpc.nn.parameter import is_deferring
from fsdpc.nn.quantized import quantize_

PathLike = str | os.PathLike[str]
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_FORMATS = ("safetensors", "gguf")


def from_config(source: PathLike | Mapping[str, Any], *, dtype: Any = None) -> Llama | GPT2:
    """Create a newly initialised model with a published model's configuration.

    Parameters
    ----------
    source : path or mapping
        A folder with ``config.json``, that file, or its content.
    dtype : dtype or "auto", optional
        Dtype of the parameters; by default float32. "auto" uses the configuration's dtype.

    Returns
    -------
    Llama or GPT2
        Inside :class:`fsdpc.deferred_init`, a model without memory.

    Raises
    ------
    ValueError
        The configuration has an unsupported feature; the error names it.
    OSError
        The file does not exist.

    Examples
    --------
    >>> from fsdpc.models import from_config
    >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    ...          "intermediate_size": 64, "vocab_size": 99}
    >>> from_config({"model_type": "llama", **sizes}).num_parameters()
    26976
    """
    content = source if isinstance(source, Mapping) else read_json(source)
    config = read_config(content)
    given = content.get("dtype") or content.get("torch_dtype") if dtype == "auto" else dtype
    with deferred_init():
        model = GPT2(config) if config.family == "gpt2" else Llama(config)
    if given is not None:
        _change_dtype(model, _float_dtype(given))
    return model if is_deferring() else model.materialize()


def from_pretrained(
    folder: PathLike, *, dtype: Any = None, quantize: str | None = None
) -> Llama | GPT2:
    """Create a published model and load its weights (collective if there are several ranks).

    Parameters
    ----------
    folder : path
        A folder with ``config.json`` and ``model.safetensors``, or several such files and their
        index.
    dtype : dtype or "auto", optional
        Dtype of the parameters, independent of the files' dtype; by default float32. "auto" uses
        the configuration's dtype.
    quantize : {"nf4", "int4", "int8"}, optional
        Quantise and freeze the linear layers, as :func:`fsdpc.nn.quantize_` does; the embedding and
        the output layer keep ``dtype``.

    Returns
    -------
    Llama or GPT2
        In training mode, like any new module; call ``eval()`` to disable dropout.

    Raises
    ------
    ValueError
        The configuration has an unsupported feature; the error names it. Or ``quantize`` is no
        scheme, or is given for a GPT-2, whose layers have another layout.
    CheckpointError
        Files are damaged, missing, or do not match the configuration; the error lists all problems.
    RuntimeError
        Called inside :class:`fsdpc.deferred_init`.

    Notes
    -----
    Every rank reads and holds the whole model. If it is too large for one rank, use
    :func:`from_config` inside :class:`fsdpc.deferred_init`, :func:`fsdpc.nn.quantize_` if wanted,
    :func:`fsdpc.fully_shard`, then :func:`load_pretrained`.

    Examples
    --------
    >>> import tempfile
    >>> from fsdpc.models import Llama, ModelConfig, from_pretrained, save_pretrained
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_pretrained(model, folder.name + "/tiny")
    >>> from_pretrained(folder.name + "/tiny").config.dim
    16
    """
    if is_deferring():
        raise RuntimeError(
            "from_pretrained() inside deferred_init() would read what is thrown away: make the "
            "model by from_config(), shard it, then call load_pretrained(model, folder)"
        )
    with deferred_init():
        model = from_config(folder, dtype=dtype)
    if quantize is not None:
        quantize_(model, quantize)
    load_pretrained(model, folder)
    return model


def load_pretrained(model: Llama | GPT2, folder: PathLike) -> None:
    """Load a published model's weights into an fsdpc model, sharded or not (collective).

    Parameters
    ----------
    model : Llama or GPT2
        It may be sharded by :func:`fsdpc.fully_shard`, or deferred. Adapters from :mod:`fsdpc.lora`
        keep their values.
    folder : path
        A folder with ``config.json`` and safetensors.

    Raises
    ------
    ValueError
        The folder's configuration describes a model that computes differently; the error names the
        differences.
    CheckpointError
        Files are damaged, missing, or do not match the model; every rank's error lists all
        problems.

    Notes
    -----
    Each rank reads its own rows from the files directly into place; no rank ever holds a whole
    parameter.

    Examples
    --------
    >>> import tempfile
    >>> from fsdpc.models import Llama, ModelConfig, load_pretrained, save_pretrained
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_pretrained(model, folder.name + "/tiny")
    >>> load_pretrained(model, folder.name + "/tiny")
    """
    found = read_config(read_json(folder))
    gpt2 = isinstance(model, GPT2)
    if gpt2 != (found.family == "gpt2"):
        raise ValueError(f"{folder} holds a {found.family}, and the model is a "
                         f"{'GPT2' if gpt2 else 'Llama'}")  # fmt: skip
    if differ := differences(found, model.config, gpt2):
        raise ValueError(
            f"{folder} and the model differ in {'; '.join(differ)}: make the model by "
            "from_config(folder)"
        )
    added = adapters_of(model)
    for p in added.values():
        if p.is_deferred and p._unit is None:  # not in the files
            p.materialize_()
            p._recipe.fill(p)
    report = checkpoint.load(
        folder, {"model": model}, names="gpt2" if gpt2 else "llama", strict=not added
    )
    missing = sorted(set(report.missing) - set(added))
    if missing or report.unexpected:
        raise checkpoint.CheckpointError(
            f"{folder} does not fit: missing {missing}, unexpected {report.unexpected}"
        )


def save_pretrained(
    model: Llama | GPT2,
    path: PathLike,
    *,
    format: str = "safetensors",
    dtype: Any = None,
    max_shard_bytes: float = 5e9,
    overwrite: bool = False,
    tokenizer: PathLike | None = None,
) -> None:
    """Write a folder for transformers' ``from_pretrained``, or a file for llama.cpp (collective).

    Parameters
    ----------
    model : Llama or GPT2
        Sharded or not.
    path : path
        The folder, or the ``.gguf`` file, to create. It appears only when all data is on the disk.
    format : "safetensors" or "gguf"
        A folder for transformers, or one GGUF file for llama.cpp.
    dtype : dtype or "q8_0", optional
        Dtype of the tensors in the files; by default the parameters' own. For GGUF float32,
        float16, bfloat16 or "q8_0" (8 bits per element, with a float16 scale for each 32).
    max_shard_bytes : float, default 5e9
        Largest file size, unless a single tensor is larger; a GGUF file is never split.
    overwrite : bool, default False
        Whether to replace a folder, or a GGUF file, that was written earlier.
    tokenizer : path, optional
        For GGUF: a ``tokenizer.json``, or a folder with one, to write into the file.

    Raises
    ------
    ValueError
        No transformers model, or for GGUF no model of llama.cpp, has this shape; the model is not
        from fsdpc.models; llama.cpp has no such tokenizer; or an option is unknown.
    OSError
        The path already exists or cannot be written; raised on every rank.
    ImportError
        The gguf package is needed and not installed; raised on every rank.

    Notes
    -----
    The folder is also a checkpoint that :func:`fsdpc.checkpoint.load` can read. Tokenizer files are
    not written: copy them into the folder.

    For a GGUF file, each rank gathers one tensor at a time, and rank 0 writes it. Vectors are
    float32 in any case; with "q8_0", matrices whose rows are not multiples of 32 are float16.
    Without ``tokenizer``, the file has none: llama.cpp's library can load it and takes token ids,
    but its programs cannot use it. With a tokenizer that has no BOS token, the end token is in its
    place.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tempfile
    >>> from fsdpc.models import Llama, ModelConfig, save_pretrained
    >>> model = Llama(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32))
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_pretrained(model, folder.name + "/tiny")
    >>> sorted(path.name for path in Path(folder.name, "tiny").iterdir())
    ['config.json', 'manifest.json', 'model.safetensors']
    """
    if format not in _FORMATS:
        raise ValueError(f"format must be one of {', '.join(_FORMATS)}, got {format!r}")
    if not isinstance(model, (Llama, GPT2)):
        raise ValueError(
            f"save_pretrained() writes models of fsdpc.models, got {type(model).__name__}: "
            "fsdpc.checkpoint.save() writes any"
        )
    content = _content_of(model)  # raises if transformers lacks the model, before the first write
    if format == "gguf":
        family = content["model_type"]
        save_gguf(model, path, family, dtype=dtype, overwrite=overwrite, tokenizer=tokenizer)
        return
    if tokenizer is not None:
        raise ValueError("tokenizer= is for format='gguf': copy tokenizer files into the folder")
    checkpoint.save(
        path,
        {"model": model},
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )


def read_json(folder: PathLike) -> dict[str, Any]:
    """Return the content of a folder's ``config.json``.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    ValueError
        The file is not a JSON object.
    """
    path = Path(folder)
    path = path / "config.json" if path.suffix != ".json" else path
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: a folder with config.json and safetensors files is needed, "
            "as transformers' save_pretrained() writes it; nothing is downloaded"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def config_of(folder: PathLike) -> ModelConfig:
    """Return the configuration of a folder's model; raises the errors of :func:`from_config`."""
    return read_config(read_json(folder))


def adapters_of(model: Module) -> dict[str, Parameter]:
    """Return the parameters that :func:`fsdpc.lora.apply` added, by dotted name."""
    return {n: p for n, p in model.named_parameters() if n.endswith((".lora_A", ".lora_B"))}


def _float_dtype(given: Any) -> _core.dtype:
    if isinstance(given, str):
        given = given.removeprefix("torch.")
    dtype = _core.as_dtype(given)
    if dtype.name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype.name}")
    return dtype


def _change_dtype(model: Module, dtype: _core.dtype) -> None:
    """Recreate deferred parameters in another dtype, keeping tied parameters tied."""
    made: dict[int, Parameter] = {}
    with deferred_init():
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is None:
                    continue
                if id(p) not in made:
                    made[id(p)] = Parameter.empty(p.shape, dtype)
                    made[id(p)]._recipe = p._recipe
                module._parameters[name] = made[id(p)]


def _content_of(model: Llama | GPT2) -> dict[str, Any]:
    """Return the content of ``config.json``; raise ValueError if transformers has no such model."""
    if adapters_of(model):
        raise ValueError("the model has adapters: lora.merge() them, or lora.save() only them")
    if any(p._code is not None for p in model.parameters()):
        raise ValueError(
            "the model is quantised: fsdpc.checkpoint.save() writes its codes, and lora.merge() "
            "makes weights of those with adapters"
        )
    return written_config(model.config, "gpt2" if isinstance(model, GPT2) else None)


def _known_content(model: Any) -> dict[str, Any] | None:
    try:
        return _content_of(model) if isinstance(model, (Llama, GPT2)) else None
    except ValueError:  # no transformers model has this shape
        return None


config_json.writers.append(_known_content)
