"""One thread that decodes what others ask for: their requests come and go in one continuous batch.

    consumers                      engine thread
    submit(job)  -> waiting   ->   generate(requests that are there)
    job.put      <- tokens, then a Result or an error

The thread starts with the first job and ends when none is left. Only it runs the target.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from threading import Lock, Thread, current_thread
from weakref import WeakKeyDictionary

from torch import nn

from headway.heads.common.errors import HeadwayError
from headway.inference.drafter import Drafter
from headway.inference.economy import Economy
from headway.inference.generate import Request, Result, generate
from headway.inference.target import Target

Piece = list[int] | Result | BaseException
"""New tokens; or what ends an answer."""

_turns: WeakKeyDictionary[nn.Module, Lock] = WeakKeyDictionary()
"""Held by the engine that runs a model, whichever target is around it: a forward changes the model's modules while it runs."""
_guard = Lock()


@dataclass(eq=False)
class Job:
    """A request under way and whom it is for."""

    request: Request
    put: Callable[[Piece], None]
    """Called in the engine's thread, with pieces in order; the last one is a Result or an error. It must not block."""
    cancelled: bool = False

    def cancel(self) -> None:
        """End the row at its next token, or before it begins."""
        self.cancelled = True

    def ends(self, ids: list[int]) -> bool:
        """Return whether the row ends at its newest token."""
        return self.cancelled


class Engine:
    """Answers jobs in one continuous batch, `batch_size` at a time, in the order they came."""

    def __init__(self, target: Target, drafter: Drafter | None, batch_size: int, economy: Economy | None) -> None:
        self._target, self._drafter, self._batch_size, self._economy = target, drafter, batch_size, economy
        self._lock = Lock()
        """Guards what follows."""
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._thread: Thread | None = None
        self._closed = False
        models = {t.model for t in (target, *(drafter.targets if drafter is not None else ()))}
        with _guard:
            # In one order for all engines, so that none waits for another in a circle.
            self._turns = [_turns.setdefault(model, Lock()) for model in sorted(models, key=id)]

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs. Raises HeadwayError after `close`."""
        with self._lock:
            if self._closed:
                raise HeadwayError("the generator was closed; make another one")
            self._waiting += jobs
            if self._thread is None and jobs:
                thread = Thread(target=self._run, name="headway-engine")
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """End all rows, with an error for whoever waits for them, and wait for the thread."""
        with self._lock:
            self._closed = True
            jobs = [*self._running, *self._waiting]
            self._waiting.clear()
            thread = self._thread
        for job in jobs:
            job.cancel()
            job.put(HeadwayError("the generator was closed before the answer was done"))
        if thread is not None and thread is not current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._answered():
            pass

    def _take_turns(self) -> list[Lock]:
        """Return the locks of all models, held; none after `close`, which must not wait for another engine."""
        held: list[Lock] = []
        for turn in self._turns:
            while not turn.acquire(timeout=0.1):
                if self._closed:
                    for other in held:
                        other.release()
                    return []
            held.append(turn)
        return held

    def _answered(self) -> bool:
        """Answer all there is; return False where an error ended the rows that ran, and others wait."""
        held: list[Lock] = []
        try:
            held = self._take_turns()
            if held:
                results = generate(
                    self._target,
                    self._arriving(),
                    head=self._drafter,
                    batch_size=self._batch_size,
                    on_tokens=lambda request, tokens: request.id.put(list(tokens)),
                    economy=self._economy,
                )
                for result in results:
                    job = result.id
                    with self._lock:
                        self._running.remove(job)
                    job.put(result)
        except BaseException as error:  # noqa: BLE001  # whatever it is, those who wait must hear of it
            with self._lock:
                jobs = [*self._running]
                self._running.clear()
                left = bool(self._waiting) and bool(jobs)  # an error that no row caused would come again and again
                if not left:
                    jobs += self._waiting
                    self._waiting.clear()
                    self._thread = None
            for job in jobs:
                job.put(error)
            return not left
        finally:
            for turn in held:
                turn.release()
        return True

    def _arriving(self) -> Iterator[Request | None]:
        """Yield the next request, or None while rows run and no other waits; end when nothing is left."""
        while True:
            with self._lock:
                while self._waiting and self._waiting[0].cancelled:
                    self._waiting.popleft()
                job = self._waiting.popleft() if self._waiting else None
                if job is not None:
                    self._running.append(job)
                elif not self._running:
                    self._thread = None  # a job that comes from now on starts another
                    return
            yield None if job is None else replace(job.request, id=job, ends=job.ends)
