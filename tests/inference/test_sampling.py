"""The law of sampled output: chi-square against the target's distribution, with biased rules that must fail it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headway.heads.common.errors import HeadwayError
from headway.inference.generate import plain
from headway.inference.sampling import Settings, gumbel, process, typical_threshold
from headway.inference.target import Target
from headway.inference.verify import walk_exact, walk_exact_rows, walk_greedy, walk_typical
from tests.inference.helpers import POLICIES, answer, encode, random_head
from tests.tiny import build, target

P = [0.5, 0.3, 0.15, 0.05]
Q = [0.1, 0.6, 0.2, 0.1]
DRAWS = 4000
ONE = Settings(temperature=1.0)


def fits(counts: Counter[Any], law: dict[Any, float], draws: int) -> bool:
    """Whether counts pass a chi-square test of the law at the level 1e-4 (the cube-root approximation of the quantile)."""
    assert sum(counts.values()) == draws
    if set(counts) - {k for k, p in law.items() if p > 0}:
        return False
    cells = [(counts[k], p * draws) for k, p in law.items() if p > 0]
    free = len(cells) - 1
    statistic = sum((seen - want) ** 2 / want for seen, want in cells)
    z = ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return z < 3.72


def proposals(kind: str, draw: int, generator: torch.Generator) -> list[int]:
    """Return the sibling tokens a draft proposes: one drawn from q, the best of q, or the two best of q."""
    if kind == "sampled":
        return [int(torch.multinomial(torch.tensor(Q), 1, generator=generator))]
    return [1] if kind == "best" else [1, 2]


def ratio_rule(tokens: list[int], draw: int) -> int:
    """The rule that is right only for drafts sampled from q: accept y with min(1, p/q), else draw from (p - q)+."""
    generator = torch.Generator().manual_seed(draw)
    for y in tokens:
        if float(torch.rand((), generator=generator)) < min(1.0, P[y] / Q[y]):
            return y
    rest = torch.tensor([max(0.0, p - q) for p, q in zip(P, Q, strict=True)])
    return int(torch.multinomial(rest, 1, generator=generator))


@pytest.mark.parametrize("kind", ["sampled", "best", "two best"])
def test_first_token_has_the_targets_law(kind: str) -> None:
    logits_NV = torch.tensor(P).log().expand(3, 4)
    generator = torch.Generator().manual_seed(0)
    right: Counter[int] = Counter()
    wrong: Counter[int] = Counter()
    for draw in range(DRAWS):
        tokens = proposals(kind, draw, generator)
        parents = [-1] + [0] * len(tokens)
        _, emitted = walk_exact([9, *tokens], parents, logits_NV, ONE, draw, [9])
        right[emitted[0]] += 1
        wrong[ratio_rule(tokens, draw)] += 1
    law = dict(enumerate(P))
    assert fits(right, law, DRAWS)
    assert 0.5 * sum(abs(right[t] / DRAWS - p) for t, p in law.items()) < 0.03
    if kind == "sampled":
        assert fits(wrong, law, DRAWS)
    else:
        assert not fits(wrong, law, DRAWS), "the biased rule passes: the test has no power"


def draft_first(token_N: list[int], parents: list[int], logits_NV: Tensor, *_: Any) -> tuple[list[int], list[int]]:
    """A biased rule: the draft is taken whenever it is not improbable."""
    path = [0, 1, 2]
    return path, [token_N[1], token_N[2], 0]


@pytest.mark.parametrize("rule", [walk_exact, draft_first])
@pytest.mark.parametrize("varied", ["key", "seed"])
def test_joint_law_of_two_tokens(rule: Callable[..., Any], varied: str) -> None:
    """A chain that always proposes (1, 1): the unlikely path. The law is p1 * p2 whatever is proposed."""
    first, second = [0.6, 0.4], {0: [0.9, 0.1], 1: [0.2, 0.8]}
    logits_NV = torch.tensor([first, second[1], [0.5, 0.5]]).log()
    counts: Counter[tuple[int, int]] = Counter()
    for draw in range(DRAWS):
        settings = Settings(temperature=1.0, seed=draw if varied == "seed" else 5)
        key = draw if varied == "key" else 5
        _, emitted = rule([9, 1, 1], [-1, 0, 1], logits_NV, settings, key, [9])
        if len(emitted) == 1:  # the next round, whose root is the token just drawn
            _, more = rule([emitted[0]], [-1], torch.tensor([second[emitted[0]]]).log(), settings, key, [9, *emitted])
            emitted = emitted + more
        counts[emitted[0], emitted[1]] += 1
    law = {(a, b): first[a] * second[a][b] for a in (0, 1) for b in (0, 1)}
    assert fits(counts, law, DRAWS) == (rule is walk_exact)


def test_duplicate_children_do_not_change_the_law() -> None:
    logits_NV = torch.tensor(P).log().expand(4, 4)
    counts: Counter[int] = Counter()
    for key in range(DRAWS):
        counts[walk_exact([9, 1, 1, 1], [-1, 0, 0, 0], logits_NV, ONE, key, [9])[1][0]] += 1
    assert fits(counts, dict(enumerate(P)), DRAWS)


def test_gumbel_is_uniform_and_independent() -> None:
    ids = torch.arange(4096)

    def uniform(seed: int, key: int, position: int) -> Tensor:
        return torch.exp(-torch.exp(-gumbel(seed, key, position, ids)))

    base = uniform(0, 0, 0)
    for where in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**40, 7, 511)]:
        u = uniform(*where)
        assert u.min() > 0
        assert u.max() < 1
        bins = Counter((u * 16).long().tolist())
        assert fits(bins, dict.fromkeys(range(16), 1 / 16), 4096), where
        pairs = Counter(zip((u[:-1] * 4).long().tolist(), (u[1:] * 4).long().tolist(), strict=True))
        assert fits(pairs, {(i, j): 1 / 16 for i in range(4) for j in range(4)}, 4095), f"neighbours depend at {where}"
        if where != (0, 0, 0):
            both = Counter(zip((base * 4).long().tolist(), (u * 4).long().tolist(), strict=True))
            assert fits(both, {(i, j): 1 / 16 for i in range(4) for j in range(4)}, 4096), (
                f"{where} depends on (0, 0, 0)"
            )
    assert not fits(Counter((base**1.2 * 16).long().tolist()), dict.fromkeys(range(16), 1 / 16), 4096)


def test_gumbel_of_one_token_over_positions() -> None:
    u = torch.tensor([float(torch.exp(-torch.exp(-gumbel(3, 0, p, torch.tensor([17]))))) for p in range(4000)])
    pairs = Counter(zip((u[:-1] * 4).long().tolist(), (u[1:] * 4).long().tolist(), strict=True))
    assert fits(pairs, {(i, j): 1 / 16 for i in range(4) for j in range(4)}, 3999)


def test_gumbel_is_a_function_of_its_arguments() -> None:
    ids = torch.tensor([5, 900, 0])
    assert gumbel(1, 2, 3, torch.arange(1000))[ids].equal(gumbel(1, 2, 3, ids))


WARPERS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.5, "top_p": 0.999, "repetition_penalty": 0.8},
]


@pytest.mark.parametrize("fields", WARPERS, ids=str)
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_process_equals_transformers(fields: dict[str, Any], scale: float) -> None:
    history = [3, 3, 99, 0, 17]
    chain = LogitsProcessorList()
    if "repetition_penalty" in fields:
        chain.append(RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"]))
    chain.append(TemperatureLogitsWarper(fields["temperature"]))
    if "top_k" in fields:
        chain.append(TopKLogitsWarper(fields["top_k"]))
    if "top_p" in fields:
        chain.append(TopPLogitsWarper(fields["top_p"]))
    if "min_p" in fields:
        chain.append(MinPLogitsWarper(fields["min_p"]))
    for seed in range(10):
        logits = scale * torch.randn(2000, generator=torch.Generator().manual_seed(seed))
        want = chain(torch.tensor([history]), logits[None].clone())[0]
        got = process(logits, Settings(**fields), history)
        assert got.isfinite().equal(want.isfinite())
        torch.testing.assert_close(got, want)


def test_process_leaves_the_logits_alone() -> None:
    logits = torch.randn(50)
    before = logits.clone()
    process(logits, Settings(temperature=0.5, top_k=3, repetition_penalty=2.0), [1, 2])
    assert logits.equal(before)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def tiny(request: pytest.FixtureRequest) -> Target:
    return target(build(4, "sdpa", model_type=request.param, num_hidden_layers=4))


@pytest.mark.parametrize(
    "fields", [{"top_p": 0.9}, {}, {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2}], ids=str
)
def test_seeded_identity(tiny: Target, fields: dict[str, Any]) -> None:
    """One seed, one answer: with no head, with either, with any tree, and from the plain twin."""
    prompt = encode("Hello wo")
    answers = set()
    for seed in (0, 1, 2**33 + 5):
        settings = {"max_new_tokens": 24, "temperature": 0.8, "seed": seed, **fields}
        want = plain(tiny, prompt, Settings(eos_ids=(), **settings), 3)
        answers.add(tuple(want))
        assert answer(tiny, prompt, key=3, **settings).token_ids == want
        for family, policy in [("medusa", "binary"), ("eagle3", "dynamic"), ("eagle3", "chain")]:
            head = random_head(family, tiny)
            assert answer(tiny, prompt, head, POLICIES[policy], key=3, **settings).token_ids == want, family
    assert len(answers) == 3, "different seeds gave one answer"


TYPICAL = [
    ([0.9, 0.05, 0.03, 0.02], 0.09, {0}),
    ([0.4, 0.3, 0.2, 0.1], 0.0834, {0, 1, 2, 3}),
    ([0.25] * 4, 0.075, {0, 1, 2, 3}),
    ([0.97, 0.01, 0.01, 0.01], 0.09, {0}),
    ([0.92, 0.07, 0.009, 0.001], 0.09, {0}),  # with epsilon and delta exchanged the second is accepted too
]


@pytest.mark.parametrize(("p", "threshold", "accepted"), TYPICAL)
def test_typical_thresholds(p: list[float], threshold: float, accepted: set[int]) -> None:
    p_V = torch.tensor(p)
    assert typical_threshold(p_V, 0.09, 0.3) == pytest.approx(threshold, abs=1e-4)
    settings = Settings(temperature=1.0, accept="typical")
    for token in range(4):
        path, emitted = walk_typical([9, token], [-1, 0], p_V.log().expand(2, 4), settings, 0, [9])
        assert (path == [0, 1]) == (token in accepted)
        assert len(emitted) == len(path)
        if token in accepted:
            assert emitted[0] == token, "an accepted token is emitted, be it the most probable or not"


def test_under_typical_acceptance_the_first_token_is_drawn() -> None:
    """It is no draft: it follows the target's law, it is not the most probable token each time."""
    logits_NV = torch.tensor(P).log().expand(2, 4)
    settings = Settings(temperature=1.0, accept="typical", epsilon=0.99, delta=99.0)
    for tokens, parents in ([9], [-1]), ([9, 2], [-1, 0]):  # nothing drafted; a draft that is not accepted
        counts = Counter(walk_typical(tokens, parents, logits_NV, settings, key, [9])[1][0] for key in range(DRAWS))
        assert fits(counts, dict(enumerate(P)), DRAWS)
    assert not fits(Counter({0: DRAWS}), dict(enumerate(P)), DRAWS)


