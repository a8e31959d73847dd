"""Append-only JSON lines that survive kill -9: written whole, and a torn last line is dropped on reopening."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from headway.heads.common.aside import file_aside, naming
from headway.heads.common.errors import HeadwayError


class AppendLog:
    """An open JSON-lines file; `rows` are the lines it held when opened, unless `each` took them one by one, each with the
    byte that it begins at.

    Every line reaches the system at once and the disk every `sync_every` lines and on close.
    """

    def __init__(
        self, path: Path, sync_every: int = 16, each: Callable[[dict[str, Any], int], None] | None = None
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._sync_every = sync_every
        self._unsynced = 0
        self._file = path.open("ab")
        lock(self._file, path)
        self.rows, whole = whole_lines(path, each)
        # Appending starts after the last whole line, over whatever a crash left behind it.
        self._file.truncate(whole)
        self._end = whole

    def append(self, row: dict[str, Any]) -> int:
        """Write one line, and return the byte that it begins at."""
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
        at, self._end = self._end, self._end + len(line)
        with naming(self.path):
            self._file.write(line)
            self._file.flush()
        self._unsynced += 1
        if self._unsynced >= self._sync_every:
            self.sync()
        return at

    def read(self, at: int) -> dict[str, Any]:
        """Return the row that begins at a byte; not after `sort`."""
        with self.path.open("rb") as file:
            file.seek(at)
            row: dict[str, Any] = json.loads(file.readline())
        return row

    def sync(self) -> None:
        """Bring what was written to the disk."""
        with naming(self.path):
            os.fsync(self._file.fileno())
        self._unsynced = 0

    def sort(self, key: Callable[[dict[str, Any]], Any]) -> None:
        """Put the lines in the order of `key`, aside and then renamed; nothing more may be appended."""
        self.sync()
        places: list[tuple[Any, int]] = []
        with self.path.open("rb") as lines:
            at = 0
            for line in lines:
                places.append((key(json.loads(line)), at))
                at += len(line)
            if all(one[0] <= other[0] for one, other in pairwise(places)):
                return
            with file_aside(self.path) as aside, aside.open("wb") as file:
                for _, at in sorted(places):
                    lines.seek(at)
                    file.write(lines.readline())

    def close(self) -> None:
        """Sync and close; safe to call twice."""
        if not self._file.closed:
            with naming(self.path):
                try:
                    self.sync()
                finally:
                    self._file.close()

    def __enter__(self) -> AppendLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def lock(file: BinaryIO, path: Path) -> None:
    """Hold the file for this process until it is closed, where the system can. Raises HeadwayError when it is held."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise HeadwayError(f"{path} is being written by another process; wait for it, or write elsewhere") from None


def whole_lines(
    path: Path, each: Callable[[dict[str, Any], int], None] | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a log and the bytes they fill; a torn last line is left out. A missing file is empty.

    With `each`, which is called with every row and the byte that it begins at, the rows returned are none, so that a log
    may be larger than the memory. Raises HeadwayError for a broken line that is not the last.
    """
    rows: list[dict[str, Any]] = []
    whole = 0
    for row, end in _ended_lines(path):
        if each is None:
            rows.append(row)
        else:
            each(row, whole)
        whole = end
    return rows, whole


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a log, one in memory at a time, as `whole_lines` returns them."""
    return (row for row, _ in _ended_lines(path))


def _ended_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row and the byte it ends at."""
    if not path.exists():
        return
    end = 0
    torn: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if torn is not None:
                raise HeadwayError(f"{path} line {torn} is broken; delete that line, or make the file again")
            try:
                row = json.loads(line.decode("utf-8")) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                end += len(line)
                yield row, end
            else:
                torn = number
