"""Recurrent and hybrid targets verify chains on copies of their own cache: the answer is transformers' own."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headway.heads.common.errors import HeadwayError
from headway.inference import replay
from headway.inference.drafter import Drafter, as_drafter
from headway.inference.drafters.draft_model import ModelDrafter
from headway.inference.drafters.hybrid import HybridDrafter
from headway.inference.drafters.ngram import NgramDrafter
from headway.inference.generate import Request, branches, generate, plain
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import DynamicTree, chain
from headway.inference.tune import tune
from tests.inference.helpers import PROMPTS, encode, hf_greedy, random_head
from tests.inference.test_economy import Script
from tests.tiny import build, llama4, target

DELTA: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
DELTA |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen3_next": DELTA,
    "bloom": {"n_head": 4, "n_layer": 4},
}
TEXTS = ("Hello wo", "The cat", "abcabcabcab")


@cache
def model(name: str) -> PreTrainedModel:
    return build(3, **{"model_type": name, "num_hidden_layers": 4, **MODELS[name]})


@pytest.fixture(scope="module", params=MODELS)
def hybrid(request: pytest.FixtureRequest) -> Target:
    t = target(model(request.param), name=request.param)
    assert t.mode == "replay", t.mode_reason
    return t


def drafters(t: Target) -> dict[str, Drafter]:
    eagle3 = as_drafter(random_head("eagle3", t, taps=(0, 1, 2)), DynamicTree(3, 2, 8))
    medusa = as_drafter(random_head("medusa", t), chain(2))
    twin = ModelDrafter(target(llama4(), name="small"))
    assert eagle3 is not None
    assert medusa is not None
    found = NgramDrafter(shortest=1)
    return {"eagle3": eagle3, "medusa": medusa, "ngram": found, "model": twin, "hybrid": HybridDrafter(eagle3, found)}


def run(t: Target, drafter: Drafter, batch_size: int, economy: Any = None, **settings: Any) -> dict[str, list[int]]:
    requests = [
        Request(encode(text), Settings(max_new_tokens=9 + 4 * i, eos_ids=(), **settings), id=text, key=i)
        for i, text in enumerate(TEXTS)
    ]
    return {r.id: r.token_ids for r in generate(t, requests, head=drafter, batch_size=batch_size, economy=economy)}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_answer_is_the_targets_own(hybrid: Target, batch_size: int) -> None:
    want = {text: hf_greedy(hybrid.model, encode(text), 9 + 4 * i) for i, text in enumerate(TEXTS)}
    drawn = {
        text: plain(hybrid, encode(text), Settings(max_new_tokens=9 + 4 * i, eos_ids=(), temperature=0.9, seed=4), i)
        for i, text in enumerate(TEXTS)
    }
    for name, drafter in drafters(hybrid).items():
        assert run(hybrid, drafter, batch_size) == want, name
        if name in ("eagle3", "ngram"):
            assert run(hybrid, drafter, batch_size, temperature=0.9, seed=4) == drawn, name
    assert run(hybrid, drafters(hybrid)["eagle3"], batch_size, economy=Script("ppddp")) == want


class Repeats(Drafter):
    """Knows the answers, and gets every third token wrong."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = answers

    def fit(self, target: Target) -> Repeats:
        return self

    def start(self, committed: Any, state: Any, rows: int) -> Any:
        return [0] * rows if state is None else state

    def propose(self, state: Any, ask: Any) -> Any:
        from headway.inference.drafters.ngram import tree_of

        guesses = []
        for history in ask.histories:
            whole = self.answers[history[0]]
            guess = whole[len(history) : len(history) + 4]
            guesses.append([(t + 1) % 200 if (len(history) + i) % 3 == 0 else t for i, t in enumerate(guess)])
        return tree_of(guesses, ask.root_B), state

    def select_rows(self, state: Any, kept: list[int]) -> Any:
        return [state[b] for b in kept]

    def join_rows(self, state: Any, other: Any) -> Any:
        return [*state, *other]


@pytest.mark.parametrize("most", [0, 3, 12])
def test_accepted_tokens_that_wait_are_not_lost(hybrid: Target, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_WAITING", most)
    texts = list(PROMPTS)
    want = {text: hf_greedy(hybrid.model, encode(text), 30) for text in texts}
    drafter = Repeats({encode(text)[0]: encode(text) + ids for text, ids in want.items()})
    requests = [Request(encode(text), Settings(max_new_tokens=30, eos_ids=()), id=text) for text in texts]
    results = list(generate(hybrid, requests, head=drafter, batch_size=2))
    assert {r.id: r.token_ids for r in results} == {text: want[text] for text in texts}
    assert all(r.accepted_length > 1.5 for r in results)


def test_rejected_tokens_that_stay_are_noticed(hybrid: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: without the copy the rejected tokens stay in the state."""
    monkeypatch.setattr(replay, "deepcopy", lambda value: value)
    want = hf_greedy(hybrid.model, encode("The cat"), 30)
    drafter = Repeats({encode("T")[0]: [0] * 100})
    (result,) = generate(hybrid, [Request(encode("The cat"), Settings(max_new_tokens=30, eos_ids=()))], head=drafter)
    assert result.token_ids != want


def test_features_are_recorded(hybrid: Target) -> None:
    ids = encode("The cat sat")
    requests = [
        Request(ids, Settings(max_new_tokens=9, eos_ids=())),
        Request(ids[:5], Settings(max_new_tokens=4), id=1),
    ]
    found = {r.id: r for r in generate(hybrid, requests, batch_size=2, record=(1, "last"))}
    whole = torch.tensor([ids + found[0].token_ids])
    tap, last = hybrid.features(whole, torch.tensor([whole.shape[1]]), (1,))
    want = torch.cat([tap, last], -1)[0, :-1]
    assert found[0].feature_TF is not None
    torch.testing.assert_close(found[0].feature_TF.float(), want, atol=0.05, rtol=0.02)


def test_a_prompt_costs_the_logits_of_one_token(hybrid: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    words = hybrid.model.get_output_embeddings()
    handle = words.register_forward_hook(lambda module, args, out: sizes.append(out.shape[1]))
    list(generate(hybrid, [Request(encode("a long prompt"), Settings(max_new_tokens=3, eos_ids=()))]))
    handle.remove()
    assert sizes == [1, 1, 1]


def test_one_prompt_under_many_keys(hybrid: Target) -> None:
    settings = Settings(max_new_tokens=6, temperature=1.0, eos_ids=())
    drafter = drafters(hybrid)["eagle3"]
    for key, result in zip([3, 8, 1], branches(hybrid, encode("The cat"), settings, [3, 8, 1], drafter), strict=True):
        assert result.token_ids == plain(hybrid, encode("The cat"), settings, key)


def test_it_is_not_tuned_and_drafts_for_no_other(hybrid: Target) -> None:
    report = tune(hybrid, random_head("medusa", hybrid), [encode("a")])
    assert report["policy"] == "chain:3"
    assert "not tuned" in report["reason"]
    with pytest.raises(HeadwayError, match="replay mode"):
        ModelDrafter(hybrid)