def test_typical_keeps_the_longest_path() -> None:
    flat = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(5, 4)
    settings = Settings(temperature=1.0, accept="typical")
    path, emitted = walk_typical([9, 0, 3, 2, 1], [-1, 0, 0, 2, 3], flat, settings, 0, [9])
    assert path == [0, 2, 3, 4]
    assert emitted[:3] == [3, 2, 1]


def test_typical_at_temperature_zero_is_greedy(tiny: Target) -> None:
    prompt = encode("Hello wo")
    for family in ("medusa", "eagle3"):
        head = random_head(family, tiny)
        got = answer(tiny, prompt, head, POLICIES["binary"], max_new_tokens=24, accept="typical").token_ids
        assert got == plain(tiny, prompt, Settings(max_new_tokens=24, eos_ids=()))


def test_typical_is_not_exact(tiny: Target) -> None:
    """With a high temperature nearly every draft is typical, so the output is the head's and not the target's."""
    prompt, settings = encode("Hello wo"), {"max_new_tokens": 24, "temperature": 20.0}
    head = random_head("eagle3", tiny)
    typical = answer(tiny, prompt, head, POLICIES["binary"], accept="typical", epsilon=1e-6, **settings)
    exact = answer(tiny, prompt, head, POLICIES["binary"], **settings)
    assert typical.token_ids != exact.token_ids
    assert typical.accepted_length > 2 > exact.accepted_length


