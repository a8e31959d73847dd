"""Saving and loading heads: strict, whole or not at all, and only for the target they were trained for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HFValidationError
from safetensors.torch import load_file, save_file

from headway.heads.common.checkpoint import load_head, read_config, save_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Frozen, Head, TargetInfo
from headway.heads.medusa import Config
from headway.heads.medusa import Head as Medusa
from headway.hub import push_to_hub

INFO = TargetInfo(
    name="owner/Tiny", model_type="llama", hidden_size=16, vocab_size=40, num_tokens=38, num_layers=3, revision="abc"
)


def frozen(seed: int = 0, **changes: Any) -> Frozen:
    info = dataclasses.replace(INFO, **changes)
    weight = torch.randn(info.vocab_size, info.hidden_size, generator=torch.Generator().manual_seed(seed))
    return Frozen(info, lambda ids: weight[ids], lambda x, rows=None: x @ weight.T, lambda: weight)


def head_for(target: Frozen, seed: int = 1) -> Head:
    torch.manual_seed(seed)
    head = Medusa(Config.for_target(target.info, num_heads=2, draft_vocab_size=20), target)
    head.set_draft_vocab(torch.arange(0, 40, 2))
    for parameter in head.parameters():
        parameter.data.normal_()
    return head


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    target = frozen()
    metrics = {"accepted_length": 1.75, "agreement": [0.5, 0.25]}
    return save_head(head_for(target), tmp_path / "head", target=target.info, metrics=metrics, data={"dialogs": 12})


def test_round_trip(saved: Path) -> None:
    target = frozen()
    expected, head = head_for(target).state_dict(), load_head(saved, target)
    assert head.state_dict().keys() == expected.keys()
    assert all(head.state_dict()[name].equal(tensor) for name, tensor in expected.items())
    assert not head.training
    assert head.draft_vocab is not None
    assert head.draft_vocab.tolist() == list(range(0, 40, 2))
    assert sorted(p.name for p in saved.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_dtype_on_request_leaves_ids_alone(saved: Path) -> None:
    head = load_head(saved, frozen(), dtype="bf16")
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    assert head.draft_vocab is not None
    assert head.draft_vocab.dtype == torch.int64
    with pytest.raises(HeadwayError, match="float7"):
        load_head(saved, frozen(), dtype="float7")


def test_config_and_card_say_what_it_is(saved: Path) -> None:
    config = read_config(saved)
    assert config["family"] == "medusa"
    assert config["target"]["name"] == "owner/Tiny"
    assert config["metrics"]["accepted_length"] == 1.75
    card = (saved / "README.md").read_text()
    for text in ("owner/Tiny", "abc", "last", "1.75", "12", "headway generate", "load_head"):
        assert text in card
    assert card.startswith("---\n")


def test_saving_replaces_a_head_and_leaves_nothing_beside_it(saved: Path) -> None:
    target = frozen()
    save_head(head_for(target, seed=5), saved, target=target.info)
    assert (
        load_head(saved, target)
        .state_dict()["lm_heads.0.weight"]
        .equal(head_for(target, seed=5).state_dict()["lm_heads.0.weight"])
    )
    assert [p.name for p in saved.parent.iterdir()] == ["head"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(HeadwayError, match="holds no head"):
        save_head(head_for(frozen()), tmp_path, target=INFO)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_empty_tensor_is_refused_by_name_and_the_old_head_stays(saved: Path) -> None:
    head = head_for(frozen(), seed=7)
    state = {**head.state_dict(), "lm_heads.1.weight": torch.zeros(0)}
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(HeadwayError, match=r"lm_heads\.1\.weight"):
        save_head(head, saved, target=INFO, state_dict=state)
    del state["lm_heads.1.weight"]
    with pytest.raises(HeadwayError, match=r"lm_heads\.1\.weight"):
        save_head(head, saved, target=INFO, state_dict=state)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["head"]


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_loading_is_strict_and_names_the_tensor(saved: Path, damage: str) -> None:
    path = saved / "model.safetensors"
    tensors = load_file(path)
    weight = tensors.pop("lm_heads.1.weight")
    if damage == "extra":
        tensors |= {"lm_heads.1.weight": weight, "stray": torch.zeros(2)}
    if damage == "shape":
        tensors["lm_heads.1.weight"] = weight[:3].clone()
    save_file(tensors, path)
    with pytest.raises(HeadwayError, match="stray" if damage == "extra" else r"lm_heads\.1\.weight"):
        load_head(saved, frozen())


@pytest.mark.parametrize("size", [4, 100, -10])
def test_a_truncated_file_is_named(saved: Path, size: int) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(HeadwayError, match=r"model\.safetensors is damaged"):
        load_head(saved, frozen())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 32}, "hidden_size 16.*hidden_size 32"),
        ({"vocab_size": 48}, "vocab_size 40.*vocab_size 48"),
        ({"num_layers": 4}, "num_layers 3.*num_layers 4"),
        ({"model_type": "qwen3"}, "llama.*qwen3"),
    ],
)
def test_a_target_of_another_shape_is_refused_naming_both(saved: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(HeadwayError, match=named):
        load_head(saved, frozen(**changes), other_target=True)


def test_another_name_is_refused_unless_it_is_the_same_model(saved: Path) -> None:
    load_head(saved, frozen(seed=3, name="somewhere/models/tiny"))
    load_head(saved, frozen(seed=3, name="somewhere/tiny.gguf"))
    load_head(saved, frozen(name="somewhere/a-copy"))  # another name, the same weights
    with pytest.raises(HeadwayError, match=r"owner/Tiny.*other/Model"):
        load_head(saved, frozen(seed=3, name="other/Model"))
    load_head(saved, frozen(seed=3, name="other/Model"), other_target=True)


def test_missing_and_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no folder"):
        load_head(tmp_path / "none", frozen())
    with pytest.raises(HeadwayError, match=r"config\.json does not exist"):
        load_head(tmp_path, frozen())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(HeadwayError, match="no head of headway"):
        load_head(tmp_path, frozen())


def test_a_newer_format_is_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(HeadwayError, match="format 99"):
        load_head(saved, frozen())


class ConnectError(Exception):
    """As the library under the hub's client raises it; which library that is depends on the client's version."""

    __module__ = "httpx2._exceptions"


@pytest.mark.parametrize("kind", [OSError, ConnectError, HFValidationError])
def test_a_hub_that_fails_is_one_line(saved: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def fails(*given: Any, **named: Any) -> Any:
        raise kind("no route to it")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fails)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(HeadwayError, match="no route to it"):
        load_head("me/medusa", frozen())
    with pytest.raises(HeadwayError, match="no route to it"):
        push_to_hub(saved, "me/medusa", token="hf_0123456789")


def test_a_fault_of_ours_is_not_taken_for_the_hubs(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **named: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fails)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(KeyError):
        push_to_hub(saved, "me/medusa", token="hf_0123456789")
