"""Sources of options for ``fsdpc train``: command line, config file and checkpoint.

Options on the command line override those of the ``--config`` file. In a resumed run, options in
`KEPT` that are set in neither place come from the checkpoint. All other options have their default
values.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpc.cli.train_checkpoint import AS_NAMES
from fsdpc.cli.train_options import (
    FIXED,
    FLAGS,
    KEPT,
    SWITCHES,
    parser,
    usual_decay,
    usual_warmup,
)
from fsdpc.display.text import as_name, as_text
from fsdpc.lora import ALL_LINEAR
from fsdpc.optim import BY_NAME
from fsdpc.sharding.offload import OffloadPolicy

_PATHS = ("data", "tokenizer", "init_from")
_OF_THE_COMMAND = ("config", "live", "no_progress", "resume")  # not written to files


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options for ``fsdpc train``, including those from a resumed run's checkpoint.

    Raises
    ------
    ValueError
        The ``--config`` file is not TOML, an option is given that a resume cannot change, a
        checkpoint exists but ``--resume`` is not given, or ``fsdpc train`` did not save the
        checkpoint.
    """
    words, p = with_config(arguments), parser()
    unset = object()
    blank = argparse.Namespace(**dict.fromkeys(vars(p.parse_args([])), unset))
    given = {k: v for k, v in vars(p.parse_args(words, blank)).items() if v is not unset}
    folder = given.get("checkpoint")
    if folder is not None and folder.is_dir():
        from fsdpc.checkpoint import manager, manifest

        latest = manager.newest_in(folder)
        if latest is not None:
            if not given.get("resume"):
                raise ValueError(
                    f"{latest} is there already: add --resume to go on from it, or name another "
                    "--checkpoint folder"
                )
            kept = options_in(manifest.read(latest))
            if not kept:
                raise ValueError(
                    f"{latest} keeps no options, so fsdpc train did not save it and cannot resume "
                    "it: name another --checkpoint folder"
                )
            _refuse_changes(latest, kept, given)
            if not given.get("schedule", "wsd").startswith("wsd"):
                kept.pop("decay", None)
            if "init_from" in given:
                kept.pop("preset", None)
            taken = {k: v for k, v in kept.items() if k not in given and v is not None}
            words = [*words_of(taken), *words]
    return p.parse_args(words)


def _refuse_changes(path: Path, kept: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name in FIXED:
        if name in kept and plain(given.get(name)) not in (None, kept[name]):
            raise ValueError(
                f"{_shown(name, plain(given[name]))}, and {path} was trained with "
                f"{_shown(name, kept[name])}, which a resume cannot change: leave it out, or name "
                "another --checkpoint folder"
            )


# ---- in checkpoints ----


def kept_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a checkpoint keeps, as JSON values with absolute paths."""
    found: dict[str, Any] = {}
    for name in KEPT:
        value = getattr(options, name)
        if name in _PATHS and value is not None:
            value = [p.absolute() for p in value] if name == "data" else value.absolute()
        found[name] = plain(value)
    if options.lora is not None:  # defaults too, because they may be passed later
        found["lora_alpha"] = found["lora_alpha"] or 2.0 * options.lora
        found["lora_targets"] = found["lora_targets"] or ALL_LINEAR
    return found


def options_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options stored in a manifest."""
    extra = content.get("extra")
    kept = extra.get("options") if isinstance(extra, dict) else None
    if not isinstance(kept, dict):
        return {}
    return {k: kept[k] for k in KEPT if k in kept and (kept[k] is None or _is_plain(kept[k]))}


def _is_plain(value: Any) -> bool:
    """Return whether an option can have this value; the file may be hand-written."""
    if isinstance(value, list):
        return bool(value) and all(_is_plain(v) and not isinstance(v, list) for v in value)
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, str) and not value.startswith("-")
    )


