"""Inspect: the supervised tokens are the ones that are coloured, and the counts are those of all dialogs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from rich.console import Console
from transformers import LlamaConfig

from headway.data.convert import convert
from headway.data.dialogs import Dialog, DialogWriter
from headway.data.inspect import inspect, marked
from headway.data.prompts import Intake, Row
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import TargetInfo

ROWS = [
    {"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo\u001b[2J"}]},
    {"id": "b", "prompt": "2+2?", "response": "4"},
    {"id": "c", "prompt": "no answer"},
    {"id": "d", "prompt": "x" * 200, "response": "too far"},
    {"id": "e", "input_ids": [65, 66, 9999], "loss_mask": [0, 1, 1]},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    byte_tokenizer().save_pretrained(folder / "target")
    LlamaConfig(hidden_size=8, num_attention_heads=1, vocab_size=264).save_pretrained(folder / "target")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_rows_are_shown_and_counted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Intake(str(place / "rows.jsonl"), answers=True)
    counts = inspect(rows, target=str(place / "target"), show_rows=1, max_length=150)
    out = capsys.readouterr().out
    assert "1. a: " in out
    assert "<|im_start|>assistant\n{+Yo\\x1b[2J<|im_end|>+}\n" in out
    assert "2. b" not in out
    assert "4 of 5 rows used" in out
    assert "skipped 1: no answer (first at line 3)" in out
    assert "2 dialogs" in out
    assert (counts.dialogs, counts.supervised, counts.spans) == (2, 7 + 2, 2)
    assert dict(counts.dropped) == {
        "no supervised token within max_length": 1,
        "a token beyond the target's vocabulary of 264": 1,
    }
    assert all(reason in out for reason in counts.dropped)


def test_a_folder_of_dialogs_is_shown_alike(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    info = TargetInfo(
        name=str(place / "target"), model_type="llama", hidden_size=8, vocab_size=264, num_tokens=264, num_layers=1
    )
    intake = Intake(str(place / "rows.jsonl"), answers=True)
    convert(byte_tokenizer(), intake, tmp_path / "d", target=info, max_length=150)
    made = inspect(intake, target=str(place / "target"), show_rows=9, max_length=150)
    shown = capsys.readouterr().out
    found = inspect(Intake(str(tmp_path / "d")), show_rows=9)
    assert vars(found) == vars(made)
    again = capsys.readouterr().out
    assert again.partition("2 dialogs")[0] == shown.partition(str(place))[0]  # before the account of the rows
    assert again.endswith(shown[shown.index("2 dialogs") :])
    inspect(Intake(str(tmp_path / "d")), only="b")
    out = capsys.readouterr().out
    assert "1. b: " in out
    assert "1. a: " not in out
    with pytest.raises(HeadwayError, match="no dialog has the id 'z'"):
        inspect(Intake(str(tmp_path / "d")), only="z")


def test_a_folder_of_dialogs_takes_no_options_of_rows(tmp_path: Path) -> None:
    with DialogWriter(tmp_path, {"vocab_size": 264}) as writer:
        writer.add(Dialog("a", [65, 66], [(1, 2)], "given"))
    for more, options in (({"limit": 1}, {}), ({"held_out": 0.5}, {}), ({}, {"max_length": 1})):
        with pytest.raises(HeadwayError, match="made already; --limit"):
            inspect(Intake(str(tmp_path), **more), **options)  # type: ignore[arg-type]
    with pytest.raises(HeadwayError, match="names no target"):
        inspect(Intake(str(tmp_path)))


def test_rows_without_a_target_are_refused(place: Path) -> None:
    with pytest.raises(HeadwayError, match="say with --target for which model"):
        inspect(Intake(str(place / "rows.jsonl"), answers=True))


def test_colour_is_on_what_is_supervised_alone() -> None:
    tokenizer = byte_tokenizer()
    dialog = Dialog("a", tokenizer("ask answer ask more")["input_ids"], [(4, 10), (15, 19)], "given")
    text = marked(dialog, tokenizer, colour=True)
    assert text.plain == "ask answer ask more"
    assert [text.plain[s.start : s.end] for s in text.spans if s.style == "green"] == ["answer", "more"]
    assert marked(dialog, tokenizer, colour=False).plain == "ask {+answer+} ask {+more+}"
    console = Console(force_terminal=True, color_system="standard", file=None, record=True, width=80)
    with console.capture() as caught:
        console.print(text)
    assert "\x1b[32manswer\x1b[0m" in caught.get()


def test_a_row_of_tokens_needs_no_template(tmp_path: Path) -> None:
    info = TargetInfo(name="t", model_type="llama", hidden_size=8, vocab_size=264, num_tokens=264, num_layers=1)
    counts = convert(byte_tokenizer(None), [Row("a", token_ids=[1, 2], spans=[(1, 2)])], tmp_path, target=info)
    assert counts["tokens"] == 1
