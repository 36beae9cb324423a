"""Compression of what a unit's ranks send to other hosts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

#: The engine's forms of numbers between hosts, besides "exact".
FORMS = ("bf16", "fp16", "int8", "fp8", "int4")
AXES = ("gather", "reduce")
EVERY = 50  # backwards from one measured one to the next


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """How replicas sum the gradients of matrices: as products of two narrow ones.

    Parameters
    ----------
    rank : int, default 8
        Columns of both factors. A matrix of (rows, cols) sends ``rank * (rows + cols)`` float32
        numbers. Parameters of three or more dimensions count as (rows, all others).
    start_step : int, default 1000
        The first so many sums of a unit, usually one per step, are exact.
    warm_start : bool, default True
        Begin with the previous step's factor instead of a random one.
    error_feedback : bool, default True
        Add what a sum leaves out to this replica's next gradient.
    min_compression_rate : float, default 2
        Matrices whose factors are not this many times smaller stay exact, as do vectors.
    seed : int, default 0
        Of random factors. Must be equal on all ranks.

    Raises
    ------
    ValueError
        A number is out of range.

    Notes
    -----
    It applies to meshes with replicas, on CPUs: ``fully_shard`` raises NotImplementedError for
    other meshes, GPUs, float64 and deterministic mode. If parameters are sharded too, each rank's
    rows are a matrix of their own.

    A rank keeps a float32 number per element of its matrices. Checkpoints do not contain it: a
    resumed run begins without errors, with random factors, and counts ``start_step`` again. After
    a NaN or an infinity, which all elements of the matrix become, its errors begin at zero.
    Source: PowerSGD (Vogels et al. 2019). ``powerSGD_hook`` of torch has the same rules.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.Compression(replicas=fsdpc.PowerSGD(rank=4, start_step=100)).replicas.rank
    4
    """

    rank: int = 8
    start_step: int = 1000
    warm_start: bool = True
    error_feedback: bool = True
    min_compression_rate: float = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (("rank", 1, 2**15), ("start_step", 0, 2**63), ("seed", 0, 2**63)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value < most:
                raise ValueError(f"PowerSGD({name}={value!r}): give an integer of at least {least}")
        if not 0 < self.min_compression_rate < float("inf"):
            raise ValueError(
                f"PowerSGD(min_compression_rate={self.min_compression_rate!r}): give a number "
                "above 0, such as 2"
            )

    def __str__(self) -> str:
        """Return this as in ``--compress replicas=``, such as ``powersgd8:start_step=10``."""
        options = [f":{f.name}={getattr(self, f.name)}" for f in fields(self)[1:]
                   if getattr(self, f.name) != f.default]  # fmt: skip
        return f"powersgd{self.rank}{''.join(options)}"

    @classmethod
    def parse(cls, text: str) -> PowerSGD:
        """Return the options that ``str`` wrote.

        Raises
        ------
        ValueError
            The text is not like ``powersgd8:start_step=10``.
        """
        name, *options = text.split(":")
        digits = name.removeprefix("powersgd")
        known = {f.name: type(f.default) for f in fields(cls)[1:]}
        given = dict(option.partition("=")[::2] for option in options)
        if digits == name or not digits.isdigit() or set(given) - set(known):
            raise ValueError(
                f"replicas={text!r}: write powersgd and a rank, such as powersgd8, then options "
                f"such as :start_step=10; they are {', '.join(known)}"
            )
        read = {bool: {"True": True, "False": False}.__getitem__, int: _number}
        try:
            values = {key: read[known[key]](value) for key, value in given.items()}
        except (KeyError, ValueError):
            raise ValueError(
                f"replicas={text!r}: its options are numbers, True or False"
            ) from None
        return cls(rank=int(digits), **values)  # type: ignore[arg-type]


def _number(text: str) -> float:
    return int(text) if text.isdigit() else float(text)


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
        send exact numbers until the next measured backward. Rank 0 says so once.
    every : int, default 50
        How many backwards pass from one measured one to the next; see
        :func:`fsdpc.compression_report`. 0: none is measured.
    replicas : PowerSGD, optional
        How replicas sum matrices, also within a host; ``reduce`` is then for all other sums.

    Raises
    ------
    TypeError
        ``replicas`` is not a PowerSGD.
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
    replicas: PowerSGD | None = None

    def __post_init__(self) -> None:
        if self.replicas is not None and not isinstance(self.replicas, PowerSGD):
            raise TypeError(f"replicas must be a PowerSGD, got {self.replicas!r}: PowerSGD(rank=8)")
        for name in AXES:
            form = getattr(self, name)
            if form is not None and form not in FORMS:
                raise ValueError(f"{name}={form!r}: choose from {', '.join(FORMS)}")
        if self.error_feedback and self.reduce is None:
            raise ValueError("error_feedback=True keeps what reductions lose: give reduce a form")
        if self.error_feedback and self.replicas is not None:
            raise ValueError(
                "error_feedback=True of codecs keeps what exact sums of all gradients lose, and "
                "replicas= sums matrices otherwise: leave one of them out"
            )
        if self.every != int(self.every) or not 0 <= self.every < 2**31:
            raise ValueError(f"every={self.every!r} must be a number of backwards, or 0")
        if self.budget is not None and not (0 < self.budget < 1 and self.every):
            raise ValueError(
                f"budget={self.budget!r} with every={self.every}: a budget is a relative error "
                "in (0, 1), and takes measured backwards"
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
            The text is not like ``gather=FORM,reduce=FORM,replicas=powersgd8``.
        """
        if text == "none":
            return cls()
        given: dict[str, Any] = dict(part.partition("=")[::2] for part in text.split(","))
        yes = {"yes": True, "no": False}.__getitem__
        read: dict[str, Any] = {"budget": float, "every": int, "error_feedback": yes}
        try:
            for name in read.keys() & given.keys():
                given[name] = read[name](given[name])
            if set(given) - {f.name for f in fields(cls)}:
                raise KeyError
        except (ValueError, KeyError):
            raise ValueError(f"{text!r}: say gather=FORM, reduce=FORM or both, with a comma; "
                             f"FORM is one of {', '.join(FORMS)}; then error_feedback=yes, "
                             "budget=NUMBER or every=BACKWARDS if you like; or replicas=powersgd8 "
                             "for replicas") from None  # fmt: skip
        if "replicas" in given:
            given["replicas"] = PowerSGD.parse(given["replicas"])
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
    replicas = given.replicas and low_rank(given.replicas)
    return {**forms, "error_feedback": given.error_feedback, "low_rank": replicas}


def unit_options(compression: Compression | None) -> dict[str, Any]:
    """Return a unit's options."""
    given = compression or Compression()
    compressed = given.gather or given.reduce
    return {
        **codecs(compression),
        "error_every": int(given.every) if compressed else 0,
        "error_budget": given.budget or 0.0,
    }


def low_rank(replicas: PowerSGD) -> tuple[int, int, bool, bool, float, int]:
    """Return the options as the engine takes them."""
    return (replicas.rank, replicas.start_step, replicas.warm_start, replicas.error_feedback,
            float(replicas.min_compression_rate), replicas.seed)  # fmt: skip


def words(compression: Compression | None) -> str:
    """Return what ranks compare."""
    return f", {compression}" if compression not in (None, Compression()) else ""