def changes(content: Mapping[str, Any], now: Mapping[str, Any], ranks: int) -> str:
    """Describe how the kept options and the number of ranks differ from those in a manifest.

    Options that have their default are compared by the value actually used. The vocabulary is not
    compared, because it comes from the loaded model.
    """
    kept = options_in(content)
    found = [
        _shown(name, now[name]) + ("" if was is False or was is True else f" (was {_value(was)})")
        for name, was in kept.items()
        if name != "vocab" and now[name] != was and _used(name, now) != _used(name, kept)
    ]
    if content["world"] != ranks:
        found.append(f"{ranks} rank{'s' if ranks > 1 else ''} (was {content['world']})")
    return ", ".join(found)


def _used(name: str, options: Mapping[str, Any]) -> Any:
    """Return an option's value, or its effective default if that depends on other options."""
    value, steps = options[name], options.get("steps")
    optimizer = BY_NAME.get(options.get("optimizer", ""))
    if value is not None:
        return value
    if name == "betas" and optimizer is not None and "betas" in optimizer._USUAL:
        return list(optimizer._USUAL["betas"])
    if name == "warmup" and isinstance(steps, int):
        return usual_warmup(steps)
    wsd = str(options.get("schedule")).startswith("wsd")
    return usual_decay(steps) if name == "decay" and wsd and isinstance(steps, int) else None


def _shown(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{option}"
    return f"no --{option}" if value is None else f"--{option} {_value(value)}"


def _value(value: Any) -> str:
    if value is None:
        return "the default"
    return " ".join(map(_word, value if isinstance(value, list) else [value]))


# ---- in files ----


def with_config(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, preceded by the options from ``--config``.

    Raises
    ------
    ValueError
        The file is not TOML, or a value is invalid for its option.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    path = first.parse_known_args(arguments)[0].config
    if path is None:
        return list(arguments)
    try:
        import tomllib
    except ImportError:
        raise ValueError("--config needs Python 3.11 or newer, which reads TOML") from None
    try:
        values = tomllib.loads(path.read_text(**AS_NAMES))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"--config {path}: {error}") from None
    for name, value in values.items():
        if isinstance(value, dict) or name == "config":
            raise ValueError(f"--config {path}: '{name}' is no option of fsdpc train")
    return [*words_of(values), *arguments]


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return options as command-line arguments."""
    found: list[str] = []
    for name, value in values.items():
        option = name.replace("_", "-")
        turned = option.removeprefix("no-")
        if option != turned and turned in SWITCHES:
            raise ValueError(f"'{name}' is no option here: write {turned} = false (or true)")
        if option in FLAGS:
            if not isinstance(value, bool):
                raise ValueError(f"'{name}' is true or false, not {value!r}")
            found += [f"--{option}"] if value else [f"--no-{option}"] * (option in SWITCHES)
        else:
            found += [f"--{option}", *map(_word, value if isinstance(value, list) else [value])]
    return found


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else as_name(str(value))


def as_toml(options: argparse.Namespace) -> str:
    """Return the options that are set, in ``--config`` format."""
    lines = ["# As fsdpc train --config takes it; options on the command line override it.\n"]
    for name, value in sorted(vars(options).items()):
        option = name.replace("_", "-")
        if name in _OF_THE_COMMAND or value is None or (option in FLAGS and not value):
            continue
        lines.append(f"{option} = {_toml_value(plain(value))}\n")
    return "".join(lines)


def plain(value: Any) -> Any:
    """Return an option's value as numbers, text or lists that can be read back."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, range):
        return f"{value[0]}:{value[-1]}"
    if isinstance(value, OffloadPolicy):
        words = [f"{name}=disk:{as_text(value.path or '')}" for name in value.on_disk]
        words += [f"{name}=host" for name in value.on_host]
        return ",".join([*words, f"fraction={value.fraction}"])
    if isinstance(value, Path):
        return as_text(value)
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)  # a mesh


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, (int, float)):
        return repr(value).lower()  # handles true and false too
    return json.dumps(value, ensure_ascii=False)
