"""The parts of a long measurement that are done, kept until all are: after Ctrl-C the same command continues.

One file of JSON lines per measurement, in `$XDG_CACHE_HOME/headway/unfinished` (`~/.cache` without it) or in a folder that
the caller names. Its name is made of everything that the figures depend on, so that another head, prompt, dtype or version
begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway import __version__
from headway.heads.common.errors import Interrupted

OURS = re.compile(r"(bench|eval|tune(-\w+)?)-[0-9a-f]{16}\.jsonl")
KEPT_SECONDS = 30 * 24 * 3600
"""A file that nobody came back to is deleted after so long."""


class Unfinished:
    """What is done so far of one measurement: a value per part, that JSON can hold."""

    def __init__(self, what: str, identity: Mapping[str, Any], folder: Path | None = None) -> None:
        """Read what the same measurement left. `identity` is what the figures depend on, the version beside it.

        Where the folder cannot be written nothing is kept, and that is said once on stderr.
        """
        text = json.dumps({**identity, "version": __version__}, sort_keys=True, default=str)
        self.what, self.path = what, Path(os.devnull)
        self.done: dict[str, Any] = {}
        """By part."""
        try:
            if folder is None:
                folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway" / "unfinished"
            self.path = folder / f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
            folder.mkdir(parents=True, exist_ok=True)
            self._forget_old(folder)
            self._read()
            with self.path.open("a", encoding="utf-8"):
                pass
        except (OSError, RuntimeError) as e:  # RuntimeError: no home
            self._give_up(e)
        if self.done:
            print(
                f"{what}: continued, {self._parts('was', 'were')} measured before (delete {self.path} to begin anew)",
                file=sys.stderr,
            )

    def keep(self, part: str, value: Any) -> None:
        """Write down that a part is done; on disk when this returns."""
        self.done[part] = value
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([part, value]) + "\n")
                file.flush()
                if self.path != Path(os.devnull):
                    os.fsync(file.fileno())
        except OSError as e:  # a full disk: the measurement goes on
            self._give_up(e)

    def _parts(self, one: str, several: str) -> str:
        return f"1 part {one}" if len(self.done) == 1 else f"{len(self.done)} parts {several}"

    def _give_up(self, error: Exception) -> None:
        print(f"{self.what}: {self.path} cannot be written ({error}); after Ctrl-C it begins anew", file=sys.stderr)
        self.path = Path(os.devnull)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, Ctrl-C raises Interrupted, which says what is kept."""
        try:
            yield
        except KeyboardInterrupt:
            if self.path == Path(os.devnull):
                raise Interrupted("interrupted: nothing could be kept; the same command begins anew") from None
            raise Interrupted(
                f"interrupted: {self._parts('is', 'are')} kept; the same command measures the others"
            ) from None

    def finish(self) -> None:
        """Forget the parts, now that the whole is somewhere."""
        if self.path != Path(os.devnull):
            self.path.unlink(missing_ok=True)
        self.done = {}

    def _read(self) -> None:
        """Read the parts; a last line that was cut short is cut off, so that the next one begins a line."""
        if not self.path.is_file():
            return
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            os.truncate(self.path, len(whole))
        for line in whole.splitlines():
            try:
                kept = json.loads(line)
            except ValueError:
                continue  # a damaged line: that part is measured again
            if isinstance(kept, list) and len(kept) == 2 and isinstance(kept[0], str):
                self.done[kept[0]] = kept[1]

    def _forget_old(self, folder: Path) -> None:
        for path in folder.glob("*.jsonl"):
            if OURS.fullmatch(path.name) and time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink(missing_ok=True)


def kept(unfinished: Unfinished | None) -> tuple[dict[str, Any], Callable[[str, Any], None]]:
    """Return the parts that are done, and what keeps another; none and nothing where nothing is to be kept."""
    if unfinished is None:
        return {}, lambda part, value: None
    return dict(unfinished.done), unfinished.keep


def file_identity(path: Path | str) -> list[Any]:
    """Return what tells a file from a later one of the same name: its path, size and time of writing."""
    path = Path(path).resolve()
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns]
