"""Compression of what a unit's ranks send to other hosts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

#: The engine's forms of numbers between hosts, besides "exact".
FORMS = ("bf16", "fp16", "int8", "fp8", "int4")
AXES = ("gather", "reduce")
EVERY = 50  # steps between two measured ones


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
    error_feedback : bool, default False
        Keep what a rank's sums lose in float32, and add it to its next sums. With n hosts, a rank
        keeps n - 1 times the elements of its shard; on replicas, its part of the sums. Checkpoints
        with an optimizer contain it.
    budget : float, optional
        The largest relative error, in (0, 1). Gathers or reductions of a unit with a larger one
        send exact numbers until the next measured step. Rank 0 says so once.
    every : int, default 50
        How many optimizer steps pass from one measured step to the next; see
        :func:`fsdpc.compression_report`. 0: none is measured.

    Raises
    ------
    ValueError
        A form is unknown, or a number is out of range.

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
    error_feedback: bool = False
    budget: float | None = None
    every: int = EVERY

    def __post_init__(self) -> None:
        for name in AXES:
            form = getattr(self, name)
            if form is not None and form not in FORMS:
                raise ValueError(f"{name}={form!r}: choose from {', '.join(FORMS)}")
        if self.error_feedback and self.reduce is None:
            raise ValueError("error_feedback=True keeps what reductions lose: give reduce a form")
        if self.every != int(self.every) or not 0 <= self.every < 2**31:
            raise ValueError(f"every={self.every!r} must be a number of steps, or 0")
        if self.budget is not None and not (0 < self.budget < 1 and self.every):
            raise ValueError(
                f"budget={self.budget!r} with every={self.every}: a budget is a relative error "
                "in (0, 1), and takes measured steps"
            )

    def __str__(self) -> str:
        """Return this compression as the value of ``--compress`` in ``fsdpc train``."""
        given = [
            f"{f.name}={'yes' if value is True else value}"
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default
        ]
        return ",".join(given) or "none"

    @classmethod
    def parse(cls, text: str) -> Compression:
        """Return the compression that ``str`` wrote.

        Raises
        ------
        ValueError
            The text is not like ``gather=FORM,reduce=FORM``.
        """
        if text == "none":
            return cls()
        given: dict[str, Any] = dict(part.partition("=")[::2] for part in text.split(","))
        numbers: dict[str, Any] = {"budget": float, "every": int}
        try:
            for name in numbers.keys() & given.keys():
                given[name] = numbers[name](given[name])
            if "error_feedback" in given:
                given["error_feedback"] = {"yes": True, "no": False}[given["error_feedback"]]
            if set(given) - {f.name for f in fields(cls)}:
                raise KeyError
        except (ValueError, KeyError):
            raise ValueError(f"{text!r}: say gather=FORM, reduce=FORM or both, with a comma; "
                             f"FORM is one of {', '.join(FORMS)}; then error_feedback=yes, "
                             "budget=NUMBER or every=STEPS if you like") from None  # fmt: skip
        return cls(**given)


def check_compression(compression: Any) -> None:
    """Raise TypeError unless this is a Compression or None."""
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(
            f"compression must be a Compression, got {compression!r}: Compression(gather='int8')"
        )


def codecs(compression: Compression | None) -> dict[str, Any]:
    """Return what decides about a unit's memory, by the engine's names."""
    given = compression or Compression()
    forms = {f"{name}_codec": getattr(given, name) or "exact" for name in AXES}
    return {**forms, "error_feedback": given.error_feedback}


def unit_options(compression: Compression | None) -> dict[str, Any]:
    """Return a unit's options."""
    given = compression or Compression()
    compressed = given.gather or given.reduce
    return {
        **codecs(compression),
        "error_every": int(given.every) if compressed else 0,
        "error_budget": given.budget or 0.0,
    }


def words(compression: Compression | None) -> str:
    """Return what ranks compare."""
    return f", {compression}" if compression not in (None, Compression()) else ""
