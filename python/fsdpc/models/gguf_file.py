"""Write a model as a GGUF file, the format of llama.cpp.

All ranks gather one tensor at a time; rank 0 writes it with the gguf package, under a temporary
name until the file is complete. Names, types and metadata are those of llama.cpp's converter.

Our models rotate element i of a head together with element i + head_dim / 2, as in transformers.
For some architectures, llama.cpp rotates elements 2 i and 2 i + 1 instead; their files contain the
rows of queries and keys in another order.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc import _core, distributed
from fsdpc.checkpoint.claim import claim_name
from fsdpc.checkpoint.shards import shards_of
from fsdpc.distributed.agree import agreed
from fsdpc.models.config import ModelConfig
from fsdpc.models.gguf_tokenizer import add_tokenizer
from fsdpc.models.rope import rope_frequencies
from fsdpc.nn.parameter import full_tensor

#: dtype -> the names of gguf's types, of a tensor and of a file.
_TYPES = {
    "float32": ("F32", "ALL_F32"), "float16": ("F16", "MOSTLY_F16"),
    "bfloat16": ("BF16", "MOSTLY_BF16"), "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}  # fmt: skip
SUFFIX = ".gguf"  # of a file's name
_BLOCK = 32  # elements of a Q8_0 block
#: model_type -> llama.cpp's architecture.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
                  "smollm3": "smollm3", "gpt2": "gpt2"}  # fmt: skip
_NEIGHBOURS = ("llama", "smollm3")  # architectures that rotate elements 2 i and 2 i + 1


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file.

    Parameters
    ----------
    name : str
    shape : tuple of int
    type : str
        One of gguf's types.
    source : Tensor
        The parameter, or a tensor that every rank has.
    heads : int
        Number of heads whose rows are reordered, or 0.
    transposed : bool
        Whether the parameter is the transpose.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    source: Any
    heads: int = 0
    transposed: bool = False

    def arranged(self, values: np.ndarray) -> np.ndarray:
        """Return a parameter's values, float32, in llama.cpp's order."""
        if self.transposed:
            values = values.T
        if self.heads:
            size = self.shape[0] // self.heads
            order = np.arange(size).reshape(2, size // 2).T.ravel()
            values = values.reshape(self.heads, size, -1)[:, order].reshape(self.shape)
        return np.ascontiguousarray(values)


def save_gguf(
    model: Any,
    path: str | os.PathLike[str],
    family: str,
    *,
    dtype: Any = None,
    overwrite: bool = False,
    tokenizer: Any = None,
) -> None:
    """Write a model of fsdpc.models as a GGUF file; see :func:`fsdpc.models.save_pretrained`.

    Parameters
    ----------
    model : Llama or GPT2
    path : path
        Ends in ``.gguf``.
    family : str
        The model's ``model_type``.
    dtype, overwrite, tokenizer
        As for :func:`fsdpc.models.save_pretrained`.

    Raises
    ------
    ImportError, OSError, ValueError
        As for :func:`fsdpc.models.save_pretrained`; on every rank.
    """
    file = Path(os.path.abspath(path))
    temp = file.with_name(f".{file.name}.saving")
    gguf = agreed(import_gguf)
    wanted, entries = agreed(lambda: _plan(gguf, model, family, file, dtype))
    first = distributed.rank() == 0
    writer = gguf.GGUFWriter(None, _ARCHITECTURES[family])
    claim = agreed(lambda: _claim(file, overwrite) if first else None)

    def begin() -> None:
        _describe(gguf, writer, model.config, wanted)
        writer.add_name(file.stem)
        if tokenizer is None:
            writer.add_tokenizer_model("none")
        else:
            add_tokenizer(gguf, writer, tokenizer, model.config)
        _write_header(gguf, writer, entries, temp)

    def write(entry: _Entry, whole: Any) -> None:
        values = entry.arranged(whole.to(_core.float32).numpy())
        kind = gguf.GGMLQuantizationType[entry.type]
        writer.write_tensor_data(gguf.quants.quantize(values, kind))

    def commit() -> None:
        writer.flush()
        os.fsync(writer.fout[0].fileno())
        os.replace(temp, file)

    try:
        agreed(lambda: begin() if first else None)
        for entry in entries:
            whole = full_tensor(entry.source)
            agreed(lambda entry=entry, whole=whole: write(entry, whole) if first else None)
            del whole
        agreed(lambda: commit() if first else None)
    finally:
        writer.close()
        if claim is not None:
            temp.unlink(missing_ok=True)
            claim.release()


def import_gguf() -> Any:
    """Import and return the gguf package; raise ImportError, with instructions, if missing."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ImportError("writing a GGUF file needs the gguf package: pip install gguf") from None


def _claim(file: Path, overwrite: bool) -> Any:
    """Lock the name for this save, unless there is a file that must not be replaced."""
    claim = claim_name(file)
    try:
        if os.path.lexists(file):
            _refuse_to_replace(file, overwrite)
    except OSError:
        claim.release()
        raise
    return claim


