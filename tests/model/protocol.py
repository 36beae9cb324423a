"""The epoch protocol (docs/design/communication.md) as a machine whose steps can be enumerated.

A *world* is what all ranks are and what they share; a *step* is something that one rank does at one
moment: raise its arrival word, decide once all have arrived, begin to write its slice. A rank's
program is a list of operations (``Op``), an operation a fixed sequence of steps (``STEPS``). Each
step is a function below: it yields the world that follows, or none while the rank must wait.
``explore.py`` runs every interleaving.

What is left out: the data. A rank's weights are one number, ``master``, that grows with every
change; its slice of the parameter buffer shows the number that was written last. So a full that is
read is one number a rank, and it is right if each is what that rank announced when it arrived in
the epoch.

What must never be raises ``Wrong``: a read while somebody writes (torn), a read of other numbers
than were announced (stale), steps that some ranks took and others did not. Errors that the
protocol promises to name raise ``Named`` if they close the communicator for all ranks, ``Refused``
if the rank alone gets an exception (from which its program, as most user code, ends).

Not in the model: fingerprints of gathers. It finds disagreement later than the library does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar


class Wrong(Exception):
    """A promise of the protocol is broken."""


class Named(Exception):
    """An error that every rank gets, with the culprit's name; nobody goes on."""


class Refused(Exception):
    """An error of one rank whose peers go on, or get the same by themselves."""


class Op(NamedTuple):
    """What a program calls: of which root, with gradients or not, the oldest or newest graph."""

    verb: str
    root: str = ""
    unit: str = "whole"
    grad: bool = False
    newest: bool = False
    interrupted: bool = False  # Ctrl-C may end any wait of it


Programs = tuple[tuple[Op, ...], ...]  # by rank


class Note(NamedTuple):
    """What a rank that arrives says about the epoch it begins."""

    kind: str = ""
    unit: str = ""
    steps: int = 0
    changed: bool = False
    held: bool = False
    late: bool = False


class Words(NamedTuple):
    """What one rank shows of one root: written by it alone, read by all."""

    arrived: int = 0
    published: int = 0
    notes: tuple[Note, Note] = (Note(), Note())  # by the epoch's parity
    version: int = 0  # of its slice of the parameter buffer
    writing: bool = False


class Graph(NamedTuple):
    """A forward that waits for its backward: what it read, and in which generation."""

    versions: tuple[int, ...]
    generation: int


class Root(NamedTuple):
    """One rank's own view of one root."""

    epoch: int = 0
    stage: str = "idle"  # of the last epoch, as root.h's fsdpc_epoch_stage
    generation: int = 0
    steps: int = 0
    master: int = 1  # the first epoch publishes
    taken: int = 0  # steps that changed the master; ranks must take the same
    announced: tuple[int, ...] = (0,)  # the master that this rank promised, by epoch
    graphs: tuple[Graph, ...] = ()
    held: tuple[int, ...] = ()  # what unshard() read; () is not held
    hold: tuple[int, ...] = ()  # what hold() fixed; () is not in force
    pending: bool = False  # our optimizer's pass is still to come: the slice shows the step before
    late: bool = False  # some rank's may be: the next gather waits for those of all
    meeting: bool = False  # it was posted


class Rank(NamedTuple):
    """One rank: its place in its program and its roots."""

    roots: tuple[Root, ...]
    op: int = 0  # index into its program
    step: int = 0  # index into STEPS of that operation
    barriers: int = 0  # of another library
    error: str = ""  # its program ended with this


class World(NamedTuple):
    """Everything; hashable, so that a search knows where it has been."""

    ranks: tuple[Rank, ...]
    words: tuple[tuple[Words, ...], ...]  # by root, then rank
    posted: tuple[tuple[tuple[str, str], ...], ...]  # fingerprints, by rank, in order


class Rules(NamedTuple):
    """The protocol, or one with a part of it left out, to show that the part is needed."""

    parity: bool = True  # notes alternate between two halves
    wait_arrivals: bool = True
    wait_publications: bool = True
    wait_reductions: bool = True
    wait_late: bool = True
    check_generation: bool = True
    compare_notes: bool = True
    refuse_held: bool = True
    close_interrupted_step: bool = True


class Event(NamedTuple):
    """What a step lets an onlooker see; matched against recorded traces."""

    name: str
    root: str = ""
    seen: tuple[int, ...] = ()


Next = Iterator[tuple[Event, World]]
Step = Callable[["Machine", World, int, Op], Next]
T = TypeVar("T")


