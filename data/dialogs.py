"""Dialogs: token ids with the spans the target emitted. A folder of `dialogs.jsonl`, `dropped.jsonl`, `manifest.json`.

    token_ids:     p  p  p  a  a  e  q  q  b  b  e
    spans:                  [3 .. 6)       [8 .. 11)       e is the end-of-turn token the target emitted
    supervised():  .  .  .  x  x  x  .  .  x  x  x

`dropped.jsonl` holds the ids that gave no dialog, with the reason, so that every id is done exactly once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from headway.data.jsonl import AppendLog, each_line
from headway.data.manifest import FORMAT, read_json, require_same, write_json
from headway.heads.common.checkpoint import other_adapter
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import AdapterInfo

if TYPE_CHECKING:
    from headway.heads.common.protocol import TargetInfo

Finish = Literal["stop", "length", "given"]


@dataclass
class Dialog:
    """One training row before features."""

    id: str
    token_ids: list[int]
    spans: list[tuple[int, int]]
    """Half-open ranges of positions whose tokens the target emitted, in order."""
    finish: Finish
    """How the last span ended: `stop` by its end-of-turn token, `length` without one, `given` not by the target."""
    answer: dict[str, Any] | None = None
    """The answer as a server gave it (content, reasoning_content, tool_calls), where tokens alone do not say it."""
    notes: tuple[str, ...] = ()
    """What a reader of the counts should know of how the ids came about."""

    def supervised(self) -> list[bool]:
        """Return, per position, whether predicting its token is a goal."""
        flags = [False] * len(self.token_ids)
        for start, end in self.spans:
            flags[start:end] = [True] * (end - start)
        return flags

    def to_json(self) -> dict[str, Any]:
        """Return the row of `dialogs.jsonl`."""
        row: dict[str, Any] = {
            "id": self.id,
            "token_ids": self.token_ids,
            "spans": [list(span) for span in self.spans],
            "finish": self.finish,
        }
        if self.answer is not None:
            row["answer"] = self.answer
        if self.notes:
            row["notes"] = list(self.notes)
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Dialog:
        """Return the dialog of a row. Raises ValueError when the row makes no sense."""
        ids, spans = row.get("token_ids"), row.get("spans")
        if not isinstance(row.get("id"), str) or row.get("finish") not in get_args(Finish):
            raise ValueError("id or finish is missing or unknown")
        if not isinstance(ids, list) or not ids or not all(type(t) is int and t >= 0 for t in ids):
            raise ValueError("token_ids is not a list of ids, of one at least")
        if not isinstance(spans, list) or not all(isinstance(s, list) and len(s) == 2 for s in spans):
            raise ValueError("spans is not a list of pairs")
        at = 0
        for start, end in spans:
            if not at <= start < end <= len(ids):
                raise ValueError(f"span [{start}, {end}) does not lie in order within {len(ids)} tokens")
            at = end
        answer, notes = row.get("answer"), row.get("notes", [])
        if not isinstance(answer, dict | None) or not isinstance(notes, list) or not all(type(n) is str for n in notes):
            raise ValueError("answer is no message, or notes is no list of strings")
        return cls(row["id"], ids, [(start, end) for start, end in spans], row["finish"], answer, tuple(notes))


class DialogWriter:
    """Writes a dialogs folder, or continues one made with the same `identity`. Use as a context manager.

    Raises HeadwayError on opening when the folder was made from anything else, naming the difference.
    """

    def __init__(self, folder: Path | str, identity: dict[str, Any], facts: dict[str, Any] | None = None) -> None:
        """`identity` must equal that of the folder to continue; `facts` are only recorded."""
        self.folder = Path(folder)
        self._manifest = {"format": FORMAT, "kind": "dialogs", **identity, **(facts or {})}
        self.saved: dict[str, Any] = {}
        """The manifest as it was when the folder was opened; empty for a new one."""
        if (self.folder / "manifest.json").exists():
            self.saved = read_json(self.folder / "manifest.json")
            require_same(self.saved, {"format": FORMAT, "kind": "dialogs", **identity}, self.folder)
        elif (self.folder / "dialogs.jsonl").exists():
            raise HeadwayError(f"{self.folder} holds dialogs without a manifest; give another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.counts: Counter[str] = Counter()
        """What the folder holds: dialogs, supervised tokens, dialogs by finish and by note, and dropped ids by reason."""
        if not (self.folder / "manifest.json").exists():
            self._write_manifest()  # before the logs, which it says what they are
        self.done: dict[str, int | None] = {}
        """Every id that was dealt with: where its dialog is in the log, or None where it was dropped. The dialogs may be
        more than the memory holds."""
        check = _Check(self.folder / "dialogs.jsonl")
        self._log = AppendLog(check.path, each=lambda row, at: self._count(check(row), at))
        self._dropped = AppendLog(self.folder / "dropped.jsonl")
        for left in self.folder.glob(".*.tmp"):  # by a process that was killed: the logs are locked by now
            left.unlink(missing_ok=True)
        for row in self._dropped.rows:
            if not isinstance(row.get("id"), str) or not isinstance(row.get("reason"), str):
                raise HeadwayError(f"{self._dropped.path} has a line without id or reason; delete it: {row}")
            self.done.setdefault(row["id"], None)
            self.counts[f"dropped: {row['reason']}"] += 1
        self._dropped.rows.clear()
        self._write_manifest()

    def add(self, dialog: Dialog) -> None:
        """Append a dialog; its id must be new."""
        assert dialog.id not in self.done, f"{dialog.id} is written already"
        self._count(dialog, self._log.append(dialog.to_json()))

    def dialog(self, dialog_id: str) -> Dialog | None:
        """Return the dialog of an id, from the log; None where there is none."""
        at = self.done.get(dialog_id)
        return None if at is None else Dialog.from_json(self._log.read(at))

    def drop(self, row_id: str, reason: str) -> None:
        """Record that an id gives no dialog, and why."""
        assert row_id not in self.done, f"{row_id} is written already"
        self._dropped.append({"id": row_id, "reason": reason})
        self.done[row_id] = None
        self.counts[f"dropped: {reason}"] += 1

    def record(self, **facts: Any) -> None:
        """Add facts to the manifest; they do not bind who continues the folder."""
        self._manifest |= facts

    def put_in_order(self, ids: Iterable[str]) -> None:
        """Rewrite the logs in the order of `ids`, in which every id that was dealt with must be.

        Answers are written as they come; in one order the folder does not tell how often its making was interrupted.
        """
        place = {name: at for at, name in enumerate(ids)}
        self._log.sort(lambda row: place[row["id"]])
        self._dropped.sort(lambda row: place[row["id"]])

    def close(self) -> None:
        """Bring rows and manifest to the disk; safe to call twice."""
        self._log.close()
        self._dropped.close()
        self._write_manifest()

    def _count(self, dialog: Dialog, at: int) -> None:
        self.done[dialog.id] = at
        self.counts["dialogs"] += 1
        self.counts["tokens"] += sum(end - start for start, end in dialog.spans)
        self.counts[dialog.finish] += 1
        self.counts.update(f"note: {note}" for note in dialog.notes)

    def _write_manifest(self) -> None:
        # In one order, whatever came first.
        write_json(self.folder / "manifest.json", {**self._manifest, "counts": dict(sorted(self.counts.items()))})

    def __enter__(self) -> DialogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def conversation(dialog_id: str) -> str:
    """Return the id of the row that a dialog is of: later turns and parts of a row carry its id and a number."""
    return re.sub(r" (turn|part) \d+$", "", dialog_id)


def read_dialogs(folder: Path | str) -> list[Dialog]:
    """Return the dialogs of a folder in the order they were written; a torn last line is left out.

    Raises HeadwayError for a missing or empty folder, or a row that does not fit its manifest, naming the line.
    """
    return list(each_dialog(folder))


def each_dialog(folder: Path | str) -> Iterator[Dialog]:
    """Yield what `read_dialogs` returns, one dialog in memory at a time, raising as it does."""
    folder = Path(folder)
    vocab_size = read_manifest(folder).get("vocab_size")
    check = _Check(folder / "dialogs.jsonl")
    line = 0
    for line, row in enumerate(each_line(check.path), 1):
        dialog = check(row)
        if vocab_size and max(dialog.token_ids) >= vocab_size:
            raise HeadwayError(
                f"{check.path} line {line} has token {max(dialog.token_ids)}, but the manifest says a "
                f"vocabulary of {vocab_size}; make the folder again"
            )
        yield dialog
    if not line:
        raise HeadwayError(f"{folder} holds no dialogs; make some with `headway distill`")


def read_manifest(folder: Path | str) -> dict[str, Any]:
    """Return the manifest of a dialogs folder. Raises HeadwayError when there is none or it is of another format."""
    manifest = read_json(Path(folder) / "manifest.json")
    if not isinstance(manifest.get("vocab_size"), int | None):
        raise HeadwayError(
            f"{folder}: its manifest has a vocab_size of {manifest['vocab_size']!r}; make the folder again"
        )
    if manifest.get("kind") != "dialogs" or manifest.get("format") != FORMAT:
        raise HeadwayError(
            f"{folder} is a {manifest.get('kind')!r} folder of format {manifest.get('format')!r}; this headway reads "
            f"'dialogs' of format {FORMAT}"
        )
    return manifest


def check_writer(manifest: dict[str, Any], info: TargetInfo, folder: Path | str) -> None:
    """Raise HeadwayError when the dialogs of `manifest` were written with another vocabulary than the target's, or by a target
    with another adapter on."""
    size, made_by = manifest.get("vocab_size"), manifest.get("target", "another target")
    if size is not None and size != info.vocab_size:
        raise HeadwayError(
            f"dialogs {folder} were made by {made_by} with {size} token ids, target {info.name} has {info.vocab_size}; "
            "distil with the target that the head is for"
        )
    if "server" not in manifest:  # nothing was generated, or nothing is known of how
        return
    reason = other_adapter(f"dialogs {folder}", manifest_adapter(manifest), info)
    if reason:
        raise HeadwayError(f"{reason}, or distil with the target that the head is for")


def manifest_adapter(manifest: dict[str, Any]) -> AdapterInfo | None:
    """Return the adapter on the target that wrote the dialogs of a manifest; None for a bare target."""
    fields = manifest.get("adapter")
    return None if fields is None else AdapterInfo(**fields)


class _Check:
    """Makes dialogs of the rows of a file, one by one. Raises HeadwayError naming the line of a row that is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._line = 0
        self._seen: set[str] = set()

    def __call__(self, row: dict[str, Any]) -> Dialog:
        self._line += 1
        where = f"{self.path} line {self._line}"
        try:
            dialog = Dialog.from_json(row)
        except (ValueError, TypeError) as error:
            raise HeadwayError(f"{where}: {error}; delete that line, or make the folder again") from error
        if dialog.id in self._seen:
            raise HeadwayError(f"{where} repeats id {dialog.id!r}; delete one of the two lines")
        self._seen.add(dialog.id)
        return dialog
