"""Write safetensors files and indices that break one rule each, for tests/ckpt/test_hostile.py.

    python tests/data/make_hostile.py FOLDER

Each file's name says the rule; ``CASES`` has for each what the error must say.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path


def framed(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of this header and data; ``length`` lies about the header's."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def one(dtype: str = "F32", shape: str = "[1]", offsets: str = "[0,4]", name: str = "a") -> bytes:
    """A header with one tensor."""
    return (
        f'{{"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}'.encode()
    )


def two(first: str, second: str, names: str = "ab") -> bytes:
    """A header with two tensors of four bytes."""
    entries = [
        f'"{name}":{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}'
        for name, offsets in zip(names, (first, second))
    ]
    return ("{" + ",".join(entries) + "}").encode()


FOUR = b"\0" * 4

# Name: the bytes, and what the error says.
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too few"),
    "seven_bytes": (b"1234567", "too few"),
    "huge_header": (framed(b"{}", length=100_000_001), "the format allows"),
    "largest_number_as_length": (framed(b"{}", length=2**64 - 1), "the format allows"),
    "header_beyond_the_file": (framed(b"{}", length=4096), "cut short"),
    "no_header": (framed(b""), "expected '{'"),
    "not_an_object": (framed(b"[]"), "expected '{'"),
    "blank_first": (framed(b" {}"), "expected '{'"),
    "text_behind": (framed(b"{}{}"), "nothing but blanks"),
    "duplicate_name": (framed(two("[0,4]", "[4,8]", "aa"), FOUR * 2), "'a' stands twice"),
    "duplicate_by_escape": (
        framed(two("[0,4]", "[4,8]", "ab").replace(b'"b"', b'"\\u0061"'), FOUR * 2),
        "'a' stands twice",
    ),
    "duplicate_key": (framed(one().replace(b'"shape"', b'"dtype":"F32","shape"'), FOUR), "twice"),
    "duplicate_metadata": (
        framed(b'{"__metadata__":{"a":"1","a":"2"}}'), "key 'a' stands twice"
    ),
    "unknown_key": (framed(one().replace(b'"shape"', b'"x":1,"shape"'), FOUR), "unknown key"),
    "missing_key": (framed(b'{"a":{"dtype":"F32","shape":[1]}}'), "lacks its data_offsets"),
    "unknown_dtype": (framed(one(dtype="F4"), FOUR), "unknown dtype 'F4'"),
    "lower_case_dtype": (framed(one(dtype="f32"), FOUR), "unknown dtype"),
    "shape_overflow": (framed(one(shape="[4294967296,4294967296,4294967296]"), FOUR), "2^64"),
    "bytes_overflow": (framed(one(shape="[4611686018427387905]"), FOUR), "2^64"),
    "number_overflow": (framed(one(shape="[18446744073709551617]"), FOUR), "below 2^64"),
    "negative": (framed(one(shape="[-1]"), FOUR), "not negative"),
    "negative_offset": (framed(one(offsets="[-4,0]"), FOUR), "not negative"),
    "float": (framed(one(shape="[1.0]"), FOUR), "whole number"),
    "exponent": (framed(one(shape="[1e0]"), FOUR), "whole number"),
    "nan": (framed(one(shape="[NaN]"), FOUR), "whole number"),
    "infinity": (framed(one(offsets="[0,Infinity]"), FOUR), "whole number"),
    "leading_zero": (framed(one(shape="[01]"), FOUR), "whole number"),
    "number_as_text": (framed(one(shape='["1"]'), FOUR), "whole number"),
    "overlap": (framed(two("[0,4]", "[2,6]"), b"\0" * 6), "inside the one that ends"),
    "same_place": (framed(two("[0,4]", "[0,4]"), FOUR), "inside the one that ends"),
    "hole": (framed(two("[0,4]", "[8,12]"), b"\0" * 12), "behind a hole"),
    "hole_first": (framed(one(offsets="[4,8]"), b"\0" * 8), "behind a hole"),
    "data_missing": (framed(one(), b"\0" * 3), "cut short"),
    "data_left_over": (framed(one(), b"\0" * 5), "added to"),
    "offsets_reversed": (framed(one(offsets="[4,0]"), FOUR), "takes 4 bytes"),
    "offsets_beyond": (framed(one(offsets="[0,4000000000]"), FOUR), "takes 4 bytes"),
    "offset_missing": (framed(one(offsets="[0]"), FOUR), "expected ','"),
    "many_dimensions": (framed(one(shape="[" + "1," * 200 + "1]"), FOUR), "8 dimensions"),
    "nested_shape": (framed(one(shape="[[1]]"), FOUR), "got '['"),
    "deep_arrays": (framed(b'{"a":' + b"[" * 1_000_000), "expected '{'"),
    "deep_objects": (framed(b'{"a":{"dtype":' + b'{"a":' * 200_000), "got '{'"),
    "bad_utf8": (framed(one().replace(b'"a"', b'"\xff"'), FOUR), "valid UTF-8"),
    "overlong_utf8": (framed(one().replace(b'"a"', b'"\xc0\xaf"'), FOUR), "valid UTF-8"),
    "surrogate_utf8": (framed(one().replace(b'"a"', b'"\xed\xa0\x80"'), FOUR), "valid UTF-8"),
    "lone_surrogate": (framed(one().replace(b'"a"', b'"\\ud800"'), FOUR), "surrogate"),
    "nul_in_a_name": (framed(one().replace(b'"a"', b'"\\u0000"'), FOUR), "NUL"),
    "control_character": (framed(one().replace(b'"a"', b'"\n"'), FOUR), "control character"),
    "unknown_escape": (framed(one().replace(b'"a"', b'"\\q"'), FOUR), "escape"),
    "metadata_not_text": (framed(b'{"__metadata__":{"a":1}}'), "expected '\"'"),
}  # fmt: skip


def index(weights: str) -> bytes:
    """An index with this weight_map."""
    return f'{{"metadata":{{"total_size":4}},"weight_map":{weights}}}'.encode()


# Indices beside a good file "model-00001-of-00001.safetensors" that has the tensor "a".
INDICES: dict[str, tuple[bytes, str]] = {
    "path_up": (index('{"a":"../x.safetensors"}'), "not the name of a file"),
    "path_absolute": (index('{"a":"/etc/passwd"}'), "not the name of a file"),
    "path_inside": (index('{"a":"b/c.safetensors"}'), "not the name of a file"),
    "path_backslash": (index('{"a":"b\\\\c"}'), "not the name of a file"),
    "path_dots": (index('{"a":".."}'), "not the name of a file"),
    "path_empty": (index('{"a":""}'), "not the name of a file"),
    "path_nul": (index('{"a":"x\\u0000"}'), "not the name of a file"),
    "path_number": (index('{"a":1}'), "not the name of a file"),
    "file_missing": (index('{"a":"other.safetensors"}'), "missing"),
    "tensor_missing": (
        index('{"a":"model-00001-of-00001.safetensors","b":"model-00001-of-00001.safetensors"}'),
        "does not fit",
    ),
    "tensor_unlisted": (index("{}"), "it has no|does not fit|missing"),
    "twice": (index('{"a":"x","a":"y"}'), "stands twice"),
    "no_map": (b'{"metadata":{}}', "weight_map"),
    "a_list": (b"[]", "weight_map"),
    "nan": (b'{"metadata":{"total_size":NaN},"weight_map":{}}', "no JSON number"),
    "not_json": (b"{", "not valid JSON"),
    "bad_utf8": (b'{"weight_map":{"\xff":"x"}}', "not valid JSON"),
    "deep": (b'{"weight_map":' + b"[" * 200_000, "nested too deep|not valid JSON"),
}


def write(folder: Path) -> None:
    """Write all of them below a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (content, _) in CASES.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    for name, (content, _) in INDICES.items():
        place = folder / f"index_{name}"
        place.mkdir(exist_ok=True)
        (place / "model-00001-of-00001.safetensors").write_bytes(framed(one(), FOUR))
        (place / "model.safetensors.index.json").write_bytes(content)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print(json.dumps({"files": len(CASES), "indices": len(INDICES)}))