def put(items: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """The tuple with one item replaced."""
    return (*items[:index], value, *items[index + 1 :])


class Machine:
    """Programs and rules: what does not change while they run."""

    def __init__(self, programs: Programs, rules: Rules | None = None) -> None:
        self.programs = programs
        self.rules = rules or Rules()
        self.size = len(programs)
        self.roots = sorted({op.root for program in programs for op in program if op.root})

    def start(self) -> World:
        """Nobody has done anything."""
        rank = Rank(tuple(Root() for _ in self.roots))
        words = tuple(tuple(Words() for _ in range(self.size)) for _ in self.roots)
        return World((rank,) * self.size, words, ((),) * self.size)

    def op_of(self, world: World, r: int) -> Op | None:
        """What rank r is doing; None: its program has ended."""
        program, at = self.programs[r], world.ranks[r].op
        return program[at] if at < len(program) and not world.ranks[r].error else None

    def successors(self, world: World, r: int) -> Next:
        """All that rank r may do next; nothing while it waits. Wrong and Named pass through."""
        op = self.op_of(world, r)
        if op is None:
            return
        world, step = self._skip(world, r, op)
        try:
            for event, after in step(self, world, r, op):
                yield event, self._advance(after, r, op)
        except Refused as refused:
            rank = world.ranks[r]._replace(error=str(refused))
            yield Event("refused", op.root), world._replace(ranks=put(world.ranks, r, rank))
            return
        if op.interrupted and step in INTERRUPTIBLE:
            if op.verb in ("step", "late step") and self.rules.close_interrupted_step:
                raise Named("interrupted in an optimizer's step that others may take")
            rank = world.ranks[r]
            rank = rank._replace(op=rank.op + 1, step=0)
            yield Event("interrupted", op.root), world._replace(ranks=put(world.ranks, r, rank))

    def _skip(self, world: World, r: int, op: Op) -> tuple[World, Step]:
        """To the next step that has something to do in the epoch's stage."""
        rank, steps = world.ranks[r], STEPS[op.verb]
        at = rank.step
        while not self._has_work(steps[at], world, r, op):
            at += 1
        return self._with_rank(world, r, rank._replace(step=at)), steps[at]

    def _has_work(self, step: Step, world: World, r: int, op: Op) -> bool:
        stage, flag = NEEDS.get(step), WHILE.get(step)
        return (stage is None or self.mine(world, r, op).stage == stage) and (
            flag is None or bool(getattr(self.mine(world, r, op), flag))
        )

    def _advance(self, world: World, r: int, op: Op) -> World:
        rank = world.ranks[r]
        if rank.step + 1 < len(STEPS[op.verb]):
            return self._with_rank(world, r, rank._replace(step=rank.step + 1))
        return self._with_rank(world, r, rank._replace(op=rank.op + 1, step=0))

    @staticmethod
    def _with_rank(world: World, r: int, rank: Rank) -> World:
        return world._replace(ranks=put(world.ranks, r, rank))

    # ---- what steps read and write

    def mine(self, world: World, r: int, op: Op) -> Root:
        """Rank r's view of the operation's root."""
        return world.ranks[r].roots[self.roots.index(op.root)]

    def words(self, world: World, op: Op) -> tuple[Words, ...]:
        """What all ranks show of the operation's root."""
        return world.words[self.roots.index(op.root)]

    def with_mine(self, world: World, r: int, op: Op, **changes: object) -> World:
        """The world in which rank r's view of the root has changed."""
        rank, i = world.ranks[r], self.roots.index(op.root)
        root = rank.roots[i]._replace(**changes)
        return self._with_rank(world, r, rank._replace(roots=put(rank.roots, i, root)))

    def with_words(self, world: World, r: int, op: Op, **changes: object) -> World:
        """The world in which rank r shows something else of the root."""
        i = self.roots.index(op.root)
        own = world.words[i][r]._replace(**changes)
        return world._replace(words=put(world.words, i, put(world.words[i], r, own)))

    def goes_ahead(self, world: World, r: int, peer: int) -> str:
        """A root on which the peer has begun an epoch that rank r has not; "" if none."""
        for i, root in enumerate(self.roots):
            if world.words[i][peer].arrived > world.ranks[r].roots[i].epoch:
                return root
        return ""

    def note_slot(self, epoch: int) -> int:
        """Which half the notes of an epoch stand in."""
        return epoch % 2 if self.rules.parity else 0


# ---- steps of an epoch


def arrive(m: Machine, world: World, r: int, op: Op) -> Next:
    """Say what this rank is about to do: everything that it read before is read."""
    mine, shown = m.mine(world, r, op), m.words(world, op)[r]
    update = op.verb in ("step", "late step")
    promise = mine.master + update
    epoch = mine.epoch + 1
    note = Note(
        kind="step" if update else op.verb,
        unit=op.unit,
        steps=mine.steps + update,
        changed=promise != shown.version + mine.pending,
        held=bool(mine.held),
        late=op.verb == "late step",
    )
    world = m.with_mine(
        world, r, op, epoch=epoch, stage="arrived", steps=note.steps,
        announced=(*mine.announced, promise),
    )  # fmt: skip
    notes = put(shown.notes, m.note_slot(epoch), note)
    world = m.with_words(world, r, op, arrived=epoch, notes=notes)
    yield Event("arrive", op.root), world


def decide(m: Machine, world: World, r: int, op: Op) -> Next:
    """Wait for all arrivals; then all see the same notes and decide alike."""
    mine, shown = m.mine(world, r, op), m.words(world, op)
    epoch = mine.epoch
    if m.rules.wait_arrivals:
        for peer in range(m.size):
            if shown[peer].arrived < epoch:
                if root := m.goes_ahead(world, r, peer):
                    raise Named(f"epochs crossed: a peer began one of {root}, not of {op.root}")
                return
            if shown[peer].arrived > epoch + 1:
                raise Named("epoch abandoned by a peer")
    notes = [words.notes[m.note_slot(epoch)] for words in shown]
    if m.rules.compare_notes and len({(n.kind, n.unit, n.steps) for n in notes}) > 1:
        raise Named("epochs disagree")
    changed = any(note.changed for note in notes)
    if m.rules.refuse_held and changed and any(note.held for note in notes):
        raise Refused("weights changed while a unit is held by unshard()")
    late = mine.late or any(note.late for note in notes)
    after = m.with_mine(
        world, r, op, stage="writing" if changed else "idle",
        generation=mine.generation + changed, late=late and m.rules.wait_late,
    )  # fmt: skip
    yield Event("decide", op.root, (int(changed),)), after


def begin_write(m: Machine, world: World, r: int, op: Op) -> Next:
    """Nobody reads now; the own slice is about to change, if this rank announced so."""
    mine = m.mine(world, r, op)
    changes = mine.announced[-1] != m.words(world, op)[r].version + mine.pending
    yield Event("begin_write", op.root), m.with_words(world, r, op, writing=changes)


def end_write(m: Machine, world: World, r: int, op: Op) -> Next:
    """The slice shows the master."""
    mine = m.mine(world, r, op)
    world = m.with_mine(world, r, op, stage="written")
    yield Event("end_write", op.root), m.with_words(
        world, r, op, writing=False, version=mine.master - mine.pending
    )


def update(m: Machine, world: World, r: int, op: Op) -> Next:
    """An optimizer's pass: master and slice in one."""
    mine = m.mine(world, r, op)
    world = m.with_mine(
        world, r, op, stage="written", master=mine.master + 1, taken=mine.taken + 1
    )
    yield Event("end_write", op.root), m.with_words(
        world, r, op, writing=False, version=mine.master + 1
    )


def put_off(m: Machine, world: World, r: int, op: Op) -> Next:
    """The same that waits until somebody needs it; what was written before shows now."""
    mine = m.mine(world, r, op)
    world = m.with_mine(
        world, r, op, stage="written", master=mine.master + 1, taken=mine.taken + 1, pending=True
    )
    yield Event("end_write", op.root), m.with_words(
        world, r, op, writing=False, version=mine.master
    )


def begin_late(m: Machine, world: World, r: int, op: Op) -> Next:
    """This rank needs it: the slice is about to change, in no epoch."""
    yield Event("begin_write", op.root), m.with_words(world, r, op, writing=True)


def end_late(m: Machine, world: World, r: int, op: Op) -> Next:
    """The slice shows the master."""
    version = m.mine(world, r, op).master
    world = m.with_mine(world, r, op, pending=False)
    yield Event("end_write", op.root), m.with_words(
        world, r, op, writing=False, version=version
    )


def post_gather(m: Machine, world: World, r: int, op: Op) -> Next:
    """The first gather after a late step, behind the own slice."""
    history = (*world.posted[r], ("gather", op.root))
    world = m.with_mine(world, r, op, late=False, meeting=True)
    yield Event("meet", op.root), world._replace(posted=put(world.posted, r, history))


def await_gather(m: Machine, world: World, r: int, op: Op) -> Next:
    """Wait until all have posted it, so that all slices are written."""
    for _, after in await_posted(m, world, r, op):
        yield Event("meet", op.root), m.with_mine(after, r, op, meeting=False)


def publish(m: Machine, world: World, r: int, op: Op) -> Next:
    """Say that the own slice is written."""
    world = m.with_mine(world, r, op, stage="published")
    epoch = m.mine(world, r, op).epoch
    yield Event("publish", op.root), m.with_words(world, r, op, published=epoch)


def await_published(m: Machine, world: World, r: int, op: Op) -> Next:
    """Wait until all slices are written."""
    epoch = m.mine(world, r, op).epoch
    for words in m.words(world, op) if m.rules.wait_publications else ():
        if words.published < epoch:
            if words.arrived > epoch:
                raise Named("epoch abandoned by a peer")
            return
    yield Event("published", op.root), m.with_mine(world, r, op, stage="idle")


def leave(m: Machine, world: World, r: int, op: Op) -> Next:
    """An optimizer does not wait: the next reader's arrival does."""
    yield Event("leave", op.root), m.with_mine(world, r, op, stage="idle")


def end(m: Machine, world: World, r: int, op: Op) -> Next:
    """Nothing is left to do after the epoch, whatever became of it."""
    yield Event("leave", op.root), world


# ---- reading


def versions_now(m: Machine, world: World, op: Op) -> tuple[int, ...]:
    """What a reader of the full finds, in no time; torn if somebody writes."""
    shown = m.words(world, op)
    if any(words.writing for words in shown):
        raise Wrong("torn read")
    return tuple(words.version for words in shown)


def promised(m: Machine, world: World, r: int, op: Op) -> tuple[int, ...]:
    """What the ranks announced in the epoch that rank r is in."""
    i, epoch = m.roots.index(op.root), m.mine(world, r, op).epoch
    return tuple(
        rank.roots[i].announced[epoch] if epoch < len(rank.roots[i].announced) else -1
        for rank in world.ranks
    )


def same(seen: tuple[int, ...], expected: tuple[int, ...]) -> tuple[int, ...]:
    """What was seen, if it is what was expected."""
    if any(a < b for a, b in zip(seen, expected)):
        raise Wrong("stale read")
    if seen != expected:
        raise Wrong("newer weights than were announced are read")
    return seen


def read(m: Machine, world: World, r: int, op: Op) -> Next:
    """Look at the unsharded parameters of this epoch, and keep what the operation keeps."""
    mine = m.mine(world, r, op)
    seen = same(versions_now(m, world, op), promised(m, world, r, op))
    if op.grad:
        graphs = (*mine.graphs, Graph(seen, mine.generation))
        world = m.with_mine(world, r, op, graphs=graphs)
    elif op.verb == "unshard":
        world = m.with_mine(world, r, op, held=seen)
    elif op.verb == "hold":
        world = m.with_mine(world, r, op, hold=seen)
    yield Event("read", op.root, seen), world


def read_held(m: Machine, world: World, r: int, op: Op) -> Next:
    """Whoever holds a unit has been reading it until now."""
    mine = m.mine(world, r, op)
    expected = mine.held if op.verb == "reshard" else mine.hold
    if expected:
        same(versions_now(m, world, op), expected)
    world = m.with_mine(world, r, op, **{"held" if op.verb == "reshard" else "hold": ()})
    yield Event("read", op.root, expected), world


def read_inside_hold(m: Machine, world: World, r: int, op: Op) -> Next:
    """No epoch: the weights are fixed."""
    if op.grad:
        raise Refused("a forward with gradients inside hold()")
    seen = same(versions_now(m, world, op), m.mine(world, r, op).hold)
    yield Event("read", op.root, seen), world


def graph_of(m: Machine, world: World, r: int, op: Op) -> Graph:
    """The graph that backward walks, if the weights are still those of its forward."""
    mine = m.mine(world, r, op)
    graph = mine.graphs[-1 if op.newest else 0]
    if m.rules.check_generation and graph.generation != mine.generation:
        raise Refused("weights changed between forward and backward")
    if mine.stage != "idle":
        raise Refused("a backward after an interrupted epoch")
    return graph


def read_again(m: Machine, world: World, r: int, op: Op) -> Next:
    """Backward gathers what its forward gave up: it must be the same."""
    graph = graph_of(m, world, r, op)
    seen = same(versions_now(m, world, op), graph.versions)
    yield Event("read", op.root, seen), world


def drop_graph(m: Machine, world: World, r: int, op: Op) -> Next:
    """The graph is used up, or its loss went out of scope."""
    graphs = m.mine(world, r, op).graphs
    graphs = graphs[:-1] if op.newest or op.verb == "drop" else graphs[1:]
    yield Event("drop", op.root), m.with_mine(world, r, op, graphs=graphs)


# ---- collectives, and what the engine knows nothing of


def post(m: Machine, world: World, r: int, op: Op) -> Next:
    """Leave a fingerprint."""
    history = (*world.posted[r], (op.verb, op.root))
    yield Event("post", op.root), world._replace(posted=put(world.posted, r, history))


def await_posted(m: Machine, world: World, r: int, op: Op) -> Next:
    """Wait until all have posted the same: a reduction, or a barrier of ours."""
    own = world.posted[r]
    waits = False
    for peer in range(m.size):
        theirs = world.posted[peer]
        if own[: len(theirs)] != theirs[: len(own)]:
            raise Named("operations disagree")
        if len(theirs) < len(own):
            if m.goes_ahead(world, r, peer):
                raise Named("operation abandoned by a peer")
            waits = True
    if not waits or not m.rules.wait_reductions:
        yield Event("done", op.root), world


def foreign_arrive(m: Machine, world: World, r: int, op: Op) -> Next:
    """Enter a barrier of another library."""
    rank = world.ranks[r]
    rank = rank._replace(barriers=rank.barriers + 1)
    yield Event("foreign"), world._replace(ranks=put(world.ranks, r, rank))


def foreign_wait(m: Machine, world: World, r: int, op: Op) -> Next:
    """Nobody names anything here: not our wait."""
    if all(rank.barriers >= world.ranks[r].barriers for rank in world.ranks):
        yield Event("foreign"), world


def write_master(m: Machine, world: World, r: int, op: Op) -> Next:
    """Another optimizer, load_state_dict, a swap of averaged weights: masters alone change."""
    mine = m.mine(world, r, op)
    yield Event("write", op.root), m.with_mine(world, r, op, master=mine.master + 1)


def refuse_in_hold(m: Machine, world: World, r: int, op: Op) -> Next:
    """An optimizer inside hold(): this rank alone knows, before it announced anything."""
    if m.mine(world, r, op).hold:
        raise Refused("an optimizer stepped inside hold()")
    yield Event("may step", op.root), world


# A rank may have been interrupted in an epoch: what it announced there is done first.
FINISH = (decide, begin_write, end_write, publish, await_published)
SETTLE = (begin_late, end_late)
EPOCH = (*FINISH, await_gather, arrive, *FINISH, *SETTLE, post_gather, await_gather)
STEPS: dict[str, tuple[Step, ...]] = {
    "forward": (*EPOCH, read),
    "collect": (post, await_posted),
    "unshard": (*EPOCH, read),
    "reshard": (read_held,),
    "hold": (*EPOCH, read),
    "use": (read_inside_hold,),
    "release": (read_held, *FINISH, arrive, *FINISH, end),
    "backward": (read_again, post, await_posted, drop_graph),
    "recompute": (read_again,),
    "drop": (drop_graph,),
    "step": (
        refuse_in_hold, *SETTLE, *FINISH, await_gather, arrive, decide, begin_write, update,
        publish, leave,
    ),
    "late step": (
        refuse_in_hold, *SETTLE, *FINISH, await_gather, arrive, decide, begin_write, put_off,
        publish, leave,
    ),
    "write": (*SETTLE, write_master),
    "barrier": (post, await_posted),
    "foreign": (foreign_arrive, foreign_wait),
}

# The stage in which a step has something to do; the others always have.
NEEDS: dict[Step, str] = {
    decide: "arrived",
    begin_write: "writing",
    end_write: "writing",
    update: "writing",
    put_off: "writing",
    publish: "written",
    await_published: "published",
    leave: "published",
}

# What a rank knows of a late step while a step has something to do.
WHILE: dict[Step, str] = {
    begin_late: "pending",
    end_late: "pending",
    post_gather: "late",
    await_gather: "meeting",
}
INTERRUPTIBLE = (decide, await_published, await_gather)
