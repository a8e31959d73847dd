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
from headway.inference.tree import chain
from tests.inference.helpers import POLICIES, PROMPTS, answer, encode, hf_greedy, random_head
from tests.inference.test_oracle import Oracle
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


class EndsThere:
    """A grammar that an answer leaves with its last token: asked what comes after that, it allows nothing, or fails."""

    def __init__(self, text: list[int], fails: bool) -> None:
        self.text, self.fails = text, fails

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids[0].tolist() != self.text:
            return scores
        assert not self.fails, "asked after the end"
        return torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("end", ["eos_ids", "max_new_tokens", "ends", "stop", "typical"])
def test_a_processor_is_not_asked_after_the_end(twelve: Target, end: str, fails: bool) -> None:
    """A draft that is right goes on after the last token; the answer does not."""
    free = hf_greedy(twelve.model, PROMPT, 12)
    text = PROMPT + free[:4]
    fields: dict[str, Any] = {"max_new_tokens": 12, "eos_ids": (), "processors": (EndsThere(text, fails),)}
    ends = None
    if end == "eos_ids":
        fields["eos_ids"] = (free[3],)
    elif end == "typical":
        fields |= {"eos_ids": (free[3],), "accept": "typical", "temperature": 1e-3, "top_k": 1}
    elif end == "max_new_tokens":
        fields["max_new_tokens"] = 4
    elif end == "stop":
        fields["stop"] = (twelve.tokenizer.decode(free[:4]),)
    else:
        ends = text.__eq__
    head = Oracle(twelve, [PROMPT + free], lambda round, depth: 0)
    request = Request(PROMPT, Settings(**fields), ends=ends)
    (result,) = generate(twelve, [request], head=head, policy=chain(5))
    assert result.token_ids == plain(twelve, PROMPT, request.settings, ends=ends) == free[:4]
    assert (result.rounds, result.accepted_per_round) == (1, [3])


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
    "fields",
    [
        {"min_new_tokens": 9, "max_new_tokens": 8},
        {"min_new_tokens": -1},
        {"processors": (3,)},
        {"processors": len},
        {"stop": "END"},  # as a tuple it would be three stop strings
        {"stop": (3,)},
        {"stop": ("",)},
        {"eos_ids": 3},
        {"eos_ids": (3, "x")},
        {"max_new_tokens": 4.5},
        {"max_new_tokens": "5"},
        {"top_k": 3.5},
        {"seed": None},
        {"temperature": None},
        {"temperature": float("inf")},
        {"top_p": float("nan")},
        {"repetition_penalty": float("inf")},
        {"epsilon": -0.1},
        {"epsilon": float("nan")},
        {"delta": -1.0},
    ],
    ids=str,
)
def test_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(HeadwayError, match=f"^{next(iter(fields))} is "):
        Settings(**fields)


def test_a_list_is_as_good_as_a_tuple(twelve: Target) -> None:
    fields: dict[str, Any] = {"eos_ids": [3], "stop": ["no"], "processors": [SuppressTokensLogitsProcessor([7])]}
    settings = Settings(max_new_tokens=4, temperature=1.0, **fields)
    assert settings == Settings(max_new_tokens=4, temperature=1.0, **{k: tuple(v) for k, v in fields.items()})
    (result,) = generate(twelve, [Request(PROMPT, settings)], head=random_head("medusa", twelve))
    assert result.token_ids == plain(twelve, PROMPT, settings)
