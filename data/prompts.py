"""Rows from one source or a mix of several; every row is used, or counted under a reason: none is fatal, none silent.

What a row may look like is in shapes.py, where it may come from in sources.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from headway.data.dialogs import conversation
from headway.data.hashes import Hashes, place
from headway.data.manifest import digest, digest_file
from headway.data.shapes import Message, Row, encodable, row_of
from headway.data.sources import NumberedRow, RowError, files_of, raw_rows
from headway.heads.common.errors import HeadwayError

__all__ = ["Intake", "IntakeReport", "Message", "Row", "read_rows"]

Part = Literal["all", "train", "held_out"]

_BROKEN = ("broken JSON", "not UTF-8")
_MOST_LINES = 1000
_MOST_REASONS = 100
_OTHER = "other reasons"


@dataclass
class IntakeReport:
    """What became of every row read: `rows == used + sum(skipped.values())`."""

    source: str
    rows: int = 0
    used: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> rows not used."""
    repaired: Counter[str] = field(default_factory=Counter)
    """What was done -> rows used after it."""
    first: dict[str, int | str] = field(default_factory=dict)
    """Reason -> line of the first row skipped for it."""
    broken_lines: list[int | str] = field(default_factory=list)
    """Line numbers (from 1) that could not be parsed, the first thousand of them."""
    parts: list[IntakeReport] = field(default_factory=list)
    """Of a mix of several sources: what became of each one's rows."""

    def skip(self, reason: str, line: int | str) -> None:
        """Count one skipped row."""
        if reason not in self.skipped and len(self.skipped) >= _MOST_REASONS:
            reason = _OTHER  # reasons name what the row holds, so a hostile file could make up any number
        self.skipped[reason] += 1
        self.first.setdefault(reason, line)
        if reason in _BROKEN and len(self.broken_lines) < _MOST_LINES:
            self.broken_lines.append(line)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as they are kept in a manifest."""
        counts: dict[str, Any] = {"source": self.source, "rows": self.rows, "used": self.used}
        counts |= {"skipped": dict(self.skipped), "repaired": dict(self.repaired)}
        return {**counts, "parts": [part.to_json() for part in self.parts]} if self.parts else counts

    def __str__(self) -> str:
        if self.parts:
            total = f"{len(self.parts)} sources: {self.used} of {self.rows} rows used"
            return "\n".join([*map(str, self.parts), total])
        parts = [f"{self.source}: {self.used} of {self.rows} rows used"]
        for reason, count in self.skipped.most_common():
            parts.append(f"  skipped {count}: {reason} (first at line {self.first[reason]})")
        if len(self.broken_lines) > 1:
            more = " ..." if len(self.broken_lines) > 20 else ""
            parts.append(f"  broken lines: {', '.join(map(str, self.broken_lines[:20]))}{more}")
        parts += [f"  repaired {count}: {what}" for what, count in self.repaired.most_common()]
        return "\n".join(parts)


class Intake:
    """The usable rows of one source or several, read as they are asked for; `report` counts those read, once it is done.

    Several sources are mixed: the next row is of the source that is furthest behind its weight, so that any beginning of
    the mix has the weights' proportions while every source lasts; when one runs out the others go on, and no row is lost.
    The order, and the ids, depend on the sources and weights alone.
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        *,
        split: str = "train",
        limit: int | None = None,
        answers: bool = False,
        tools: bool | None = None,
        dedupe: bool = False,
        keeps_answers: bool = False,
        held_out: float = 0.0,
        part: Part = "train",
    ) -> None:
        """A source may end in `=WEIGHT`, 1 where it does not. At most `limit` rows are used of each source.

        With `answers` a row must hold an answer to learn from and may be text or tokens; without, a row must hold a user
        turn. `tools` says whether rows with tools or tool turns are used, and is as `answers` where not given. With
        `dedupe` a row that says what an earlier one said is skipped; without `answers`, one that asks what it asked, which
        is the row but for its answers, or with `keeps_answers` but for its last. Of the rows whose id has its place in the
        first `held_out` of [0, 1), none is in the `part` train, only they are in held_out.

        Raises HeadwayError for a weight or share that is none.
        """
        given = [sources] if isinstance(sources, str) else list(sources)
        self.sources, self.weights = map(list, zip(*map(split_weight, given), strict=True)) if given else ([], [])
        if not given:
            raise HeadwayError("no prompts were given; give a file, a folder or a hub id")
        if not 0 <= held_out < 1:
            raise HeadwayError(f"the held-out share is {held_out}; give a number from 0 to below 1, such as 0.02")
        self._split, self._limit, self._answers = split, limit, answers
        self._tools = answers if tools is None else tools
        self._held_out, self._part = held_out, part
        self._dedupe, self._keeps_answers = dedupe, keeps_answers
        names = [Path(source).name.partition(".")[0] for source in self.sources]
        self._names = [n if names.count(n) == 1 else f"{n}{i + 1}" for i, n in enumerate(names)]
        self.report = IntakeReport("")
        self._begin()

    def identity(self) -> dict[str, Any]:
        """Return what says which rows these are: sources, the hashes of local files, and how they are chosen."""
        files = [file for source in self.sources for file in files_of(source, self._split)]
        return {
            "source": ", ".join(self.sources),
            "sha256": digest([digest_file(file) for file in files]),
            "chosen": {"split": self._split, **self.chosen, "weights": self.weights},
        }

    @property
    def chosen(self) -> dict[str, Any]:
        """Which rows are left out."""
        return {"limit": self._limit, "dedupe": self._dedupe, "held_out": self._held_out}

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows, from the beginning at each call. Raises HeadwayError for a missing source, or when no row is
        usable."""
        self._begin()
        left = [
            self._usable(raw_rows(source, self._split), part, name)
            for source, part, name in zip(self.sources, self._parts, self._names, strict=True)
        ]
        alive = list(range(len(left)))
        try:
            while alive:
                # Stride scheduling: ties go to the source given first.
                turn = min(alive, key=lambda i: (self._parts[i].used + 1) / self.weights[i])
                row = next(left[turn], None)
                if row is not None:
                    yield row
                    continue
                alive.remove(turn)
                if not self._parts[turn].used:
                    said = " ".join(str(self._parts[turn]).split())
                    raise HeadwayError(f"no usable rows. {said}; see the README for the shapes of a row")
        finally:
            self._add_up()

    def _begin(self) -> None:
        self._parts = [IntakeReport(source) for source in self.sources]
        self.report = self._parts[0] if len(self._parts) == 1 else IntakeReport("", parts=self._parts)
        self._ids, self._said = Hashes(), Hashes()

    def _usable(self, rows: Iterator[NumberedRow], report: IntakeReport, name: str) -> Iterator[Row]:
        while self._limit is None or report.used < self._limit:
            line, raw = next(rows, (0, None))
            if not line:
                return
            report.rows += 1
            repairs: list[str] = []
            try:
                row = self._row(raw, line, name, repairs)
            except RowError as error:
                report.skip(str(error), line)
                continue
            report.used += 1
            report.repaired.update(repairs)
            yield row

    def _row(self, raw: Any, line: int | str, name: str, repairs: list[str]) -> Row:
        """Return the row with its id, or raise RowError."""
        where = f"line{line}" if isinstance(line, int) else line
        mixed = f"{name}:{where}" if len(self.sources) > 1 else where
        given = given_id(raw)
        row_id = mixed if given is None else encodable(given)
        row = row_of(raw, row_id, answers=self._answers, tools=self._tools, repairs=repairs)
        if conversation(row_id) != row_id:
            row_id = f"{row_id}~{mixed}"
            repairs.append("id ends as that of a later turn, line number added")
        if self._part != "all" and (place(row_id) < self._held_out) != (self._part == "held_out"):
            raise RowError("held out" if self._part == "train" else "not held out")
        if self._dedupe and not self._said.add(_said(row, self._answers, self._keeps_answers)):
            raise RowError("duplicate")
        if not self._ids.add(row_id):
            row_id = f"{row_id}~{mixed}"
            while not self._ids.add(row_id):  # a row before may have brought that very id
                row_id += "~"
            repairs.append("id already taken, line number added")
        return row if row_id == row.id else replace(row, id=row_id)

    def _add_up(self) -> None:
        total = self.report
        if total.parts:
            total.rows = sum(part.rows for part in total.parts)
            total.used = sum(part.used for part in total.parts)
            total.skipped = sum((part.skipped for part in total.parts), Counter())
            total.repaired = sum((part.repaired for part in total.parts), Counter())


def read_rows(source: str | Sequence[str], **options: Any) -> tuple[list[Row], IntakeReport]:
    """Return the usable rows of a source or several, and the account of all rows read; options are those of Intake.

    Raises HeadwayError for a missing source, or when no row is usable.
    """
    intake = Intake(source, **options)
    return list(intake), intake.report


def split_weight(source: str) -> tuple[str, float]:
    """Return a source without its `=WEIGHT`, and the weight. Raises HeadwayError unless it is above 0."""
    found = re.fullmatch(r"(.+)=([-+.\deE]+)", source)
    if found is None or Path(source).expanduser().exists():
        return source, 1.0
    try:
        weight = float(found[2])
    except ValueError:
        return source, 1.0
    if not 0 < weight < float("inf"):
        raise HeadwayError(f"the weight of {found[1]!r} is {found[2]}; give a number above 0, as in prompts.jsonl=0.3")
    return found[1], weight


def given_id(raw: Any) -> str | None:
    """Return the id that a raw row brings, as text; None where it has none."""
    if not isinstance(raw, dict):
        return None
    given = next((raw[k] for k in ("id", "question_id", "task_id") if raw.get(k) not in (None, "")), None)
    return None if given is None else str(given)


def _said(row: Row, answers: bool, keeps_answers: bool) -> str:
    """Return what a row says, or only what it asks, with blanks made even: equal for duplicates."""
    if row.token_ids is not None:
        return json.dumps(row.token_ids)
    if row.text is not None:
        return " ".join(row.text.split())
    # Calls of tools are read before their results, and are not asked for again.
    last = row.messages[-1:] if keeps_answers else row.messages
    again = [] if answers else [id(m) for m in last if m["role"] == "assistant"]
    turns = [m for m in row.messages if id(m) not in again or "tool_calls" in m]
    return json.dumps([row.tools, [{**m, "content": " ".join(m["content"].split())} for m in turns]], sort_keys=True)
