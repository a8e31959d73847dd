"""Parts of a measurement are kept until it is done, and taken up by the same one only."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from headway.inference.unfinished import KEPT_SECONDS, Unfinished, file_identity


def test_parts_are_kept_until_it_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Unfinished("bench", {"prompts": ["né"]}, tmp_path)
    assert capsys.readouterr().err == ""
    first.keep("0", {"tokens": [1, 2]})
    first.keep("1", [3.5, None])
    again = Unfinished("bench", {"prompts": ["né"]}, tmp_path)
    assert again.done == {"0": {"tokens": [1, 2]}, "1": [3.5, None]}
    assert "2 parts" in capsys.readouterr().err
    assert Unfinished("bench", {"prompts": ["ne"]}, tmp_path).done == {}
    assert Unfinished("tune", {"prompts": ["né"]}, tmp_path).done == {}
    again.finish()
    assert Unfinished("bench", {"prompts": ["né"]}, tmp_path).done == {}


@pytest.mark.parametrize("torn", [b'["1", [1, ', b'["1", "\xc3', b"\x00\x00"])
def test_a_line_cut_short_is_measured_again(tmp_path: Path, torn: bytes) -> None:
    first = Unfinished("eval", {}, tmp_path)
    first.keep("0", 1)
    with first.path.open("ab") as file:
        file.write(torn)
    again = Unfinished("eval", {}, tmp_path)
    assert again.done == {"0": 1}
    again.keep("1", 2)
    assert Unfinished("eval", {}, tmp_path).done == {"0": 1, "1": 2}


@pytest.mark.parametrize("line", [b"[]\n", b"3\n", b'{"a": 1}\n', b"\xff\n", b'[["x"], 1]\n'])
def test_a_line_of_something_else_is_left_out(tmp_path: Path, line: bytes) -> None:
    first = Unfinished("eval", {}, tmp_path)
    first.path.write_bytes(line)
    assert Unfinished("eval", {}, tmp_path).done == {}


def test_no_place_to_keep_them_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    unfinished = Unfinished("tune", {}, tmp_path / "file")
    assert "begins anew" in capsys.readouterr().err
    unfinished.keep("0", 1)
    assert unfinished.done == {"0": 1}
    unfinished.finish()


def test_what_nobody_came_back_to_goes(tmp_path: Path) -> None:
    old, other = Unfinished("eval", {"n": 1}, tmp_path), tmp_path / "export-2024-01-01T00-00.jsonl"
    old.keep("0", 1)
    other.write_text("mine\n")
    long_ago = time.time() - KEPT_SECONDS - 60
    os.utime(old.path, (long_ago, long_ago))
    os.utime(other, (long_ago, long_ago))
    Unfinished("eval", {"n": 2}, tmp_path)
    assert not old.path.exists()
    assert other.exists()


def test_a_file_written_anew_is_another(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a")
    before = file_identity(path)
    assert file_identity(path) == before
    path.write_bytes(b"ab")
    assert file_identity(path) != before
