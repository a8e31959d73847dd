"""Drafters that need no training, and drafters that misbehave: the answer is the target's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.inference.drafter import Ask, Committed, Drafter, HeadDrafter
from headway.inference.drafters.draft_model import WAITING, ModelDrafter
from headway.inference.drafters.hybrid import HybridDrafter
from headway.inference.drafters.ngram import Guess, NgramDrafter, cut_to_pay
from headway.inference.generate import Request, Result, generate, plain
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import DynamicTree, Policy, StaticTree, Tree, chain
from tests.inference.helpers import BINARY3, PROMPTS, encode, hf_greedy, random_head
from tests.tiny import build, llama4, llama12, target

TEXTS = (*PROMPTS, "abcabcabcab", "x" * (WAITING + 9))
WINDOW: dict[str, Any] = {"head_dim": 16, "sliding_window": 12}
FOUR_DEEP = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0)))
MIXED: dict[str, Any] = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 4}


@pytest.fixture(scope="module")
def twelve() -> Target:
    return target(llama12())


@pytest.fixture(scope="module")
def four() -> Target:
    return target(llama4(), name="small")


def answers(t: Target, drafter: Drafter, batch_size: int = 3, **settings: Any) -> dict[str, Result]:
    requests = [
        Request(encode(text), Settings(**{"max_new_tokens": 24 + i, "eos_ids": (), **settings}), id=text, key=i)
        for i, text in enumerate(TEXTS)
    ]
    return {r.id: r for r in generate(t, requests, head=drafter, batch_size=batch_size)}


MAKERS: dict[str, Callable[[Target, Target], Drafter]] = {
    "ngram": lambda t, small: NgramDrafter(shortest=1),
    "model chain": lambda t, small: ModelDrafter(small),
    "model tree": lambda t, small: ModelDrafter(small, DynamicTree(depth=3, top_k=3, nodes=10)),
    "model static": lambda t, small: ModelDrafter(small, BINARY3),
    "hybrid": lambda t, small: HybridDrafter(
        HeadDrafter(random_head("eagle3", t), DynamicTree(2, 3, 7)), NgramDrafter(shortest=1)
    ),
    "hybrid of a model": lambda t, small: HybridDrafter(ModelDrafter(small), NgramDrafter(shortest=1, depth=2)),
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_the_answer_is_the_targets_own(name: str, batch_size: int, twelve: Target, four: Target) -> None:
    drafter = MAKERS[name](twelve, four)
    for i, (text, result) in enumerate(sorted(answers(twelve, drafter, batch_size).items(), key=at)):
        assert result.token_ids == hf_greedy(twelve.model, encode(text), 24 + i), text
    drawn = answers(twelve, drafter, batch_size, temperature=0.9, top_p=0.95, seed=5)
    for i, (text, result) in enumerate(sorted(drawn.items(), key=at)):
        settings = Settings(max_new_tokens=24 + i, eos_ids=(), temperature=0.9, top_p=0.95, seed=5)
        assert result.token_ids == plain(twelve, encode(text), settings, key=i), text


def at(pair: tuple[str, Any]) -> int:
    return TEXTS.index(pair[0])


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3, "top_k": 20}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("policy", [chain(4), FOUR_DEEP], ids=["chain", "tree"])
@pytest.mark.parametrize("changes", [{}, WINDOW | {"model_type": "mistral"}, MIXED | {"model_type": "gemma3_text"}])
def test_a_model_that_is_the_target_is_always_right(
    changes: dict[str, Any], policy: Policy, settings: dict[str, Any]
) -> None:
    """So its cache, positions and masks are those of plain decoding: the best child is always the token."""
    model = build(3, num_hidden_layers=12, **changes) if not changes else build(3, **changes)
    t = target(model)
    drafter = ModelDrafter(Target(model, t.tokenizer, "twin"), policy)
    for result in answers(t, drafter, 3, **settings).values():
        assert all(n == 5 for n in result.accepted_per_round[:-1]), (result.id, result.accepted_per_round)


def test_a_draft_that_does_not_see_its_own_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    t = target(llama12())
    drafter = ModelDrafter(Target(t.model, t.tokenizer, "twin"), chain(4))
    real = drafter.model.forward

    def blind(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("before_BM") is not None and kwargs["before_BM"].shape[1]:
            args[2][:, :, : kwargs["before_BM"].shape[1]] = False
        return real(*args, **kwargs)

    monkeypatch.setattr(drafter.model, "forward", blind)
    got = answers(t, drafter, 1)
    assert any(n < 5 for result in got.values() for n in result.accepted_per_round[:-1])
    for i, (text, result) in enumerate(sorted(got.items(), key=at)):
        assert result.token_ids == hf_greedy(t.model, encode(text), 24 + i)


def test_models_that_cannot_draft_are_refused(twelve: Target, four: Target) -> None:
    with pytest.raises(HeadwayError, match="plain mode"):
        ModelDrafter(target(llama4(), mode="plain"))
    other = target(llama4(), name="other")
    other.tokenizer.add_tokens(["<new>"])  # type: ignore[union-attr]
    with pytest.raises(HeadwayError, match="another vocabulary"):
        answers(twelve, ModelDrafter(other))


def test_a_model_with_more_padding_rows_drafts(twelve: Target) -> None:
    for size in (266, 300):
        small = target(build(1, num_hidden_layers=4, vocab_size=size), name="padded")
        for i, (text, result) in enumerate(sorted(answers(twelve, ModelDrafter(small)).items(), key=at)):
            assert result.token_ids == hf_greedy(twelve.model, encode(text), 24 + i)


def test_chains_where_the_target_takes_no_trees(four: Target) -> None:
    t = target(llama12(), mode="chain")
    drafter = ModelDrafter(four, DynamicTree(3, 3, 10)).fit(t)
    assert drafter.policy == chain(3)
    for i, (text, result) in enumerate(sorted(answers(t, drafter).items(), key=at)):
        assert result.token_ids == hf_greedy(t.model, encode(text), 24 + i)


def ask(*histories: list[int]) -> Ask:
    return Ask(torch.tensor([h[-1] for h in histories]), list(histories))


def test_ngram_takes_the_longest_match_and_the_newest_place() -> None:
    drafter = NgramDrafter(depth=3, longest=3, shortest=1)
    drafter._shares = lambda n, learned: [0.5] * drafter.depth  # type: ignore[method-assign]
    text = [1, 2, 3, 7, 9, 2, 3, 8, 9, 3, 5, 1, 2, 3]
    (guess,) = drafter.guesses(drafter.start(None, None, 1), ask(text))  # type: ignore[arg-type]
    assert guess.tokens == [7, 9, 2]  # 1 2 3 stood first; 2 3 -> 8 and 3 -> 5 are nearer and shorter
    (guess,) = drafter.guesses(drafter.start(None, None, 1), ask(text[1:]))  # type: ignore[arg-type]
    assert guess.tokens == [8, 9, 3]
    (guess,) = drafter.guesses(drafter.start(None, None, 1), ask([4, 4]))  # type: ignore[arg-type]
    assert guess.tokens == [4, 4, 4]  # a text that repeats goes on repeating
    (guess,) = drafter.guesses(drafter.start(None, None, 1), ask([1, 2, 3]))  # type: ignore[arg-type]
    assert guess.tokens == []


def test_ngram_reads_only_what_is_new() -> None:
    """An index that grows with its text finds what one made at once finds."""
    text = torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    grown = NgramDrafter(depth=4, longest=4, shortest=2)
    grown._shares = lambda n, learned: [0.5] * 4  # type: ignore[method-assign]
    state = grown.start(None, None, 1)  # type: ignore[arg-type]
    end = 1
    while end < len(text):
        fresh = NgramDrafter(depth=4, longest=4, shortest=2)
        fresh._shares = lambda n, learned: [0.5] * 4  # type: ignore[method-assign]
        want = fresh.guesses(fresh.start(None, None, 1), ask(text[:end]))  # type: ignore[arg-type]
        assert grown.guesses(state, ask(text[:end])) == want
        end += 1 + end % 3


def test_ngram_learns_how_far_to_follow() -> None:
    drafter = NgramDrafter(depth=8, longest=2, shortest=2)
    before = len(drafter._shares(2))
    right = NgramDrafter(depth=8, longest=2, shortest=2)
    for d in (drafter, right):
        state, text = d.start(None, None, 1), [1, 2]  # type: ignore[arg-type]
        for i in range(60):
            d.guesses(state, ask(text))
            text += [1, 2] * 4 if d is right else [20 + i, 1, 2]
    assert len(drafter._shares(2)) < before < len(right._shares(2)) == 8


def test_a_long_guess_is_cut_where_all_rows_would_pay_for_it() -> None:
    sure, none = Guess([1] * 8, [0.9**d for d in range(1, 9)]), Guess([], [])

    def widths(*guesses: Guess, lossy: bool = False, free: int = 0) -> list[int]:
        asked = replace(ask(*([0] for _ in guesses)), lossy=lossy)
        return [len(tokens) for tokens in cut_to_pay(list(guesses), asked, free)]

    assert widths(sure) == [8]
    assert widths(sure, none, none, none, none, none, none, none) == [0] * 8
    assert 0 < widths(sure, none)[0] <= 8
    assert widths(*[sure] * 8)[0] > 1
    assert widths(none) == [0]
    # What is there anyway is used; lossy acceptance may not depend on other rows.
    assert widths(sure, *[none] * 7, free=3) == [3] + [0] * 7
    assert widths(sure, *[none] * 7, lossy=True) == [8] + [0] * 7


def test_ngram_helps_where_the_text_repeats(twelve: Target) -> None:
    def again(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[0, ids[0, -3]] = 100.0
        return scores

    settings = Settings(max_new_tokens=60, eos_ids=(), processors=(again,))
    (result,) = generate(twelve, [Request(encode("abc"), settings)], head=NgramDrafter())
    assert result.token_ids == plain(twelve, encode("abc"), settings) == encode("abc" * 20)
    assert result.accepted_length > 5


def test_hybrid_drafts_only_where_nothing_is_found(twelve: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = HeadDrafter(random_head("eagle3", twelve), chain(2))
    hybrid = HybridDrafter(head, NgramDrafter(shortest=2))
    calls = []
    real = HeadDrafter.propose
    monkeypatch.setattr(HeadDrafter, "propose", lambda self, *args: (calls.append(1), real(self, *args))[1])
    state = hybrid.start(
        Committed(
            torch.tensor([[1, 2]] * 2),
            torch.tensor([[2, 3]] * 2),
            torch.tensor([[0, 1]] * 2),
            [2, 2],
            torch.randn(2, 2, 3 * 64),
        ),
        None,
        2,
    )
    found = [5, 6, 7, 8, 5, 6]
    tree, state = hybrid.propose(state, ask(found, found))
    assert not calls
    assert tree.token_BN[:, :3].tolist() == [[6, 7, 8]] * 2
    tree, state = hybrid.propose(state, ask([1, 2, 3], found))
    assert calls
    alone, _ = real(head, state[1], ask([1, 2, 3], found))
    assert tree.token_BN[0, :3].tolist() == alone.token_BN[0].tolist()
    assert tree.token_BN[1, :3].tolist() == [6, 7, 8]
    assert tree.parents[0][3:] == list(range(2, tree.token_BN.shape[1] - 1))


class Wrong(Drafter):
    """Proposes what it is told to, whatever the text."""

    def __init__(self, tree: Callable[[int, int], tuple[list[int], list[int]]]) -> None:
        self.tree = tree

    def fit(self, target: Target) -> Wrong:
        return self

    def describe(self) -> str:
        return "wrong"

    def start(self, committed: Committed, state: Any, rows: int) -> Any:
        return [0] * rows if state is None else state

    def propose(self, state: Any, ask: Ask) -> tuple[Tree, Any]:
        made = [self.tree(root, len(h)) for root, h in zip(ask.root_B.tolist(), ask.histories, strict=True)]
        return Tree.from_parents(torch.tensor([[*t] for t, _ in made]), [p for _, p in made]), state

    def select_rows(self, state: Any, kept: list[int]) -> Any:
        return [state[b] for b in kept]

    def join_rows(self, state: Any, other: Any) -> Any:
        return [*state, *other]


WRONG: dict[str, Callable[[int, int], tuple[list[int], list[int]]]] = {
    "nothing": lambda root, n: ([root], [-1]),
    "one token again and again": lambda root, n: ([root] + [65] * 6, [-1, 0, 0, 0, 1, 1, 2]),
    "ids beyond the vocabulary": lambda root, n: ([root, 10**9, -5, 272, 271], [-1, 0, 0, 1, 2]),
    "every token": lambda root, n: ([root, *range(272)], [-1] + [0] * 272),
    "a tree beyond the context": lambda root, n: ([root] + [66] * 64, [-1, *range(64)]),
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_drafter_costs_time_only(name: str, batch_size: int) -> None:
    t = target(build(4, num_hidden_layers=4, max_position_embeddings=80))
    drafter = Wrong(WRONG[name])
    for i, (text, result) in enumerate(sorted(answers(t, drafter, batch_size).items(), key=at)):
        want = hf_greedy(t.model, encode(text), min(24 + i, 80 - len(encode(text))))
        assert result.token_ids == want
