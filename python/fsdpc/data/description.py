"""``tokens.json``, which describes a folder's token files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc.data.files import explained

NAME = "tokens.json"


@dataclass(frozen=True, kw_only=True)
class TokenDescription:
    """The contents of ``tokens.json``, which describes the token files in the same folder.

    Parameters
    ----------
    dtype : str
        Dtype of ``.bin`` files, "uint16" or "uint32".
    vocab_size : int, optional
        Upper bound of all ids (exclusive).
    end_of_document : int, optional
        The id that ends each document.
    shards : tuple of dict
        The files in order, each with ``"file"`` (a name), ``"tokens"`` and ``"crc32c"`` (of the
        bytes, hexadecimal). If empty, all token files in the folder, sorted by name.
    documents, text_bytes : int, optional
        Number of documents, and size of their text in UTF-8 bytes.
    tokenizer : dict, optional
        The tokenizer file's ``"name"`` and ``"sha256"``.

    Examples
    --------
    >>> from fsdpc import data
    >>> data.TokenDescription(dtype="uint16", vocab_size=50257).vocab_size
    50257
    """

    dtype: str
    vocab_size: int | None = None
    end_of_document: int | None = None
    shards: tuple[dict[str, Any], ...] = ()
    documents: int | None = None
    text_bytes: int | None = None
    tokenizer: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype is uint16 or uint32, not {self.dtype!r}")
        for name in ("vocab_size", "end_of_document", "documents", "text_bytes"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if value is not None and not whole:
                raise ValueError(f"{name} is a whole number, not {value!r}")
        for shard in self.shards:
            name, tokens = shard.get("file"), shard.get("tokens")
            if not isinstance(name, str) or "/" in name or not isinstance(tokens, int):
                raise ValueError(f"a shard has a file (its name) and tokens, not {shard!r}")
        if self.tokenizer is not None and not isinstance(self.tokenizer.get("sha256"), str):
            raise ValueError(f"a tokenizer has a name and a sha256, not {self.tokenizer!r}")

    @property
    def tokens(self) -> int:
        """Total number of tokens in the listed shards."""
        return sum(shard["tokens"] for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Write ``tokens.json`` into a folder."""
        rows = {"dtype": self.dtype, "vocab_size": self.vocab_size,
                "end_of_document": self.end_of_document, "tokens": self.tokens,
                "documents": self.documents, "text_bytes": self.text_bytes,
                "tokenizer": self.tokenizer, "shards": list(self.shards)}  # fmt: skip
        (folder / NAME).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read_description(folder: Path) -> TokenDescription | None:
    """Return the contents of a folder's ``tokens.json``, or None if the file does not exist.

    Raises
    ------
    ValueError
        The file does not describe token files; the message names the file and the fault.
    PermissionError
        The file cannot be read.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tempfile
    >>> from fsdpc import data
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(data.read_description(Path(folder)))
    None
    """
    path = folder / NAME
    if not path.is_file():
        return None
    with explained(path):
        text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        shards = tuple(dict(shard) for shard in found.get("shards") or ())
        names = ("dtype", "vocab_size", "end_of_document", "documents", "text_bytes", "tokenizer")
        given = {name: found[name] for name in names if name in found}
        return TokenDescription(shards=shards, **{"dtype": "", **given})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"data file {path} describes no token files: {error}") from None


def check_shard(path: Path, ids: np.ndarray, description: TokenDescription | None) -> None:
    """Raise ValueError if a file's token count differs from the one in its description."""
    for shard in description.shards if description else ():
        if shard["file"] == path.name and shard["tokens"] != len(ids):
            raise ValueError(
                f"token file {path} has {len(ids):,} tokens, and its {NAME} says "
                f"{shard['tokens']:,}: it was cut, or is of another folder"
            )
