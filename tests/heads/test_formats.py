"""Heads in other engines' layouts: names, sizes and numbers as the engines read them, and back bit for bit."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from headway import foreign
from headway.heads.common.checkpoint import load_head, save_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Frozen, Head, TargetInfo
from headway.heads.eagle3 import Config as Eagle3Config
from headway.heads.eagle3 import Head as Eagle3
from headway.heads.formats.damage import MASK_TOKEN
from headway.heads.formats.layout import NOTE, Foreign, Saved, TargetWeights, layouts_of, read_folder, to_layout
from headway.heads.formats.sglang import tap_ids, taps_of
from headway.inference.parity import weights_of
from tests import tiny
from tests.heads.test_contract import small

IDS = "eagle_aux_hidden_state_layer_ids"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"draft_vocab_size": 64}),
    "eagle3-full": ("eagle3", {"draft_vocab_size": 0}),
    "eagle3-options": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3-residual": ("eagle3", {"norm_before_residual": True}),
    "eagle": ("eagle", {"draft_vocab_size": 0}),
    "eagle-bias": ("eagle", {"draft_vocab_size": 0, "bias": True}),
    "peagle": ("peagle", {"draft_vocab_size": 64, "depths": 4, "num_layers": 2}),
    "peagle-full": ("peagle", {"draft_vocab_size": 0, "num_layers": 1, "mask_token_id": 0}),
    "medusa-draft": ("medusa", {}),
    "medusa-own": ("medusa", {"lm_head": "own", "num_heads": 3}),
    "medusa-shared": ("medusa", {"lm_head": "shared"}),
}


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.llama12("sdpa"), mode="tree")


def saved_of(head: Head, info: TargetInfo) -> Saved:
    return Saved(type(head).__module__.rsplit(".", 1)[-1], head.config, dict(head.state_dict()), info)


def exported(head: Head, target, layout: str, out: Path) -> Foreign:
    source = save_head(head, out.parent / f"{out.name}-head", target=target.info)
    return foreign.export(str(source), layout, out, target=target)


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | fields).items() if v is not ...}))


REFUSED = {
    ("eagle3-options", "eagle"): "head.fc_norm",
    ("eagle3-residual", "eagle"): "head.norm_before_residual",
    ("eagle3-residual", "sglang"): "head.norm_before_residual",
    ("eagle-bias", "vllm"): "head.bias",
}
"""What a layout cannot hold of a kind."""


def test_what_a_layout_cannot_hold_is_refused_by_name(target, tmp_path):
    for (kind, layout), named in REFUSED.items():
        family, fields = KINDS[kind]
        with pytest.raises(HeadwayError, match=f"layout {layout} cannot hold {named}"):
            exported(small(family, target, **fields), target, layout, tmp_path / "out")
    scaled = saved_of(
        small("eagle", target, draft_vocab_size=0), dataclasses.replace(target.info, model_type="gemma3_text")
    )
    with pytest.raises(HeadwayError, match="scales its embedding"):
        to_layout("vllm", scaled, torch.float32)
    assert not (tmp_path / "out").exists()


HELD = [(k, x) for k in KINDS for x in layouts_of(KINDS[k][0]) if (k, x) not in REFUSED]


@pytest.mark.parametrize(("kind", "layout"), HELD)
def test_round_trip_is_bit_equal(target, tmp_path, kind, layout):
    family, fields = KINDS[kind]
    head = small(family, target, **fields)
    exported(head, target, layout, tmp_path / "out")
    again, found, _ = foreign.import_head(tmp_path / "out", None, target, tmp_path / "again")
    assert found == layout
    assert again.config == head.config
    loaded = load_head(tmp_path / "again", target).state_dict()
    assert loaded.keys() == head.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_a_dtype_is_written_and_comes_back(target, tmp_path, layout):
    head = small("eagle3", target, draft_vocab_size=64)
    source = save_head(head, tmp_path / "head", target=target.info)
    foreign.export(str(source), layout, tmp_path / "out", "bfloat16", target)
    files = read_folder(tmp_path / "out")
    assert files.config["dtype"] == files.config["torch_dtype"] == "bfloat16"
    assert {t.dtype for t in files.tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}
    again, _, _ = foreign.imported(tmp_path / "out", None, target)
    want = head.to(torch.bfloat16).state_dict()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in want.items())


def test_offsets_and_mask_of_the_draft_vocabulary():
    info = TargetInfo(name="t", model_type="llama", hidden_size=8, vocab_size=16, num_tokens=16, num_layers=8)
    weight = torch.randn(16, 8)
    frozen = Frozen(info, lambda ids: weight[ids], lambda x, rows=None: x @ weight.T, lambda: weight)
    head = Eagle3(
        Eagle3Config.for_target(info, draft_vocab_size=6, num_attention_heads=1, num_key_value_heads=1), frozen
    )
    head.set_draft_vocab(torch.tensor([0, 2, 5, 7, 8, 11]))
    for layout in ("vllm", "sglang", "speculators", "eagle"):
        tensors = to_layout(layout, saved_of(head, info), torch.float32, TargetWeights(weight, weight)).tensors
        assert tensors["d2t"].tolist() == [0, 1, 3, 4, 4, 6]
        assert tensors["d2t"].dtype == torch.int64
        assert tensors["t2d"].dtype == torch.bool
        assert tensors["t2d"].nonzero()[:, 0].tolist() == [0, 2, 5, 7, 8, 11]


def test_eagle3_names_shapes_and_config(target, tmp_path):
    head = small("eagle3", target, draft_vocab_size=64, taps=[2, 6, 9])
    files = exported(head, target, "vllm", tmp_path / "out")
    layer = {"input_layernorm": [64], "hidden_norm": [64], "post_attention_layernorm": [64]}
    layer |= {"self_attn.q_proj": [64, 128], "self_attn.k_proj": [32, 128], "self_attn.v_proj": [32, 128]}
    layer |= {"self_attn.o_proj": [64, 64], "mlp.gate_proj": [128, 64], "mlp.up_proj": [128, 64]}
    layer |= {"mlp.down_proj": [64, 128]}
    want = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    want |= {"fc.weight": [64, 192], "norm.weight": [64], "lm_head.weight": [64, 64], "d2t": [64], "t2d": [272]}
    assert {name: list(t.shape) for name, t in load_file(tmp_path / "out" / "model.safetensors").items()} == want
    config = files.config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["num_hidden_layers"], config["draft_vocab_size"], config["vocab_size"]) == (1, 64, 272)
    assert config["tie_word_embeddings"] is False
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 7, 10]
    assert all(config[flag] is False for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    theirs = AutoConfig.from_pretrained(tmp_path / "out")
    assert theirs.rope_parameters["rope_theta"] == 10000.0
    assert (theirs.head_dim, theirs.dtype, theirs.tie_word_embeddings) == (16, torch.float32, False)
    outside = exported(head, target, "speculators", tmp_path / "spec")
    assert {n.replace("layers.0.", "midlayer.") for n in outside.tensors} == want.keys() | {"embed_tokens.weight"}
    assert outside.config["norm_before_residual"] is False
    assert outside.config["eagle_aux_hidden_state_layer_ids"] == [3, 7, 10]
    verifier = outside.config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}


def test_a_tied_target_ties_nothing_of_the_draft(tmp_path):
    tied = tiny.target(tiny.llama8_tied("sdpa"), mode="tree")
    head = small("eagle3", tied, draft_vocab_size=64)
    files = exported(head, tied, "speculators", tmp_path / "out")
    assert list(files.tensors["lm_head.weight"].shape) == [64, 64]
    assert (
        files.config["tie_word_embeddings"] is files.config["transformer_layer_config"]["tie_word_embeddings"] is False
    )
    assert torch.equal(files.tensors["embed_tokens.weight"], weights_of(tied).embedding)
    assert "embed_tokens.weight" not in exported(head, tied, "vllm", tmp_path / "native").tensors


def test_taps_in_each_engines_numbers(target, tmp_path):
    """The outputs of layers 2, 6 and 9 are the inputs of 3, 7 and 10, and the states 3, 7 and 10 of transformers."""
    head = small("eagle3", target, taps=[2, 6, 9])
    ids = {}
    for layout in ("vllm", "sglang", "speculators"):
        config = exported(head, target, layout, tmp_path / layout).config
        ids[layout] = config["eagle_aux_hidden_state_layer_ids"]
        assert config["headway"]["taps"] == [2, 6, 9]
        assert "outputs" in config["headway"]["taps_are"]
    assert ids == {"vllm": [3, 7, 10], "speculators": [3, 7, 10], "sglang": [2, 6, 9]}
    with pytest.raises(HeadwayError, match=r"layout eagle cannot hold head.taps \[2, 6, 9\].*\[1, 5, 8\]"):
        exported(head, target, "eagle", tmp_path / "eagle")
    assert not (tmp_path / "eagle").exists()
    with pytest.raises(HeadwayError, match="last"):
        exported(small("eagle3", target, taps=[2, 6, "last"]), target, "vllm", tmp_path / "last")


@pytest.mark.parametrize(
    ("model_type", "taps", "ids"),
    [
        ("llama", [1, 5, 8], [1, 5, 8]),
        ("deepseek_v2", [1, 5, 8], [1, 5, 8]),
        ("deepseek_v2", [2, 5, 8], [3, 6, 9]),
        ("gpt_oss", [1, 5, 8], [1, 5, 8]),
        ("gpt_oss", [1, 5, 11], [2, 6, 12]),
    ],
)
def test_sglang_counts_by_the_targets_type(target, model_type, taps, ids):
    info = dataclasses.replace(target.info, model_type=model_type)
    assert tap_ids(taps, info) == ids
    assert list(taps_of(ids, info)) == taps


def test_a_shallow_targets_taps_are_distinct_and_refused_where_they_cannot_be_had(tmp_path):
    shallow = tiny.target(tiny.llama4("sdpa"), mode="tree")
    head = small("eagle3", shallow)
    assert head.config.taps == (0, 1, 3)
    assert exported(head, shallow, "vllm", tmp_path / "out").config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    for layout in ("sglang", "eagle"):
        with pytest.raises(HeadwayError, match=rf"layout {layout} cannot hold head.taps \[0, 1, 3\]"):
            exported(head, shallow, layout, tmp_path / layout)


def test_rotary_angles_in_both_spellings_and_the_targets_length(tmp_path):
    for i, model in enumerate(tiny.rope_twins("sdpa")):
        target = tiny.target(model, mode="tree")
        head = small("eagle3", target, taps=[0, 2, 4], max_position_embeddings=128)
        config = exported(head, target, "sglang", tmp_path / f"out{i}").config
        for rope in (config["rope_parameters"], config["rope_scaling"] | {"rope_theta": config["rope_theta"]}):
            assert (rope["rope_theta"], rope["rope_type"], rope["factor"]) == (500000.0, "llama3", 8.0)
        assert AutoConfig.from_pretrained(tmp_path / f"out{i}").rope_parameters == config["rope_parameters"]
        assert config["max_position_embeddings"] == 512  # the target's, not the training length
        for layout in ("vllm", "speculators"):
            exported(head, target, layout, tmp_path / f"{layout}{i}")
            again, _, _ = foreign.imported(tmp_path / f"{layout}{i}", None, target)
            assert again.config.rope == head.config.rope


@pytest.mark.parametrize(
    "rope", [{"rope_type": "llama3", "rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": 5e5}]
)
def test_the_eagle_repository_builds_plain_angles(target, tmp_path, rope):
    extra = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    head = small("eagle3", target, rope=rope | (extra if rope["rope_type"] == "llama3" else {"factor": 2.0}))
    with pytest.raises(HeadwayError, match=f"rotary angles of type {rope['rope_type']}"):
        exported(head, target, "eagle", tmp_path / "out")
    plain = small("eagle3", target, rope={"rope_type": "default", "rope_theta": 5e5})
    assert exported(plain, target, "eagle", tmp_path / "plain").config["rope_theta"] == 5e5


def test_medusa_names_and_counts(target, tmp_path):
    head = small("medusa", target, num_heads=3, lm_head="own")
    files = exported(head, target, "vllm", tmp_path / "vllm")
    shapes = {name: list(t.shape) for name, t in files.tensors.items()}
    want = {f"blocks.{i}.layers.0.weight": [64, 64] for i in range(3)}
    want |= {f"blocks.{i}.layers.0.bias": [64] for i in range(3)} | {
        f"lm_heads.{i}.weight": [272, 64] for i in range(3)
    }
    assert shapes == want
    fields = ("model_type", "hidden_size", "num_heads", "num_hidden_layers", "vocab_size", "truncated_vocab_size")
    assert [files.config[f] for f in fields] == ["medusa", 64, 3, 1, 272, 272]
    assert files.config["medusa_fc_bias"] is True
    assert files.config["original_lm_head"] is False
    old = exported(head, target, "medusa", tmp_path / "old")
    assert old.tensors.keys() == {
        f"{i}.{n}" for i in range(3) for n in ("0.linear.weight", "0.linear.bias", "1.weight")
    }
    assert (old.config["medusa_num_heads"], old.config["medusa_num_layers"]) == (3, 1)
    assert "architectures" not in old.config  # TGI would take it for another kind
    shared = exported(small("medusa", target, lm_head="shared"), target, "medusa", tmp_path / "shared")
    assert shared.config["version"] == "2"
    assert {name.split(".", 1)[1] for name in shared.tensors} == {"0.linear.weight", "0.linear.bias"}


def test_no_more_tokens_are_asked_of_a_server_than_there_are_heads(target, tmp_path):
    files = exported(small("medusa", target, num_heads=2), target, "vllm", tmp_path / "out")
    assert '"num_speculative_tokens": 2' in foreign.serving_command("vllm", files, tmp_path / "out")
    files = exported(small("eagle3", target), target, "sglang", tmp_path / "out3")
    command = foreign.serving_command("sglang", files, tmp_path / "out3")
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in command


@pytest.mark.parametrize("layout", ["medusa", "tgi"])
def test_medusa_layers(target, tmp_path, layout):
    """The Medusa repository repeats one block; TGI takes one over a shared LM head."""
    deep = {kind: small("medusa", target, num_layers=2, lm_head=kind) for kind in ("own", "shared")}
    with pytest.raises(HeadwayError, match="num_layers 2"):
        exported(deep["shared"], target, layout, tmp_path / "out")
    if layout == "medusa":
        with pytest.raises(HeadwayError, match="num_layers 2"):
            exported(deep["own"], target, layout, tmp_path / "out")
    else:
        exported(deep["own"], target, layout, tmp_path / "out")
        again, _, _ = foreign.imported(tmp_path / "out", layout, target)
        assert again.config == deep["own"].config


def test_a_widened_draft_vocabulary_never_changes_the_best_word(target, tmp_path):
    head = small("medusa", target, draft_vocab_size=64)
    head.lm_heads[0].weight.data += 1.0  # rows that lean one way, so that their mean is no small vector
    wide = exported(head, target, "vllm", tmp_path / "out").tensors["lm_heads.0.weight"]
    x = torch.randn(2000, 64) + torch.randn(2000, 1)
    narrow = x @ head.lm_heads[0].weight.T
    assert torch.equal((x @ wide.T).argmax(-1), head.vocab_ids[narrow.argmax(-1)])


@pytest.mark.parametrize("damage", ["empty", "missing", "extra", "nan"])
def test_an_export_refuses_a_tensor_by_name(target, tmp_path, damage):
    for family, name in (("eagle3", "layer.mlp.down_proj.weight"), ("medusa", "blocks.1.0.linear.weight")):
        head = small(family, target)
        saved = saved_of(head, target.info)
        if damage == "missing":
            del saved.tensors[name]
        else:
            key = "stray" if damage == "extra" else name
            value = {"empty": torch.zeros(0), "extra": torch.ones(2), "nan": saved.tensors[name] * torch.nan}[damage]
            saved.tensors[key] = value
        match = {"empty": "down_proj|0.0.linear|1.layers", "extra": "stray", "missing": name}.get(damage, "finite")
        with pytest.raises(HeadwayError, match=match):
            to_layout("vllm", saved, torch.float32, weights_of(target))


def test_an_overflow_of_the_dtype_is_refused(target):
    saved = saved_of(small("eagle3", target), target.info)
    saved.tensors["norm.weight"] = torch.full((64,), 1e30)
    with pytest.raises(HeadwayError, match="norm.weight.*float16"):
        to_layout("vllm", saved, torch.float16)


def test_a_layout_refuses_a_family_by_name(target, tmp_path):
    with pytest.raises(HeadwayError, match="layout sglang holds no medusa heads.*vllm or medusa or tgi"):
        exported(small("medusa", target), target, "sglang", tmp_path / "out")
    with pytest.raises(HeadwayError, match="unknown layout 'onnx'"):
        exported(small("medusa", target), target, "onnx", tmp_path / "out")
    with pytest.raises(HeadwayError, match=r"head.taps \[3\]"):
        exported(small("medusa", target, taps=[3]), target, "vllm", tmp_path / "out")


@pytest.mark.parametrize("layout", ["sglang", "eagle", "medusa", "tgi"])
def test_layouts_that_hold_no_parallel_drafts_refuse_them_by_name(target, tmp_path, layout):
    with pytest.raises(HeadwayError, match=f"layout {layout} holds no peagle heads.*--to vllm or speculators"):
        exported(small("peagle", target), target, layout, tmp_path / "out")
    with pytest.raises(HeadwayError, match=r"layout vllm cannot hold head.taps \[2, 'last'\]"):
        exported(small("peagle", target, taps=[2, "last"]), target, "vllm", tmp_path / "last")
    assert not list(tmp_path.glob("out"))


def test_peagle_names_shapes_and_config(target, tmp_path):
    head = small("peagle", target, draft_vocab_size=64, taps=[2, 6, 9], num_layers=2, depths=5, mask_token_id=9)
    files = exported(head, target, "vllm", tmp_path / "out")
    each = {
        "self_attn.o_proj": [64, 64],
        "mlp.gate_proj": [128, 64],
        "mlp.up_proj": [128, 64],
        "mlp.down_proj": [64, 128],
    }
    each |= {"input_layernorm": [64], "post_attention_layernorm": [64]}
    rows = {"q": 64, "k": 32, "v": 32}
    want = {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in each.items()}
    want |= {f"layers.{i}.self_attn.{p}_proj.weight": [n, 128 - 64 * i] for i in range(2) for p, n in rows.items()}
    want |= {
        "layers.0.hidden_norm.weight": [64],
        "fc.weight": [64, 192],
        "mask_hidden": [1, 1, 192],
        "norm.weight": [64],
    }
    want |= {"lm_head.weight": [64, 64], "d2t": [64], "t2d": [272]}
    assert {name: list(t.shape) for name, t in files.tensors.items()} == want
    config = files.config
    assert config["eagle_config"][IDS] == config[IDS] == [3, 7, 10]
    assert config["num_hidden_layers"] == 2
    assert [config[key] for key in MASK_TOKEN] == [9, 9, 9]  # vLLM's releases each know some of them
    assert config["norm_before_residual"] is False
    command = foreign.serving_command("vllm", files, tmp_path / "out")
    assert '"method": "eagle3"' in command
    assert '"num_speculative_tokens": 5, "parallel_drafting": true' in command
    outside = exported(head, target, "speculators", tmp_path / "spec")
    assert outside.tensors.keys() == want.keys() | {"embed_tokens.weight"}
    assert (outside.config["speculators_model_type"], outside.config["architectures"]) == (
        "peagle",
        ["PEagleSpeculator"],
    )
    assert (outside.config["mask_token_id"], outside.config["embed_requires_grad"]) == (9, False)
    assert outside.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert outside.config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert not {NOTE, *MASK_TOKEN} & outside.config["transformer_layer_config"].keys()


def test_taps_of_peagle_in_another_order_move_what_stands_for_them(target, tmp_path):
    head = small("peagle", target, taps=[6, 2, 4], num_layers=1, depths=2)
    files = exported(head, target, "vllm", tmp_path / "out")
    own = head.state_dict()
    for name in ("fc.weight", "mask_hidden"):
        parts = own[name].split(64, -1)
        assert torch.equal(files.tensors[name], torch.cat([parts[1], parts[2], parts[0]], -1))
    again = foreign.imported(tmp_path / "out", None, target)[0]
    assert again.config.taps == (2, 4, 6)


def test_a_published_peagle_head_comes_in(target, tmp_path):
    """As trainers elsewhere write it: one name of the token, [1, n] for what is to come, a norm that nothing reads."""
    head = small("peagle", target, num_layers=2, mask_token_id=9)
    files = exported(head, target, "vllm", tmp_path / "out")
    files.tensors["mask_hidden"] = files.tensors["mask_hidden"].view(1, -1)
    tensors = {name.replace("layers.0.", "midlayer."): t for name, t in files.tensors.items()}
    folder = tmp_path / "published"
    folder.mkdir()
    torch.save(tensors | {"layers.1.hidden_norm.weight": torch.ones(64)}, folder / "pytorch_model.bin")
    kept = {k: v for k, v in files.config.items() if k not in (NOTE, "mask_token_id", "pard_token")}
    (folder / "config.json").write_text(json.dumps(kept))
    again, layout, said = foreign.imported(folder, None, target)
    assert (layout, again.config.mask_token_id, again.config.depths) == ("vllm", 9, 6)
    assert "how many tokens" in said[0]
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
    for change, named in (
        ({"ptd_token_id": ...}, "no mask_token_id"),
        ({"pard_token": 3}, "several mask tokens"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"num_hidden_layers": 3}, "num_hidden_layers 3"),
        ({"ptd_token_id": 272}, "mask_token_id is 272"),
        ({"ptd_token_id": -1}, "ptd_token_id -1"),
    ):
        edit(folder, **({"pard_token": ...} | kept | change))
        with pytest.raises(HeadwayError, match=named):
            foreign.imported(folder, None, target)


def test_a_head_of_the_hydra_repository_is_refused_by_name(target, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hydra_num_heads": 1, "hydra_num_layers": 1}))
    names = ("hydra_mlp.0.1.linear.weight", "hydra_mlp.0.1.res_connection.bias", "hydra_lm_head.0.1.weight")
    torch.save({name: torch.ones(2, 2) for name in names}, tmp_path / "hydra_lm_head.pt")
    with pytest.raises(HeadwayError, match="Hydra repository"):
        foreign.imported(tmp_path, None, target)


def test_a_folder_of_something_else_is_left_alone(target, tmp_path):
    head = small("eagle3", target)
    source = save_head(head, tmp_path / "head", target=target.info)
    with pytest.raises(HeadwayError, match="another folder|holds no export"):
        foreign.export(str(source), "vllm", source)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(HeadwayError, match="holds no export"):
        foreign.export(str(source), "vllm", tmp_path / "mine")
    foreign.export(str(source), "vllm", tmp_path / "out")
    foreign.export(str(source), "sglang", tmp_path / "out")  # an export is replaced by another
    assert read_folder(tmp_path / "out").config["headway"]["layout"] == "sglang"


# What others trained


def medusa_files(
    folder: Path, kind: str, heads: int = 3, words: bool = True, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Write a Medusa head as its repository does; return the tensors."""
    torch.manual_seed(1)
    tensors = {}
    for i in range(heads):
        tensors[f"{prefix}{i}.0.linear.weight"] = torch.randn(64, 64)
        tensors[f"{prefix}{i}.0.linear.bias"] = torch.randn(64)
        if words:
            tensors[f"{prefix}{i}.1.weight"] = torch.randn(272, 64)
    folder.mkdir()
    if kind == "safetensors":
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    else:
        torch.save(tensors, folder / f"medusa_lm_head.{kind}")
    config = {"medusa_num_heads": heads, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("words", [True, False])
def test_an_original_medusa_head_is_recognised(target, tmp_path, kind, words):
    tensors = medusa_files(tmp_path / "old", kind, words=words)
    head, layout, _ = foreign.import_head(tmp_path / "old", None, target, tmp_path / "new")
    assert (layout, head.config.num_heads, head.config.num_layers) == ("medusa", 3, 1)
    assert head.config.lm_head == ("own" if words else "shared")
    new = load_file(tmp_path / "new" / "model.safetensors")
    assert torch.equal(new["blocks.2.0.linear.bias"], tensors["2.0.linear.bias"])
    if words:
        assert torch.equal(new["lm_heads.1.weight"], tensors["1.1.weight"])


@pytest.mark.parametrize("prefix", ["medusa_head.", "model.medusa_heads."])
def test_the_heads_of_a_full_model_are_read_alone(target, tmp_path, prefix):
    tensors = medusa_files(tmp_path / "old", "safetensors", prefix=prefix)
    (tmp_path / "old" / "medusa_lm_head.safetensors").unlink()
    base = {"model.embed_tokens.weight": torch.zeros(272, 64), "model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}
    save_file(tensors | base, tmp_path / "old" / "model.safetensors")
    edit(tmp_path / "old", num_hidden_layers=12, model_type="llama")
    head, _, _ = foreign.imported(tmp_path / "old", None, target)
    assert head.config.num_heads == 3
    assert torch.equal(head.state_dict()["lm_heads.2.weight"], tensors[f"{prefix}2.1.weight"])


def test_medusa_counts_are_checked(target, tmp_path):
    medusa_files(tmp_path / "old", "pt")
    edit(tmp_path / "old", medusa_num_heads=2)
    with pytest.raises(HeadwayError, match="2 Medusa heads, the tensors 3"):
        foreign.imported(tmp_path / "old", None, target)
    edit(tmp_path / "old", medusa_num_heads=3, medusa_num_layers=2)
    with pytest.raises(HeadwayError, match="2 Medusa layers, the tensors 1"):
        foreign.imported(tmp_path / "old", None, target)


@pytest.mark.parametrize("gone", ["1.0.linear.weight", "1.1.weight"])
def test_a_medusa_file_with_a_gap_is_refused(target, tmp_path, gone):
    tensors = medusa_files(tmp_path / "old", "safetensors")
    del tensors[gone]
    save_file(tensors, tmp_path / "old" / "medusa_lm_head.safetensors")
    with pytest.raises(HeadwayError, match="head 1, layer 0|some are missing"):
        foreign.imported(tmp_path / "old", None, target)


def test_a_pickle_that_runs_code_is_not_read(target, tmp_path):
    medusa_files(tmp_path / "old", "pt")

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "boom",))

    with (tmp_path / "old" / "medusa_lm_head.pt").open("wb") as file:
        pickle.dump({"0.0.linear.weight": Bomb()}, file, protocol=2)
    with pytest.raises(HeadwayError, match="could run code"):
        foreign.imported(tmp_path / "old", None, target)
    assert not (tmp_path / "boom").exists()


