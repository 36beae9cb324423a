"""Compression of what a unit's ranks send to other hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: How unsharded parameters may travel; the engine's codecs.
GATHERS = ("bf16", "int8", "fp8", "int4")


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How a unit's parameters travel between hosts, by default as they are.

    Parameters
    ----------
    gather : {"bf16", "int8", "fp8", "int4"}, optional
        The form in which gathers send parameters. "bf16" rounds float32 parameters. The others
        keep a scale for each block of 256 elements of a row ("int4": 64), and 1 byte per element
        (half a byte); "fp8" is e4m3.

    Raises
    ------
    ValueError
        The form is unknown.

    Notes
    -----
    Every rank computes with what this form can express, its owner too, so results do not depend on
    the number of ranks or hosts, and a model on one host computes the same as on several. Masters,
    optimizer states and checkpoints stay exact. Parameters of one dimension, matrices with rows
    shorter than 64, and float64 stay exact in all forms but "bf16", as do larger arrays whose rows
    are not multiples of 256.

    It works on CPUs; ``fully_shard`` raises NotImplementedError if ranks compute on GPUs.
    Source: ZeRO++ (Wang et al. 2023), qwZ; LLM.int8() (Dettmers et al. 2022) for blocks of codes.

    Examples
    --------
    >>> import fsdpc
    >>> model = fsdpc.nn.Linear(64, 64)
    >>> _ = fsdpc.fully_shard(model, compression=fsdpc.Compression(gather="int8"))
    >>> model(fsdpc.ones(1, 64)).shape
    (1, 64)
    """

    gather: str | None = None

    def __post_init__(self) -> None:
        if self.gather is not None and self.gather not in GATHERS:
            raise ValueError(f"gather={self.gather!r}: choose from {', '.join(GATHERS)}")

    def __str__(self) -> str:
        """Return this compression as the value of ``--compress`` in ``fsdpc train``."""
        return f"gather={self.gather}" if self.gather else "none"

    @classmethod
    def parse(cls, text: str) -> Compression:
        """Return the compression that ``str`` wrote.

        Raises
        ------
        ValueError
            The text is not ``gather=FORM``.
        """
        fields = dict(part.partition("=")[::2] for part in text.split(","))
        if text == "none":
            return cls()
        if set(fields) - {"gather"}:
            raise ValueError(f"{text!r}: say gather=FORM, with one of {', '.join(GATHERS)}")
        return cls(**fields)


def check_compression(compression: Any) -> None:
    """Raise TypeError unless this is a Compression or None."""
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(
            f"compression must be a Compression, got {compression!r}: Compression(gather='int8')"
        )


def gather_codec(compression: Compression | None) -> str:
    """Return the engine's name of the form in which gathers send."""
    return (compression and compression.gather) or "exact"


def words(compression: Compression | None) -> str:
    """Return what ranks compare."""
    return f", {compression}" if compression is not None and compression.gather else ""
