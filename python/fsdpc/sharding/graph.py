"""Launch whole training steps as one GPU graph."""

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
    """A training step that a ``with`` block captures and :meth:`replay` runs again.

    Create it with :func:`graph_step`. Dropping the object frees the graph's memory.

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
        gc.collect()  # otherwise a dropped model's streams and pinned memory might be captured
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
        """Run the step again on the current contents of its tensors.

        The replay uses the current optimizer options, such as a scheduled learning rate, and
        advances the step counts. It waits for the other ranks to begin the same replay, but only
        reading the loss waits for the GPU.

        Raises
        ------
        RuntimeError
            The step was not captured, or a replay would do different work, on any rank:

            - gradients are pending although there were none at capture, or vice versa;
            - ``unshard()`` keeps a unit gathered, or ``hold()`` has since given it separate memory;
            - weights were written (``load_state_dict``), or the optimizer's step counts;
            - a unit's settings, ``requires_grad``, parameter groups, amsgrad or the kind of
              momentum changed;
            - the last step was incomplete, or another step is being captured.

            Nothing has run in this case, and training can continue without the graph.
        NotImplementedError
            The caller, on any rank, got a piece of the model for writing (``p.local``). Again
            nothing was done.
        MismatchError
            Another rank did not replay this step. This ends the run, as do the next two errors.
        PeerError, TimeoutError
            Another rank failed, or did not begin the replay in time.
        """
        if self._core is None:
            raise RuntimeError("replay() of a step that was not captured: run it in the with block")
        self._optimizer._set_options()
        self._core.replay()


def graph_step(model: Any, optimizer: Optimizer) -> GraphStep:
    """Capture a training step as a GPU graph that a single call launches.

    Parameters
    ----------
    model : Module
        The outermost module, sharded by :func:`fsdpc.fully_shard`. It must have run at least one
        step.
    optimizer : Optimizer
        An optimizer over only this model's parameters.

    Returns
    -------
    GraphStep
        Enter it with ``with``. The block makes one normal step, from the forward to
        ``optimizer.step()`` and ``optimizer.zero_grad()``. The step runs as one launch when the
        block ends, and :meth:`GraphStep.replay` runs subsequent steps.

    Raises
    ------
    NotImplementedError
        The device is not ``"cuda"``, or the model is in deterministic mode. A piece of the model
        was handed out for writing (``p.local``), or the optimizer has trainable parameters without
        a unit. Or the block creates random tensors or uses a loss scaler.
    RuntimeError
        No complete step was run before, or the block cannot be captured. It reads a value from the
        GPU (``float(loss)``), creates tensors from host values, exchanges tensors with another
        library (DLPack), or uses different shapes than earlier steps. Or it runs another model or
        optimizer, does not end as it began (gradients pending or not), sets the random seed, or
        contains another ``graph_step``. In this case the step was not taken. Weights and step
        counts are as before the block, pending gradients are dropped if the block zeroed them, and
        tensors created inside have undefined contents. Steps without a graph can continue.
    TypeError
        The model is not sharded, or the optimizer is not one of fsdpc's.

    Notes
    -----
    Entering, leaving and replaying are collective; a failure on one rank is raised on all.

    A replay does the same work on the same memory, and its result is bitwise equal to that of the
    step it replaces. Use ``copy_`` to copy each new batch into the tensors that the block read; a
    loss or norm that the block created contains the last replay's value. Dropout draws new random
    numbers in each replay. Python code in the block does not run again, so schedulers, counters and
    data loading belong outside. Until the graph is dropped, it reserves the memory that existed
    when the block began or that the block allocated (``other_bytes`` of :func:`memory_stats`). A
    graph therefore needs about as much extra memory as an ordinary step. If a tensor that existed
    when the block began uses another library's memory (DLPack), the library gets it back when the
    graph is dropped.

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
    moving = [m for m in model.modules() if getattr(m, "_fsdpc_saved", None) is not None]
    if moving:
        raise NotImplementedError(
            f"graph_step() with activations of unit '{moving[0]._fsdpc_unit.name}' on the host"
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