def _refuse_to_replace(file: Path, overwrite: bool) -> None:
    """Raise FileExistsError, unless the file may be replaced and is a GGUF file."""
    if not overwrite:
        raise FileExistsError(
            f"{file} is there already: choose another name, or pass overwrite=True"
        )
    with contextlib.suppress(IsADirectoryError), open(file, "rb") as found:
        if found.read(4) == b"GGUF":
            return
    raise FileExistsError(
        f"{file} is there already and is not a GGUF file, so it is not written over: choose "
        "another name, or remove it first"
    )


def _plan(gguf: Any, model: Any, family: str, file: Path, dtype: Any) -> tuple[str, list[_Entry]]:
    """Return the dtype that names the file's type, and the tensors of the file."""
    if file.suffix != SUFFIX:
        raise ValueError(f"the name of a GGUF file ends in .gguf, got {file}")
    check_shape(model.config, family)
    parameters = dict(model.named_parameters())
    held = [(s.name, parameters[s.name]) for s in shards_of(model, False).shards]
    types = [_dtype_name(p.dtype if dtype is None else dtype) for _, p in held]
    arch = _ARCHITECTURES[family]
    found = _entries(gguf, model.config, arch, held, [_TYPES[each][0] for each in types])
    return types[0], list(found)


def _dtype_name(dtype: Any) -> str:
    """Return the key in :data:`_TYPES` for a dtype or its name; raise ValueError if not there."""
    name = dtype if isinstance(dtype, str) else _core.as_dtype(dtype).name
    if name not in _TYPES:
        raise ValueError(f"the dtype in a GGUF file must be one of {', '.join(_TYPES)}, got {name}")
    return name


def check_shape(c: ModelConfig, family: str) -> None:
    """Raise ValueError if llama.cpp would compute something else.

    Parameters
    ----------
    c : ModelConfig
    family : str
        The model's ``model_type``.
    """
    wrong = []
    layers = range(c.layers)
    gpt2 = family == "gpt2"
    usual = ("gelu_new", "gelu_pytorch_tanh") if gpt2 else ("silu",)
    if c.activation not in (None, *usual):
        wrong.append(f"activation '{c.activation}'")
    if any((c.window_of(i) or c.max_seq) < c.max_seq for i in layers) and not gpt2:
        wrong.append(f"sliding_window {c.sliding_window} below max_seq {c.max_seq}")
    if family == "smollm3" and any(c.rotates(i) == ((i + 1) % 4 == 0) for i in layers):
        wrong.append("blocks without positions other than every 4th")
    if family in ("qwen3", "smollm3") and (c.qkv_bias or c.out_bias or c.mlp_bias):
        wrong.append("biases")
    scaled = c.rope_scaling is not None and c.rope_scaling.kind == "llama3"
    if scaled and _ARCHITECTURES[family] != "llama":
        wrong.append("rope scaling 'llama3'")
    if wrong:
        raise ValueError(f"llama.cpp has no {family} with {', '.join(wrong)}")


def _entries(
    gguf: Any, c: ModelConfig, arch: str, held: list[tuple[str, Any]], types: list[str]
) -> Iterator[_Entry]:
    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[arch], c.layers)
    if c.rope_scaling is not None and c.rope_scaling.kind == "llama3":
        plain = rope_frequencies(c.head_dim, c.rope_theta, None)
        divisors = _core.tensor(plain / c.rope_scaling.apply(plain))
        yield _Entry("rope_freqs.weight", tuple(divisors.shape), "F32", divisors)
    for (ours, p), wanted in zip(held, types, strict=True):
        layer, _, kind = ours.rpartition(".")
        name, shape = f"{names.get_name(layer)}.{kind}", tuple(p.shape)
        transposed = layer.endswith((".c_attn", ".c_proj", ".c_fc"))  # transformers' Conv1D
        shape = shape[::-1] if transposed else shape
        heads = 0
        if arch in _NEIGHBOURS and layer.endswith((".q_proj", ".k_proj")):
            heads = c.heads if layer.endswith(".q_proj") else c.kv_heads
        yield _Entry(name, shape, _type_of(name, shape, wanted), p, heads, transposed)


def _type_of(name: str, shape: tuple[int, ...], wanted: str) -> str:
    """Return a tensor's type, by the rules of llama.cpp's converter."""
    if len(shape) < 2 or name == "position_embd.weight":
        return "F32"
    return "F16" if wanted == "Q8_0" and shape[-1] % _BLOCK else wanted


def _describe(gguf: Any, writer: Any, c: ModelConfig, dtype: str) -> None:
    """Add the metadata from which llama.cpp builds the same model."""
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(gguf.LlamaFileType[_TYPES[dtype][1]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_seq)
    writer.add_embedding_length(c.dim)
    writer.add_block_count(c.layers)
    writer.add_feed_forward_length(c.inner)
    writer.add_head_count(c.heads)
    if writer.arch == "gpt2":
        writer.add_layer_norm_eps(c.layer_norm_eps)
        return
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    if c.rope_scaling is not None and c.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(c.rope_scaling.factor)


def _write_header(gguf: Any, writer: Any, entries: list[_Entry], temp: Path) -> None:
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.type]
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        nbytes = int(np.prod(entry.shape)) // per_block * block_bytes
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), nbytes, kind)
    writer.write_header_to_file(temp)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
