"""Models that cannot verify a tree fall to a lesser mode, with a reason, and answer as transformers does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headway.heads.common.errors import HeadwayError
from headway.inference import probe
from headway.inference.drafter import as_drafter
from headway.inference.drafters.draft_model import ModelDrafter
from headway.inference.generate import Request, generate, plain
from headway.inference.sampling import Settings
from headway.inference.target import Target, usable_positions
from headway.inference.tree import chain
from tests.inference.helpers import POLICIES, PROMPTS, answer, encode, hf_greedy, random_head
from tests.tiny import build, target

LESSER: dict[str, tuple[str, dict[str, Any]]] = {
    "mpt": ("chain", {"d_model": 64, "n_layers": 8, "n_heads": 4, "max_seq_len": 512}),
    "bloom": ("replay", {"n_head": 4, "n_layer": 8}),
    "mamba": ("plain", {"state_size": 8}),
    "rwkv": ("plain", {"attention_hidden_size": 64}),
    # A window over places in the cache: wrong for ragged rows and trees, in texts longer than the probe's.
    "gpt_neo": (
        "plain",
        {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_hidden_layers": 4, "window_size": 8},
    ),
}


@pytest.mark.parametrize("name", LESSER)
def test_lesser_mode_with_a_reason_and_the_same_answer(name: str) -> None:
    mode, fields = LESSER[name]
    t = target(build(3, **{"model_type": name, **fields}))
    assert t.mode == mode
    assert t.mode_reason
    assert "\n" not in t.mode_reason
    for text in PROMPTS[::2]:
        want = hf_greedy(t.model, encode(text), 20)
        assert plain(t, encode(text), Settings(max_new_tokens=20, eos_ids=())) == want
        assert answer(t, encode(text), max_new_tokens=20).token_ids == want
        for policy in POLICIES.values():
            got = answer(t, encode(text), random_head("medusa", t), policy, max_new_tokens=20)
            assert got.token_ids == want, policy
            assert got.finish_reason == "length"


@pytest.mark.parametrize("name", LESSER)
def test_lesser_mode_in_a_batch(name: str) -> None:
    _, fields = LESSER[name]
    t = target(build(3, **{"model_type": name, **fields}))
    requests = [Request(encode(text), Settings(max_new_tokens=12, eos_ids=()), id=text) for text in PROMPTS]
    results = list(generate(t, requests, head=random_head("medusa", t), policy=POLICIES["chain"], batch_size=3))
    assert {r.id for r in results} == set(PROMPTS)
    for result in results:
        assert result.token_ids == hf_greedy(t.model, encode(result.id), 12)
        assert 1 + sum(result.accepted_per_round) == result.new_tokens


def test_plain_mode_stops_and_streams() -> None:
    t = target(build(3, model_type="mamba", state_size=8))
    want = hf_greedy(t.model, encode("a"), 20)
    streamed: list[int] = []
    request = Request(encode("a"), Settings(max_new_tokens=20, eos_ids=(want[7],)))
    (result,) = generate(t, [request], on_tokens=lambda _, tokens: streamed.extend(tokens))
    assert result.token_ids == streamed == want[: want.index(want[7]) + 1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_lose_the_tree(dtype: torch.dtype) -> None:
    for name, fields in [("llama", {}), ("mistral", {"sliding_window": 12, "head_dim": 16})]:
        t = target(build(3, "sdpa", **{"model_type": name, "initializer_range": 0.05, **fields}).to(dtype))
        assert t.mode == "tree", t.mode_reason
        head = random_head("eagle3", t).to(dtype)
        result = answer(t, encode("Hello wo"), head, POLICIES["dynamic"], max_new_tokens=12)
        assert len(result.token_ids) == 12


def test_half_precision_without_a_cache_is_plain() -> None:
    t = target(build(3, model_type="rwkv", attention_hidden_size=64).to(torch.bfloat16))
    assert t.mode == "plain"
    assert t.mode_reason


def unlisted() -> Target:
    """A llama whose layers sit in a Sequential, where nothing looks for them."""
    model = build(3)
    model.model.layers = nn.Sequential(*model.model.layers)
    return target(model)


def test_layers_that_cannot_be_found_cost_only_the_taps() -> None:
    t = unlisted()
    want = hf_greedy(build(3), encode("Hello wo"), 20)
    assert answer(t, encode("Hello wo"), max_new_tokens=20).token_ids == want
    head = random_head("medusa", t)
    assert answer(t, encode("Hello wo"), head, POLICIES["binary"], max_new_tokens=20).token_ids == want
    with pytest.raises(HeadwayError, match="without a head"):
        answer(t, encode("Hello wo"), random_head("eagle3", t), POLICIES["chain"], max_new_tokens=4)


def test_a_model_deaf_to_the_mask_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(3)
    honest = model.forward

    def deaf(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 4:
            seen = torch.arange(attention_mask.shape[-1]) <= kwargs["position_ids"][..., None].amax(1, keepdim=True)
            attention_mask = torch.where(seen[:, None], 0.0, torch.finfo(torch.float32).min).expand_as(attention_mask)
        return honest(*args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(model, "forward", deaf)
    assert target(model).mode == "replay"  # which gives it no mask


def test_a_cache_that_forgets_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that reads several tokens as if nothing had been before them, as some recurrent ones do."""
    model = build(3, model_type="lfm2", layer_types=["conv", "full_attention"] * 2, num_hidden_layers=4)
    honest = model.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] > 1:
            kwargs["past_key_values" if "past_key_values" in kwargs else "cache"] = None
        return honest(*args, **kwargs)

    monkeypatch.setattr(model, "forward", forgetful)
    t = target(model)
    assert t.mode == "plain"
    assert "replay verification differs" in t.mode_reason


