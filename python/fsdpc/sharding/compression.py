"""Compression of what a unit's ranks send to other hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: The engine's forms of numbers between hosts, besides "exact".
FORMS = ("bf16", "fp16", "int8", "fp8", "int4")
FIELDS = ("gather", "reduce")


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How a unit's parameters and gradients travel between hosts, by default as they are.

    Parameters
    ----------
    gather : {"bf16", "fp16", "int8", "fp8", "int4"}, optional
        The form in which gathers send parameters. "bf16" and "fp16" round float32 ones. The others
        keep a scale for each block of 256 elements of a row ("int4": 64), and 1 byte per element
        (half a byte); "fp8" is e4m3.
    reduce : {"bf16", "fp16", "int8", "fp8", "int4"}, optional
        The form in which reductions send a host's sums of gradients, whose blocks may cross rows.

    Raises
    ------
    ValueError
        A form is unknown.

    Notes
    -----
    Gathers: every rank computes with what the form can express, its owner too, so results do not
    depend on the number of ranks or hosts, and a model on one host computes the same as on several.
    Masters, optimizer states and checkpoints stay exact. Parameters of one dimension, matrices with
    rows shorter than 64, and float64 stay exact in all forms with blocks, as do larger arrays whose
    rows are not multiples of 256.

    Reductions: the ranks of a host sum exactly. The sums are encoded once, and their receiver adds
    in float32. Results depend on the number of hosts. A NaN or an infinity stays one.

    It works on CPUs; ``fully_shard`` raises NotImplementedError if ranks compute on GPUs.
    Source: ZeRO++ (Wang et al. 2023), qwZ and qgZ.

    Examples
    --------
    >>> import fsdpc
    >>> model = fsdpc.nn.Linear(64, 64)
    >>> compression = fsdpc.Compression(gather="int8", reduce="int8")
    >>> _ = fsdpc.fully_shard(model, compression=compression)
    >>> model(fsdpc.ones(1, 64)).shape
    (1, 64)
    """

    gather: str | None = None
    reduce: str | None = None

    def __post_init__(self) -> None:
        for name in FIELDS:
            form = getattr(self, name)
            if form is not None and form not in FORMS:
                raise ValueError(f"{name}={form!r}: choose from {', '.join(FORMS)}")

    def __str__(self) -> str:
        """Return this compression as the value of ``--compress`` in ``fsdpc train``."""
        forms = [f"{name}={form}" for name in FIELDS if (form := getattr(self, name))]
        return ",".join(forms) or "none"

    @classmethod
    def parse(cls, text: str) -> Compression:
        """Return the compression that ``str`` wrote.

        Raises
        ------
        ValueError
            The text is not like ``gather=FORM,reduce=FORM``.
        """
        fields = dict(part.partition("=")[::2] for part in text.split(","))
        if text == "none":
            return cls()
        if set(fields) - set(FIELDS):
            raise ValueError(f"{text!r}: say gather=FORM, reduce=FORM or both, with a comma; "
                             f"FORM is one of {', '.join(FORMS)}")  # fmt: skip
        return cls(**fields)


def check_compression(compression: Any) -> None:
    """Raise TypeError unless this is a Compression or None."""
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(
            f"compression must be a Compression, got {compression!r}: Compression(gather='int8')"
        )


def codecs(compression: Compression | None) -> dict[str, str]:
    """Return a unit's forms by the engine's names."""
    given = compression or Compression()
    return {f"{name}_codec": getattr(given, name) or "exact" for name in FIELDS}


def words(compression: Compression | None) -> str:
    """Return what ranks compare."""
    return f", {compression}" if compression not in (None, Compression()) else ""
