"""Drafting with an eye on the noise: what it gains, and that no token changes by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headway.heads.common.protocol import Context, Frontier, Head, HeadConfig
from headway.inference import draft
from headway.inference.draft import Draws, grow
from headway.inference.generate import Request, generate, plain
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import DynamicTree, Policy, chain
from tests.inference.helpers import POLICIES, answer, encode, random_head
from tests.tiny import llama12, target

PROMPT = encode("The cat sat")
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.05},
]

Paths = list[list[list[int]]]


class Knowing(Head):
    """Drafts with the target's own scores: only the dice can make it miss."""

    def __init__(self, t: Target) -> None:
        super().__init__(HeadConfig.for_target(t.info), t.frozen)
        self.model = [t.model]  # in a list, so that it is no part of the head

    def start(self, context: Context, state: Any, rows: int) -> Any:
        texts = state[0] if state is not None else [PROMPT[:1]] * rows
        told = [context.next_BT[b, : context.count_B[b]].tolist() for b in range(rows)]
        return [text + new for text, new in zip(texts, told, strict=True)], []

    def step(self, state: Any, frontier: Frontier) -> tuple[Tensor, Any]:
        texts, above = state
        paths: Paths = []
        for b in range(len(texts)):
            tokens, parents = frontier.token_BN[b].tolist(), frontier.parent_BN[b].tolist()
            paths.append([[*above[b][p], t] if frontier.depth else [] for t, p in zip(tokens, parents, strict=True)])
        rows = [
            torch.stack([self.model[0](torch.tensor([text + path])).logits[0, -1] for path in row])
            for text, row in zip(texts, paths, strict=True)
        ]
        return torch.stack(rows), (texts, paths)

    def select_rows(self, state: Any, kept: list[int]) -> Any:
        return [state[0][b] for b in kept], []

    def join_rows(self, state: Any, other: Any) -> Any:
        return state[0] + other[0], []


@pytest.fixture(scope="module")
def twelve() -> Target:
    return target(llama12())


@pytest.mark.parametrize("fields", SAMPLED)
@pytest.mark.parametrize("policy", [chain(3), DynamicTree(depth=3, top_k=2, nodes=15)])
def test_who_knows_the_scores_never_misses(
    twelve: Target, fields: dict[str, Any], policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "CANDIDATES", twelve.info.vocab_size)  # a random model has no likely tokens
    monkeypatch.setattr(draft, "DOUBT", 0.01)  # and this head has no doubts
    knowing = answer(twelve, PROMPT, Knowing(twelve), policy, max_new_tokens=33, seed=5, **fields)
    assert knowing.accepted_per_round == [4] * 8, "a token comes from the prefill, the other 32 in fours"
    monkeypatch.setattr(Draws, "of", staticmethod(lambda *given: None))
    blind = answer(twelve, PROMPT, Knowing(twelve), policy, max_new_tokens=33, seed=5, **fields)
    assert blind.token_ids == knowing.token_ids
    assert blind.accepted_length < 3, "the control: without the noise the likeliest tokens are drafted, and missed"


@pytest.mark.parametrize("family", ["medusa", "eagle3"])
@pytest.mark.parametrize("name", POLICIES)
def test_rows_of_all_kinds_in_one_batch(twelve: Target, family: str, name: str) -> None:
    kinds: list[dict[str, Any]] = [{}, *SAMPLED, {"temperature": 0.9, "repetition_penalty": 1.2}]
    requests = [
        Request(PROMPT, Settings(max_new_tokens=20, eos_ids=(), seed=2, **fields), id=n, key=n)
        for n, fields in enumerate([*kinds, {"temperature": 0.9, "accept": "typical"}])
    ]
    head = random_head(family, twelve)
    results = {r.id: r for r in generate(twelve, requests, head=head, policy=POLICIES[name], batch_size=len(requests))}
    for request in requests[:-1]:  # the last is lossy
        assert results[request.id].token_ids == plain(twelve, PROMPT, request.settings, request.key)


def test_only_drawn_rows_are_ranked_otherwise(twelve: Target) -> None:
    """A greedy row and a typical one get the trees that they get alone."""
    head = Knowing(twelve)
    root = torch.tensor([PROMPT[-1]] * 3)
    state = ([PROMPT] * 3, [])
    kinds = [Settings(), Settings(temperature=1.5, accept="typical"), Settings(temperature=1.5)]
    draws = Draws.of(kinds, [0, 1, 2], [len(PROMPT)] * 3)
    policy = DynamicTree(depth=2, top_k=3, nodes=7)
    with_noise, _ = grow(head, state, policy, root, draws)
    without, _ = grow(head, state, policy, root)
    for b in (0, 1):
        assert with_noise.token_BN[b].tolist() == without.token_BN[b].tolist()
        assert with_noise.parents[b] == without.parents[b]
    assert with_noise.token_BN[2].tolist() != without.token_BN[2].tolist()
    assert Draws.of(kinds[:2], [0, 1], [9, 9]) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.9, "top_p": 0.9}])
@pytest.mark.parametrize("name", POLICIES)
def test_a_head_that_gives_no_numbers_costs_no_token(
    twelve: Target, name: str, fields: dict[str, Any], some: bool, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_head("eagle3", twelve)
    step = head.step

    def broken(state: Any, frontier: Frontier) -> tuple[Tensor, Any]:
        logits_BNV, state = step(state, frontier)
        return logits_BNV.clone().index_fill_(2, torch.arange(1, 200 if not some else 150), value), state

    monkeypatch.setattr(head, "step", broken)
    got = answer(twelve, PROMPT, head, POLICIES[name], max_new_tokens=33, seed=3, **fields)
    assert got.token_ids == plain(twelve, PROMPT, Settings(max_new_tokens=33, eos_ids=(), seed=3, **fields))
