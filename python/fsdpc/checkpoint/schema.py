"""The manifest schema, which applies to manifests written by any program.

The manifest's checksum proves that it is unchanged, not that fsdpc wrote it. This module checks,
once, everything that loading relies on. User objects check their own state dicts.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from fsdpc._core import as_dtype

# Dtype names in files.
FILE_DTYPES = {
    "float64": "F64", "int64": "I64", "float32": "F32", "int32": "I32", "bfloat16": "BF16",
    "float16": "F16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
ITEM_BYTES = {file: as_dtype(name).itemsize for name, file in FILE_DTYPES.items()}
FLOATS = {file for name, file in FILE_DTYPES.items() if as_dtype(name).is_floating_point}
_CRC = re.compile(r"[0-9a-f]{8}")
_U63, _U64 = (1 << 63) - 1, (1 << 64) - 1


class Unfit(Exception):
    """Reports where and how a manifest violates the schema."""


def check(content: dict[str, Any]) -> None:
    """Raise :class:`Unfit` unless the manifest is complete and consistent for loading."""
    _whole(content, "world", 1)
    _whole({"step": 0, **content}, "step")
    rng = _get(content, "rng", dict)
    for key in ("seed", "next_stream"):
        _whole(rng, key, 0, _U64)
    _list_of(dict, rng.get("ranks", []), "rng.ranks")
    aliases = content.get("aliases", {})
    _list_of(str, [aliases] if not isinstance(aliases, dict) else [*aliases.values()], "aliases")
    for mesh in _list_of(dict, content.get("meshes", []), "meshes"):
        for key in ("replicate", "shard"):
            _whole(mesh, key, 1)
    _list_of(str, content.get("strategies", []), "strategies")
    if "base" in content:
        _crc(_get(content, "base", dict), "crc32c")
    for name, code in _get({"codes": {}, **content}, "codes", dict).items():
        if not (isinstance(code, list) and [type(part) for part in code] == [str, int]):
            raise Unfit(f"codes of '{name}' are {code!r}, not a scheme and columns")
    for entry in _list_of(dict, list(_get(content, "files", dict).values()), "files"):
        _whole(entry, "bytes")
        _whole(entry, "header_bytes", 0, entry["bytes"])
        _crc(entry, "header_crc32c")
    tables = _get(content, "tensors", dict)
    for kind in ("model", "optimizer"):
        for name, entry in _get(tables, kind, dict).items():
            try:
                _tensor(entry, content["files"])
            except Unfit as error:
                raise Unfit(f"tensor '{name}': {error}") from None
    if "optimizer" in content:
        _optimizer(_get(content, "optimizer", dict))
    if "ema" in content:
        _ema(_get(content, "ema", dict))
    if "outer" in content:
        _outer(_get(content, "outer", dict))


def _tensor(entry: Any, files: dict[str, Any]) -> None:
    _list_of(dict, [entry], "its entry")
    item = ITEM_BYTES[_one_of(entry, "dtype", tuple(ITEM_BYTES))]
    shape = _get(entry, "shape", list)
    for extent in shape:
        _check_whole(extent, "shape")
    total = prod(shape)
    if total * item > _U63:
        raise Unfit(f"shape {shape} is beyond memory")
    _one_of(entry, "file", tuple(files))
    _crc(entry, "crc32c")
    offsets = _get(entry, "offsets", list)
    if len(offsets) != 2:
        raise Unfit(f"offsets {offsets} are not two")
    begin, end = (_check_whole(offset, "offsets") for offset in offsets)
    if end - begin != total * item:
        raise Unfit(f"offsets {offsets} are not those of {total} elements")


def _optimizer(entry: dict[str, Any]) -> None:
    _get(entry, "class", str)
    for group in _list_of(dict, _get(entry, "param_groups", list), "param_groups"):
        _list_of(str, _get(group, "params", list), "params")
    _steps(entry)


def _ema(entry: dict[str, Any]) -> None:
    for key in ("num_updates", "calls"):
        _whole(entry, key)
    _steps(entry)


def _outer(entry: dict[str, Any]) -> None:
    _whole(entry, "calls")
    _whole(entry, "replicas", 1)
    _steps(entry)


def _steps(entry: dict[str, Any]) -> None:
    steps = _get(entry, "steps", dict)
    for name in steps:
        _whole(steps, name)


def _get(holder: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(holder.get(key), kind):
        raise Unfit(f"'{key}' must be there as a {kind.__name__}, got {holder.get(key)!r:.60}")
    return holder[key]


def _one_of(holder: dict[str, Any], key: str, values: tuple[str, ...]) -> str:
    if _get(holder, key, str) not in values:
        raise Unfit(f"'{key}' is {holder[key]!r:.60}, which is none of {', '.join(values)[:200]}")
    return holder[key]


def _whole(holder: dict[Any, Any], key: Any, least: int = 0, most: int = _U63) -> int:
    return _check_whole(holder.get(key), key, least, most)


def _check_whole(value: Any, what: Any, least: int = 0, most: int = _U63) -> int:
    if type(value) is not int or not least <= value <= most:
        raise Unfit(f"'{what}' must be a whole number from {least} on, got {value!r:.60}")
    return value


def _crc(holder: dict[str, Any], key: str) -> None:
    if not _CRC.fullmatch(_get(holder, key, str)):
        raise Unfit(f"'{key}' must be 8 hexadecimal digits, got {holder[key]!r:.60}")


def _list_of(kind: type, values: Any, what: str) -> list[Any]:
    if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
        raise Unfit(f"{what} must be {kind.__name__}, got {values!r:.60}")
    return values
