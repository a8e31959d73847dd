"""Intake: every shape of row is read, every broken row is counted, none is fatal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.data.prompts import Row, read_rows
from headway.heads.common.errors import HeadwayError


def write(folder: Path, rows: list[Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def gpt(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {**more, "conversations": [{"from": role, "value": value} for role, value in turns]}


def spelled(row: Row) -> str:
    return " ".join(f"{m['role'][0]}:{m['content']}" for m in row.messages)


BROKEN = [
    (gpt(), "empty conversation"),
    (gpt(("human", "a"), ("human", "b"), ("gpt", "c")), "two user turns in a row"),
    (gpt(("human", "a"), ("gpt", None)), "null content"),
    (gpt(("human", "a"), ("gpt", "")), "blank answer, nothing to learn"),
    (gpt(("bing", "a"), ("gpt", "b")), "unknown role 'bing'"),
    (gpt((["human"], "a")), "unknown role ['human']"),  # type: ignore[arg-type]
    ({"text_a": "x"}, "no conversation field (has text_a)"),
    ([1, 2], "row is a JSON list, not an object"),
    ({"messages": "hello"}, "conversation is not a list of messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "content is a JSON int"),
    (gpt(("gpt", "b")), "no user turn"),
    (gpt(("human", " \n")), "blank user turn"),
    (gpt(("human", "a"), ("system", "S"), ("gpt", "b")), "system turn inside the conversation"),
    ({"prompt": "\ud800"}, "text holds a lone surrogate"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "multimodal content (part of type 'image_url')",
    ),
]


@pytest.mark.parametrize(("row", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_broken_row_is_skipped_with_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    rows, report = read_rows(write(tmp_path, [{"prompt": "good"}, row]))
    assert [spelled(r) for r in rows] == ["u:good"]
    assert dict(report.skipped) == {reason: 1}
    assert report.first == {reason: 2}
    assert report.rows == report.used + sum(report.skipped.values()) == 2
    assert reason in str(report)


GOOD = [
    (gpt(("human", "a"), ("gpt", "b")), "u:a a:b"),
    (gpt(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), system="S."), "s:S. u:a a:b u:c a:d"),
    (gpt(("system", "S."), ("user", "a"), ("assistant", "b")), "s:S. u:a a:b"),
    (gpt(("gpt", "b"), ("human", "a"), ("gpt", "c")), "u:a a:c"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        "u:ab",
    ),
    (
        {"messages": [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c")]]},
        "u:a a:b u:c",
    ),
    ({"turns": ["first", "second"]}, "u:first u:second"),
    ({"prompt": "p", "response": "r"}, "u:p a:r"),
    ({"prompt": [{"role": "user", "content": "p"}]}, "u:p"),
]


@pytest.mark.parametrize(("row", "messages"), GOOD, ids=[messages for _, messages in GOOD])
def test_shapes(tmp_path: Path, row: Any, messages: str) -> None:
    rows, report = read_rows(write(tmp_path, [row]))
    assert [spelled(r) for r in rows] == [messages]
    assert not report.skipped


def test_dropping_the_opening_answer_is_said(tmp_path: Path) -> None:
    _, report = read_rows(write(tmp_path, [gpt(("gpt", "b"), ("human", "a"))]))
    assert dict(report.repaired) == {"used from the first user turn": 1}


# A byte-order mark, CRLF, a blank line, two schemas, a line torn off, a field of two types, no newline at the end.
MIXED = (
    b'\xef\xbb\xbf{"id": "a", "messages": [{"role": "user", "content": "caf\xc3\xa9"}]}\r\n\r\n'
    b'{"id": "b", "conversations": [{"from": "human", "value": "x"}]}\n{"id": "c", "messages": [\n'
    b'{"id": "d", "prompt": "p", "meta": {"k": 1}}\n{"id": "e", "prompt": "p", "meta": "text"}\n{"prompt": "\xff"}'
)


def test_mixed_file_names_the_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(MIXED)
    rows, report = read_rows(str(path))
    assert [row.id for row in rows] == ["a", "b", "d", "e"]
    assert rows[0].messages[0]["content"] == "café"
    assert report.broken_lines == [4, 7]
    assert dict(report.skipped) == {"broken JSON": 1, "not UTF-8": 1}
    assert "4, 7" in str(report)


def test_text_is_utf8_in_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(MIXED)
    code = "import sys; from headway.data.prompts import read_rows; r, _ = read_rows(sys.argv[1])"
    code += "; sys.exit(r[0].messages[0]['content'] != 'caf\\xe9')"
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code, str(path)], env=env, check=False).returncode == 0


def test_rendered_text_needs_answers(tmp_path: Path) -> None:
    path = write(tmp_path, [{"id": "t", "text": "already rendered"}, {"id": "p", "prompt": "p"}])
    rows, report = read_rows(path)
    assert [row.id for row in rows] == ["p"]
    assert list(report.skipped) == ["already rendered text (`headway convert` takes it)"]
    rows, report = read_rows(path, answers=True)
    assert [(row.id, row.text) for row in rows] == [("t", "already rendered")]
    assert list(report.skipped) == ["no answer"]


def test_ids_are_unique_and_stable(tmp_path: Path) -> None:
    path = write(tmp_path, [{"id": 0, "prompt": "a"}, {"id": 0, "prompt": "b"}, {"prompt": "c"}])
    rows, report = read_rows(path)
    assert [row.id for row in rows] == ["0", "0~line2", "line3"]
    assert dict(report.repaired) == {"id already taken, line number added": 1}
    assert read_rows(path)[0] == rows


def test_limit(tmp_path: Path) -> None:
    rows, report = read_rows(write(tmp_path, [{"prompt": str(i)} for i in range(5)]), limit=2)
    assert len(rows) == report.used == report.rows == 2


def test_json_and_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    data = [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "rows.json").write_text(json.dumps(data), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(data), tmp_path / "rows.parquet")
    for name in ("rows.json", "rows.parquet"):
        assert [spelled(row) for row in read_rows(str(tmp_path / name))[0]] == ["u:a", "u:b"]


def test_saved_dataset_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "set")
    assert [spelled(row) for row in read_rows(str(tmp_path / "set"))[0]] == ["u:a"]


@pytest.mark.parametrize("name", ["none.jsonl", "./none", "a/b/c"])
def test_missing_source(tmp_path: Path, name: str) -> None:
    with pytest.raises(HeadwayError, match="does not exist"):
        read_rows(name)


@pytest.mark.parametrize("content", ["", "\n\n", '{"a": 1}\n', "not json"])
def test_nothing_usable(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(HeadwayError, match="no usable rows") as error:
        read_rows(str(path))
    assert "\n" not in str(error.value)


def test_an_answer_that_was_cut_is_known_from_its_finish_reason(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    rows = [{"messages": said, "finish_reason": reason} for reason in ("length", "stop")]
    rows += [{"prompt": "Hi", "response": "Hel", "finish_reason": "length"}, {"messages": said}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row.cut for row in read_rows(str(path), answers=True)[0]] == [True, False, True, False]


def test_an_id_that_a_later_turn_would_get_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": "Hi"}) + "\n" for i in ("a", "a turn 2", "a part 3")))
    rows, report = read_rows(str(path))
    assert [row.id for row in rows] == ["a", "a turn 2~line2", "a part 3~line3"]
    assert sum(report.repaired.values()) == 2
