"""Logits processors at every node of a tree, each with its own path as history, as transformers applies them to a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TypicalLogitsWarper,
)

from headway.heads.common.errors import HeadwayError
from headway.inference.generate import Request, generate, plain
from headway.inference.sampling import Processor, Settings
from headway.inference.target import Target
from tests.inference.helpers import POLICIES, PROMPTS, answer, encode, hf_greedy, random_head
from tests.tiny import llama12, target

PROMPT = encode("The cat sat on the cat")


class OnlyOdd:
    """A processor that keeps a state, as grammars do: it insists on being asked token by token."""

    def __init__(self) -> None:
        self.length: int | None = None
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.shape[0] == scores.shape[0] == 1
        assert self.length is None or ids.shape[1] == self.length + 1, (ids.shape[1], self.length)
        self.length, self.calls = ids.shape[1], self.calls + 1
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 != self.calls % 2, -torch.inf)


KINDS: dict[str, Callable[[], Processor]] = {
    "no_repeat_ngram": lambda: NoRepeatNGramLogitsProcessor(2),
    "bad_words": lambda: NoBadWordsLogitsProcessor([[134], [93, 48], [99, 3, 1]]),
    "suppress": lambda: SuppressTokensLogitsProcessor(list(range(0, 250, 3))),
    "penalty": lambda: RepetitionPenaltyLogitsProcessor(1.7),
    "typical_p": lambda: TypicalLogitsWarper(0.6),
    "prefix": lambda: PrefixConstrainedLogitsProcessor(
        lambda b, ids: [int(ids[-1] * 7 + k) % 250 for k in (1, 2, 3)], 1
    ),
    "stateful": OnlyOdd,
}


@pytest.fixture(scope="module")
def twelve() -> Target:
    return target(llama12())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_equals_transformers(twelve: Target, kind: str, policy: str) -> None:
    want = hf_greedy(twelve.model, PROMPT, 24, logits_processor=LogitsProcessorList([KINDS[kind]()]))
    assert want != hf_greedy(twelve.model, PROMPT, 24) or kind == "typical_p", "the processor changes something"
    for family in ("medusa", "eagle3"):
        got = answer(
            twelve,
            PROMPT,
            random_head(family, twelve),
            POLICIES[policy],
            max_new_tokens=24,
            processors=(KINDS[kind](),),
        )
        assert got.token_ids == want, family


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_rows_of_a_batch_equal_plain(twelve: Target, kind: str) -> None:
    def settings() -> Settings:
        return Settings(
            max_new_tokens=20,
            eos_ids=(),
            temperature=0.9,
            top_p=0.9,
            seed=4,
            processors=(KINDS[kind](),),
            repetition_penalty=1.1,
        )

    requests = [Request(encode(p), settings(), id=n, key=n) for n, p in enumerate(PROMPTS)]
    head = random_head("eagle3", twelve)
    results = {r.id: r for r in generate(twelve, requests, head=head, policy=POLICIES["dynamic"], batch_size=3)}
    for n, prompt in enumerate(PROMPTS):
        assert results[n].token_ids == plain(twelve, encode(prompt), settings(), n)


@pytest.mark.parametrize("policy", [None, "chain", "dynamic"])
def test_min_new_tokens(twelve: Target, policy: str | None) -> None:
    free = hf_greedy(twelve.model, PROMPT, 24)
    eos = free[3]  # would end after four tokens
    want = hf_greedy(twelve.model, PROMPT, 24, eos=eos, min_new_tokens=11)
    head = random_head("medusa", twelve) if policy else None
    fields: dict[str, Any] = {"eos_ids": (eos,), "max_new_tokens": 24}
    assert (
        answer(twelve, PROMPT, head, POLICIES[policy] if policy else None, min_new_tokens=11, **fields).token_ids
        == want
    )
    assert len(answer(twelve, PROMPT, head, POLICIES[policy] if policy else None, **fields).token_ids) < 11 <= len(want)
    assert plain(twelve, PROMPT, Settings(min_new_tokens=11, **fields)) == want


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", [False, True])
def test_everything_excluded(twelve: Target, temperature: float, head: bool) -> None:
    def nothing(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf)

    with pytest.raises(HeadwayError, match=f"every token is excluded at position {len(PROMPT)} .by nothing"):
        answer(
            twelve,
            PROMPT,
            random_head("medusa", twelve) if head else None,
            temperature=temperature,
            processors=(nothing,),
        )


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("after", [0, 3])
def test_scores_that_are_no_numbers(
    twelve: Target, fields: dict[str, Any], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = twelve.forward, []

    def broken(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        calls.append(1)
        if len(calls) > after:
            out.logits_BNV[..., 7] = torch.nan
        return out

    monkeypatch.setattr(twelve, "forward", broken)
    with pytest.raises(HeadwayError, match="not numbers"):
        answer(twelve, PROMPT, random_head("eagle3", twelve), POLICIES["dynamic"], **fields)


def test_wrong_shape(twelve: Target) -> None:
    with pytest.raises(HeadwayError, match="one score for each word"):
        answer(twelve, PROMPT, processors=(lambda ids, scores: scores[:, :5],))


@pytest.mark.parametrize(
    "fields", [{"min_new_tokens": 9, "max_new_tokens": 8}, {"min_new_tokens": -1}, {"processors": (3,)}]
)
def test_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(HeadwayError, match=next(iter(fields))):
        Settings(**fields)
