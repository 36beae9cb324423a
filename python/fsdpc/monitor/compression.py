"""Report how much a compressed model's messages leave out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fsdpc.display import html
from fsdpc.sharding import rules

HEAD = ("unit", "operation", "form", "relative error", "at backward", "now")


@dataclass(frozen=True)
class CompressedOperation:
    """What a unit's gathers or reductions leave out.

    Parameters
    ----------
    unit : str
    operation : "gather" or "reduce"
    form : str
        The form of its numbers; see :class:`fsdpc.Compression`.
    error : float or None
        Of all ranks' messages in the last measured backward: the root of the sum of squares of what
        they left out, over that of what was to be sent. None before the first measurement.
    backwards : int or None
        How many backwards came before that one.
    exact : bool
        The error exceeds the budget, and numbers are sent exactly until the next measured backward.

    Examples
    --------
    >>> from fsdpc.monitor.compression import CompressedOperation
    >>> CompressedOperation("head", "reduce", "int8", 0.0071, 50, False).cells()
    ('head', 'reduce', 'int8', '0.71 %', '50', 'int8')
    """

    unit: str
    operation: str
    form: str
    error: float | None
    backwards: int | None
    exact: bool

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table whose headings are ``HEAD``."""
        measured = ("-", "-") if self.error is None else (f"{self.error:.2%}", str(self.backwards))
        error = measured[0].replace("%", " %")
        now = "exact" if self.exact else self.form
        return self.unit, self.operation, self.form, error, measured[1], now


@dataclass(frozen=True)
class CompressionReport:
    """The result of :func:`compression_report`: one row per unit and operation.

    Parameters
    ----------
    operations : tuple of CompressedOperation

    Examples
    --------
    >>> from fsdpc.monitor.compression import CompressionReport
    >>> print(CompressionReport(()))
    no unit is compressed
    """

    operations: tuple[CompressedOperation, ...]

    def metrics(self) -> dict[str, float]:
        """Return the largest measured error of each operation, by the name of a metric.

        Examples
        --------
        >>> from fsdpc.monitor.compression import CompressedOperation, CompressionReport
        >>> row = CompressedOperation("head", "gather", "int8", 0.5, 0, False)
        >>> CompressionReport((row,)).metrics()
        {'compression_error/gather': 0.5}
        """
        found: dict[str, float] = {}
        for row in self.operations:
            name = f"compression_error/{row.operation}"
            if row.error is not None and not math.isnan(found.get(name, 0.0)):
                found[name] = max(row.error, found.get(name, 0.0))
        return found

    def __str__(self) -> str:
        """Return the rows as a table of text."""
        if not self.operations:
            return "no unit is compressed"
        rows = [HEAD, *(row.cells() for row in self.operations)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
        return "\n".join(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        rows = [row.cells() for row in self.operations]
        return html.fields("compression", {"units": len({row[0] for row in rows})}, HEAD, rows)


def compression_report(model: Any) -> CompressionReport:
    """Return what the messages of a model's units left out in the last measured backward.

    Parameters
    ----------
    model : module
        Native or torch's, with units that were given a :class:`Compression`.

    Returns
    -------
    CompressionReport
        The same on all ranks. ``Compression(every=)`` says which backwards are measured; a
        reduction that stays on one host sends no codes and is never measured.

    Examples
    --------
    >>> import fsdpc
    >>> model = fsdpc.nn.Linear(64, 64, bias=False)
    >>> _ = fsdpc.fully_shard(model, compression=fsdpc.Compression(gather="bf16"))
    >>> model(fsdpc.ones(1, 64)).sum().backward()
    >>> fsdpc.compression_report(model).operations[0].form
    'bf16'
    """
    found = []
    for unit in rules.units_of(model):
        forms = (("gather", unit.gather_codec), ("reduce", unit.reduce_codec))
        for (operation, form), measured in zip(forms, unit.codec_errors, strict=True):
            if form != "exact":
                row = measured or (None, None, False)
                found.append(CompressedOperation(unit.name, operation, form, *row))
    return CompressionReport(tuple(found))
