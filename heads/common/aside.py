"""Files and folders written beside their place and then renamed, so that none is mistaken for whole that is not.

`.NAME.PID@HOST.tmp` is what a process writes, `.NAME.PID@HOST.old` the folder that it takes the place of. Who writes to the same
place next removes what a process that was killed has left.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LITTLE_BYTES = 1 << 20
"""A disk with less room is full."""
SLACK_SECONDS = 60
"""By which the clocks of a file's disk and of this machine may differ."""

_said: set[Path] = set()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, what keeps a file from being written to its end is an OSError that names `path`: those of an open file name none,
    and safetensors and torch raise errors of their own."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else it says what it has to in words, which a name would take the place of
            error.filename = error.filename or str(path)
        raise
    except Exception as error:
        number = _number(error, path)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _number(error: Exception, path: Path) -> int | None:
    """Return the system's number of an error in writing that a library raised as its own; None for any other."""
    found = re.search(r"Error while serializing: .*\(os error (\d+)\)", str(error))
    if found is not None:
        return int(found[1])
    if isinstance(error, RuntimeError) and "inline_container" in str(error):  # torch.save, which gives no reason
        return errno.ENOSPC if shutil.disk_usage(path.parent).free < LITTLE_BYTES else errno.EIO
    return None


@contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write a file under; on leaving without error it is on the disk and called `path`."""
    aside = _place(path)
    remove_dead(path)
    try:
        with naming(path):
            yield aside
            _to_disk(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def scratch_aside(path: Path) -> Iterator[Path]:
    """Give an empty folder beside `path`, which is removed on leaving."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _place(path)
    remove_dead(path)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def folder_aside(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside `folder`; on leaving without error it takes that name and what had it is removed."""
    # What a link leads to is written, not the link.
    folder = folder.resolve() if folder.is_symlink() else folder.absolute()
    before = _place(folder, "old")
    with scratch_aside(folder) as aside:
        try:
            with naming(folder):
                yield aside
                for path in aside.iterdir():
                    _to_disk(path)
            if folder.exists():
                folder.replace(before)
            aside.replace(folder)
        finally:
            if folder.exists():
                shutil.rmtree(before, ignore_errors=True)
            elif before.exists():
                before.replace(folder)


def remove_dead(path: Path) -> None:
    """Remove what processes that ended on this machine while they wrote to `path` have left beside it; a folder that was to be
    replaced and has lost its name gets it back. What may be another machine's is said on stderr, once."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.(\d+)@(.+)\.(tmp|old)")
    try:
        beside = [(left, found) for left in path.parent.iterdir() if (found := ours.fullmatch(left.name))]
    except (FileNotFoundError, PermissionError):  # nothing there, or a folder that may be written and not be read
        return
    for left, found in beside:
        if found[2] != socket.gethostname():
            if left not in _said:
                _said.add(left)
                print(
                    f"headway: {left} was left by process {found[1]} on {found[2]}, or is being written there; delete it if "
                    "that has ended",
                    file=sys.stderr,
                )
        elif not _lives(int(found[1]), left):
            if found[3] == "old" and not path.exists():
                left.replace(path)
            elif left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _place(path: Path, end: str = "tmp") -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}@{socket.gethostname()}.{end}")


def _lives(process: int, left: Path) -> bool:
    """Return whether a process other than this one runs, and may have written what is left."""
    import psutil

    if process == os.getpid():
        return False  # of an earlier one with this number: this one is about to write
    try:
        found = psutil.Process(process)
        older = found.create_time() <= left.stat().st_mtime + SLACK_SECONDS
        return older and found.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
    except psutil.Error:
        return True


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
