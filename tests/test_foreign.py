"""`headway check`: every fault that an engine would load without a word is found before anyone serves it.

The heads are fitted to the target's own answers, so that drafts are accepted and a fault costs something.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway import foreign
from headway.cli import main
from headway.heads.common.checkpoint import save_head
from headway.heads.common.protocol import Batch, Head
from headway.heads.formats.damage import MASK_TOKEN
from headway.heads.formats.layout import layouts_of, read_folder
from headway.heads.formats.reference import Reading, read
from headway.inference.generate import Request, generate
from headway.inference.parity import Text, accepted_per_round, answers, compare, head_draft, weights_of, write
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import chain
from tests import tiny
from tests.heads.test_contract import small

PROMPTS = [list(b"hello there"), list(b"12345")]
NEW = 18


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.build(4, "sdpa"), mode="tree")


@pytest.fixture(scope="module")
def texts(target) -> list[Text]:
    return write(target, PROMPTS, NEW)


@pytest.fixture(scope="module")
def fitted(target, texts) -> dict[str, Head]:
    """Heads of every family that has a layout, fitted to what the target answers."""
    heads = {"eagle3": small("eagle3", target, draft_vocab_size=0), "shared": small("medusa", target, lm_head="shared")}
    heads["eagle"] = small("eagle", target, draft_vocab_size=0)
    heads["options"] = small("eagle3", target, fc_norm=True, norm_output=True, norm_before_residual=True)
    heads["peagle"] = small("peagle", target, draft_vocab_size=0, num_layers=2, depths=4)
    heads["medusa"] = small("medusa", target, num_heads=3, lm_head="own")
    for name, head in heads.items():
        told = answers(target, texts, [*head.config.taps, "last"])
        size = max(len(a.token_T) for a in told)
        rows = [(torch.nn.functional.pad, a) for a in told]
        token = torch.stack([pad(a.token_T, (0, size - len(a.token_T))) for pad, a in rows])
        tap, last = (
            torch.stack([pad(a.taps(t), (0, 0, 0, size - len(a.token_T))) for pad, a in rows])
            for t in (head.config.taps, ("last",))
        )
        length = torch.tensor([len(a.token_T) for a in told])
        at = torch.arange(size)
        supervised = (at >= torch.tensor([a.prompt for a in told])[:, None]) & (at < length[:, None])
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
        for _ in range(25 if name != "options" else 0):
            optimizer.zero_grad()
            head.loss(Batch(token, length, supervised, tap, last)).loss.backward()
            optimizer.step()
        head.eval().requires_grad_(False)
    return heads


@pytest.fixture(scope="module")
def exports(target, fitted, tmp_path_factory) -> Callable[[str, str], Path]:
    """Return the folder of a fitted head in a layout; made once, not to be changed."""
    root = tmp_path_factory.mktemp("exports")

    def make(name: str, layout: str) -> Path:
        out = root / f"{name}-{layout}"
        if not out.exists():
            head = fitted[name]
            source = save_head(head, root / name, target=target.info)
            foreign.export(str(source), layout, out, target=target)
        return out

    return make


EVERY = [("eagle3", x) for x in layouts_of("eagle3")] + [("eagle", x) for x in layouts_of("eagle")]
EVERY += [("peagle", x) for x in layouts_of("peagle")]
EVERY += [(n, x) for n in ("medusa", "shared") for x in layouts_of("medusa")]


@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_a_whole_export_drafts_as_the_head_does(target, texts, fitted, exports, name, layout):
    report = foreign.check(exports(name, layout), target, texts, head=fitted[name])
    assert report.faults == []
    assert report.lines()[-1] == "ok"
    assert report.parity is not None
    assert report.parity.accepted_engine == report.parity.accepted_head > 1.3
    assert report.parity.difference is not None
    assert report.parity.difference < 1e-5


def test_options_of_eagle3(target, texts, fitted, exports):
    for layout in ("vllm", "speculators"):
        assert foreign.check(exports("options", layout), target, texts, head=fitted["options"]).faults == []


@pytest.mark.parametrize("name", ["eagle3", "eagle", "peagle", "medusa"])
def test_simulated_rounds_are_those_of_decoding(target, texts, fitted, exports, name):
    head = fitted[name]
    requests = [Request(ids, Settings(max_new_tokens=NEW), i) for i, ids in enumerate(PROMPTS)]
    real = {r.id: r.accepted_per_round for r in generate(target, requests, head=head, policy=chain(3))}
    files = read_folder(exports(name, "vllm"))
    reading, _ = read(
        "vllm", head.__module__.rsplit(".", 1)[-1], files.tensors, files.config, target.info, weights_of(target)
    )
    assert reading is not None
    for i, answer in enumerate(answers(target, texts, head.config.taps)):
        feature = answer.taps(head.config.taps)
        ours = accepted_per_round(
            answer, lambda p, n, f, a=answer, x=feature: head_draft(head, x, a.token_T, p, n, f), 3
        )
        theirs = accepted_per_round(
            answer, lambda p, n, f, a=answer, x=feature: reading.draft(x, a.token_T, p, n, f), 3
        )
        assert ours == theirs == real[i]


def damage(source: Path, out: Path, tensors: Callable[[dict[str, Any]], Any] | None = None, **config: Any) -> Path:
    """Copy an export and change it; `config` None removes a key. The note goes too, as other tools write none."""
    shutil.copytree(source, out)
    (path,) = out.glob("*.safetensors")
    held = load_file(path)
    if tensors is not None:
        tensors(held)
        save_file(held, path)
    written = json.loads((out / "config.json").read_text())
    inner = {
        "transformer_layer_config": written.get("transformer_layer_config", {})
        | config.get("transformer_layer_config", {})
    }
    written |= config | (inner if inner["transformer_layer_config"] else {})
    written = {k: v for k, v in written.items() if v is not None and k != "headway"}
    (out / "config.json").write_text(json.dumps(written))
    return out


def zeroed(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda held: held.__setitem__(name, torch.zeros_like(held[name]))


def without(*names: str) -> Callable[[dict[str, Any]], Any]:
    return lambda held: [held.pop(name) for name in names]


def noisy(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda held: held.__setitem__(name, torch.randn_like(held[name]) * held[name].std())


IDS = "eagle_aux_hidden_state_layer_ids"
MORE = {"proposal_methods": [{"speculative_tokens": 5}], "verifier": {"name_or_path": "tiny"}}
FAULTS = {
    "a tensor is missing": ("eagle3", "vllm", {"tensors": without("midlayer.mlp.down_proj.weight")}, "missing: .*down_proj"),
    "a tensor is missing, sglang": ("eagle3", "sglang", {"tensors": without("fc.weight")}, "missing: fc.weight"),
    "a tensor is random": ("eagle3", "vllm", {"tensors": noisy("midlayer.mlp.down_proj.weight")}, "logits differ"),
    "a tensor is zero": ("eagle3", "vllm", {"tensors": zeroed("midlayer.mlp.down_proj.weight")}, "logits differ"),
    "a tensor too many": ("eagle3", "vllm", {"tensors": lambda held: held.update(x=torch.ones(2))}, "extra: x"),
    "NaN": ("eagle3", "vllm", {"tensors": lambda held: held["norm.weight"].fill_(torch.nan)}, "not finite: norm.weight"),
    "eagle, a tensor is missing": ("eagle", "vllm", {"tensors": without("layers.0.mlp.up_proj.weight")}, "missing: .*up_proj"),
    "eagle, no bias": ("eagle", "sglang", {"tensors": without("fc.bias")}, "missing: fc.bias"),
    "eagle, a bias": ("eagle", "vllm", {"tensors": lambda held: held.update({"fc.bias": torch.ones(64)})}, "extra: fc.bias"),
    "eagle, a norm": ("eagle", "vllm", {"tensors": lambda held: held.update({"norm.weight": torch.ones(64)})}, "extra: norm"),
    "peagle, a tensor is missing": ("peagle", "vllm", {"tensors": without("layers.1.mlp.down_proj.weight")}, "missing: .*1.mlp"),
    "peagle, a layer less": ("peagle", "vllm", {"num_hidden_layers": 1}, "extra: layers.1"),
    "peagle, a layer more": ("peagle", "speculators", {"transformer_layer_config": {"num_hidden_layers": 3}}, "missing: layers.2"),
    "peagle, nothing for what is to come": ("peagle", "vllm", {"tensors": without("mask_hidden")}, "missing: mask_hidden"),
    "peagle, zeros for what is to come": ("peagle", "vllm", {"tensors": zeroed("mask_hidden")}, "logits differ"),
    "peagle, no mask token": ("peagle", "vllm", dict.fromkeys(MASK_TOKEN), "no mask_token_id"),
    "peagle, no mask token, speculators": ("peagle", "speculators", {"mask_token_id": None}, "no mask_token_id"),
    "peagle, another mask token": ("peagle", "vllm", dict.fromkeys(MASK_TOKEN, 7), "logits differ"),
    "peagle, another in older vLLM": ("peagle", "vllm", {"ptd_token_id": 7}, "mask tokens .* differ"),
    "peagle, a mask token that is not there": ("peagle", "vllm", dict.fromkeys(MASK_TOKEN, 272), "mask token is 272"),
    "peagle, more tokens than it learnt": ("peagle", "speculators", {"speculators_config": MORE}, "5 tokens, .* trained on 4"),
    "peagle, a norm that vLLM does not see": ("peagle", "speculators", {"fc_norm": True}, "does not read it"),
    "peagle, taps one off": ("peagle", "vllm", {IDS: [1, 3, 4], "eagle_config": {IDS: [1, 3, 4]}}, r"taps \[0, 2, 3\]"),
    "peagle, taps not written": ("peagle", "vllm", {IDS: None, "eagle_config": None}, "are not written"),
    "peagle, the norm's flag": ("peagle", "vllm", {"norm_before_residual": True}, "logits differ"),
    "peagle, NaN": ("peagle", "vllm", {"tensors": lambda held: held["mask_hidden"].fill_(torch.nan)}, "not finite: mask_h"),
    "peagle, random": ("peagle", "speculators", {"tensors": noisy("layers.1.mlp.down_proj.weight")}, "logits differ"),
    "no LM head": ("medusa", "vllm", {"tensors": without(*(f"lm_heads.{i}.weight" for i in range(3)))}, "missing: words.0"),
    "no LM head, but one for all": ("shared", "vllm", {"original_lm_head": False}, "missing: words.1"),
    "biases are not read": ("medusa", "vllm", {"medusa_fc_bias": False}, "extra: block.0.0.bias"),
    "fewer heads in the config": ("medusa", "vllm", {"num_heads": 2}, "extra: block.2.0"),
    "more heads in the config": ("medusa", "medusa", {"medusa_num_heads": 4}, "missing: block.3.0"),
    "taps one off": ("eagle3", "vllm", {IDS: [1, 3, 4], "eagle_config": {IDS: [1, 3, 4]}}, r"taps \[0, 2, 3\]"),
    "taps one off, sglang": ("eagle3", "sglang", {IDS: [2, 4, 5], "eagle_config": {IDS: [2, 4, 5]}}, r"taps \[2, 4, 5\]"),
    "taps not written": ("eagle3", "vllm", {IDS: None, "eagle_config": None}, "are not written"),
    "the norm's flag": ("eagle3", "vllm", {"norm_before_residual": True}, "logits differ"),
    "the norm's flag, left out": ("eagle3", "speculators", {"norm_before_residual": None}, "norm_before_residual is not"),
    "the norm's flag, not known": ("eagle3", "sglang", {"norm_before_residual": True}, "does not know it"),
    "the output's flag": ("eagle3", "vllm", {"norm_output": True}, "logits differ"),
    "a norm that is not there": ("eagle3", "vllm", {"fc_norm": True}, "missing: fc_norm.0.weight"),
    "another base of the angles": ("eagle3", "vllm", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "logits"),
    "another width": ("eagle3", "vllm", {"intermediate_size": 256}, "shape: midlayer|shape: layers"),
    "too short": ("eagle3", "sglang", {"max_position_embeddings": 64}, "max_position_embeddings is 64"),
    "the target's vocabulary": ("eagle3", "vllm", {"vocab_size": 256, "draft_vocab_size": 272}, "vocab_size is 256"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(target, texts, fitted, exports, tmp_path, fault):
    name, layout, change, named = FAULTS[fault]
    folder = damage(exports(name, layout), tmp_path / "out", **change)
    report = foreign.check(folder, target, texts[:1], head=fitted[name], layout=layout)
    assert any(re.search(named, text) for text in report.faults), report.lines()


def test_offsets_that_are_ids(target, texts, tmp_path):
    head = small("eagle3", target)
    foreign.export(str(save_head(head, tmp_path / "head", target=target.info)), "vllm", tmp_path / "out")
    ids = damage(tmp_path / "out", tmp_path / "ids", lambda held: held.update(d2t=torch.arange(0, 128, 2)))
    gone = damage(tmp_path / "out", tmp_path / "gone", without("d2t"))
    moved = damage(tmp_path / "out", tmp_path / "moved", lambda held: held["d2t"].add_(1))
    for folder, named in ((ids, "different words"), (gone, "missing: d2t"), (moved, "different words")):
        report = foreign.check(folder, target, texts[:1], head=head, layout="vllm")
        assert any(named in text for text in report.faults), report.lines()


def test_taps_in_another_order_are_put_right(target, texts, tmp_path):
    """Engines capture in ascending order, so the columns of fc move."""
    head = small("eagle3", target, taps=[6, 2, 4])
    source = str(save_head(head, tmp_path / "head", target=target.info))
    for layout in ("vllm", "sglang"):
        foreign.export(source, layout, tmp_path / layout)
        report = foreign.check(tmp_path / layout, target, texts[:1], head=head)
        assert report.faults == []
        assert report.taps == [2, 4, 6]


def test_a_rounded_export_is_compared_with_the_rounded_head(target, texts, fitted, tmp_path):
    source = str(save_head(fitted["eagle3"], tmp_path / "head", target=target.info))
    foreign.export(source, "vllm", tmp_path / "out", "bfloat16")
    assert foreign.check_source(tmp_path / "out", target, texts, source).faults == []


def test_a_draft_vocabulary_in_medusa_drafts_the_same(target, texts, tmp_path):
    head = small("medusa", target)
    foreign.export(str(save_head(head, tmp_path / "head", target=target.info)), "tgi", tmp_path / "out")
    assert foreign.check(tmp_path / "out", target, texts, head=head).faults == []

    def last_row(held: dict[str, Any]) -> None:
        held["0.1.weight"][271] = 2 * held["0.1.weight"][:128:2].abs().max(0).values

    worse = damage(tmp_path / "out", tmp_path / "worse", last_row)
    report = foreign.check(worse, target, texts, head=head, layout="tgi")
    assert "logits differ" in " ".join(report.faults)


@pytest.mark.parametrize("layout", layouts_of("eagle"))
def test_a_draft_vocabulary_of_eagle_is_left_out(target, texts, fitted, tmp_path, layout):
    """Engines' EAGLE drafts over all words with the target's LM head; the weights are the same."""
    whole = fitted["eagle"]
    head = small("eagle", target, draft_vocab_size=64)
    head.load_state_dict(head.state_dict() | whole.state_dict())
    source = save_head(head, tmp_path / "head", target=target.info)
    files = foreign.export(str(source), layout, tmp_path / "out")
    assert "64 words is left out" in " ".join(files.said)
    assert not any(t.dtype == torch.int64 for t in files.tensors.values())
    report = foreign.check(tmp_path / "out", target, texts, head=head)
    assert report.faults == []
    assert report.parity.accepted_head > 1.3
    again, _, _ = foreign.imported(tmp_path / "out", None, target)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())


def test_without_a_head(target, texts, exports, tmp_path):
    """Alone, a folder shows its own faults: what is missing, what was changed, and taps whose neighbours draft better."""
    whole = exports("eagle3", "vllm")
    report = foreign.check(whole, target, texts)
    assert report.faults == []
    assert "compared with no head" in " ".join(report.lines())
    flag = damage(whole, tmp_path / "flag", norm_before_residual=True)
    report = foreign.check(flag, target, texts, layout="vllm")
    assert "with norm_before_residual False" in " ".join(report.faults)
    random = damage(whole, tmp_path / "random", noisy("lm_head.weight"))
    report = foreign.check(random, target, texts, layout="vllm")
    assert "no draft was accepted" in report.faults, report.lines()
    assert "random-looking: lm_head.weight" in " ".join(report.lines())
    shutil.copytree(whole, tmp_path / "edited")
    held = load_file(whole / "model.safetensors")
    save_file(held | {"norm.weight": held["norm.weight"] * 1.01}, tmp_path / "edited" / "model.safetensors")
    assert "not those that were exported" in " ".join(foreign.check(tmp_path / "edited", target, texts[:1]).faults)


class Oracle(Reading):
    """Drafts rightly where its features are those of `right`, else nothing that is accepted."""

    def __init__(self, texts: list[Text], right: tuple[int, ...], target: Target) -> None:
        self.known = {tuple(a.token_T.tolist()): a.taps(right) for a in answers(target, texts, right)}
        self.taps = (1, 3, 4)

    def others(self, num_layers):
        moved = []
        for taps in ((0, 2, 3), (2, 4, 5)):
            moved.append((f"taps {list(taps)}", copy.copy(self)))
            moved[-1][1].taps = taps
        return moved

    def draft(self, feature_TF, token_T, p, depth, forced):
        hit = torch.equal(self.known[tuple(token_T.tolist())], feature_TF)
        return [torch.eye(272)[int(token_T[p + 2 + d]) if hit else 271] for d in range(depth)]


def test_taps_of_another_convention_are_seen_without_a_head(target, texts):
    for right in ((0, 2, 3), (2, 4, 5)):
        parity = compare(target, Oracle(texts, right, target), None, texts)
        (fault,) = parity.faults
        assert fault.startswith("accepted length is 1.00 as the folder is read")
        assert f"with taps {list(right)}" in fault
    assert compare(target, Oracle(texts, (1, 3, 4), target), None, texts).faults == []


def test_random_looking_means_untrained(target):
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 96).weight.data
    ranks = torch.randn(96, 8) @ torch.randn(8, 64)
    for weight, found in (
        (linear, True),
        (torch.randn(96, 64), True),
        (ranks, False),
        (linear * torch.rand(96, 1), False),
    ):
        _, findings = read("medusa", "medusa", {"0.0.linear.weight": weight}, {}, target.info, weights_of(target))
        assert any(f.kind == "random-looking" for f in findings) is found


# The commands


@pytest.fixture
def run(capfd, monkeypatch, tmp_path) -> Callable[..., tuple[int, str, str]]:
    def call(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(a) for a in argv])
        return code, *capfd.readouterr()

    monkeypatch.chdir(tmp_path)
    return call


def test_export_check_import(run, monkeypatch):
    monkeypatch.setattr(foreign, "PROMPTS", ("Hi",))
    model = tiny.build(0, num_hidden_layers=8)
    model.save_pretrained("target")
    tiny.byte_tokenizer().save_pretrained("target")
    target = tiny.target(model, "target", mode="tree")
    head = small("eagle3", target)
    save_head(head, "run/head", target=target.info)
    code, out, err = run("export", "run", "--to", "vllm", "--out", "served", "--check")
    assert (code, err) == (0, "")
    assert 'vllm serve target --speculative-config \'{"method": "eagle3", "model": "served"' in out
    assert out.endswith("ok\n")
    code, out, _ = run("check", "served", "--target", "target", "--head", "run", "--max-new-tokens", "8", "--json")
    assert code == 0
    assert json.loads(out)["ok"] is True
    code, out, _ = run("import", "served", "--target", "target", "--out", "again")
    assert code == 0
    assert "eagle3 head" in out
    again = load_file("again/model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in head.state_dict().items())
    damage(Path("served"), Path("broken"), without("norm.weight"))
    code, out, _ = run("check", "broken", "--target", "target", "--head", "run", "--as", "vllm", "-n", "8")
    assert code == 1
    assert "fault: missing: norm.weight" in out
    for argv, named in (
        (("export", "run", "--to", "tgi", "--out", "x"), "layout tgi holds no eagle3 heads"),
        (("export", "run", "--to", "vllm", "--out", "x", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("check", "none", "--target", "target"), "does not exist"),
        (("import", "broken", "--target", "target", "--out", "x"), "--from vllm"),
        (("import", "broken", "--from", "vllm", "--target", "target", "--out", "x"), "lacks tensor 'norm.weight'"),
        (("import", "none", "--target", "target", "--out", "x"), "no folder"),
    ):
        code, out, err = run(*argv)
        assert (code, out) == (2, ""), argv
        assert named in err
        assert err.count("\n") == 1
    assert not Path("x").exists()
