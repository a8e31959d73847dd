"""Greedy output equals transformers' own, whatever a head proposes: architectures, trees, batches, lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.data.chat import prompt_ids
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.inference.generate import Request, generate, plain
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import OFF, StaticTree
from tests.inference.helpers import POLICIES, PROMPTS, answer, encode, hf_greedy, random_head
from tests.tiny import build, llama4, llama12, qwen2_padded, target

WINDOW: dict[str, Any] = {"head_dim": 16, "sliding_window": 12}
MIXED: dict[str, Any] = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": WINDOW,
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "gpt_neox": {},
    "phi3": {},
    "mixtral": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "head_dim": 16,
        "attention_chunk_size": 12,
        "num_local_experts": 2,
        "intermediate_size_mlp": 128,
        "layer_types": ["chunked_attention", "full_attention"] * 4,
    },
}
EAGER_ONLY = {"gpt_oss"}
TOP4_THEN_CHAIN = StaticTree(
    ((0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 0, 0)),
)
FAMILIES = ("medusa", "eagle3")
TEXT = encode("The cat sat on the mat and then")


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name: str, attn: str) -> None:
    """Every family and tree on the attention that needs no kernel; one of each on the one that decodes fast."""
    if attn == "sdpa" and name in EAGER_ONLY:
        pytest.skip("transformers runs this model with eager attention only")
    t = target(build(3, attn, **{"model_type": name, **ARCHITECTURES[name]}))
    assert t.mode == "tree", t.mode_reason
    want = hf_greedy(t.model, TEXT, 28)
    assert len(set(want)) > 8
    if attn == "sdpa":
        assert answer(t, TEXT, max_new_tokens=28).token_ids == want
        assert answer(t, TEXT, random_head("eagle3", t), POLICIES["binary"], max_new_tokens=28).token_ids == want
        return
    assert plain(t, TEXT, Settings(max_new_tokens=28, eos_ids=())) == want
    for family in FAMILIES:
        head = random_head(family, t)
        for policy in POLICIES.values():
            assert answer(t, TEXT, head, policy, max_new_tokens=28).token_ids == want, (family, policy)


@pytest.fixture(scope="module")
def twelve() -> Target:
    return target(llama12())


@pytest.fixture(scope="module", params=FAMILIES)
def head(request: pytest.FixtureRequest, twelve: Target) -> Head:
    return random_head(request.param, twelve)


@pytest.mark.parametrize("policy", [*POLICIES.values(), TOP4_THEN_CHAIN], ids=[*POLICIES, "top4"])
def test_prompts_and_trees(twelve: Target, head: Head, policy: Any) -> None:
    requests = [Request(encode(text), Settings(max_new_tokens=48, eos_ids=()), id=text) for text in PROMPTS]
    for result in generate(twelve, requests, head=head, policy=policy, batch_size=2):
        assert result.token_ids == greedy(result.id, 48)


@cache
def greedy(text: str, count: int) -> list[int]:
    """Return transformers' greedy answer of the twelve-layer model."""
    return hf_greedy(llama12(), encode(text), count)


