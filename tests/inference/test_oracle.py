"""Drafters that know the answer, and are made to be right and wrong exactly where the loop could slip."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Context, Frontier, Head, HeadConfig
from headway.inference.generate import Request, Result, generate, plain
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import DynamicTree, Policy, chain
from tests.inference.helpers import BINARY3, answer, encode, hf_greedy
from tests.tiny import byte_tokenizer, llama12, target

Plan = Callable[[int, int], int | None]
"""(round, depth) -> the rank at which the right token is put among a right node's children; None leaves it out."""


@dataclass
class Place:
    """Where a row is: its whole text, the root's index in it, and how many rounds it has had."""

    text: list[int]
    root: int
    round: int


State = tuple[list[Place], list[list[bool]]]
"""The places, and for each node of the last frontier whether its whole path is right."""


class Oracle(Head):
    """Drafts from the known text as `plan` says; everything else it proposes is wrong.

    Its draft vocabulary names each target id twice, so that children may be duplicates. It also checks what it is told:
    every committed token and position must be the text's own.
    """

    def __init__(self, t: Target, texts: list[list[int]], plan: Plan, twice: bool = False) -> None:
        super().__init__(HeadConfig.for_target(t.info), t.frozen)
        self.texts, self.plan, self.twice, self.size = texts, plan, twice, t.info.vocab_size

    @property
    def draft_vocab(self) -> Tensor:
        return torch.arange(2 * self.size) % self.size

    def start(self, context: Context, state: State | None, rows: int) -> State:
        places = []
        for b in range(rows):
            count = context.count_B[b]
            told, where = context.next_BT[b, :count].tolist(), context.position_BT[b, :count].tolist()
            if state is None:
                assert where == list(range(count))
                (text,) = [x for x in self.texts if x[1 : count + 1] == told]
                places.append(Place(text, count, 0))
            else:
                old = state[0][b]
                assert where == list(range(old.root, old.root + count))
                assert told == old.text[old.root + 1 : old.root + 1 + count]
                places.append(Place(old.text, old.root + count, old.round + 1))
        return places, []

    def step(self, state: State, frontier: Frontier) -> tuple[Tensor, State]:
        places, above = state
        right = []
        for b, place in enumerate(places):
            if frontier.depth == 0:
                right.append([True])
                continue
            tokens, parents = frontier.token_BN[b].tolist(), frontier.parent_BN[b].tolist()
            want = self.at(place, frontier.depth)
            right.append([above[b][p] and t == want for t, p in zip(tokens, parents, strict=True)])
        rows = [
            torch.stack([self.order(place, frontier.depth, known) for known in right[b]])
            for b, place in enumerate(places)
        ]
        return torch.stack(rows), (places, right)

    def at(self, place: Place, ahead: int) -> int:
        index = place.root + ahead
        return place.text[index] if index < len(place.text) else 0

    def order(self, place: Place, depth: int, known: bool) -> Tensor:
        """Return logits that rank the ids as planned: the right one at its rank, wrong ones (padding ids too) elsewhere."""
        right = self.at(place, depth + 1)
        wrong = [i for i in (self.size - 1, self.size - 2, 7, 11, 13, 17, 19) if i != right]
        rank = self.plan(place.round, depth) if known else None
        ids = wrong[:4] if rank is None else [*wrong[:rank], right, *wrong[rank:4]]
        if self.twice:
            ids = [i + copy * self.size for i in ids for copy in (0, 1)]
        logits = torch.full((2 * self.size,), -9.0)
        logits[ids] = torch.arange(len(ids), 0, -1) * 0.1
        return logits

    def select_rows(self, state: State, kept: list[int]) -> State:
        return [state[0][b] for b in kept], []

    def join_rows(self, state: State, other: State) -> State:
        return state[0] + other[0], []


@pytest.fixture(scope="module")
def twelve() -> Target:
    return target(llama12())


PROMPT = encode("Hello wo")


