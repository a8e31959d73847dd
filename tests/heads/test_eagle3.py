"""What EAGLE-3 takes from its target: taps, rotary parameters, geometry; and that features are what their names say."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.heads.eagle3 import Config, Head, default_taps
from headway.inference.target import Target
from tests import tiny
from tests.heads import test_contract as contract
from tests.heads.test_contract import drafted_logits, loss_of_logits, make_batch, small


def test_taps_are_the_outputs_of_the_named_layers():
    """At training time and at decode time alike, checked with hooks; `last` is after the final norm."""
    target = tiny.target(tiny.llama12("sdpa"), mode="tree")
    ids = torch.tensor([list(b"tap test")])
    seen: dict[int, torch.Tensor] = {}
    layers = target.model.model.layers
    hooks = [
        layers[i].register_forward_hook(
            lambda m, a, out, i=i: seen.__setitem__(i, out[0] if isinstance(out, tuple) else out)
        )
        for i in (2, 6, 9)
    ]
    states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    want = torch.cat([seen[i] for i in (2, 6, 9)], -1)
    for hook in hooks:
        hook.remove()
    assert torch.equal(states[3], want[..., :64])  # entry k + 1 of hidden_states is the output of layer k
    assert torch.equal(states[12], target.model.model.norm(_output_of_layer(target, 11, ids)))
    tap, last = target.features(ids, torch.tensor([8]), (2, 6, 9))
    torch.testing.assert_close(tap, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last, states[12], rtol=1e-5, atol=1e-5)
    cache = target.new_cache(1)
    causal = torch.ones(1, 8, 8, dtype=torch.bool).tril()
    out = target.forward(ids, torch.arange(8)[None], causal, cache, taps=(2, 6, 9, "last"))
    torch.testing.assert_close(out.tap_BNF, torch.cat([want, states[12]], -1), rtol=1e-4, atol=1e-4)


def _output_of_layer(target: Target, layer: int, ids: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    hook = target.layers[layer].register_forward_hook(
        lambda m, a, out: kept.append(out if torch.is_tensor(out) else out[0])
    )
    target.model(input_ids=ids)
    hook.remove()
    return kept[0]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 7, 8, 12, 30, 32])
def test_default_taps_are_distinct_layers(num_layers):
    taps = default_taps(num_layers)
    assert len(set(taps)) == len(taps) == min(3, num_layers)
    assert all(0 <= t < num_layers for t in taps)


def test_default_taps_of_a_deep_target():
    assert default_taps(32) == (1, 15, 28)


def test_both_spellings_of_the_rotary_setting_give_one_draft_rotary():
    angles = []
    for model in tiny.rope_twins("sdpa"):
        target = tiny.target(model, mode="tree")
        config = Config.for_target(target.info, draft_vocab_size=64)
        assert config.rope["rope_theta"] == 500000.0
        assert config.rope["rope_type"] == "llama3"
        assert config.rope["factor"] == 8.0
        head = Head(config, target.frozen)
        angles.append(head.rotary(torch.zeros(1, 1, 64), torch.arange(300)[None]))
        theirs = model.model.rotary_emb(torch.zeros(1, 1, 64), torch.arange(300)[None])
        for ours, other in zip(angles[-1], theirs, strict=True):
            assert torch.equal(ours, other)
    assert all(torch.equal(a, b) for a, b in zip(*angles, strict=True))


def test_a_cast_does_not_round_the_rotary_frequencies():
    target = tiny.target(tiny.llama4("sdpa"), mode="tree")
    head = Head(Config.for_target(target.info, draft_vocab_size=64), target.frozen)
    position = torch.arange(400)[None]
    before = head.rotary(torch.zeros(1, 1, 64), position)
    after = head.to(torch.bfloat16).rotary(torch.zeros(1, 1, 64), position)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"taps": [1, 1, 2]}, "twice"),
        ({"taps": [1, 99]}, "99"),
        ({"draft_vocab_size": 100000}, "100000"),
        ({"steps": 0}, "steps"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_what_does_not_fit_is_refused(fields, named):
    info = tiny.target(tiny.llama4("sdpa"), mode="tree").info
    with pytest.raises(HeadwayError, match=named):
        Config.for_target(info, **fields)


def test_a_draft_layer_for_a_target_that_rotates_part_of_its_heads():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 8.0}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "partial_rotary_factor": 0.75}
    loaded = tiny.target(tiny.build(3, model_type="phi3", rope_parameters=rope), mode="tree")
    head = Head(Config.for_target(loaded.info), loaded.frozen)
    assert head.config.rope == {"rope_type": "default", "rope_theta": 1e4}


@pytest.fixture(scope="module")
def deep():
    return tiny.target(tiny.llama12("sdpa"), mode="tree")


OPTIONS = [{"fc_norm": True}, {"norm_output": True}, {"norm_before_residual": True}]
ALL = OPTIONS[0] | OPTIONS[1] | OPTIONS[2]


@pytest.mark.parametrize("options", [*OPTIONS, ALL], ids=lambda options: "+".join(options))
def test_with_each_option_it_drafts_what_it_is_trained_to_say(deep, options):
    head = small("eagle3", deep, **options)
    contract.test_training_and_drafting_compute_the_same(head, deep)
    contract.test_gradients_reach_every_parameter_and_none_of_the_target(head, deep)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_parity_fails_where_drafting_leaves_an_option_out(deep, options):
    """Negative control: a head trained with the option, drafting without it."""
    head = small("eagle3", deep, **options)
    batch = make_batch(deep, head.config.taps, lengths=(20,))
    only = dataclasses.replace(batch, supervised_BT=torch.zeros_like(batch.supervised_BT))
    only.supervised_BT[0, 10] = True
    trained = float(head.loss(only).loss_S[1])
    for config, same in (
        (head.config, True),
        (dataclasses.replace(head.config, **dict.fromkeys(options, False)), False),
    ):
        head.config = config
        loss = loss_of_logits(head, batch, drafted_logits(head, batch, 7, 2, split=4)[1], 10)
        assert (loss == pytest.approx(trained, rel=1e-4, abs=1e-5)) is same


@pytest.mark.parametrize("fc_norm", [True, False])
def test_fc_norms_hear_each_tap_alike(deep, fc_norm):
    head = small("eagle3", deep, fc_norm=fc_norm)
    batch = make_batch(deep, head.config.taps, lengths=(12,))
    loud = batch.tap_BTF * torch.tensor([1.0, 5.0, 1.0]).repeat_interleave(64)
    assert torch.allclose(head.fuse_taps(batch.tap_BTF), head.fuse_taps(loud), atol=1e-3) is fc_norm


def test_an_older_head_has_none_of_the_options(deep):
    saved = {k: v for k, v in small("eagle3", deep).config.to_json().items() if k not in ALL}
    config = Config.from_json(saved)
    assert not any(getattr(config, option) for option in ALL)