def test_a_wrong_mask_is_noticed(twelve: Target, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: with siblings attending to one another the answer changes."""
    from headway.inference import drafter as module

    grow = module.grow

    def blind(*args: Any) -> Any:
        tree, state = grow(*args)
        tree.ancestor_BNN = torch.ones_like(tree.ancestor_BNN)
        return tree, state

    monkeypatch.setattr(module, "grow", blind)
    got = answer(twelve, TEXT, head, POLICIES["binary"], max_new_tokens=32).token_ids
    assert got != hf_greedy(twelve.model, TEXT, 32)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_batch_equals_single(twelve: Target, head: Head, policy: Any) -> None:
    requests = [Request(encode(text), Settings(max_new_tokens=24, eos_ids=()), id=text) for text in PROMPTS]
    for result in generate(twelve, requests, head=head, policy=policy, batch_size=4):
        (alone,) = generate(twelve, [Request(encode(result.id), requests[0].settings)], head=head, policy=policy)
        assert result.token_ids == alone.token_ids == greedy(result.id, 48)[:24]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_leave_and_enter(twelve: Target, head: Head, temperature: float) -> None:
    """Seven requests of different lengths and budgets share three places; each answers as it does alone."""
    texts = [*PROMPTS, "abc", "67890", "Hello wo"]
    budgets = [9, 24, 1, 13, 6, 30, 2]
    requests = [
        Request(encode(text), Settings(max_new_tokens=n, temperature=temperature, eos_ids=()), id=i, key=i)
        for i, (text, n) in enumerate(zip(texts, budgets, strict=True))
    ]
    streamed: dict[int, list[int]] = {r.id: [] for r in requests}
    results = list(
        generate(
            twelve,
            iter(requests),
            head=head,
            policy=POLICIES["dynamic"],
            batch_size=3,
            on_tokens=lambda request, tokens: streamed[request.id].extend(tokens),
        )
    )
    assert sorted(r.id for r in results) == list(range(7))
    for result in results:
        (alone,) = generate(twelve, [requests[result.id]], head=head, policy=POLICIES["dynamic"])
        assert result.token_ids == alone.token_ids == streamed[result.id]
        assert result.accepted_per_round == alone.accepted_per_round
        assert result.token_ids == plain(
            twelve, requests[result.id].prompt_ids, requests[result.id].settings, result.id
        )


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_batch_with_windows(name: str) -> None:
    t = target(build(3, "sdpa", **{"model_type": name, **ARCHITECTURES[name]}))
    rows = [TEXT, encode("a"), encode("Hello wo"), TEXT[:20]]
    requests = [Request(ids, Settings(max_new_tokens=20, eos_ids=()), id=i) for i, ids in enumerate(rows)]
    for result in generate(t, requests, head=random_head("eagle3", t), policy=POLICIES["binary"], batch_size=3):
        assert result.token_ids == hf_greedy(t.model, rows[result.id], 20)


def test_beyond_the_heads_own_length(twelve: Target) -> None:
    head = random_head("eagle3", twelve, max_position_embeddings=64)
    prompt = encode("0123456789" * 7)
    for policy in POLICIES.values():
        assert answer(twelve, prompt, head, policy, max_new_tokens=40).token_ids == hf_greedy(twelve.model, prompt, 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_lm_head_wider_than_the_tokenizer(family: str) -> None:
    t = target(qwen2_padded())
    assert (t.info.vocab_size, t.info.num_tokens) == (272, 264)
    head = random_head(family, t, draft_vocab_size=None)
    assert head.draft_vocab is not None
    assert int(head.draft_vocab.max()) < 264
    outside = False
    for text in PROMPTS:
        want = hf_greedy(t.model, encode(text), 40)
        outside = outside or max(want) >= 264
        assert answer(t, encode(text), head, POLICIES["dynamic"], max_new_tokens=40).token_ids == want
    assert outside, "no answer left the tokenizer's ids: the case is not exercised"


def test_a_shallow_target_gets_distinct_taps() -> None:
    t = target(llama4())
    head = random_head("eagle3", t)
    taps = head.config.taps
    assert len(set(taps)) == len(taps)
    assert all(tap == "last" or 0 <= tap < 4 for tap in taps)
    assert answer(t, TEXT, head, POLICIES["binary"], max_new_tokens=24).token_ids == hf_greedy(t.model, TEXT, 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_of_positions_is_not_overrun(family: str) -> None:
    """Learned positions end with the context; the trees of the last rounds reach beyond it."""
    t = target(build(3, model_type="gpt2", max_position_embeddings=48, num_key_value_heads=4))
    assert t.model.transformer.wpe.num_embeddings == t.max_positions == 48
    head = random_head(family, t)
    for policy in POLICIES.values():
        result = answer(t, TEXT, head, policy, max_new_tokens=100)
        assert result.token_ids == hf_greedy(t.model, TEXT, 48 - len(TEXT))
        assert result.finish_reason == "context"


def test_a_head_that_drafts_nothing_is_not_run(twelve: Target, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    want = hf_greedy(twelve.model, encode(PROMPTS[0]), 12)
    monkeypatch.setattr(type(head), "start", None)
    monkeypatch.setattr(type(twelve), "_capture", no_taps)
    assert answer(twelve, encode(PROMPTS[0]), head, OFF, max_new_tokens=12).token_ids == want


@contextmanager
def no_taps(target: Target, taps: Any) -> Iterator[list[Any]]:
    assert not taps
    yield []


@pytest.mark.real
def test_the_real_model(real_model: Path) -> None:
    """Its answers are transformers' own, greedy, with trees of heads of both families; sampled, the same with any head."""
    t = Target.load(real_model)
    assert t.mode == "tree"
    heads = [random_head(family, t, noise=0.01) for family in ("medusa", "eagle3")]
    sampled = Settings(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=5)
    for words in ("What is the capital of France?", "Write a Python function that adds two numbers."):
        ids = prompt_ids(t.tokenizer, [{"role": "user", "content": words}])  # type: ignore[arg-type]
        want = hf_greedy(t.model, ids, 24, eos=list(t.eos_ids))
        drawn = plain(t, ids, sampled)
        for head in heads:
            for policy in POLICIES.values():
                greedy = Request(ids, Settings(max_new_tokens=24))
                (result,) = generate(t, [greedy], head=head, policy=policy)
                assert result.token_ids == want
            (result,) = generate(t, [Request(ids, sampled)], head=head, policy=POLICIES["dynamic"])
            assert result.token_ids == drawn


@pytest.mark.parametrize("batch_size", [0, -1])
def test_no_rows_at_a_time_is_refused(twelve: Target, batch_size: int) -> None:
    with pytest.raises(HeadwayError, match=f"batch_size is {batch_size}"):
        list(generate(twelve, [Request(encode("a"))], batch_size=batch_size))