def test_greedy_walk_is_the_exact_walk_at_temperature_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits_NV = torch.randn(6, 4, generator=generator)
        tokens = torch.randint(4, (6,), generator=generator).tolist()
        parents = [-1, 0, 0, 1, 1, 3]
        exact = walk_exact(tokens, parents, logits_NV, Settings(), 0, [9])
        assert walk_greedy(tokens, parents, logits_NV.argmax(-1).tolist()) == exact


@pytest.mark.parametrize(
    "field",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"accept": "maybe"},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_settings_refuse(field: dict[str, Any]) -> None:
    with pytest.raises(HeadwayError, match=next(iter(field))):
        Settings(**field)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "top_k": 9}])
def test_rows_are_walked_together_as_alone(fields: dict[str, Any]) -> None:
    settings = Settings(seed=3, **fields)
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(20):
        logits_BNV = torch.randn(5, 9, 6, generator=generator) * 2
        token_BN = torch.randint(6, (5, 9), generator=generator).tolist()
        parents = [[-1, *(int(torch.randint(n, (1,), generator=generator)) for n in range(1, 9))] for _ in range(5)]
        together = walk_exact_rows(token_BN, parents, logits_BNV, settings, list(range(5)), [4, 7, 1, 2, 9])
        for b, history in enumerate([4, 7, 1, 2, 9]):
            alone = walk_exact(token_BN[b], parents[b], logits_BNV[b], settings, b, [0] * history)
            assert together[b] == alone
            lengths.add(len(alone[1]))
    assert len(lengths) > 2  # rows of unlike length did walk together
