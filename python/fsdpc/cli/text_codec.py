"""Convert between text and ids, which are bytes or tokens of a model's ``tokenizer.json``."""

from __future__ import annotations

import codecs
import hashlib
import json
from pathlib import Path
from typing import Any

from fsdpc.data.tokenizer import import_tokenizers

FILE = "tokenizer.json"
BYTES = 256
_OTHERS = ("tokenizer.model", "vocab.json", "tokenizer_config.json")  # other kinds, without FILE


class ByteText:
    """UTF-8 bytes as ids."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text."""
        return list(text.encode())

    def begin(self, prompt: list[int]) -> None:
        """Reset the decoder; the ids that follow continue the prompt."""
        self._decoder.reset()

    def add(self, token: int) -> str:
        """Return the text that one more id completes."""
        return self._decoder.decode(bytes([token]) if token < BYTES else b"?")

    def end(self) -> str:
        """Return the remaining text, whether or not it is complete."""
        return self._decoder.decode(b"", True)


class TokenText:
    """Tokens from a ``tokenizer.json``.

    Parameters
    ----------
    path : Path
        The file.

    Raises
    ------
    ImportError
        The tokenizers package is not installed.
    ValueError
        The file is not a tokenizer.json.
    """

    def __init__(self, path: Path) -> None:
        library = import_tokenizers(str(path))
        try:
            self._tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises Exception itself
            raise ValueError(f"{path}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.begin([])

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text; ``special`` prepends the tokenizer's special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def begin(self, prompt: list[int]) -> None:
        """Reset the decoder; the next ids follow the prompt's."""
        self._ids = list(prompt[-8:])  # context: a token's text may depend on preceding tokens
        self._shown, self._read = 0, len(self._ids)

    def add(self, token: int) -> str:
        """Return the text that one more id completes."""
        self._ids.append(token)
        piece = self._behind()
        if not piece or piece.endswith("\ufffd"):  # an incomplete character
            return ""
        self._shown, self._read = self._read, len(self._ids)
        return piece

    def end(self) -> str:
        """Return the remaining text, complete or not."""
        return self._behind()

    def _behind(self) -> str:
        before = self._tokenizer.decode(self._ids[self._shown : self._read])
        return self._tokenizer.decode(self._ids[self._shown :])[len(before) :]


def open_text(
    folders: list[Path], given: Path | None, vocab_size: int, trained: dict[str, str] | None
) -> ByteText | TokenText:
    """Return the codec that converts between a model's ids and text.

    Parameters
    ----------
    folders : list of Path
        Folders that may contain its tokenizer.
    given : Path, optional
        A tokenizer.json, or a folder with one, to use instead.
    vocab_size : int
        The model's vocabulary size.
    trained : dict, optional
        "name" and "sha256" of the tokenizer that the run was trained with.

    Raises
    ------
    ValueError
        The tokenizer is larger than the vocabulary or not the run's, or is missing and ids are not
        bytes.
    FileNotFoundError
        The given file does not exist.
    """
    if given is not None:
        path = given / FILE if given.is_dir() else given
        if not path.is_file():
            raise FileNotFoundError(f"--tokenizer {path} does not exist")
        folders = []
    else:
        path = next((f / FILE for f in folders if (f / FILE).is_file()), Path())
    if given is not None or path.name:
        text = TokenText(path)
        if trained and trained["sha256"] not in ("", hashlib.sha256(path.read_bytes()).hexdigest()):
            raise ValueError(
                f"{path} is not the tokenizer that the run was trained with, '{trained['name']}': "
                "name that file with --tokenizer"
            )
        if text.vocab_size > vocab_size:
            raise ValueError(
                f"{path} has {text.vocab_size} tokens, and the model knows {vocab_size}: it is "
                "another model's tokenizer"
            )
        return text
    if trained:
        raise ValueError(
            f"{folders[0]} was trained with the tokenizer '{trained['name']}' and has no {FILE}: "
            "name the file with --tokenizer"
        )
    others = [str(f / name) for f in folders for name in _OTHERS if (f / name).is_file()]
    if others or vocab_size < BYTES:
        why = f"a tokenizer of another kind ({others[0]})" if others else "none"
        raise ValueError(
            f"{folders[0]} has no {FILE}, but {why}, and the model has a vocabulary of "
            f"{vocab_size}: name a file with --tokenizer"
        )
    return ByteText()


def render_chat(folders: list[Path], messages: list[dict[str, str]]) -> str:
    """Render messages with a folder's chat template, up to the start of the answer.

    Parameters
    ----------
    folders : list of Path
        Folders that may contain ``chat_template.jinja`` or ``tokenizer_config.json``.
    messages : list of dict
        Each with "role" and "content".

    Raises
    ------
    ValueError
        There is no template, jinja2 is not installed, or the template rejects the messages.
    """
    template, words = _find_template(folders)
    if template is None:
        raise ValueError(f"--chat: {folders[0]} has no chat template: leave --chat out")
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("--chat needs the jinja2 package: pip install jinja2") from None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, **words
        )
    except TemplateError as error:
        raise ValueError(f"--chat: the chat template of {folders[0]}: {error}") from None


def _now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)


def _find_template(folders: list[Path]) -> tuple[str | None, dict[str, Any]]:
    """Return the chat template and the tokens that it may use."""
    for folder in folders:
        content: dict[str, Any] = {}
        if (folder / "tokenizer_config.json").is_file():
            content = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        words = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = content.get(name)
            words[name] = value.get("content") if isinstance(value, dict) else value or ""
        found = content.get("chat_template")
        if isinstance(found, list):  # several, by name
            found = {each["name"]: each["template"] for each in found}.get("default")
        if (folder / "chat_template.jinja").is_file():
            found = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        if found:
            return found, words
    return None, {}
