"""Whole training steps as one launch on a GPU."""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Any

from fsdpc import _core
from fsdpc.optim.optimizer import Optimizer
from fsdpc.sharding.fsdp_module import FSDPModule
from fsdpc.sharding.rules import units_of
from fsdpc.tensors import device


class GraphStep:
    """A training step that is captured in a ``with`` block, and replayed after it.

    Made by :func:`graph_step`. Dropping it gives back the memory that the graph holds.

    Examples
    --------
    >>> import fsdpc
    >>> with fsdpc.graph_step(model, optimizer) as graph:  # doctest: +SKIP
    ...     loss = model(x, y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> graph.replay()                                     # doctest: +SKIP
    """

    def __init__(self, model: FSDPModule, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._core: _core.StepGraph | None = None

    def __enter__(self) -> GraphStep:
        if self._core is not None:
            raise RuntimeError("this step was captured already: call graph_step() for another one")
        self._optimizer._refuse_late_sharding()
        self._optimizer._set_options()
        gc.collect()  # else streams and pinned memory of a dropped model might go inside
        self._core = _core.StepGraph(units_of(self._model), self._optimizer._core)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._core is not None
        if error is None:
            self._core.end()
        else:
            self._core.abandon(f"{kind.__name__ if kind else ''}: {error}")

    def replay(self) -> None:
        """Make the step once more, on what its tensors hold now.

        Options of the optimizer, such as a rate that a scheduler has set, and its step counts are
        those of the step that it is by then. Waits for the other ranks to begin the same replay,
        and not for the GPU; reading a loss does.

        Raises
        ------
        RuntimeError
            The step was not captured, or a replay would not be the same work as it, on any rank:

            - gradients are pending where there were none when it was captured, or the other way
              round;
            - a unit is held by ``unshard()``, or was given memory of its own since (``hold()``);
            - weights were written (``load_state_dict``), or the optimizer's step counts;
            - settings of a unit, ``requires_grad``, parameter groups, amsgrad or the kind of
              momentum are others;
            - the last step was not a whole one, or another step is being captured.

            Nothing has happened then, and steps without the graph go on.
        NotImplementedError
            A piece of the model was handed out to be written (``p.local``), on any rank. The same
            holds.
        MismatchError
            Another rank did not replay this step. The run is over then, as it is after the next
            two.
        PeerError, TimeoutError
            Another rank failed, or did not begin the replay in time.
        """
        if self._core is None:
            raise RuntimeError("replay() of a step that was not captured: run it in the with block")
        self._optimizer._set_options()
        self._core.replay()


def graph_step(model: Any, optimizer: Optimizer) -> GraphStep:
    """Capture a training step as a graph of the GPU, which launches all of it at once.

    Parameters
    ----------
    model : Module
        Sharded by :func:`fsdpc.fully_shard`; the outermost module. It has made a step or two.
    optimizer : Optimizer
        Over parameters of this model alone.

    Returns
    -------
    GraphStep
        To be entered by ``with``. The block makes one step as ever, from the forward to
        ``optimizer.step()`` and ``optimizer.zero_grad()``; it is computed when the block ends, as
        one launch, and :meth:`GraphStep.replay` makes further ones.

    Raises
    ------
    NotImplementedError
        The device is not ``"cuda"``, or the model is in deterministic mode. A piece of the model
        was handed out to be written (``p.local``), or the optimizer has trainable parameters
        without a unit. The block makes random tensors or uses a loss scaler.
    RuntimeError
        No whole step was made before, or the block cannot be captured. It reads a value of the GPU
        (``float(loss)``), makes tensors from values of the host, exchanges tensors with another
        library (DLPack), or has other shapes than the steps before it. Or it runs another model or
        optimizer, does not end as it began (gradients pending or not), sets the random seed, or
        holds another ``graph_step``. The step has not happened then. Weights and step counts are
        as before the block, pending gradients are dropped if the block zeroed them, and tensors
        made inside hold nothing. Steps without a graph go on.
    TypeError
        The model is not sharded, or the optimizer is none of fsdpc's.

    Notes
    -----
    Entering, leaving and replaying are collective; what fails on one rank is raised on all.

    A replay repeats the same work on the same memory, bitwise equal to the step that it stands for.
    So a new batch goes into the tensors that the block read, by ``copy_``, and a loss or norm that
    the block made holds the last replay's value. Dropout draws what it would in that step. What
    Python does in the block is not repeated: schedulers, counters and data loading belong outside.
    Memory that lived when the block began or was taken in it serves the graph alone until that is
    dropped (``other_bytes`` of :func:`memory_stats`). So a graph takes about as much again as a
    step without it. Memory of other libraries that tensors stood on when the block began (DLPack)
    goes back to them when the graph does.

    Examples
    --------
    ::

        x, y = fsdpc.tensor(first_x), fsdpc.tensor(first_y)
        for _ in range(2):
            train_step(x, y)
        with fsdpc.graph_step(model, optimizer) as step:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for new_x, new_y in batches:
            x.copy_(fsdpc.tensor(new_x))
            y.copy_(fsdpc.tensor(new_y))
            step.replay()
            scheduler.step()

    Examples
    --------
    >>> import fsdpc
    >>> with fsdpc.graph_step(model, optimizer) as graph:  # doctest: +SKIP
    ...     loss = model(x, y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> graph.replay()                                     # doctest: +SKIP
    """
    if device.get_default_device() != "cuda":
        raise NotImplementedError(
            f"graph_step() needs device 'cuda', and this process computes on "
            f"'{device.get_default_device()}'"
        )
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"graph_step() takes a sharded model, got {type(model).__name__}: call fully_shard() "
            "on it first"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"graph_step() takes an optimizer of fsdpc.optim, got {type(optimizer).__name__}"
        )
    apart = sum(p._unit is None and p.requires_grad for p in optimizer._params())
    if apart:
        raise NotImplementedError(
            f"graph_step() takes steps of sharded parameters, and {apart} trainable parameters of "
            "the optimizer belong to no unit: leave them to an optimizer outside, or freeze them"
        )
    return GraphStep(model, optimizer)