@pytest.fixture(scope="module")
def text(twelve: Target) -> list[int]:
    """The prompt and its greedy answer of 48 tokens."""
    return PROMPT + hf_greedy(twelve.model, PROMPT, 48)


def consistent(result: Result) -> None:
    assert 1 + sum(result.accepted_per_round) == result.new_tokens == len(result.token_ids)
    assert len(result.accepted_per_round) == result.rounds
    assert all(n >= 1 for n in result.accepted_per_round)


def test_every_accepted_length(twelve: Target, text: list[int]) -> None:
    """Round r accepts r mod 5 of a chain of four."""
    oracle = Oracle(twelve, [text], lambda r, d: 0 if d < r % 5 else None)
    result = answer(twelve, PROMPT, oracle, chain(4), max_new_tokens=40)
    assert result.token_ids == text[8:48]
    assert result.accepted_per_round[:10] == [1, 2, 3, 4, 5] * 2
    consistent(result)


@pytest.mark.parametrize("twice", [False, True], ids=["distinct", "duplicates"])
def test_every_path_of_a_binary_tree(twelve: Target, text: list[int], twice: bool) -> None:
    """Round r is right at the ranks of path r; with duplicate children each token comes twice, at ranks 2k and 2k + 1."""
    every = [p for d in range(4) for p in itertools.product((0, 1), repeat=d)]

    def plan(r: int, d: int) -> int | None:
        path = every[r % len(every)]
        if d >= len(path):
            return None
        return 0 if twice else [0, 1][path[d]]

    for first in range(0, len(every), 5):
        oracle = Oracle(twelve, [text], lambda r, d, first=first: plan(r + first, d), twice)
        result = answer(twelve, PROMPT, oracle, BINARY3, max_new_tokens=len(text) - 8)
        assert result.token_ids == text[8:]
        want = [len(every[(r + first) % len(every)]) + 1 for r in range(5)]
        assert result.accepted_per_round[: len(want) - 1] == want[:-1]
        consistent(result)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("twice", [False, True], ids=["distinct", "duplicates"])
@pytest.mark.parametrize("policy", [DynamicTree(3, 4, 85), DynamicTree(3, 2, 6), DynamicTree(4, 3, 9)])
def test_the_right_token_at_a_rank_of_a_dynamic_tree(
    twelve: Target, text: list[int], rank: int, twice: bool, policy: DynamicTree
) -> None:
    oracle = Oracle(twelve, [text], lambda r, d: rank if d == 0 else 0, twice)
    result = answer(twelve, PROMPT, oracle, policy, max_new_tokens=24)
    assert result.token_ids == text[8:32]
    consistent(result)
    if rank == 0:
        assert max(result.accepted_per_round) > 1


