"""Starting ``fsdpc train`` from a published model, and exporting the trained model."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from fsdpc import _core, distributed, lora, models, nn
from fsdpc.cli.train_tokens import make_source, with_vocabulary
from fsdpc.models.gguf_file import SUFFIX, check_shape, import_gguf
from fsdpc.models.gguf_tokenizer import add_tokenizer
from fsdpc.models.pretrained import config_of
from fsdpc.models.published import written_config

MODEL, PRESET = "llama", "2M"  # defaults
BYTES = 256  # vocabulary size of data without a tokenizer

#: A model's tokenizer and generation settings files; exported unchanged.
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
           "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
           "chat_template.json", "generation_config.json")  # fmt: skip


def add_options(group: Any) -> None:
    """Add the ``fsdpc train`` options for published models."""
    group.add_argument(
        "--init-from",
        type=Path,
        metavar="DIR",
        help="start from the model in this folder (config.json and safetensors); it is in place "
        "of --model and --preset",
    )
    group.add_argument(
        "--export",
        type=Path,
        metavar="PATH",
        help="at the end write the model there, as transformers reads it; with --lora the "
        "adapters; to a name that ends in .gguf one file with its tokenizer, for llama.cpp",
    )
    group.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="train adapters of this rank on the frozen model of --init-from",
    )
    group.add_argument(
        "--lora-alpha", type=float, metavar="X", help="their scale times RANK (default: 2 RANK)"
    )
    group.add_argument(
        "--lora-targets",
        metavar="NAMES",
        help="layers that get one, q_proj,v_proj say (default: all-linear)",
    )
    group.add_argument(
        "--quantize",
        choices=_core.weight_schemes,
        help="store the frozen linear layers in 4 or 8 bits per element (QLoRA); needs --lora",
    )


def resolve(options: argparse.Namespace) -> None:
    """Set the model's options and tokenizer from ``--init-from``, or to their defaults.

    Raises
    ------
    ValueError
        An option contradicts the configuration in the folder.
    FileNotFoundError
        The folder has no configuration.
    """
    _check_lora(options)
    if options.init_from is None:
        options.model = options.model or MODEL
        options.preset = options.preset or PRESET
        return
    config = config_of(options.init_from)
    kind = "gpt2" if config.family == "gpt2" else "llama"
    if options.preset is not None:
        raise ValueError(
            f"--preset {options.preset}, and --init-from {options.init_from} has sizes of its own: "
            "leave --preset out"
        )
    if options.model not in (None, kind):
        raise ValueError(
            f"--model {options.model}, and --init-from {options.init_from} holds a "
            f"{config.family}: leave --model out"
        )
    if options.seq > config.max_seq:
        raise ValueError(
            f"--seq {options.seq}, and the model of --init-from {options.init_from} is for "
            f"sequences of at most {config.max_seq}: take a smaller --seq"
        )
    if options.quantize is not None and kind == "gpt2":
        raise ValueError("--quantize is for models with linear layers, which a GPT-2 has not")
    options.model = kind
    own = options.init_from / "tokenizer.json"
    if options.tokenizer is None and own.is_file():
        options.tokenizer = own


def _check_lora(options: argparse.Namespace) -> None:
    if options.lora is None:
        for name in ("lora_alpha", "lora_targets", "quantize"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --lora RANK")
        return
    if options.lora < 1:
        raise ValueError(f"--lora must be at least 1, got {options.lora}")
    if options.lora_alpha is not None and not options.lora_alpha > 0:
        raise ValueError(f"--lora-alpha must be above 0, got {options.lora_alpha}")
    if options.init_from is None:
        raise ValueError("--lora needs --init-from DIR, the model to add adapters to")


def adapt(options: argparse.Namespace, model: Any) -> None:
    """Quantise a model that is not sharded yet and add adapters, as the options say."""
    if getattr(options, "lora", None) is None:
        return
    if getattr(options, "quantize", None) is not None:
        nn.quantize_(model, options.quantize)
    targets = options.lora_targets or lora.ALL_LINEAR
    if targets != lora.ALL_LINEAR:
        targets = targets.split(",")
    lora.apply(model, options.lora, targets, alpha=options.lora_alpha)


def check(options: argparse.Namespace) -> None:
    """Raise if the data do not match the model, or if the export cannot be written.

    Raises
    ------
    ValueError
        The vocabulary does not match the data, or llama.cpp cannot use the model or tokenizer.
    FileExistsError
        The ``--export`` path already exists.
    """
    if options.init_from is not None:
        config = config_of(options.init_from)
        tokenized = options.tokenizer is not None
        if not tokenized and config.vocab_size < BYTES:
            raise ValueError(
                f"--init-from {options.init_from} has a vocabulary of {config.vocab_size}, and the "
                f"data are bytes, of which there are {BYTES}"
            )
    if options.export is not None and options.export.exists():
        raise FileExistsError(f"--export {options.export} is there already: name another path")
    if options.export is not None and options.export.suffix == SUFFIX:
        _check_gguf(options)


def _check_gguf(options: argparse.Namespace) -> None:
    """Raise ValueError, before training, if the export as a GGUF file would fail after it."""
    try:
        if options.lora is not None:
            raise ValueError("a GGUF file holds a model, and --lora exports adapters")
        gguf, config = import_gguf(), with_vocabulary(options, config_for(options))
        content = written_config(config, "gpt2" if options.model == "gpt2" else None)
        check_shape(config, content["model_type"])
        tokenizer = make_source(options).tokenizer
        if tokenizer is not None:
            add_tokenizer(gguf, gguf.GGUFWriter(None, ""), tokenizer.path, config)
    except (ImportError, ValueError) as error:
        raise ValueError(f"--export {options.export}: {error}") from None


def title(options: argparse.Namespace) -> str:
    """Return the model's name, for messages."""
    if options.init_from is not None:
        return f"{options.model} of {options.init_from}"
    return f"{options.model} {options.preset}"


def config_for(options: argparse.Namespace) -> models.ModelConfig:
    """Return the model shape that the options describe."""
    folder = getattr(options, "init_from", None)
    return models.preset(options.preset) if folder is None else config_of(folder)


def keep_tokenizer(tokenizer: Any, folder: Path | None) -> None:
    """On rank 0, save a run's tokenizer, if any, in a folder."""
    if tokenizer is not None and folder is not None and distributed.rank() == 0:
        (folder / "tokenizer.json").write_bytes(tokenizer.data)


def export(options: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """Export the model, with its tokenizer and other files from its source folder; collective."""
    if options.export is None:
        return
    if options.lora is not None:
        lora.save(model, options.export, base=str(options.init_from.resolve()))
    elif options.export.suffix == SUFFIX:
        file = None if tokenizer is None else tokenizer.path
        models.save_pretrained(model, options.export, format="gguf", tokenizer=file)
    else:
        models.save_pretrained(model, options.export)
    if distributed.rank() == 0:
        if options.export.is_dir():
            for name in _BESIDE if options.init_from is not None else ():
                if (options.init_from / name).is_file():
                    shutil.copyfile(options.init_from / name, options.export / name)
            keep_tokenizer(tokenizer, options.export)
        print(f"exported to {options.export}", flush=True)
    distributed.barrier()
