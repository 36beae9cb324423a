"""Write a run's metrics as JSON lines or CSV, or to TensorBoard, W&B or MLflow.

Only rank 0 writes. On other ranks a logger does nothing, so loops need not check the rank. Each
call passes its record to the kernel in one write before it returns, so nothing is lost if the
process is killed later. (A power failure may lose records, because no call waits for the disk.)
Files are appended to, so a resumed run continues in the same file.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fsdpc import distributed
from fsdpc.display.text import as_text

Value = float | int | str | None


class Logger:
    """Base class of all loggers; a subclass overrides :meth:`write`.

    Examples
    --------
    >>> from fsdpc import loggers
    >>> class Printed(loggers.Logger):
    ...     def write(self, step, values):
    ...         print(step, values)
    >>> Printed().write(1, {"loss": 2.5})
    1 {'loss': 2.5}
    """

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log a step's values on rank 0; on other ranks, return immediately.

        Parameters
        ----------
        step : int
        values : mapping
            Numbers, text or one-element tensors by name; tensors' values are read.
        """
        if _writes():
            self.write(int(step), {name: _plain(value) for name, value in values.items()})

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write values as plain numbers or text; called only on rank 0."""
        raise NotImplementedError("a logger defines write(step, values)")

    def close(self) -> None:
        """Close the logger; everything logged has already been written."""

    def __enter__(self) -> Logger:
        """Return the logger, which is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class JsonLines(Logger):
    """Writes one JSON object per line: ``step``, wall-clock ``time`` and values (NaN as null).

    Parameters
    ----------
    path : path
        The file, created with its folders by the first call.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from fsdpc import loggers
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name, "run.jsonl")
    >>> logger = loggers.JsonLines(path)
    >>> logger.write(1, {"loss": 2.5})
    >>> logger.close()
    >>> "loss" in path.read_text()
    True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = _Appended(path)

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write a line."""
        finite = {name: None if _is_odd(value) else value for name, value in values.items()}
        line = json.dumps({"step": step, "time": time.time(), **finite}, allow_nan=False)
        self._file.append(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Csv(Logger):
    """Writes a CSV table with one column per name; a new name adds a column.

    Parameters
    ----------
    path : path

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from fsdpc import loggers
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name, "run.csv")
    >>> logger = loggers.Csv(path)
    >>> logger.write(1, {"loss": 2.5})
    >>> logger.close()
    >>> path.read_text().splitlines()[0]
    'step,loss'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self._file = _Appended(path)
        self._names: list[str] | None = None

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write a line; if there are new names, rewrite the file first."""
        row: dict[str, Any] = {"step": step, **values}
        if self._names is None:
            self._names = self._found()
        if new := [name for name in row if name not in self._names]:
            self._widen(self._names + new)
        self._file.append(_csv_line(row.get(name, "") for name in self._names))

    def _found(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])

    def _widen(self, names: list[str]) -> None:
        """Write all lines, with the new names, to a second file, which then replaces the first."""
        rows: list[dict[str, str]] = []
        if self._names:
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        self._file.close()
        wider = _Appended(self.path.with_name(f".{self.path.name}.wider"), fresh=True)
        wider.append(_csv_line(names))
        for row in rows:
            wider.append(_csv_line(row.get(name) or "" for name in names))
        wider.close()
        wider.path.replace(self.path)
        self._names = names

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard(Logger):
    """Writes scalars to an event file, using the ``tensorboard`` package.

    Parameters
    ----------
    folder : path
        A folder, to which each run adds a file.

    Raises
    ------
    ImportError
        The package is not installed; only rank 0 needs it.

    Examples
    --------
    >>> from fsdpc import loggers
    >>> logger = loggers.TensorBoard("runs/one")  # doctest: +SKIP
    >>> logger.write(1, {"loss": 2.5})  # doctest: +SKIP
    >>> logger.close()  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        self._writer: Any = None
        if not _writes():
            return
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ImportError(
                "logging to TensorBoard needs its package: pip install tensorboard, or log to "
                "jsonl:FILE"
            ) from error
        if as_text(self._folder) != self._folder:  # TensorBoard assumes UTF-8 names
            raise ValueError(
                f"TensorBoard cannot write to {as_text(self._folder)!r} under this locale: set "
                "LC_ALL=C.UTF-8, or name a folder in ASCII"
            )
        self._make, self._event, self._summary = EventFileWriter, event_pb2.Event, summary_pb2

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write an event that contains all numeric values."""
        if self._writer is None:
            self._writer = self._make(self._folder)
        numbers = [
            self._summary.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if isinstance(value, (int, float))
        ]
        summary = self._summary.Summary(value=numbers)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()  # its own thread writes

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Wandb(Logger):
    """Logs to a run in Weights & Biases, using the ``wandb`` package.

    Parameters
    ----------
    project : str, default "fsdpc"
    **options
        Options of ``wandb.init``, such as ``mode="offline"``, ``dir=``, ``config=``, ``id=`` and
        ``resume=``.

    Raises
    ------
    ImportError
        The package is not installed; only rank 0 needs it.

    Notes
    -----
    W&B's own process writes from a queue that is lost if it is killed: also log to a file.

    Examples
    --------
    >>> from fsdpc import loggers
    >>> logger = loggers.Wandb("fsdpc", mode="offline")  # doctest: +SKIP
    >>> logger.write(1, {"loss": 2.5})  # doctest: +SKIP
    >>> logger.close()  # doctest: +SKIP
    """

    def __init__(self, project: str = "fsdpc", **options: Any) -> None:
        self._run: Any = None
        if not _writes():
            return
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                "logging to W&B needs its package: pip install wandb, or log to jsonl:FILE"
            ) from error
        self._run = wandb.init(project=project, **options)

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Log to the run."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflow(Logger):
    """Logs to a run in MLflow, using the ``mlflow-skinny`` or ``mlflow`` package.

    Parameters
    ----------
    where : path or str
        A folder, or a server's address, such as ``http://host:5000``.
    experiment : str, default "fsdpc"
        Created if it does not exist.
    run : str, optional
        ID of a run to continue; by default ``MLFLOW_RUN_ID``, otherwise a new run.

    Attributes
    ----------
    run : str
        The run's ID; empty on ranks that do not write.

    Raises
    ------
    ImportError
        The package is not installed; only rank 0 needs it.

    Notes
    -----
    Text is not logged. Each call writes to the folder, or waits for the server, before it returns.
    A killed process therefore loses nothing, but the run's status remains RUNNING. MLflow writes to
    folders only if ``MLFLOW_ALLOW_FILE_STORE`` is true; this class sets it unless you have.
    MLflow's package sends usage data to its developers unless ``MLFLOW_DISABLE_TELEMETRY`` is true.

    Examples
    --------
    >>> from fsdpc import loggers
    >>> logger = loggers.MLflow("mlruns")  # doctest: +SKIP
    >>> logger.write(1, {"loss": 2.5})  # doctest: +SKIP
    >>> logger.close()  # doctest: +SKIP
    """

    def __init__(
        self, where: str | os.PathLike[str], experiment: str = "fsdpc", run: str | None = None
    ) -> None:
        self.run: str = ""
        if not _writes():
            return
        uri = os.fspath(where)
        if "://" not in uri:
            uri = Path(uri).absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ImportError as error:
            raise ImportError(
                "logging to MLflow needs its package: pip install mlflow-skinny, or log to "
                "jsonl:FILE"
            ) from error
        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        self.run = run or os.environ.get("MLFLOW_RUN_ID", "")
        if self.run:
            self._client.update_run(self.run, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        self.run = self._client.create_run(number).info.run_id

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Log all numeric values to the run."""
        now = time.time_ns() // 1_000_000
        numbers = [
            self._metric(name, float(value), now, step)
            for name, value in values.items()
            if isinstance(value, (int, float))
        ]
        self._client.log_batch(self.run, metrics=numbers)

    def close(self) -> None:
        """Mark the run as finished."""
        if self.run:
            self._client.set_terminated(self.run)
            self.run = ""


class Loggers(Logger):
    """Combine several loggers into one.

    Parameters
    ----------
    loggers : iterable of Logger

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from fsdpc import loggers
    >>> folder = tempfile.TemporaryDirectory()
    >>> paths = [Path(folder.name, name) for name in ("run.csv", "run.jsonl")]
    >>> both = loggers.Loggers([loggers.Csv(paths[0]), loggers.JsonLines(paths[1])])
    >>> both.write(1, {"loss": 2.5})
    >>> both.close()
    >>> [path.exists() for path in paths]
    [True, True]
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self.loggers: list[Logger] = list(loggers)

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write to each logger."""
        for logger in self.loggers:
            logger.write(step, values)

    def close(self) -> None:
        """Close each logger."""
        for logger in self.loggers:
            logger.close()


def open_loggers(text: str) -> Loggers:
    """Create loggers from the text of a command-line option.

    Parameters
    ----------
    text : str
        ``jsonl:FILE``, ``csv:FILE``, ``tensorboard:FOLDER``, ``mlflow:FOLDER`` or ``mlflow:URL``,
        and ``wandb`` or ``wandb:PROJECT``, separated by commas.

    Raises
    ------
    ValueError
        A kind is unknown, or a file name is missing.

    Examples
    --------
    >>> [type(each).__name__ for each in open_loggers("jsonl:run.jsonl,csv:run.csv").loggers]
    ['JsonLines', 'Csv']
    """
    words = read_words(text)
    return Loggers(_KINDS[kind](where) if where else Wandb() for kind, where in words)


def read_words(text: str) -> list[tuple[str, str]]:
    """Parse each logger's kind and destination; raises the same errors as `open_loggers`.

    Examples
    --------
    >>> from fsdpc import loggers
    >>> loggers.read_words("jsonl:run.jsonl,csv:run.csv")
    [('jsonl', 'run.jsonl'), ('csv', 'run.csv')]
    """
    found = []
    for part in text.split(","):
        kind, _, where = part.strip().partition(":")
        if kind not in _KINDS:
            raise ValueError(f"'{part}': one of {', '.join(_KINDS)}, as in jsonl:run.jsonl")
        if not where and kind != "wandb":
            raise ValueError(f"'{part}': say where to, as in {kind}:PATH")
        found.append((kind, where))
    return found


_KINDS: dict[str, Callable[[str], Logger]] = {
    "jsonl": JsonLines, "csv": Csv, "tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow
}  # fmt: skip


def _writes() -> bool:
    return not distributed.is_initialized() or distributed.rank() == 0


def _plain(value: Any) -> Value:
    if value is None or isinstance(value, (str, int, float)):
        return value
    return float(value)  # a tensor, or a NumPy scalar


def _is_odd(value: Value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class _Appended:
    """A file to which each record is appended in one write; the first record creates the file."""

    def __init__(self, path: str | os.PathLike[str], fresh: bool = False) -> None:
        self.path, self._fresh, self._fd = Path(path), fresh, -1

    def append(self, record: bytes) -> None:
        if self._fd < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.path, flags | os.O_TRUNC * self._fresh, 0o666)
            length = os.fstat(self._fd).st_size
            if length and os.pread(self._fd, 1, length - 1) != b"\n":
                record = b"\n" + record  # a full disk cut off the previous line
        while record:
            record = record[os.write(self._fd, record) :]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _csv_line(values: Iterable[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()
