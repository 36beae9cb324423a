"""How cases of the property test are drawn; ranks do without this and without hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .random_cases import Case, Leaf, Node, Policy

LEAVES = ("linear", "scale", "mlp", "lora", "tied", "unused")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD")

# What a script is made of; more often what trains.
OPS = (
    ("forward",) * 6
    + ("backward",) * 6
    + ("step",) * 3
    + ("zero", "clip", "sync", "eval", "freeze", "hold", "unshard", "summon", "accumulate")
    + ("reshard_after_forward", "reshard_after_backward", "reset")
)

POLICIES = (
    Policy(),
    Policy(),
    Policy("bfloat16", "float32"),
    Policy("bfloat16", "bfloat16"),
    Policy("bfloat16", None, "float32"),
    Policy("float32", None, None),
    Policy("float32", "bfloat16", "bfloat16"),
    Policy("float16", "float32"),
    Policy("bfloat16", "float32", None, False),
)


def leaves() -> st.SearchStrategy[Leaf]:
    """Layers, most of them fp32 and trainable."""
    return st.builds(
        Leaf,
        kind=st.sampled_from(LEAVES),
        dtype=st.sampled_from(("float32", "float32", "float32", "bfloat16", "float64", "float16")),
        trainable=st.sampled_from((True, True, True, False)),
    )


@st.composite
def nodes(draw: Any, depth: int, root: bool = False) -> Node:
    """A tree of modules."""
    child = leaves() if depth == 0 else st.one_of(leaves(), nodes(depth - 1), nodes(depth - 1))
    children = tuple(draw(st.lists(child, min_size=1, max_size=3)))
    natural = tuple(range(len(children)))
    order = draw(
        st.one_of(
            st.just(natural),
            st.just(natural),
            st.lists(st.integers(0, len(children) - 1), min_size=1, max_size=4).map(tuple),
        )
    )
    unit = root or draw(st.booleans())
    return Node(
        children=children,
        order=order,
        unit=unit,
        checkpoint=not root and draw(st.sampled_from((False, False, True))),
        reshard=draw(st.sampled_from((None, None, True, False))),
        policy=draw(st.sampled_from(POLICIES)) if unit else Policy(),
    )


@st.composite
def cases(draw: Any) -> Case:
    """Models and scripts."""
    root = draw(nodes(2, root=True))
    places = st.integers(0, len(root.children) - 1)
    return Case(
        root=root,
        strategy=draw(st.sampled_from(STRATEGIES)),
        input_grad=draw(st.booleans()),
        paths=tuple(
            draw(st.lists(st.lists(places, max_size=4).map(tuple), min_size=2, max_size=2))
        ),
        script=tuple(
            draw(
                st.lists(
                    st.tuples(st.sampled_from(OPS), st.integers(0, 7), st.integers(0, 7)),
                    min_size=2,
                    max_size=14,
                )
            )
        ),
    )