def published(target, tmp_path: Path, **fields: Any) -> tuple[Head, Path]:
    """Return a head, and it as the EAGLE repository publishes it: pytorch_model.bin, a bare config, no note."""
    head = small("eagle3", target, draft_vocab_size=64)
    files = exported(head, target, "eagle", tmp_path / "out")
    folder = tmp_path / "published"
    folder.mkdir()
    torch.save(files.tensors, folder / "pytorch_model.bin")
    kept = (
        "architectures",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    kept += ("draft_vocab_size", "rms_norm_eps", "max_position_embeddings", "model_type", "num_hidden_layers")
    config = {key: files.config[key] for key in kept} | fields
    (folder / "config.json").write_text(json.dumps(config))
    return head, folder


def test_a_published_eagle3_head_comes_in(target, tmp_path):
    head, folder = published(target, tmp_path)
    again, layout, _ = foreign.imported(folder, None, target)
    assert layout == "eagle"
    assert again.config.taps == (1, 5, 8)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


def test_numbered_taps_are_asked_about(target, tmp_path):
    _, folder = published(target, tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 6, 9]})
    with pytest.raises(HeadwayError, match="--from vllm.*--from sglang"):
        foreign.imported(folder, None, target)
    assert foreign.imported(folder, "vllm", target)[0].config.taps == (1, 5, 8)
    assert foreign.imported(folder, "sglang", target)[0].config.taps == (2, 6, 9)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"fc_norm": True}, "lacks tensor 'fc_norm.0.weight'"),
        ({"num_hidden_layers": 2}, "more than one layer"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_attention_heads": 8}, "num_attention_heads 8"),
        ({"draft_vocab_size": 32}, "draft_vocab_size 32"),
        ({"intermediate_size": 256}, "intermediate_size 256"),
        ("embed_tokens.weight", "embed_tokens"),
        ("midlayer.self_attn.q_proj.bias", "q_proj.bias"),
        ("stray.weight", "stray"),
        ("-norm.weight", "lacks tensor 'norm.weight'"),
        ("d2t", "offsets"),
        ("t2d", "different words"),
    ],
)
def test_what_a_head_of_ours_cannot_be_is_refused_by_name(target, tmp_path, change, named):
    _, folder = published(target, tmp_path, **({"head_dim": 16} | change if isinstance(change, dict) else {}))
    if isinstance(change, str):
        tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
        if change[0] == "-":
            del tensors[change[1:]]
        elif change == "d2t":
            tensors["d2t"] = torch.arange(64) * 4  # ids in place of offsets, which lead beyond the vocabulary
        else:
            tensors[change] = torch.zeros(272, dtype=torch.bool) if change == "t2d" else torch.zeros(272, 64)
        torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(HeadwayError, match=named):
        foreign.imported(folder, None, target)