@pytest.mark.parametrize("name", ["gpt2", "mpt", "bloom"])
def test_names_of_their_own_are_known_by_the_common_ones(name: str) -> None:
    fields = {
        "gpt2": {"n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 512},
        **{k: v for k, (_, v) in LESSER.items()},
    }
    t = target(build(3, **{"model_type": name, **fields[name]}), mode="plain")
    assert t.info.text_config["num_attention_heads"] == 4
    assert t.info.text_config["hidden_size"] == 64


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, 512),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 512),
        (
            {
                "max_position_embeddings": 512,
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64},
            },
            64,
        ),
        (
            {
                "max_position_embeddings": 512,
                "original_max_position_embeddings": 128,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0]},
            },
            128,
        ),
        (
            {
                "max_position_embeddings": 512,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 256},
                },
            },
            256,
        ),
        ({}, 2**31),
    ],
)
def test_the_context_ends_where_rotary_angles_would_change(text: dict[str, Any], size: int) -> None:
    assert usable_positions(text) == size


def test_a_longrope_target_ends_at_its_original_length() -> None:
    """Past it every row would be given other angles than those its keys were written with."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 16.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
    t = target(build(3, model_type="phi3", rope_parameters=rope, original_max_position_embeddings=32))
    assert t.mode == "tree"
    assert t.max_positions == 32
    settings = Settings(max_new_tokens=60, eos_ids=())
    texts = ["Hello wo", "a", "The cat sat on the mat an"]
    for head in (None, random_head("medusa", t)):
        requests = [Request(encode(text), settings, id=text) for text in texts]
        for result in generate(t, requests, head=head, batch_size=3):
            want = hf_greedy(t.model, encode(result.id), 32 - len(result.id))
            assert result.token_ids == want
            assert result.finish_reason == "context"


def mpt(seed: int, places: int, **changes: Any) -> PreTrainedModel:
    """A model with ALiBi of slots, its config as the hub's are: without `max_position_embeddings`."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "mpt", d_model=64, n_layers=2, n_heads=4, max_seq_len=places, vocab_size=272, initializer_range=0.6, **changes
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("seed", [1, 4, 5])
def test_a_bias_by_slots_is_found_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling or two move it by less than may be rounding, in bfloat16 at least; the config tells, and so do many."""
    t = target(mpt(seed, 256))
    assert t.mode == "chain"
    assert Target(mpt(seed, 256).bfloat16(), None, "half").mode == "chain"
    monkeypatch.setattr(probe, "_has_alibi", lambda config: False)
    assert target(mpt(seed, 256)).mode == "chain"
    monkeypatch.setattr(probe, "SIBLINGS", 1)
    assert target(mpt(seed, 256)).mode == "tree", "the test can fail"


@pytest.mark.parametrize("size", [1, 33, 38, 39])
@pytest.mark.parametrize("drafter", ["medusa", "itself"])
def test_a_bias_by_slots_to_the_end_of_the_context(drafter: str, size: int) -> None:
    """What is drafted there lies beyond the table of the bias."""
    t = target(mpt(3, 40))
    assert t.max_positions == 40
    made = as_drafter(random_head("medusa", t), chain(4)) if drafter == "medusa" else ModelDrafter(t, chain(4))
    prompt = [(7 * i * i + 3) % 250 for i in range(size)]
    requests = [Request(ids, Settings(max_new_tokens=60, eos_ids=()), id=len(ids)) for ids in (prompt, prompt[:1] * 2)]
    for result in generate(t, requests, head=made, batch_size=2):
        ids = prompt if result.id == size else prompt[:1] * 2
        assert result.token_ids == hf_greedy(t.model, ids, 40 - len(ids))
        assert result.finish_reason == "context"
    assert t.model.config.max_seq_len == 40
