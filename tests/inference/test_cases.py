"""Everything that can end, cut or bend an answer, at once: every family and drafter, under every policy and mode.

One batch holds rows of all kinds: short budgets, end ids and stop strings inside an accepted run, a penalty, a processor,
drawn tokens, a prompt longer than the head. Each row must be transformers' own answer, or the plain twin's under a seed.

Heads of random weights are hardly ever right, so here they are told the right token most of the time; what they carry from
round to round is their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Frontier, Head, families, find_family
from headway.inference.drafter import Ask, Drafter, HeadDrafter
from headway.inference.drafters.draft_model import ModelDrafter
from headway.inference.drafters.hybrid import HybridDrafter
from headway.inference.drafters.ngram import NgramDrafter
from headway.inference.generate import Request, Result, generate, plain
from headway.inference.generator import Generator
from headway.inference.metrics import mean_accepted_length
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import OFF, ByRows, DynamicTree, Policy, StaticTree, Tree, chain, parse_policy
from tests.inference.helpers import encode, hf_greedy, random_head
from tests.tiny import build, rope_twins, target

FAMILIES = families()
POLICIES: dict[str, Policy] = {
    "chain": chain(3),
    # With gaps: a child without its likelier sibling.
    "static": StaticTree(((0,), (1,), (3,), (0, 1), (1, 0), (1, 2), (0, 1, 0), (1, 0, 1))),
    "dynamic": DynamicTree(depth=3, top_k=3, nodes=9),
    "by rows": parse_policy("1=static:0/1/0.0/1.0/1.0.0 2=chain:2 3=off"),
}
UNTRAINED = ("ngram", "model", "hybrid")
LONG = encode("0123456789" * 7)


class Told(HeadDrafter):
    """A head that is told the right token two times out of three, half of these as its second choice."""

    texts: list[list[int]]

    def fit(self, target: Target) -> Told:
        fitted = Told(self.head, super().fit(target).policy)
        fitted.texts = self.texts
        return fitted

    def propose(self, state: Any, ask: Ask) -> tuple[Tree, Any]:
        with telling(self.head, self.texts, ask.histories):
            return super().propose(state, ask)


@contextmanager
def telling(head: Head, texts: list[list[int]], histories: list[list[int]]) -> Iterator[None]:
    own = head.step

    def step(state: Any, frontier: Frontier) -> tuple[Tensor, Any]:
        logits_BNV, state = own(state, frontier)
        logits_BNV = logits_BNV.clone()
        for b, history in enumerate(histories):
            at = len(history) + frontier.depth
            right = next((text[at : at + 1] for text in texts if text[: len(history)] == history), [])
            known = (
                right if head.draft_vocab is None else (head.draft_vocab == torch.tensor(right or -1)).nonzero()[:, 0]
            )
            if len(known) and at % 3:
                best = logits_BNV[b].max()
                logits_BNV[b, :, int(known[0])] = best + 30
                if at % 2:
                    logits_BNV[b, :, int(known[0]) - 1] = best + 40
        return logits_BNV, state

    head.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.step


def cycle(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor under which the text repeats its last three tokens for ever."""
    scores[0, ids[0, -3]] = 100.0
    return scores


