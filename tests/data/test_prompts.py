"""Intake: every shape of row is read, every broken row is counted, none is fatal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.data.hashes import Hashes, place
from headway.data.prompts import Intake, Row, read_rows
from headway.data.sources import raw_rows
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
    ({"\ud800" + "k" * 99: "x"}, f"no conversation field (has \\ud800{'k' * 39})"),
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


def test_a_cell_that_cannot_be_read_costs_its_row_alone(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    columns = {
        "prompt": pa.array([b"a", b"\xff", b"c", b"d"], pa.binary()).view(pa.string()),
        "when": pa.array([0, 0, 2**62, 0], pa.timestamp("us")),
    }
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    rows, report = read_rows(str(tmp_path / "rows.parquet"))
    assert [spelled(row) for row in rows] == ["u:a", "u:d"]
    assert report.skipped == {"not UTF-8": 1, "a value in 'when' that cannot be read": 1}
    assert report.first == {"not UTF-8": 2, "a value in 'when' that cannot be read": 3}


def test_images_of_a_dataset_are_not_decoded(tmp_path: Path) -> None:
    """Neither is a library needed for that, nor do those that are damaged cost other rows."""
    datasets = pytest.importorskip("datasets")
    given = [{"prompt": name, "image": image} for name, image in (("a", {"bytes": b"no image"}), ("b", None))]
    shapes = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image(decode=False)})
    stored = datasets.Dataset.from_list(given, features=shapes)
    stored.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "set")
    rows, report = read_rows(str(tmp_path / "set"))
    assert [spelled(row) for row in rows] == ["u:b"]
    assert report.skipped == {"multimodal row (field 'image')": 1}


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


def call(name: str = "add", arguments: Any = '{"a": 1}', **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        **more,
    }


ASKED = {"role": "user", "content": "q"}
RESULT = {"role": "tool", "content": "1", "tool_call_id": "x"}
SAID = {"role": "assistant", "content": "a"}

FOR_LEARNING = [
    ({"instruction": "Add.", "input": "1 2", "output": "3"}, "u:Add.\n\n1 2 a:3"),
    ({"instruction": "Say.", "input": "", "output": "3", "text": "rendered"}, "u:Say. a:3"),
    ({"question": "q", "answer": "a"}, "u:q a:a"),
    ({"prompt": [ASKED], "completion": [SAID]}, "u:q a:a"),
    ({"prompt": "q", "completion": "a"}, "u:q a:a"),
    ({"messages": json.dumps([ASKED, SAID])}, "u:q a:a"),
    ({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}, "u:q a:a"),
    ({"messages": [{"role": "developer", "content": "S"}, ASKED, SAID]}, "s:S u:q a:a"),
    ({"messages": [ASKED, call(), RESULT, SAID]}, "u:q a: t:1 a:a"),
    ({"messages": [ASKED, call(), RESULT, RESULT, call(arguments={}), RESULT, SAID]}, "u:q a: t:1 t:1 a: t:1 a:a"),
    (gpt(("human", "q"), ("function_call", '{"name": "f", "arguments": {}}'), ("observation", "1"), ("gpt", "a")),
     "u:q a: t:1 a:a"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "messages"), FOR_LEARNING, ids=[messages for _, messages in FOR_LEARNING])
def test_shapes_that_hold_answers(tmp_path: Path, row: Any, messages: str) -> None:
    rows, report = read_rows(write(tmp_path, [row]), answers=True)
    assert [spelled(r) for r in rows] == [messages]
    assert not report.skipped


UNFIT = [
    (
        {"conversations": {"from": ["human", "gpt", "human"], "value": ["q", "a"]}},
        "conversation is not a list of messages",
    ),
    ({"messages": [ASKED, RESULT, SAID]}, "tool turn that no call asked for"),
    ({"messages": [ASKED, call(), RESULT, ASKED, SAID]}, "tool turn without an answer to it"),
    ({"messages": [ASKED, call(), ASKED, SAID]}, "tool call without a result"),
    ({"messages": [ASKED, call(arguments="{broken"), RESULT, SAID]}, "malformed tool call"),
    ({"messages": [ASKED, call(name=3), RESULT, SAID]}, "malformed tool call"),  # type: ignore[arg-type]
    ({"messages": [ASKED, SAID], "tools": [3]}, "malformed tools"),
    ({"messages": [ASKED, SAID], "images": ["x.png"]}, "multimodal row (field 'images')"),
    ({"messages": [ASKED, {**SAID, "weight": 0}]}, "no answer"),
    ({"input_ids": []}, "no tokens"),
    ({"input_ids": [1, -1]}, "tokens that are not ids"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "a mask of another length than the tokens"),
    ({"input_ids": [1, 2], "labels": [-100, -100]}, "no supervised token"),
    ({"input_ids": [1, 2], "spans": [[1, 3]]}, "spans that do not lie in order within the tokens"),
]


@pytest.mark.parametrize(("row", "reason"), UNFIT, ids=[reason for _, reason in UNFIT])
def test_row_unfit_for_learning_is_skipped_with_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    rows, report = read_rows(write(tmp_path, [{"prompt": "q", "response": "a"}, row]), answers=True)
    assert (len(rows), dict(report.skipped)) == (1, {reason: 1})


def test_calls_reasoning_and_tools_are_kept(tmp_path: Path) -> None:
    thought = {**SAID, "reasoning": "hm", "weight": 0}
    row = {"messages": [ASKED, call(), RESULT, thought, ASKED, SAID], "functions": [{"name": "add"}]}
    ((made,), _) = read_rows(write(tmp_path, [row]), answers=True)
    assert made.tools == [{"type": "function", "function": {"name": "add"}}]
    assert made.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert made.messages[2]["tool_call_id"] == "x"
    assert (made.messages[3]["reasoning_content"], made.messages[3]["weight"]) == ("hm", 0)


def test_tools_are_refused_by_name_where_they_are_not_asked_for(tmp_path: Path) -> None:
    path = write(
        tmp_path, [{"prompt": "q"}, {"messages": [ASKED, call(), RESULT, SAID]}, {"prompt": "q", "tools": [{}]}]
    )
    assert dict(read_rows(path)[1].skipped) == {"tools or tool turns (`headway convert` takes them)": 2}
    assert len(read_rows(path, tools=True)[0]) == 3


TOKENS = [
    ({"input_ids": [5, 6, 7]}, [5, 6, 7], [(0, 3)]),
    ({"token_ids": [5, 6, 7], "spans": [[1, 2]]}, [5, 6, 7], [(1, 2)]),
    ({"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]}, [5, 6, 7, 8], [(1, 2), (3, 4)]),
    ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, [5, 6, 7], [(1, 3)]),
    ({"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0], "assistant_masks": [0, 0, 1, 1]}, [5, 6], [(1, 2)]),
]


@pytest.mark.parametrize(("row", "token_ids", "spans"), TOKENS)
def test_rows_that_are_tokens_already(tmp_path: Path, row: Any, token_ids: list[int], spans: Any) -> None:
    path = write(tmp_path, [row])
    ((made,), _) = read_rows(path, answers=True)
    assert (made.token_ids, made.spans) == (token_ids, spans)
    with pytest.raises(HeadwayError, match="already tokenised"):
        read_rows(path)


TABLE = '\ufeffid,prompt,response\r\n1,"a, b",c\r\n\r\n2,"two\nlines",d\r\n3,short\r\n4,e,f,g\r\n5,caf\u00e9,\r\n'


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(TABLE.encode() + b"6,\xff,z\r\n7,q,a")
    rows, report = read_rows(str(path), answers=True)
    assert [(row.id, spelled(row)) for row in rows] == [
        ("1", "u:a, b a:c"),
        ("2", "u:two\nlines a:d"),
        ("7", "u:q a:a"),
    ]
    assert dict(report.skipped) == {
        "fewer cells than the header has": 1,
        "more cells than the header has": 1,
        "blank answer, nothing to learn": 1,
        "not UTF-8": 1,
    }
    assert report.first["fewer cells than the header has"] == 6
    (tmp_path / "rows.tsv").write_text("prompt\tresponse\na\tb\n")
    (tmp_path / "semi.csv").write_text("prompt;response\na,1;b\n")
    (tmp_path / "list.csv").write_text('messages\n"[{""role"": ""user"", ""content"": ""q""}]"\n')
    found = [spelled(read_rows(str(tmp_path / name))[0][0]) for name in ("rows.tsv", "semi.csv", "list.csv")]
    assert found == ["u:a a:b", "u:a,1 a:b", "u:q"]


def test_folder_of_files_with_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, words in (("train-0.jsonl", "a"), ("train-1.json", "b"), ("test-0.jsonl", "c")):
        row = {"prompt": words}
        (tmp_path / "data" / name).write_text(json.dumps([row] if name.endswith("json") else row))
    rows, _ = read_rows(str(tmp_path))
    assert [(row.id, spelled(row)) for row in rows] == [
        ("data/train-0.jsonl:1", "u:a"),
        ("data/train-1.json:1", "u:b"),
    ]
    assert [spelled(row) for row in read_rows(str(tmp_path), split="test")[0]] == ["u:c"]
    with pytest.raises(HeadwayError, match="--split can be test, train"):
        read_rows(str(tmp_path), split="dev")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HeadwayError, match="holds no rows"):
        read_rows(str(tmp_path / "empty"))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_json_array_is_read_element_by_element(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.data.json_array._CHUNK", max(chunk, 2))
    value = [{"a": "x" * 30, "b": [1, {"c": "\u00e9]},{"}]}, 12345, "s", None, [], {}, -1.5e3]
    path = tmp_path / "rows.json"
    for indent in (None, 2):
        path.write_text(json.dumps(value, indent=indent, ensure_ascii=False), encoding="utf-8-sig")
        assert [row for _, row in raw_rows(str(path))] == value


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (b'[{"prompt": "a"}, {"prompt": "b"', 1),
        (b'[{"prompt": "a"}, {"prompt": }, {"prompt": "c"}]' + b" " * 99, 1),
        (b'[{"prompt": "a"}, {"prompt": "b"}', 2),
        (b'[{"prompt": "a"}, {"prompt": "\xff"}, {"prompt": "c"}]', 2),
        (b'[{"prompt": "a"}]\n[{"prompt": "b"}]', 1),
        (b'[{"prompt": "a"}, {"prompt": "b", "id": ' + b"9" * 5000 + b"}]", 1),  # more digits than Python reads
    ],
)
def test_broken_json_array_is_said(tmp_path: Path, text: bytes, good: int) -> None:
    (tmp_path / "rows.json").write_bytes(text)
    rows, report = read_rows(str(tmp_path / "rows.json"))
    assert len(rows) == good
    assert sum(report.skipped.values()) == 1
    assert list(report.skipped)[0].startswith(("broken JSON, and the rows after it", "not UTF-8", "text after the end"))


def test_zipped_lines(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 3))
    assert len(read_rows(str(path))[0]) == 3
    whole = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % i for i in range(200)))
    for damaged in (whole[:-9], whole[:40] + b"\xff" + whole[41:], whole[:-6] + b"\xff" + whole[-5:]):
        path.write_bytes(damaged)
        with pytest.raises(HeadwayError, match="cannot be read to its end"):
            read_rows(str(path))


def test_hub_id_with_revision_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load(*names: Any, **more: Any) -> list[dict[str, str]]:
        asked.append((*names, more))
        return [{"prompt": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    read_rows("who/what@v1:part", split="test")
    assert asked == [("who/what", "part", {"split": "test", "revision": "v1", "streaming": True})]


def test_a_mix_has_its_proportions_and_loses_no_row(tmp_path: Path) -> None:
    for name, count in (("a", 40), ("b", 10)):
        rows = "".join(json.dumps({"prompt": f"{name}{i}"}) + "\n" for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text(rows + "broken\n")
    sources = [f"{tmp_path}/a.jsonl=3", f"{tmp_path}/b.jsonl=1"]
    rows, report = read_rows(sources)
    kinds = "".join(row.id[0] for row in rows)
    assert {kinds[:n].count("b") for n in (20, 21, 22)} == {5}
    assert (kinds.count("a"), kinds.count("b")) == (40, 10)
    assert rows[0].id == "a:line1"
    assert (report.rows, report.used, dict(report.skipped)) == (52, 50, {"broken JSON": 2})
    assert "2 sources: 50 of 52 rows used" in str(report)
    assert [part["used"] for part in report.to_json()["parts"]] == [40, 10]
    assert [row.id[0] for row in read_rows(sources, limit=2)[0]] == ["a", "a", "b", "b"]
    with pytest.raises(HeadwayError, match="weight of 'x.jsonl' is 0"):
        Intake("x.jsonl=0")


def test_duplicates_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": p, "response": r} for p, r in [("q", "a"), ("q ", "b"), ("q", "a"), ("p", "a")]])
    for answers, ids in ((False, ["line1", "line4"]), (True, ["line1", "line2", "line4"])):
        rows, report = read_rows(path, answers=answers, dedupe=True)
        assert [row.id for row in rows] == ids
        assert dict(report.skipped) == {"duplicate": 4 - len(ids)}


def test_rows_that_differ_in_what_is_read_before_an_answer_are_no_duplicates(tmp_path: Path) -> None:
    def row(first: str, result: str, last: str) -> dict[str, Any]:
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        turns = [("user", "q"), ("assistant", first), ("user", "r"), call, ("tool", result), ("assistant", last)]
        return {"messages": [t if isinstance(t, dict) else {"role": t[0], "content": t[1]} for t in turns]}

    path = write(tmp_path, [row("a", "1", "x"), row("a", "2", "x"), row("b", "1", "x"), row("a", "1", "y")])
    for keeps_answers, ids in ((False, ["line1", "line2"]), (True, ["line1", "line2", "line3"])):
        rows, _ = read_rows(path, tools=True, dedupe=True, keeps_answers=keeps_answers)
        assert [row.id for row in rows] == ids


def test_an_id_made_up_for_one_row_may_be_anothers_already(tmp_path: Path) -> None:
    path = write(tmp_path, [{"id": i, "prompt": "p"} for i in ("a", "a~line3", "a", "line5", None, "a~line3~")])
    rows, report = read_rows(path)
    assert len({row.id for row in rows}) == len(rows) == report.used == 6


LONE = [
    {"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}], "prompt": "p"},
    {"messages": [{"role": "user", "content": "p"}, {"role": "tool", "name": "\ud800", "content": "r"}]},
    gpt(("human", "p"), ("function_call", '{"name": "f", "arguments": {"a": "\\ud800"}}')),
]


@pytest.mark.parametrize("row", LONE)
def test_a_lone_surrogate_is_found_in_tools_calls_and_names_too(tmp_path: Path, row: Any) -> None:
    rows, report = read_rows(write(tmp_path, [{"prompt": "good"}, row]), tools=True)
    assert len(rows) == 1
    assert dict(report.skipped) == {"text holds a lone surrogate": 1}


@pytest.mark.parametrize("spans", [[["a", 2]], [[0, 1.5]], [[0, None]], 5, [[True, 2]]])
def test_spans_that_are_none_are_a_reason(tmp_path: Path, spans: Any) -> None:
    rows, report = read_rows(write(tmp_path, [{"text": "t"}, {"input_ids": [1, 2, 3], "spans": spans}]), answers=True)
    assert len(rows) == sum(report.skipped.values()) == 1


def test_hashes_is_a_set() -> None:
    hashes, plain = Hashes(), set[str]()
    for i in range(5000):
        text = str(i % 3000)
        assert hashes.add(text) == (text not in plain)
        plain.add(text)
    assert len(hashes) == len(plain) == 3000


def test_held_out_rows_are_the_same_whatever_else_there_is(tmp_path: Path) -> None:
    parts = {}
    for count in (200, 400):
        path = write(tmp_path, [{"id": f"r{i}", "prompt": "p"} for i in range(count)])
        for part in ("train", "held_out"):
            rows, report = read_rows(path, held_out=0.1, part=part)  # type: ignore[arg-type]
            parts[count, part] = {row.id for row in rows}
            assert list(report.skipped) == [{"train": "held out", "held_out": "not held out"}[part]]
        assert not parts[count, "train"] & parts[count, "held_out"]
        assert len(parts[count, "train"]) + len(parts[count, "held_out"]) == count
    assert parts[200, "held_out"] == {i for i in parts[400, "held_out"] if int(i[1:]) < 200}
    assert 10 <= len(parts[200, "held_out"]) <= 30
    assert 0 <= place("r0") < 1
    with pytest.raises(HeadwayError, match="held-out share is 1"):
        Intake("x.jsonl", held_out=1)


def test_what_is_held_out_is_what_training_holds_out(tmp_path: Path) -> None:
    from headway.data.dialogs import Dialog
    from headway.train.batches import make_rows

    ids = [f"r{i}" for i in range(300)]
    dialogs = [Dialog(i, list(range(9)), [(2, 9)], "stop") for i in ids]
    held_out = make_rows(dialogs, 20, 0.1, 1000).held_out
    assert [row.id for row in held_out] == sorted(ids, key=place)[:30]


def test_reasons_made_up_by_a_hostile_file_stay_few(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": f"role{i}", "content": "x"}]} for i in range(300)]
    _, report = read_rows(write(tmp_path, [{"prompt": "p"}, *rows]))
    assert len(report.skipped) == 101
    assert report.skipped["other reasons"] == 200
    assert report.rows == report.used + sum(report.skipped.values())


def test_a_mix_with_a_source_of_no_use_says_so_at_once(tmp_path: Path) -> None:
    good = write(tmp_path, [{"prompt": str(i)} for i in range(9)])
    (tmp_path / "bad.jsonl").write_text("{}\n")
    intake = iter(Intake([good, str(tmp_path / "bad.jsonl")]))
    assert next(intake).id == "rows:line1"
    with pytest.raises(HeadwayError, match="no usable rows. .*bad.jsonl"):
        next(intake)


def test_bench_prompts_are_the_held_out_ones(tmp_path: Path) -> None:
    from byte_tokenizer import byte_tokenizer

    from headway.heads.common.protocol import TargetInfo
    from headway.inputs import bench_prompts

    path = write(tmp_path, [{"id": f"r{i}", "prompt": "p"} for i in range(60)])
    info = TargetInfo(name="t", model_type="llama", hidden_size=8, vocab_size=264, num_tokens=264, num_layers=1)
    chosen = bench_prompts([path], byte_tokenizer(), info, None, 0.2)
    trained = {row.id for row in read_rows(path, held_out=0.2)[0]}
    assert {row_id for row_id, _, _ in chosen} == {f"r{i}" for i in range(60)} - trained
