"""Dialogs on disk: whole lines only, each id once, and no mixing of what was made differently."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from headway.data.dialogs import Dialog, DialogWriter, read_dialogs, read_manifest
from headway.data.jsonl import AppendLog
from headway.heads.common.errors import HeadwayError

IDENTITY: dict[str, Any] = {"target": "t", "settings": {"temperature": 0.5, "stop": ()}, "vocab_size": 100}


def dialog(name: str) -> Dialog:
    return Dialog(name, [1, 2, 3, 4, 5], [(1, 3), (4, 5)], "stop")


def made(folder: Path, *names: str) -> Path:
    with DialogWriter(folder, IDENTITY) as writer:
        for name in names:
            writer.add(dialog(name))
    return folder


def test_round_trip(tmp_path: Path) -> None:
    assert read_dialogs(made(tmp_path, "a", "b")) == [dialog("a"), dialog("b")]
    assert dialog("a").supervised() == [False, True, True, False, True]
    row = json.loads((tmp_path / "dialogs.jsonl").read_text().splitlines()[0])
    assert row == {"id": "a", "token_ids": [1, 2, 3, 4, 5], "spans": [[1, 3], [4, 5]], "finish": "stop"}
    manifest = read_manifest(tmp_path)
    assert manifest["counts"] == {"dialogs": 2, "tokens": 6, "stop": 2}
    assert manifest["target"] == "t"
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("torn", [b'{"id": "c", "tok', b'{"id": "c"}', b"\x00\x00\n", b'{"id": "c", \n'])
def test_torn_last_line_is_dropped_and_written_over(tmp_path: Path, torn: bytes) -> None:
    made(tmp_path, "a", "b")
    with (tmp_path / "dialogs.jsonl").open("ab") as file:
        file.write(torn)
    assert [d.id for d in read_dialogs(tmp_path)] == ["a", "b"]
    with DialogWriter(tmp_path, IDENTITY) as writer:
        assert list(writer.done) == ["a", "b"]
        writer.add(dialog("c"))
    assert [d.id for d in read_dialogs(tmp_path)] == ["a", "b", "c"]


def test_broken_line_inside_is_named(tmp_path: Path) -> None:
    made(tmp_path, "a", "b")
    lines = (tmp_path / "dialogs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "dialogs.jsonl").write_text(lines[0] + "broken\n" + lines[1])
    with pytest.raises(HeadwayError, match="line 2 is broken"):
        read_dialogs(tmp_path)


BAD_ROWS = [
    ({"spans": [[3, 9]]}, "does not lie in order"),
    ({"spans": [[3, 3]]}, "does not lie in order"),
    ({"spans": [[2, 4], [3, 5]]}, "does not lie in order"),
    ({"spans": [[1]]}, "not a list of pairs"),
    ({"token_ids": [1, "2"]}, "not a list of ids"),
    ({"finish": "done"}, "unknown"),
    ({"token_ids": [1, 2, 3, 4, 100]}, "vocabulary of 100"),
    ({"id": "a"}, "repeats id 'a'"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ROWS, ids=[str(change) for change, _ in BAD_ROWS])
def test_row_that_makes_no_sense_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    made(tmp_path, "a")
    with AppendLog(tmp_path / "dialogs.jsonl") as log:
        log.append({**dialog("b").to_json(), **change})
    with pytest.raises(HeadwayError, match=f"line 2.*{message}"):
        read_dialogs(tmp_path)


def test_each_id_once_over_restarts(tmp_path: Path) -> None:
    for names in (["a"], ["b", "c"]):
        made(tmp_path, *names)
    with DialogWriter(tmp_path, IDENTITY) as writer:
        writer.drop("d", "empty answer")
        for name in "ad":
            with pytest.raises(AssertionError):
                writer.add(dialog(name))
    with DialogWriter(tmp_path, IDENTITY) as writer:
        assert list(writer.done) == ["a", "b", "c", "d"]
        assert [writer.dialog(name) for name in "abcde"] == [dialog("a"), dialog("b"), dialog("c"), None, None]
        assert writer.counts == {"dialogs": 3, "tokens": 9, "stop": 3, "dropped: empty answer": 1}


def test_dialogs_do_not_stay_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    with DialogWriter(tmp_path, IDENTITY) as writer:
        tracemalloc.start()
        for i in range(200):
            writer.add(Dialog(f"r{i}", list(range(1000, 3000)), [(0, 2000)], "stop"))
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert size < 200 * 2000  # bytes: less than one for each token


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    made(tmp_path, "a")
    size, limits = (tmp_path / "dialogs.jsonl").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    long = Dialog("b", [7] * 9999, [(0, 9)], "stop")
    try:
        with pytest.raises(OSError) as caught, DialogWriter(tmp_path, IDENTITY) as writer:  # noqa: PT011, PT012
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, limits[1]))
            writer.add(long)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.filename == str(tmp_path / "dialogs.jsonl")
    assert [d.id for d in read_dialogs(tmp_path)] == ["a"]
    with DialogWriter(tmp_path, IDENTITY) as writer:
        writer.add(long)
    assert [d.id for d in read_dialogs(tmp_path)] == ["a", "b"]


def test_a_line_of_what_was_dropped_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    made(tmp_path, "a")
    (tmp_path / "dropped.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(HeadwayError, match="dropped.jsonl has a line without id or reason"):
        DialogWriter(tmp_path, IDENTITY)


CHANGES = [
    ({"target": "u"}, "target was 't', now 'u'"),
    ({"settings": {"temperature": 0.7, "stop": ()}}, "settings.temperature was 0.5, now 0.7"),
    ({"vocab_size": 7}, "vocab_size was 100, now 7"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[message for _, message in CHANGES])
def test_other_identity_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    made(tmp_path, "a")
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(HeadwayError, match=message.replace("(", r"\(")):
        DialogWriter(tmp_path, {**IDENTITY, **change})
    assert (tmp_path / "manifest.json").read_bytes() == before
    made(tmp_path, "b")


def test_two_writers_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with DialogWriter(tmp_path, IDENTITY), pytest.raises(HeadwayError, match="another process"):
        DialogWriter(tmp_path, IDENTITY)
    made(tmp_path, "a")


def test_missing_empty_and_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="does not exist"):
        read_dialogs(tmp_path / "none")
    with pytest.raises(HeadwayError, match="holds no dialogs"):
        read_dialogs(made(tmp_path / "empty"))
    made(tmp_path / "other", "a")
    (tmp_path / "other" / "manifest.json").write_text('{"kind": "dialogs", "format": 99}')
    with pytest.raises(HeadwayError, match="format 99"):
        read_dialogs(tmp_path / "other")
    (tmp_path / "other" / "manifest.json").unlink()
    with pytest.raises(HeadwayError, match="without a manifest"):
        DialogWriter(tmp_path / "other", IDENTITY)


def test_a_folder_whose_making_was_killed_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("headway.data.dialogs.AppendLog", None)
        with pytest.raises(TypeError):
            DialogWriter(tmp_path / "d", {"target": "t"})
    with DialogWriter(tmp_path / "d", {"target": "t"}) as writer:
        writer.add(dialog("a"))
    assert [d.id for d in read_dialogs(tmp_path / "d")] == ["a"]
