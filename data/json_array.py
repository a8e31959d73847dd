"""The elements of a JSON array in a file, one at a time: a file of any size needs the memory of its largest element."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

_CHUNK = 1 << 20
_LARGEST = 64 << 20
_AFTER = tuple(" \t\r\n,]")
_BETWEEN = re.compile(r"[\s,]*")
_BEYOND = "text after the end of the JSON array"
_LOST = (
    "broken JSON, and the rows after it in the array cannot be told apart (as JSON lines only this one would be lost)"
)


def array_items(text: TextIO) -> Iterator[tuple[Any, str]]:
    """Yield (element, "") for each element of the array that `text` holds.

    `text` was opened with errors="surrogateescape"; an element with such a character comes as (None, "not UTF-8"). What
    cannot be parsed comes as (None, why), and is the last.
    """
    parse = json.JSONDecoder().raw_decode
    held = text.read(_CHUNK)
    at = held.index("[") + 1
    ended = False
    while True:
        at = _BETWEEN.match(held, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if held[at : at + 1] == "]":
            if held[at + 1 :].strip() or any(chunk.strip() for chunk in iter(lambda: text.read(_CHUNK), "")):
                yield None, _BEYOND
            return
        try:
            item, end = parse(held, at)
            # A number may go on: 1 in what is held of 12, or of 1e3.
            whole = ended or (held[end : end + 1] in _AFTER if isinstance(item, int | float) else end < len(held))
        except json.JSONDecodeError as error:
            whole, end = False, at
            # Text that only ends too early is wrong at its end, or in a string that never ended.
            if ended or not (error.msg.startswith("Unterminated") or error.pos > len(held) - 16):
                yield None, _LOST
                return
        except (ValueError, RecursionError):  # a number of more digits than Python reads
            yield None, _LOST
            return
        if whole:
            yield (item, "") if _is_utf8(held, at, end) else (None, "not UTF-8")
            at = end
            continue
        if len(held) - at > _LARGEST:
            yield None, _LOST
            return
        # Doubling keeps the number of attempts at a long element small.
        more = text.read(max(_CHUNK, len(held) - at))
        held, at, ended = held[at:] + more, 0, not more


def _is_utf8(held: str, start: int, end: int) -> bool:
    try:
        held[start:end].encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