def often(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor under which the text likes to repeat its last three tokens, or the last one."""
    scores[0, ids[0, -3]] += 18.0
    scores[0, ids[0, -1]] += 15.0
    return scores


@dataclasses.dataclass
class Cases:
    """Requests of every kind, and the answer and finish of each."""

    requests: list[Request]
    want: dict[str, tuple[list[int], str]]
    texts: list[list[int]]


@pytest.fixture(scope="module")
def four() -> dict[str, Target]:
    model = build(0, num_hidden_layers=3)
    return {mode: target(model, mode=mode) for mode in ("tree", "chain", "replay", "plain")}


@pytest.fixture(scope="module")
def heads(four: dict[str, Target]) -> dict[str, Head]:
    return {family: of_family(family, four["tree"], max_position_embeddings=64) for family in FAMILIES}


def of_family(family: str, t: Target, **fields: Any) -> Head:
    """Return a random head with those of the fields that its family has, and a draft vocabulary that leaves words out."""
    known = {f.name for f in dataclasses.fields(find_family(family)[0])}
    fields = {"draft_vocab_size": 200, **fields}
    return random_head(family, t, **{name: value for name, value in fields.items() if name in known})


@pytest.fixture(scope="module")
def cases(four: dict[str, Target]) -> Cases:
    t = four["plain"]
    prompt, free = encode("Hello wo"), hf_greedy(t.model, encode("Hello wo"), 18)
    assert len(set(free[:11])) > 6
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    assert t.tokenizer is not None
    stop = {"processors": (cycle,), "stop": (str(t.tokenizer.decode(encode("xyzxyzx"))),)}
    rows: list[tuple[str, list[int], dict[str, Any], list[int], str]] = [
        ("free", prompt, {"max_new_tokens": 18}, free, "length"),
        *((f"budget {n}", prompt, {"max_new_tokens": n}, free[:n], "length") for n in (1, 2, 5)),
        *(ended(t, prompt, free, index, 18) for index in (2, 3, 7)),
        ended(t, prompt, free, 6, free.index(free[6]) + 1),  # the end id takes the last token of the budget
        (
            "penalty",
            encode("aaaaab"),
            {"max_new_tokens": 12, "repetition_penalty": 1.3},
            hf_greedy(t.model, encode("aaaaab"), 12, repetition_penalty=1.3),
            "length",
        ),
        (
            "processor",
            encode("abc"),
            {"max_new_tokens": 14, "processors": (cycle,)},
            hf_greedy(t.model, encode("abc"), 14, logits_processor=LogitsProcessorList([cycle])),  # type: ignore[list-item]
            "length",
        ),
        ("stop string", encode("wxyz"), {"max_new_tokens": 20, **stop}, encode("xyzxyzx"), "stop_string"),
        ("long", LONG, {"max_new_tokens": 8}, hf_greedy(t.model, LONG, 8), "length"),
        (
            "typical at zero",
            encode("12345"),
            {"max_new_tokens": 9, "accept": "typical"},
            hf_greedy(t.model, encode("12345"), 9),
            "length",
        ),
        (
            "drawn",
            encode("The cat"),
            {"max_new_tokens": 14, **drawn},
            plain(t, encode("The cat"), Settings(max_new_tokens=14, eos_ids=(), **drawn), 7),
            "length",
        ),
    ]
    return Cases(
        [Request(ids, Settings(**{"eos_ids": (), **fields}), id=name, key=7) for name, ids, fields, _, _ in rows],
        {name: (answer, finish) for name, _, _, answer, finish in rows},
        [ids + answer for _, ids, _, answer, _ in rows],
    )


def ended(
    t: Target, prompt: list[int], free: list[int], index: int, budget: int
) -> tuple[str, list[int], dict[str, Any], list[int], str]:
    """Return the row whose end id is the token at that index of the free answer."""
    eos = free[index]
    answer = free[: free.index(eos) + 1]
    assert answer == hf_greedy(t.model, prompt, 18, eos)
    return f"end {index} of {budget}", prompt, {"max_new_tokens": budget, "eos_ids": (eos,)}, answer, "stop"


def check(cases: Cases, t: Target, drafter: Drafter | None, batch_size: int = 4) -> list[Result]:
    """Compare every row, its stream, its finish and its counts with what they must be; return the results."""
    streamed: dict[str, list[int]] = {request.id: [] for request in cases.requests}
    dice = torch.get_rng_state()
    results = list(
        generate(
            t,
            cases.requests,
            head=drafter,
            batch_size=batch_size,
            on_tokens=lambda request, tokens: streamed[request.id].extend(tokens),
        )
    )
    assert sorted(r.id for r in results) == sorted(cases.want)
    assert torch.equal(torch.get_rng_state(), dice), "torch's own generator is left alone"
    for r in results:
        assert (r.token_ids, r.finish_reason) == cases.want[r.id], r.id
        assert streamed[r.id] == r.token_ids
        # Only emitted tokens count, none behind the end; the first came with the prompt.
        assert 1 + sum(r.accepted_per_round) == r.new_tokens
        assert r.rounds == len(r.accepted_per_round)
        assert min(r.accepted_per_round, default=1) >= 1
        assert r.accepted_length == pytest.approx(mean_accepted_length([n - 1 for n in r.accepted_per_round]))
    return results


def told(head: Head, policy: Policy, texts: list[list[int]]) -> Told:
    drafter = Told(head, policy)
    drafter.texts = texts
    return drafter


MODES = [*(("tree", p) for p in POLICIES), ("chain", "static"), ("replay", "by rows")]


@pytest.mark.parametrize(("mode", "policy"), MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_heads(
    four: dict[str, Target], heads: dict[str, Head], cases: Cases, family: str, mode: str, policy: str
) -> None:
    results = check(cases, four[mode], told(heads[family], POLICIES[policy], cases.texts))
    assert max(n for r in results for n in r.accepted_per_round or [1]) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_alone(four: dict[str, Target], heads: dict[str, Head], cases: Cases, family: str) -> None:
    check(cases, four["tree"], told(heads[family], POLICIES["by rows"], cases.texts), batch_size=1)


@pytest.mark.parametrize("mode", ["tree", "chain", "replay", "plain"])
def test_drafting_off(four: dict[str, Target], heads: dict[str, Head], cases: Cases, mode: str) -> None:
    check(cases, four[mode], None)
    check(cases, four[mode], HeadDrafter(heads["eagle3"], OFF))


def untrained(name: str, four: dict[str, Target], head: Head, texts: list[list[int]]) -> Drafter:
    twin = ModelDrafter(target(four["tree"].model, name="twin", mode="tree"), POLICIES["static"])
    found = NgramDrafter(shortest=2)
    return {"ngram": found, "model": twin, "hybrid": HybridDrafter(told(head, POLICIES["static"], texts), found)}[name]


@pytest.mark.parametrize("mode", ["tree", "chain", "replay", "plain"])
@pytest.mark.parametrize("name", UNTRAINED)
def test_drafters_without_training(
    four: dict[str, Target], heads: dict[str, Head], cases: Cases, name: str, mode: str
) -> None:
    results = check(cases, four[mode], untrained(name, four, heads["eagle3"], cases.texts))
    assert max(n for r in results for n in r.accepted_per_round or [1]) > 3 or mode == "plain"


TYPICAL: dict[str, Any] = {"temperature": 3.0, "accept": "typical", "epsilon": 0.002, "delta": 1.0, "seed": 2}


@pytest.mark.parametrize("mode", ["tree", "replay"])
@pytest.mark.parametrize("name", [*FAMILIES, *UNTRAINED])
def test_typical_rows_of_a_batch_are_those_alone(
    four: dict[str, Target], heads: dict[str, Head], name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer depends on what is drafted, and what is drafted for a row must not depend on the others, nor on what a
    lookup learned of how far to go."""
    texts = ["abcabcabcab", "aaa", "The cat sat", "xyxyxyxyxy", "0000000"]

    def drafter() -> Drafter:
        if name in FAMILIES:
            return HeadDrafter(heads[name], parse_policy("1=static:0/1/0.0/1.0 2=chain:1 3=off"))
        return untrained(name, four, heads["eagle3"], [])

    likely = {"processors": (often,)} if name in ("ngram", "hybrid") else {}
    requests = [
        Request(encode(text), Settings(max_new_tokens=8 + n, eos_ids=(), **TYPICAL, **likely), id=n, key=n)
        for n, text in enumerate(texts)
    ]
    together = {r.id: r for r in generate(four[mode], requests, head=drafter(), batch_size=3)}
    assert max(n for r in together.values() for n in r.accepted_per_round) > 1
    usual = NgramDrafter._shares

    def misled(self: NgramDrafter, n: int, learned: bool = True) -> list[float]:
        return [1.0] if learned else usual(self, n, False)

    for learned in (False, True):
        if learned:
            monkeypatch.setattr(NgramDrafter, "_shares", misled)
        for request in requests:
            (alone,) = generate(four[mode], [request], head=drafter())
            assert together[request.id].token_ids == alone.token_ids, (request.id, learned)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_deeper_than_the_head(four: dict[str, Target], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is computed, by rows too; a head that can go on for ever takes it."""
    t = four["tree"]
    head = of_family(family, t, num_heads=3, depths=3)
    deep: list[Policy] = [
        StaticTree(((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 0, 0))),
        DynamicTree(depth=4),
        ByRows(((1, chain(1)), (2, chain(4)))),
    ]
    if head.max_depth is None:
        want = hf_greedy(t.model, LONG, 9)
        for policy in [*deep, chain(12)]:
            (result,) = generate(t, [Request(LONG, Settings(max_new_tokens=9, eos_ids=()))], head=head, policy=policy)
            assert result.token_ids == want
        return
    assert head.max_depth == 3
    monkeypatch.setattr(t, "forward", None)
    for policy in deep:
        with pytest.raises(HeadwayError, match=r"depth 4.* 3 "):
            next(generate(t, [Request(LONG)], head=head, policy=policy))
        with pytest.raises(HeadwayError, match=r"depth 4.* 3 "):
            Generator(t, head, policy)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "medusa"])
def test_both_spellings_of_the_rotary_setting_draft_the_same(family: str) -> None:
    """Every family with a draft layer carries the target's angles, whichever transformers wrote its config."""
    for model in rope_twins():
        t = target(model, mode="tree")
        head: Any = of_family(family, t)
        assert {k: head.config.rope[k] for k in ("rope_theta", "rope_type", "factor")} == {
            "rope_theta": 5e5,
            "rope_type": "llama3",
            "factor": 8.0,
        }
        position = torch.arange(300)[None]
        ours, theirs = (
            head.rotary(torch.zeros(1, 1, 64), position),
            model.model.rotary_emb(torch.zeros(1, 1, 64), position),
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        plain_angles = build(8, num_hidden_layers=6).model.rotary_emb(torch.zeros(1, 1, 64), position)
        assert not torch.equal(ours[0], plain_angles[0])


@pytest.mark.parametrize("mode", ["tree", "chain", "replay"])
@pytest.mark.parametrize("name", ["medusa", "ngram", "hybrid"])
def test_token_zero_is_no_padding(four: dict[str, Target], heads: dict[str, Head], name: str, mode: str) -> None:
    """A path that ends before others do is not gone on with the token 0 because that is what padding looks like."""

    def zeros(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([0 if ids.shape[1] % 4 else 90]), 100.0)

    texts = {text: encode(text) for text in ("Hello wo", "abcabc", "a")}
    want = {t: [0 if (len(ids) + n) % 4 else 90 for n in range(17)] for t, ids in texts.items()}
    drafter = (
        untrained(name, four, heads["medusa"], [])
        if name in UNTRAINED
        else HeadDrafter(heads[name], POLICIES["static"])
    )
    requests = [
        Request(ids, Settings(max_new_tokens=17, eos_ids=(), processors=(zeros,)), id=t) for t, ids in texts.items()
    ]
    trees: list[tuple[Tree, list[list[int]]]] = []
    for r in generate(four[mode], requests, head=drafter, batch_size=2, observe=lambda *seen: trees.append(seen)):
        assert r.token_ids == want[r.id]
        assert 1 + sum(r.accepted_per_round) == 17
    for tree, paths in trees:
        for parents, path in zip(tree.parents, paths, strict=True):
            assert [parents[n] for n in path] == [-1, *path[:-1]]
