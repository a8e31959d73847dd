"""A file of rows of which one in a hundred is broken, in fifteen ways by turns."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

WORDS = ("river", "caf\u00e9", "seven", "\u4e2d\u6587", "bridge", "light \U0001f600", "of", "the", "many", "said")


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


CALL = {**said(None), "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}

KINDS: list[tuple[str, bytes | dict[str, Any] | list[Any]]] = [
    ("broken JSON", b'{"id": "torn", "messages": [{"role": "user", "content": "a'),
    ("not UTF-8", b'{"messages": [{"role": "user", "content": "\xe9t\xe9"}]}'),
    ("row is a JSON list, not an object", [1, 2]),
    ("no conversation field (has body, title)", {"title": "a", "body": "b"}),
    ("empty conversation", {"messages": []}),
    ("conversation is not a list of messages", {"messages": "hello"}),
    ("null content", {"messages": [user("a"), said(None)]}),
    ("content is a JSON int", {"messages": [user(7), said("b")]}),
    ("unknown role 'narrator'", {"messages": [{"role": "narrator", "content": "a"}]}),
    ("multimodal content (part of type 'image_url')", {"messages": [user([{"type": "image_url"}]), said("b")]}),
    ("two user turns in a row", {"messages": [user("a"), user("b"), said("c")]}),
    ("blank answer, nothing to learn", {"messages": [user("a"), said(" ")]}),
    ("no answer", {"messages": [user("a")]}),
    ("text holds a lone surrogate", {"messages": [user("\ud83d"), said("b")]}),
    ("malformed tool call", {"messages": [user("a"), CALL]}),
]


def write_rows(path: Path, megabytes: float) -> tuple[int, Counter[str]]:
    """Write the file; return how many rows are good, and how many are broken by reason."""
    good, broken, number = 0, Counter[str](), 0
    with path.open("wb") as file:
        while file.tell() < megabytes * 1e6 or sum(broken.values()) % len(KINDS):
            number += 1
            if number % 100 == 50:
                reason, row = KINDS[sum(broken.values()) % len(KINDS)]
                broken[reason] += 1
                file.write((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")
                continue
            good += 1
            text = " ".join(WORDS[(number + k * k) % len(WORDS)] for k in range(20 + number % 60))
            turns = [user(text) if k % 2 == 0 else said(text[::-1]) for k in range(2 + 2 * (number % 2))]
            file.write(json.dumps({"id": f"r{number}", "messages": turns}, ensure_ascii=False).encode() + b"\n")
    return good, broken
