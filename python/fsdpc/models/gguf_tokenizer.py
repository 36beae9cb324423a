"""Write a ``tokenizer.json`` into a GGUF file.

llama.cpp has its own code for each way to split text, and the file names which one to use. A
tokenizer is refused unless one of them is known to split text in the same way.
"""

from __future__ import annotations

from typing import Any

from fsdpc.data.tokenizer import Tokenizer
from fsdpc.models.config import ModelConfig

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: Regular expression -> llama.cpp's name, and whether it looks up whole words before merges.
_SPLITS = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: ("llama-bpe", True),
    _CONTRACTIONS + r"\p{N}" + _REST: ("qwen2", False),
}


def _read(path: Any) -> tuple[Tokenizer, str]:
    """Return a tokenizer and llama.cpp's name for how it splits text; raise ValueError if none."""
    tokenizer = Tokenizer(path)
    if tokenizer.path.name != "tokenizer.json":
        raise ValueError(f"tokenizer {tokenizer.path} must be named tokenizer.json")
    name = _split_name(tokenizer._json)
    if name is None:
        raise ValueError(
            f"tokenizer {tokenizer.path} cannot be written into a GGUF file: only byte-level BPE "
            "that splits text as GPT-2, LLaMA 3 or Qwen2 does"
        )
    return tokenizer, name


def _split_name(found: dict[str, Any]) -> str | None:
    model = found["model"]
    if model.get("type") != "BPE" or not model.get("merges") or any(
        model.get(key) for key in ("byte_fallback", "continuing_subword_prefix",
                                   "end_of_word_suffix", "unk_token")
    ):  # fmt: skip
        return None
    added = found.get("added_tokens") or []
    if any(each.get(key) for each in added for key in ("lstrip", "rstrip", "single_word")):
        return None
    split = found.get("pre_tokenizer") or {}
    *before, last = split.get("pretokenizers") or [split]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    own_split = last.get("use_regex", True)
    name, whole_words = ("gpt-2", False) if own_split and not before else (None, False)
    if len(before) == 1 and not own_split and before[0].get("behavior") == "Isolated":
        pattern = None if before[0].get("invert") else before[0]["pattern"].get("Regex")
        name, whole_words = _SPLITS.get(pattern, (None, False))
    normal = (found.get("normalizer") or {}).get("type")
    if normal and (normal, name) != ("NFC", "qwen2"):  # llama.cpp's converter ignores this one too
        return None
    return name if bool(model.get("ignore_merges")) == whole_words else None


def add_tokenizer(gguf: Any, writer: Any, path: Any, config: ModelConfig) -> None:
    """Add a tokenizer's vocabulary, merges, special tokens and chat template to a GGUFWriter.

    Parameters
    ----------
    gguf, writer : module, GGUFWriter
    path : path
        A ``tokenizer.json``, or a folder with one.
    config : ModelConfig
        The model's; its special tokens are used if the tokenizer's files name none.

    Raises
    ------
    FileNotFoundError, ValueError
        The file is missing; llama.cpp would split text differently; the tokenizer is larger than
        the model's vocabulary, or has no token that ends a text.
    """
    tokenizer, split = _read(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} tokens, and the model has "
            f"{config.vocab_size}"
        )
    kinds, known = gguf.TokenType, tokenizer._tokens
    types = dict.fromkeys(known, kinds.NORMAL)
    for each in tokenizer._json.get("added_tokens") or []:
        types[each["id"]] = kinds.CONTROL if each.get("special") else kinds.USER_DEFINED
    ids, special = range(config.vocab_size), gguf.SpecialVocab(tokenizer.path.parent, True)
    writer.add_tokenizer_model("gpt2")  # llama.cpp's name for byte-level BPE
    writer.add_tokenizer_pre(split)
    writer.add_token_list([known.get(i, f"[PAD{i}]") for i in ids])
    writer.add_token_types([types.get(i, kinds.UNUSED) for i in ids])
    tokens = special.special_token_ids
    for name in ("bos", "eos", "pad"):
        own = getattr(config, f"{name}_token_id")
        own = own[0] if isinstance(own, tuple) else own
        if own is not None:
            tokens.setdefault(name, own)
    # If the file names no such token, llama.cpp uses token 11.
    if "eos" not in tokens:
        tokens["eos"] = tokenizer.find_end()
    tokens.setdefault("bos", tokens["eos"])
    special.add_special_token = {"bos": False, "eos": False, **special.add_special_token}
    special.add_to_gguf(writer, quiet=True)
