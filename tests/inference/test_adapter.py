"""A LoRA adapter on the target: decoded with exactly, told from another, refused where it does not belong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import inputs
from headway.heads.common.checkpoint import load_head, read_config, save_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head, find_family
from headway.inference.adapter import attach, read_adapter
from headway.inference.bench import environment
from headway.inference.generate import Request, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import parse_policy
from headway.inference.tune import read_policies, save_policy
from tests.tiny import build, byte_tokenizer, target

peft = pytest.importorskip("peft")

PROMPTS = [[257, 72, 101, 121], [257, 10, 50, 90, 40, 30]]
BOTH = ["q_proj", "v_proj", "down_proj"]


def bare(**changes: Any) -> Any:
    return build(0, num_hidden_layers=2, **changes)


def write_adapter(folder: Path, seed: int = 1, modules: Any = BOTH, **fields: Any) -> Path:
    """Write a random adapter, strong enough to change what the tiny target says."""
    tied = fields.pop("tied", False)
    model = bare(tie_word_embeddings=tied)
    torch.manual_seed(seed)
    fields = {"lora_alpha": 16, "target_modules": modules, "init_lora_weights": False} | fields
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **fields))
    for weight in wrapped.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "a")


def carrying(folder: Path, merge: bool = False, mode: str | None = "tree", **changes: Any) -> Target:
    model, info = attach(bare(**changes), folder, merge=merge)
    return Target(model, byte_tokenizer(), "tiny", mode=mode, adapter=info)


def stock(model: Any, prompt: list[int], count: int = 8) -> list[int]:
    """Return what transformers' own greedy loop says."""
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, attention_mask=torch.ones(1, len(prompt))
    )
    return ids[0, len(prompt) :].tolist()


def decode(loaded: Target, head: Head | None = None) -> list[list[int]]:
    policy = parse_policy("dynamic:depth=2,top_k=3,nodes=6") if head is not None else None
    requests = [Request(p, Settings(max_new_tokens=8), id=i) for i, p in enumerate(PROMPTS)]
    results = {r.id: r.token_ids for r in generate(loaded, requests, head=head, policy=policy, batch_size=2)}
    return [results[i] for i in range(len(PROMPTS))]


def make_head(loaded: Target, family: str = "medusa") -> Head:
    config, cls = find_family(family)
    torch.manual_seed(3)
    head = cls(config.for_target(loaded.info, num_heads=2, lm_head="own"), loaded.frozen)
    head.warm_start()
    return head.eval()