def test_a_wrong_commit_is_noticed(twelve: Target, text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: committing the first nodes instead of the accepted ones breaks the answer."""
    from headway.heads.common.slots import Slots

    commit = Slots.commit
    monkeypatch.setattr(Slots, "commit", lambda self, kept: commit(self, [list(range(len(p))) for p in kept]))
    oracle = Oracle(twelve, [text], lambda r, d: 1)
    with pytest.raises(AssertionError):
        assert answer(twelve, PROMPT, oracle, BINARY3, max_new_tokens=40).token_ids == text[8:48]


def test_rows_of_different_luck_in_one_batch(twelve: Target) -> None:
    prompts = [encode(t) for t in ("Hello wo", "a", "The cat sat", "12345", "xyz")]
    texts = [p + hf_greedy(twelve.model, p, 30) for p in prompts]
    oracle = Oracle(twelve, texts, lambda r, d: [0, None, 1, 0, 1][(r * 3 + d) % 5])
    requests = [Request(p, Settings(max_new_tokens=12 + 4 * i, eos_ids=()), id=i) for i, p in enumerate(prompts)]
    for result in generate(twelve, requests, head=oracle, policy=BINARY3, batch_size=3):
        size = len(prompts[result.id])
        assert result.token_ids == texts[result.id][size : size + 12 + 4 * result.id]
        consistent(result)


@pytest.mark.parametrize("index", range(9))
def test_end_token_at_each_place_of_a_run(twelve: Target, text: list[int], index: int) -> None:
    new = text[8:28]
    eos = new[index]
    oracle = Oracle(twelve, [text], lambda r, d: 0)
    streamed: list[int] = []
    request = Request(PROMPT, Settings(max_new_tokens=20, eos_ids=(eos,)))
    (result,) = generate(
        twelve, [request], head=oracle, policy=chain(4), on_tokens=lambda _, tokens: streamed.extend(tokens)
    )
    assert result.token_ids == streamed == new[: new.index(eos) + 1] == hf_greedy(twelve.model, PROMPT, 20, eos)
    assert result.finish_reason == "stop"
    consistent(result)


def test_the_first_of_several_end_ids_ends(twelve: Target, text: list[int]) -> None:
    new = text[8:]
    ends = (new[11], new[5], 999)
    oracle = Oracle(twelve, [text], lambda r, d: 0)
    result = answer(twelve, PROMPT, oracle, chain(4), max_new_tokens=40, eos_ids=ends)
    assert result.token_ids == new[: min(new.index(new[5]), new.index(new[11])) + 1]
    assert result.token_ids == hf_greedy(twelve.model, PROMPT, 40, list(ends))
    assert answer(twelve, PROMPT, oracle, chain(4), max_new_tokens=40, eos_ids=()).token_ids == new[:40]


def test_the_targets_own_end_ids_are_the_default(text: list[int]) -> None:
    t = target(llama12())
    t.model.generation_config.eos_token_id = [999, text[8 + 6]]
    oracle = Oracle(t, [text], lambda r, d: 0)
    result = answer(t, PROMPT, oracle, chain(4), max_new_tokens=40, eos_ids=None)
    assert result.token_ids == text[8 : 8 + text[8:].index(text[8 + 6]) + 1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7])
def test_never_more_than_the_budget(twelve: Target, text: list[int], budget: int) -> None:
    for policy in (chain(6), BINARY3):
        oracle = Oracle(twelve, [text], lambda r, d: 0)
        result = answer(twelve, PROMPT, oracle, policy, max_new_tokens=budget)
        assert result.token_ids == text[8 : 8 + budget]
        assert result.finish_reason == "length"
        consistent(result)


# A text of distinct bytes: a model that maps each byte to the one after it writes the line and begins again.
TOKENIZER = byte_tokenizer()
LINE = "abc€defgü.\nhij😀klm"
BYTES = TOKENIZER(LINE)["input_ids"]


def speller(max_positions: int = 512) -> Target:
    """A target that spells LINE over and over: embeddings are one-hot, its layers add nothing, its LM head is the successor."""
    assert len(set(BYTES)) == len(BYTES) == len(LINE.encode())
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=272,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_positions,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=260,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(272))
        for one, following in itertools.pairwise([*BYTES, BYTES[0]]):
            model.lm_head.weight[following, one] = 1.0
    return Target(model, TOKENIZER, "speller")


ENDLESS = BYTES * 30


@pytest.mark.parametrize("depth", [0, 1, 3, 6])
@pytest.mark.parametrize(
    ("stop", "end"),
    [
        (("c",), "abc"),
        (("€d",), "abc€d"),
        (("€",), "abc€"),
        (("gü.", "zzz"), "abc€defgü."),
        ((".\nh", "€defgü.\nhij😀"), "abc€defgü.\nh"),
        (("😀kl",), "abc€defgü.\nhij😀kl"),
        (("mabc€d",), LINE + "abc€d"),
        (("zzz", "b"), "ab"),
    ],
    ids=str,
)
def test_stop_strings_across_tokens(stop: tuple[str, ...], end: str, depth: int) -> None:
    """The answer ends with the very byte that completes a stop string, however long the accepted run."""
    t = speller()
    prompt = [BYTES[-1]]
    oracle = Oracle(t, [prompt + ENDLESS], lambda r, d: 0)
    result = answer(t, prompt, oracle, chain(depth), max_new_tokens=100, stop=stop)
    assert TOKENIZER.decode(result.token_ids) == end
    assert result.finish_reason == "stop_string"
    assert result.token_ids == plain(t, prompt, Settings(max_new_tokens=100, eos_ids=(), stop=stop))
    consistent(result)


def test_a_stop_string_in_the_prompt_does_not_stop() -> None:
    t = speller()
    oracle = Oracle(t, [ENDLESS], lambda r, d: 0)
    result = answer(t, BYTES[:3], oracle, chain(4), max_new_tokens=60, stop=("bc€d", "abc"))
    assert TOKENIZER.decode(result.token_ids) == LINE[3:] + "abc"


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("room", [1, 2, 5, 9])
def test_the_context_ends_the_answer(depth: int, room: int) -> None:
    t = speller(max_positions=40)
    prompt = ENDLESS[: 40 - room]
    oracle = Oracle(t, [ENDLESS], lambda r, d: 0)
    result = answer(t, prompt, oracle, chain(depth), max_new_tokens=100)
    assert result.token_ids == ENDLESS[40 - room : 40]
    assert result.finish_reason == "context"
    assert len(prompt) + len(result.token_ids) == t.max_positions
    assert result.token_ids == plain(t, prompt, Settings(max_new_tokens=100, eos_ids=()))
    consistent(result)


@pytest.mark.parametrize("size", [40, 41, 90])
def test_a_prompt_longer_than_the_context_is_refused(size: int) -> None:
    t = speller(max_positions=40)
    with pytest.raises(HeadwayError, match=rf"{size} tokens.* 39 "):
        answer(t, ENDLESS[:size], max_new_tokens=5)
    with pytest.raises(HeadwayError, match=rf"{size} tokens"):
        plain(t, ENDLESS[:size], Settings(max_new_tokens=5))


@pytest.mark.parametrize(("prompt", "words"), [([], "empty"), ([1, 272], "272"), ([-1, 3], "-1")])
def test_prompts_that_cannot_be_run_are_refused(prompt: list[int], words: str) -> None:
    t = speller()
    with pytest.raises(HeadwayError, match=words):
        answer(t, prompt, max_new_tokens=5)
    with pytest.raises(HeadwayError, match=words):
        plain(t, prompt, Settings(max_new_tokens=5))


@pytest.mark.parametrize("policy", [None, chain(4), BINARY3])
def test_prompts_that_share_a_beginning(policy: Policy | None) -> None:
    """What a prompt shares with the one before it may be reused; the answers must not show it."""
    t = target(llama12())
    texts = [
        "system: be brief. a",
        "system: be brief. bcd",
        "system: be",
        "system: be",
        "other",
        "system: be brief. a?",
    ]
    prompts = [encode(x) for x in texts]
    answers = [p + hf_greedy(t.model, p, 12) for p in prompts]
    head = None if policy is None else Oracle(t, [a for i, a in enumerate(answers) if i != 3], lambda r, d: r % 2)
    requests = [Request(p, Settings(max_new_tokens=12, eos_ids=()), id=i) for i, p in enumerate(prompts)]
    for batch_size in (1, 3):
        for result in generate(t, requests, head=head, policy=policy, batch_size=batch_size):
            assert result.token_ids == answers[result.id][len(prompts[result.id]) :]


def test_a_long_prompt_after_a_short_one_that_begins_it() -> None:
    """The second needs far more room than what it takes over was given."""
    t = speller()
    for first, second in [(10, 200), (200, 10)]:
        requests = [
            Request(ENDLESS[:size], Settings(max_new_tokens=new, eos_ids=()), id=size)
            for size, new in [(first, 2), (second, 250)]
        ]
        for result in generate(t, requests):
            assert result.token_ids == ENDLESS[result.id :][: result.new_tokens]
            assert result.finish_reason == "length"