def test_a_speculators_head_that_does_not_say_where_its_norm_is(target, tmp_path):
    """vLLM takes it to be before the residual."""
    exported(small("eagle3", target), target, "speculators", tmp_path / "out")
    edit(tmp_path / "out", norm_before_residual=...)
    head, _, _ = foreign.imported(tmp_path / "out", None, target)
    assert head.config.norm_before_residual is True


def test_a_published_eagle_head_comes_in(target, tmp_path):
    """pytorch_model.bin with the target's embedding and, as the repository's default has it, a bias of fc."""
    head = small("eagle", target, draft_vocab_size=0, bias=True)
    files = exported(head, target, "eagle", tmp_path / "out")
    assert files.tensors.keys() == {
        "fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight",
        *(f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    }  # fmt: skip
    assert (files.config["architectures"], files.config["bias"]) == (["LlamaForCausalLM"], True)
    folder = tmp_path / "published"
    folder.mkdir()
    torch.save(files.tensors | {"embed_tokens.weight": weights_of(target).embedding}, folder / "pytorch_model.bin")
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
    )
    (folder / "config.json").write_text(json.dumps({key: files.config[key] for key in kept}))
    again, layout, _ = foreign.imported(folder, None, target)
    assert layout == "eagle"
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
    plain = exported(small("eagle", target, draft_vocab_size=0), target, "sglang", tmp_path / "plain")
    assert not plain.tensors["fc.bias"].any()  # SGLang makes one in any case, and leaves it random where there is none
    assert plain.config["architectures"] == ["LlamaForCausalLMEagle"]
    torch.save(files.tensors | {"lm_head.weight": torch.zeros(272, 64)}, folder / "pytorch_model.bin")
    with pytest.raises(HeadwayError, match="an LM head of its own"):
        foreign.imported(folder, None, target)


def test_low_rank_lm_heads_are_multiplied_out(target, tmp_path):
    head = small("medusa", target, rank=8, lm_head="own")
    files = exported(head, target, "tgi", tmp_path / "out")
    x = torch.randn(5, 64)
    torch.testing.assert_close(x @ files.tensors["2.1.weight"].T, head.lm_heads.logits(2, x), rtol=1e-4, atol=1e-4)
    assert "rank 8" in files.said[0]
