"""Work that is killed with -9 at a counted moment of it: in a child, forked so that nothing is imported or built again."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and kill -9")


@dataclass(frozen=True)
class Moment:
    """A call of a function, in which the process dies."""

    what: str
    owner: Any
    name: str
    call: int = 1
    """Which of the calls that `of` is part of the arguments of, from 1."""
    of: str = ""
    how: Literal["before", "half", "after"] = "before"
    """Before the function has begun; when the file that it writes is there by half; or once it returned."""

    def __str__(self) -> str:
        return self.what


def killed(work: Callable[[], Any], moment: Moment) -> None:
    """Do the work in a child that dies at the moment. Fails where it did not die of that."""
    real, calls = getattr(moment.owner, moment.name), []

    def dies(*args: Any, **named: Any) -> Any:
        if moment.of in " ".join(str(arg) for arg in args if isinstance(arg, str | Path)):
            calls.append(1)
        if len(calls) != moment.call:
            return real(*args, **named)
        if moment.how != "before":
            real(*args, **named)
        if moment.how == "half":
            (written,) = (arg for arg in args if isinstance(arg, Path))
            os.truncate(written, written.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of forks beside threads
        patch.setattr(moment.owner, moment.name, dies)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                work()
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, f"was not killed: {moment}"
