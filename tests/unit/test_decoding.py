"""Generation with a cache: unequal prompts, ranks, hold(), ends, sampling.

That greedy tokens are those of transformers stands in test_pretrained.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc.models import GPT2, Llama, ModelConfig
from fsdpc.models.decoding import Sampler

SIZES = {"vocab_size": 61, "dim": 32, "layers": 2, "heads": 4, "inner": 48, "max_seq": 40}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8], [9, 7, 9, 3, 2, 3]]


def lively(model: Any) -> Any:
    """The model with weights so large that its words are not all the same."""
    with fsdpc.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(fsdpc.tensor(p.numpy() * 12))
    return model


def make(kind: Any = Llama, **changes: Any) -> Any:
    fsdpc.manual_seed(4)
    return lively(kind(ModelConfig(**{**SIZES, **changes})))


def recomputed(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens without a cache."""
    ids = list(prompt)
    for _ in range(count):
        with fsdpc.no_grad():
            ids.append(int(model(np.array([ids]))[0, -1].numpy().argmax()))
    return ids


def test_a_cache_changes_no_token() -> None:
    for model in (make(), make(GPT2), make(sliding_window=3, kv_heads=2, qk_norm=True)):
        for prompt, row in zip(PROMPTS, model.generate(PROMPTS, 9), strict=True):
            assert row.tolist() == recomputed(model, prompt, 9)
        same = [PROMPTS[0], PROMPTS[0][::-1]]  # of one length: no mask
        for prompt, row in zip(same, model.generate(same, 9), strict=True):
            assert row.tolist() == recomputed(model, prompt, 9)
        assert model.generate(PROMPTS[1], 9).tolist() == recomputed(model, PROMPTS[1], 9)


def test_stopping() -> None:
    model = make()
    whole = model.generate(PROMPTS, 12)
    third = int(whole[0][len(PROMPTS[0]) + 2])
    for row, all_, prompt in zip(model.generate(PROMPTS, 12, stop=third), whole, PROMPTS):
        new = all_[len(prompt) :].tolist()
        cut = new[: new.index(third) + 1] if third in new else new
        assert row.tolist() == [*prompt, *cut]
    ended = make(eos_token_id=(60, third))
    assert ended.generate(PROMPTS[0], 12).tolist() == model.generate(
        PROMPTS[0], 12, stop=[third, 60]).tolist()  # fmt: skip
    assert ended.generate(PROMPTS[0], 12, stop=()).tolist() == whole[0].tolist()
    assert model.generate(PROMPTS[0], 0).tolist() == PROMPTS[0]
    assert list(model.stream(PROMPTS[:2], 1)) == [
        [int(row[len(prompt)]) for row, prompt in zip(whole[:2], PROMPTS)]
    ]


def test_sampling_is_reproducible_and_bounded() -> None:
    model = make()
    drawn = [model.generate(PROMPTS, 12, temperature=1.5, seed=s) for s in (1, 1, 2)]
    flat = [np.concatenate(rows).tolist() for rows in drawn]
    assert flat[0] == flat[1] != flat[2]
    greedy = np.concatenate(model.generate(PROMPTS, 12)).tolist()
    for options in ({"top_k": 1}, {"top_p": 1e-9}):
        found = model.generate(PROMPTS, 12, temperature=1.5, **options)
        assert np.concatenate(found).tolist() == greedy
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    for options, allowed in (((None, 0.65), {1, 3}), ((3, None), {1, 2, 3}), ((3, 0.4), {1}),
                             ((None, None), {0, 1, 2, 3})):  # fmt: skip
        sampler = Sampler(1.0, *options, 7)
        assert {sampler.pick(0, logits) for _ in range(200)} == allowed
    counts = np.bincount([sampler.pick(1, logits) for _ in range(4000)]) / 4000
    np.testing.assert_allclose(counts, [0.1, 0.4, 0.2, 0.3], atol=0.04)


@pytest.mark.parametrize(
    ("prompt", "count", "options", "text"),
    [
        ([], 3, {}, None),
        ([[1], []], 3, {}, "prompt 1 must be a sequence of at least one token"),
        ([0.5], 3, {}, "prompt 0 must be"),
        ([1], 40, {}, "a prompt of 1 tokens and 40 new ones are more than the 40"),
        ([1], -1, {}, "max_new_tokens must be at least 0, got -1"),
        ([1], 1, {"temperature": -1.0}, "temperature must be"),
        ([1], 1, {"top_k": 0}, "top_k must be at least 1, got 0"),
        ([1], 1, {"top_p": 1.5}, "top_p must be above 0"),
    ],
)
def test_what_cannot_be_generated(
    prompt: Any, count: int, options: dict[str, Any], text: str | None
) -> None:
    model = make()
    if text is None:
        assert model.generate(prompt, count) == []
        return
    with pytest.raises(ValueError, match=text):
        model.generate(prompt, count, **options)


@pytest.mark.ranks([2, 3], timeout=300)
@pytest.mark.parametrize("kind", [Llama, GPT2])
def test_ranks_generate_as_much_as_each_needs(kind: Any) -> None:
    """Different prompts, numbers of tokens and ends; one rank has no prompt at all."""
    model = make(kind)
    prompts, count = [(PROMPTS, 5), ([], 3), (PROMPTS[1:2], 11)][fsdpc.rank()]
    want = [recomputed(model, prompt, count) for prompt in prompts]
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    for _ in range(2):
        found = model.generate(prompts, count)
        assert [row.tolist() for row in found] == want
    with model.hold():  # each by itself
        for _ in range(1 + fsdpc.rank()):
            assert [row.tolist() for row in model.generate(prompts, count)] == want
    loss = model(np.array(PROMPTS[:1]), np.array(PROMPTS[:1]))
    loss.backward()  # training goes on


@pytest.mark.ranks(2)
def test_in_bf16_over_ranks() -> None:
    """The cache has the compute dtype; tokens are those without it, but for rounding."""
    model = make()
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16)
    for block in model.blocks():
        fsdpc.fully_shard(block, mp_policy=policy)
    fsdpc.fully_shard(model, mp_policy=policy)
    found = model.generate(PROMPTS[0], 6, temperature=1.0, seed=3)
    assert len(found) == len(PROMPTS[0]) + 6
    every = fsdpc.all_gather(found)
    np.testing.assert_array_equal(every[0], every[1])
