"""Conversations and prompts from rows of many shapes; unusable rows are counted by reason, never fatal, never silent.

Shapes: OpenAI `messages`, ShareGPT `conversations` (from/value), `turns` (the user's turns), `prompt` (with an optional
`response` and `finish_reason`), and `text` (already rendered). A top-level `system` becomes the system turn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from headway.data.dialogs import conversation
from headway.data.sources import RowError, raw_rows
from headway.heads.common.errors import HeadwayError

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": str}, and of an assistant maybe `tool_calls` (OpenAI's, with
`arguments` as an object) and `reasoning_content` (str)."""

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_BROKEN = ("broken JSON", "not UTF-8")


@dataclass(frozen=True)
class Row:
    """One usable row: either `messages` (system?, user, assistant, user, ... in turn) or `text`, never both."""

    id: str
    """Unique within its source, and the same at every reading."""
    messages: list[Message] = field(default_factory=list)
    text: str | None = None
    """Text that is rendered already; no template is applied to it."""
    cut: bool = False
    """The last answer was stopped by a length limit, so its end is not the end of a turn."""
    tools: list[dict[str, Any]] | None = None
    """What the target may call, as OpenAI spells it."""


@dataclass
class IntakeReport:
    """What became of every row: `rows == used + sum(skipped.values())`."""

    source: str
    rows: int = 0
    used: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> rows not used."""
    repaired: Counter[str] = field(default_factory=Counter)
    """What was done -> rows used after it."""
    first: dict[str, int] = field(default_factory=dict)
    """Reason -> line of the first row skipped for it."""
    broken_lines: list[int] = field(default_factory=list)
    """Line numbers (from 1) that could not be parsed."""

    def skip(self, reason: str, line: int) -> None:
        """Count one skipped row."""
        self.skipped[reason] += 1
        self.first.setdefault(reason, line)
        if reason in _BROKEN:
            self.broken_lines.append(line)

    def __str__(self) -> str:
        parts = [f"{self.source}: {self.used} of {self.rows} rows used"]
        for reason, count in self.skipped.most_common():
            parts.append(f"  skipped {count}: {reason} (first at line {self.first[reason]})")
        if len(self.broken_lines) > 1:
            more = " ..." if len(self.broken_lines) > 20 else ""
            parts.append(f"  broken lines: {', '.join(map(str, self.broken_lines[:20]))}{more}")
        parts += [f"  repaired {count}: {what}" for what, count in self.repaired.most_common()]
        return "\n".join(parts)


def read_rows(
    source: str, *, split: str = "train", limit: int | None = None, answers: bool = False
) -> tuple[list[Row], IntakeReport]:
    """Return the usable rows of `source` (at most `limit`) and the account of all rows read.

    With `answers` a row must hold an answer to learn from and may be `text`; without, a row must hold a user turn.
    Raises HeadwayError for a missing source, or when no row is usable.
    """
    rows: list[Row] = []
    seen: set[str] = set()
    report = IntakeReport(source)
    for line, raw in raw_rows(source, split):
        if limit is not None and len(rows) >= limit:
            break
        report.rows += 1
        repairs: list[str] = []
        try:
            row = _row(raw, line, answers, repairs)
        except RowError as error:
            report.skip(str(error), line)
            continue
        if row.id in seen:
            row = Row(f"{row.id}~line{line}", row.messages, row.text, row.cut)
            repairs.append("id already taken, line number added")
        if conversation(row.id) != row.id:
            row = Row(f"{row.id}~line{line}", row.messages, row.text, row.cut)
            repairs.append("id ends as that of a later turn, line number added")
        seen.add(row.id)
        rows.append(row)
        report.repaired.update(repairs)
    report.used = len(rows)
    if not rows:
        raise HeadwayError(f"no usable rows. {' '.join(str(report).split())}; see the README for the shapes of a row")
    return rows, report


def _row(raw: Any, line: int, answers: bool, repairs: list[str]) -> Row:
    """Return the row, appending to `repairs` what was changed. Raises RowError with the reason it is unusable."""
    if isinstance(raw, RowError):
        raise raw
    if not isinstance(raw, dict):
        raise RowError(f"row is a JSON {type(raw).__name__}, not an object")
    given = next((raw[k] for k in ("id", "question_id", "task_id") if raw.get(k) not in (None, "")), None)
    row_id = f"line{line}" if given is None else _encodable(str(given))
    if isinstance(raw.get("text"), str) and not any(k in raw for k in ("messages", "conversations", "turns", "prompt")):
        if not answers:
            raise RowError("already rendered text (`headway convert` takes it)")
        if not raw["text"].strip():
            raise RowError("blank text")
        return Row(row_id, text=_encodable(raw["text"]))
    messages = _in_turn(_messages(raw), repairs)
    if answers and all(m["role"] != "assistant" for m in messages):
        raise RowError("no answer")
    return Row(row_id, messages, cut=raw.get("finish_reason") == "length" and messages[-1]["role"] == "assistant")


def _messages(raw: dict[str, Any]) -> list[Message]:
    """Return the messages of a row of any shape, roles and content normalised."""
    pairs = _role_content_pairs(raw)
    if not pairs:
        raise RowError("empty conversation")
    messages = [{"role": _role(role), "content": _content(content)} for role, content in pairs]
    if isinstance(raw.get("system"), str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _encodable(raw["system"])})
    return messages


def _role_content_pairs(raw: dict[str, Any]) -> list[tuple[Any, Any]]:
    listed = next((raw[k] for k in ("messages", "conversations") if raw.get(k) is not None), None)
    if listed is None and isinstance(raw.get("prompt"), list):
        listed = raw["prompt"]
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(m, dict) for m in listed):
            raise RowError("conversation is not a list of messages")
        return [(m.get("role", m.get("from")), m.get("content", m.get("value"))) for m in listed]
    if isinstance(raw.get("turns"), list):
        # Turns without answers between them: the target's answers go there.
        return [("user", turn) for turn in raw["turns"]]
    if "prompt" in raw:
        answer = raw.get("response")
        return [("user", raw["prompt"])] + ([] if answer is None else [("assistant", answer)])
    raise RowError(f"no conversation field (has {', '.join(sorted(map(str, raw))[:6]) or 'nothing'})")


def _role(role: Any) -> str:
    if not isinstance(role, str) or role not in _ROLES:
        raise RowError(f"unknown role {role!r}")
    return _ROLES[role]


def _content(content: Any) -> str:
    """Return the text of a message; a list of text parts is joined."""
    if content is None:
        raise RowError("null content")
    if isinstance(content, str):
        return _encodable(content)
    if not isinstance(content, list):
        raise RowError(f"content is a JSON {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type", "unknown") if isinstance(part, dict) else "text"
        if kind != "text":
            raise RowError(f"multimodal content (part of type {kind!r})")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise RowError("null content")
        texts.append(text)
    return _encodable("".join(texts))


def _encodable(text: str) -> str:
    """Return `text`, or raise RowError where no tokenizer could read it (JSON can spell lone surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError("text holds a lone surrogate") from None
    return text


def _in_turn(messages: list[Message], repairs: list[str]) -> list[Message]:
    """Return messages as system?, user, assistant, user, ...; raise RowError where that cannot be."""
    system, rest = [], messages
    if messages[0]["role"] == "system":
        system, rest = messages[:1], messages[1:]
        if not system[0]["content"].strip():
            system = []
            repairs.append("blank system turn left out")
    first_user = next((i for i, m in enumerate(rest) if m["role"] == "user"), None)
    if first_user is None:
        raise RowError("no user turn")
    if first_user > 0:
        repairs.append("used from the first user turn")
    rest = rest[first_user:]
    user_only = all(m["role"] == "user" for m in rest)
    for i, message in enumerate(rest):
        if message["role"] == "system":
            raise RowError("system turn inside the conversation")
        if not message["content"].strip():
            raise RowError("blank user turn" if message["role"] == "user" else "blank answer, nothing to learn")
        if not user_only and message["role"] != ("user", "assistant")[i % 2]:
            raise RowError(f"two {message['role']} turns in a row")
    return system + rest