KINDS: dict[str, dict[str, Any]] = {
    "attention": {"modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "one of q, k, v": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "lm head": {"modules": ["q_proj", "lm_head"]},
    "tied lm head": {"modules": ["q_proj", "lm_head"], "tied": True},
    "tied embedding": {"modules": ["q_proj", "embed_tokens"], "tied": True},
    "whole lm head": {"modules_to_save": ["lm_head"]},
}


MERGED = ["one of q, k, v", "dora", "tied lm head", "whole lm head"]


@pytest.mark.filterwarnings("ignore")  # PEFT says that the ends are no longer tied
@pytest.mark.parametrize(("kind", "merge"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in MERGED)])
def test_decoding_is_that_of_the_peft_model(kind: str, merge: bool, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", **KINDS[kind])
    tied = KINDS[kind].get("tied", False)
    base = bare(tie_word_embeddings=tied)
    without = [stock(base, p) for p in PROMPTS]
    want = [stock(peft.PeftModel.from_pretrained(base, folder).eval(), p) for p in PROMPTS]
    assert want != without  # else this would show nothing
    loaded = carrying(folder, merge, mode="tree", tie_word_embeddings=tied)
    assert not loaded.packed.reason
    assert decode(loaded) == want
    head = make_head(loaded)
    assert decode(loaded, head) == want
    # What heads read of the target: the LM head's rows are what the model multiplies with.
    out = loaded.own_pass(PROMPTS[0], keep=1)[0][0, -1]
    last = loaded.features(torch.tensor([PROMPTS[0]]), torch.tensor([len(PROMPTS[0])]), ["last"])[1][0, -1]
    assert torch.allclose(loaded.frozen.logits(last[None], torch.arange(272))[0], out, atol=1e-4)
    assert torch.allclose(loaded.frozen.logits(last[None])[0], out, atol=1e-4)


def test_attached_and_merged_hand_heads_the_same_weights(adapter: Path) -> None:
    both = [carrying(adapter, merge).frozen.layer_weights(1) for merge in (False, True)]
    plain = target(bare(), mode="tree").frozen.layer_weights(1)
    assert both[0].keys() == both[1].keys() == plain.keys()
    assert all(torch.allclose(both[0][name], both[1][name], atol=1e-6) for name in plain)
    assert not torch.allclose(both[0]["self_attn.q_proj.weight"], plain["self_attn.q_proj.weight"], atol=1e-2)


def test_the_probe_passes_with_an_adapter_on(adapter: Path) -> None:
    assert carrying(adapter, mode=None).mode == "tree"


def test_packed_weights_follow_an_adapter_that_is_merged_where_it_is(adapter: Path, tmp_path: Path) -> None:
    loaded = carrying(adapter)
    before = decode(loaded)
    layers = [m for m in loaded.model.modules() if hasattr(m, "lora_A")]
    for layer in layers:
        layer.merge()
    assert decode(loaded) == before  # the packed copies of the bare weights would say something else
    for layer in layers:
        layer.unmerge()
        with torch.no_grad():
            layer.lora_B["default"].weight.zero_()
    assert decode(loaded) == [stock(bare(), p) for p in PROMPTS]


def test_a_peft_model_given_as_it_is_is_known_by_the_same_digest(adapter: Path) -> None:
    wrapped = peft.PeftModel.from_pretrained(bare(), adapter).eval()
    want = [stock(wrapped, p) for p in PROMPTS]
    loaded = target(wrapped, mode="tree")
    assert loaded.info.adapter is not None
    assert loaded.info.adapter.sha256 == read_adapter(adapter).sha256
    assert decode(loaded) == want


def test_several_adapters_and_prompt_tuning_are_refused(adapter: Path, tmp_path: Path) -> None:
    wrapped = peft.PeftModel.from_pretrained(bare(), adapter)
    wrapped.load_adapter(write_adapter(tmp_path / "b", 2), "other")
    wrapped.base_model.set_adapter(["default", "other"])
    with pytest.raises(HeadwayError, match="default.*other.*one LoRA is allowed"):
        target(wrapped, mode="tree")
    prompt = peft.get_peft_model(bare(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(HeadwayError, match="PROMPT_TUNING.*LORA"):
        target(prompt, mode="tree")


def test_the_digest_tells_what_changes_the_target(adapter: Path, tmp_path: Path) -> None:
    digest = read_adapter(adapter).sha256
    assert read_adapter(write_adapter(tmp_path / "again")).sha256 == digest
    assert read_adapter(write_adapter(tmp_path / "other", 2)).sha256 != digest
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    (tmp_path / "again" / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    assert read_adapter(tmp_path / "again").sha256 != digest
    (tmp_path / "again" / "adapter_config.json").write_text(json.dumps(config | {"inference_mode": False}))
    assert read_adapter(tmp_path / "again").sha256 == digest


def rewrite(**fields: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def retensor(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def apply(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return apply


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "config is no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "is no JSON"),
    "config is a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "no JSON object"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "has neither"),
    "torn": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 99), "damaged"),
    "prefix tuning": (rewrite(peft_type="PREFIX_TUNING"), "PREFIX_TUNING.*allowed: 'LORA'"),
    "activated lora": (rewrite(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
    "layers twice": (rewrite(layer_replication=[[0, 2]]), "layer_replication"),
    "a tensor less": (retensor(lambda t: t.pop(sorted(t)[0])), "is missing in its file"),
    "a tensor more": (
        retensor(lambda t: t.update({sorted(t)[0].replace("layers.0", "layers.7"): torch.ones(4, 64)})),
        "no place",
    ),
    "another width": (retensor(lambda t: t.update({k: v.repeat(1, 2) for k, v in t.items()})), "does not fit"),
    "no such modules": (rewrite(target_modules=["query_key_value"]), "does not fit"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_adapter_is_refused(fault: str, adapter: Path, tmp_path: Path) -> None:
    import shutil

    change, said = BROKEN[fault]
    shutil.copytree(adapter, tmp_path / "a")
    change(tmp_path / "a")
    with pytest.raises(HeadwayError, match=said):
        attach(bare(), tmp_path / "a")


def test_what_is_no_folder_or_id_is_refused() -> None:
    with pytest.raises(HeadwayError, match="no folder './nowhere'.*hub id"):
        read_adapter("./nowhere")


def test_merging_that_changes_the_logits_is_refused(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = peft.tuners.lora.layer.Linear
    monkeypatch.setattr(layer, "get_delta_weight", lambda self, name: torch.ones_like(self.weight))
    with pytest.raises(HeadwayError, match="changes the logits by .*leave out --merge-adapter"):
        attach(bare(), adapter, merge=True)


def test_without_peft_the_remedy_is_said(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.inference.adapter.find_spec", lambda name: None)
    with pytest.raises(HeadwayError, match=r"pip install 'headway\[peft\]'"):
        read_adapter(adapter)


def test_a_head_goes_with_the_adapter_it_was_made_with(adapter: Path, tmp_path: Path) -> None:
    with_a, with_b = carrying(adapter), carrying(write_adapter(tmp_path / "b", 2))
    without = target(bare(), mode="tree")
    a = save_head(make_head(with_a), tmp_path / "head-a", target=with_a.info)
    none = save_head(make_head(without), tmp_path / "head", target=without.info)
    assert read_config(a)["target"]["adapter"] == {
        "name": str(adapter),
        "revision": None,
        "sha256": read_adapter(adapter).sha256,
        "base": read_adapter(adapter).base,
    }
    card = (a / "README.md").read_text()
    assert f"--target-adapter {adapter}" in card
    assert read_adapter(adapter).sha256 in card
    assert "adapter" not in (none / "README.md").read_text()

    for loaded in (with_a, carrying(adapter, merge=True)):
        load_head(a, loaded)
    with pytest.raises(HeadwayError, match="made with adapter .*a .*no adapter on; give --target-adapter"):
        load_head(a, without)
    with pytest.raises(HeadwayError, match="made with adapter .*has adapter .*b "):
        load_head(a, with_b)
    with pytest.raises(HeadwayError, match="made with the bare target.*leave out --target-adapter"):
        load_head(none, with_a)
    load_head(none, with_a, other_target=True)

    # A head of before there were adapters is one of a bare target.
    config = read_config(none)
    del config["target"]["adapter"]
    (none / "config.json").write_text(json.dumps(config))
    load_head(none, without)
    with pytest.raises(HeadwayError, match="bare target"):
        load_head(none, with_a)


def test_features_and_dialogs_of_another_adapter_are_refused(adapter: Path, tmp_path: Path) -> None:
    from headway.data.capture import capture
    from headway.data.distill import distill
    from headway.data.prompts import Row

    def row(n: int) -> Row:
        return Row(f"r{n}", [{"role": "user", "content": f"hello {n}"}])

    with_a, without = carrying(adapter), target(bare(), mode="tree")
    with_a.tokenizer.chat_template = without.tokenizer.chat_template
    settings = Settings(max_new_tokens=4)
    out = tmp_path / "dialogs"
    distill(with_a, [row(1)], out, settings=settings, show=False)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["adapter"]["sha256"] == read_adapter(adapter).sha256
    assert manifest["adapter"]["name"] == str(adapter)
    distill(carrying(adapter, merge=True), [row(1)], out, settings=settings, show=False)  # continues
    with pytest.raises(HeadwayError, match="adapter was "):
        distill(without, [row(1)], out, settings=settings, show=False)
    capture(with_a, out, ["last"], show=False)
    with pytest.raises(HeadwayError, match="made with adapter .*no adapter on"):
        capture(without, out, ["last"], show=False)
    manifest["adapter"] = None  # as if the bare target had written them
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(HeadwayError, match="adapter was"):
        capture(without, out, ["last"], show=False)
    with pytest.raises(HeadwayError, match="made with the bare target"):
        capture(with_a, out, ["last"], show=False)


def test_a_folder_of_an_adapter_is_no_target(adapter: Path) -> None:
    with pytest.raises(HeadwayError, match="is a PEFT adapter, no target; give its base"):
        Target.load(adapter)


def test_a_copy_of_the_model_stays_bare(adapter: Path) -> None:
    model = bare()
    twin = copy.deepcopy(model)
    attach(model, adapter)
    assert target(twin, mode="tree").info.adapter is None
    assert target(model, mode="tree").info.adapter is not None


def test_a_tree_tells_an_attached_adapter_from_a_merged_one(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare_target, attached, merged = target(bare()), carrying(adapter), carrying(adapter, merge=True)
    assert [t.carries for t in (bare_target, attached, merged)] == ["", "adapter attached", "adapter merged"]
    assert [str(environment(t)["adapter"]).rpartition(", ")[2] for t in (attached, merged)] == ["attached", "merged"]
    row = {"policy": "chain:2", "accepted_length": 2.0, "round_ms": 12.0, "tokens_per_ms": 0.17}
    save_policy(tmp_path, attached, {"policy": "chain:2", "plain_ms": 10.0, "candidates": [row]})
    save_head(make_head(attached), tmp_path / "head", target=attached.info)
    (tmp_path / "tree.json").replace(tmp_path / "head" / "tree.json")
    head = str(tmp_path / "head")
    assert inputs.saved_tree(head, attached) == parse_policy("chain:2")
    assert inputs.economy(head, attached, None)._prices
    assert capsys.readouterr().err == ""
    for other, words in ((merged, "cpu float32, adapter merged"), (bare_target, "cpu float32")):
        assert inputs.saved_tree(head, other) is None
        assert f"was tuned for cpu float32, adapter attached; not for {words}\n" in capsys.readouterr().err
        assert not inputs.economy(head, other, None)._prices
    save_policy(head, merged, {"policy": "off", "plain_ms": 10.0, "candidates": [row]})
    assert set(read_policies(head)) == {"cpu float32, adapter attached", "cpu float32, adapter merged"}
    for module in attached.model.modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            module.merge()  # by who holds the model
    assert attached.carries == "adapter merged"
