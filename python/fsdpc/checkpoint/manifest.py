"""``manifest.json``, which describes a checkpoint's contents and marks it complete.

Python encodes most members; ``csrc/ckpt/layout.c`` adds files and tensors with their checksums, and
writes the text. The last key is a checksum of all text that precedes its digits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdpc import _core
from fsdpc.checkpoint import schema
from fsdpc.distributed.agree import raised_together

NAME = "manifest.json"
VERSION = 1
MAX_BYTES = 1 << 30
_CHECKSUM = '"checksum":"'


@raised_together
class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or mismatched; the message lists the problems.

    The page docs/troubleshooting.md#exceptions explains what to do.
    """


def encoded(key: str, value: Any) -> str:
    """Return a member's value as JSON.

    Raises
    ------
    ValueError
        The value cannot be encoded; the message names its key.
    """
    try:
        text = json.dumps(value, allow_nan=False, indent=1, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"'{key}' of a checkpoint must be numbers, text, None, and lists, tuples and "
            f"dicts of them: {error}"
        ) from None
    return text.replace("\n", "\n ")


def strict_json(text: bytes, what: str) -> Any:
    """Parse JSON strictly: reject duplicate keys, NaN, infinities and bad UTF-8.

    Messages contain ``what``.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))
            raise CheckpointError(f"{what}: the key '{twice}' stands twice")
        return found

    def constant(name: str) -> Any:
        raise CheckpointError(f"{what}: {name} is no JSON number")

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{what}: nested too deep") from None
    except ValueError as error:
        raise CheckpointError(f"{what}: not valid JSON: {error}") from None


def read(folder: Path) -> dict[str, Any]:
    """Read and check a folder's manifest.

    Raises
    ------
    CheckpointError
        The manifest is missing, damaged, or of another version or layout.
    """
    path = folder / NAME
    try:
        if not path.is_file():  # reading anything but a regular file may never end
            raise FileNotFoundError
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are too many")
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} has no {NAME}: it is no checkpoint, or was never committed"
        ) from None
    mark = _CHECKSUM.encode()
    at = text.rfind(mark)
    own = text[at + len(mark) :]
    if at < 0 or own[8:] != b'"\n}\n':
        raise CheckpointError(f"{path}: cut short or changed: its checksum is not at its end")
    want = f"{_core.crc32c(0, text[: at + len(mark)]):08x}".encode()
    if own[:8] != want:
        raise CheckpointError(
            f"{path}: damaged: its checksum is {want.decode()}, it says "
            f"{own[:8].decode('latin-1')}"
        )
    content = strict_json(text, str(path))
    told = content if isinstance(content, dict) else {}
    if told.get("format") != "fsdpc" or not isinstance(told.get("version"), int):
        raise CheckpointError(f"{path}: not a manifest of fsdpc")
    version, layout = content["version"], content.get("layout")
    if (version, layout) != (VERSION, "full"):
        raise CheckpointError(
            f"{path}: version {version} with layout {layout!r:.60}; this fsdpc reads version "
            f"{VERSION} with layout 'full': use the fsdpc that saved it"
        )
    try:
        schema.check(content)
    except schema.Unfit as error:
        raise CheckpointError(f"{path}: not a manifest that fsdpc wrote: {error}") from None
    return content


def step_of(content: dict[str, Any]) -> int | None:
    """Return a manifest's step, or None if no step was saved."""
    extra = content.get("extra")
    step = content.get("step", extra.get("step") if isinstance(extra, dict) else None)
    return step if type(step) is int and step >= 0 else None


def plain_name(name: str, what: str) -> str:
    """Return the name of a file inside a folder; raise if it points outside the folder.

    ``what`` specifies, for messages, where the name was found.
    """
    if not isinstance(name, str) or not name or name in (".", "..") or set(name) & set("/\\\0"):
        raise CheckpointError(f"{what}: {name!r} is not the name of a file next to it")
    return name


def check_files(folder: Path, content: dict[str, Any]) -> None:
    """Compare a folder's files with its manifest: sizes, headers and indices, but not tensor data.

    Raises
    ------
    CheckpointError
        Files are missing or differ; the message lists all of them.
    """
    files = sorted(content["files"].items())
    problems = [_file_problem(folder / plain_name(name, NAME), entry) for name, entry in files]
    if any(problems):
        raise CheckpointError("; ".join(filter(None, problems)))


def _file_problem(path: Path, entry: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path}: {size} bytes, {entry['bytes']} were written"
        with path.open("rb") as file:
            head = file.read(entry["header_bytes"])
    except FileNotFoundError:
        return f"{path} is missing"
    if _core.crc32c(0, head) != int(entry["header_crc32c"], 16):
        whole = entry["header_bytes"] == entry["bytes"]
        return f"{path}: {'' if whole else 'its header is '}damaged, or the file of another one"
    return None
