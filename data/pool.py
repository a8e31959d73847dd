"""Many requests over some endpoints: so many at once on each, each answered once, whatever fails on the way.

    jobs -> waiting (by number) -> a worker of any endpoint -> settled
               ^                        |
               +---- after a while -----+  failed

Workers are coroutines of one thread, so what happens to an answer happens to one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headway.data.endpoint import Endpoint, Patience, RequestError
from headway.heads.common.errors import HeadwayError


@dataclass(order=True)
class Job:
    """Something to be asked."""

    number: int
    """Smaller ones go first."""
    what: Any = field(compare=False)
    failures: int = field(default=0, compare=False)
    """That count against it."""
    attempts: int = field(default=0, compare=False)


Ask = Callable[[Endpoint, Job], Awaitable[list[Job]]]
"""Asks an endpoint for a job, keeps the answer, and returns the jobs that it makes possible. Raises RequestError."""


class Pool:
    """Runs jobs to their end."""

    def __init__(
        self,
        endpoints: list[Endpoint],
        concurrency: int,
        patience: Patience,
        *,
        refused: Callable[[Job, RequestError], list[Job]],
        left_open: Callable[[Job, RequestError], None],
    ) -> None:
        """`refused` is told of a job that no server will ever answer; `left_open` of one that failed too often."""
        self.endpoints, self.concurrency, self.patience = endpoints, concurrency, patience
        self._refused, self._left_open = refused, left_open
        self.failures: Counter[str] = Counter()
        """By kind, over all endpoints."""
        self.under_way = 0
        self._open = 0
        self._last: dict[str, str] = {}
        self._down_since: float | None = None

    @property
    def serving(self) -> int:
        """Number of endpoints that answer."""
        return sum(not e.dead and not e.breaker.tripped for e in self.endpoints)

    async def run(self, jobs: Iterator[Job], ask: Ask) -> None:
        """Ask for all jobs; they are taken from the iterator as there is room for them.

        Raises HeadwayError where no endpoint is left, and whatever keeping an answer raised.
        """
        self._jobs, self._ask = jobs, ask
        self._waiting: asyncio.PriorityQueue[Job] = asyncio.PriorityQueue()
        self._finished = asyncio.Event()
        self._settle([])
        workers = [asyncio.create_task(self._work(e)) for e in self.endpoints for _ in range(self.concurrency)]
        end = asyncio.create_task(self._finished.wait())
        try:
            while not self._finished.is_set():
                done, _ = await asyncio.wait({end, *workers}, timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                self._check_alive()
                workers = [task for task in workers if not task.done()]
        finally:
            for task in (end, *workers):
                task.cancel()
            await asyncio.gather(end, *workers, return_exceptions=True)

    async def _work(self, endpoint: Endpoint) -> None:
        while not endpoint.dead:
            job = await self._take()
            delay = endpoint.breaker.delay()
            if delay > 0 or endpoint.dead:
                self._waiting.put_nowait(job)
                await asyncio.sleep(delay)
                continue
            job.attempts += 1
            self.under_way += 1
            try:
                following = await self._ask(endpoint, job)
            except RequestError as failure:
                self._failed(endpoint, job, failure)
            else:
                endpoint.breaker.succeeded()
                self._down_since = None
                self._settle(following, 1)
            finally:
                self.under_way -= 1

    async def _take(self) -> Job:
        if self._waiting.empty():
            self._pull()
        return await self._waiting.get()

    def _pull(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._add(job)

    def _add(self, job: Job) -> None:
        self._open += 1
        self._waiting.put_nowait(job)

    def _settle(self, following: list[Job], settled: int = 0) -> None:
        for job in following:
            self._add(job)
        self._open -= settled
        if self._open == 0:
            self._pull()
        if self._open == 0:
            self._finished.set()

    def _failed(self, endpoint: Endpoint, job: Job, failure: RequestError) -> None:
        endpoint.failures[failure.kind] += 1
        self.failures[failure.kind] += 1
        self._last[endpoint.url] = str(failure)
        if failure.blame == "request" and endpoint.answers:  # one that refuses everything is set up wrongly
            endpoint.breaker.succeeded()
            self._settle(self._refused(job, failure), 1)
            return
        if failure.blame == "setup":
            endpoint.dead = str(failure)
        elif failure.blame == "busy":
            endpoint.breaker.busy(failure.pause)
        else:
            endpoint.breaker.failed()
            if failure.pause is not None:
                endpoint.breaker.pause(failure.pause)
        counts = failure.blame in ("server", "request")
        job.failures += counts
        if job.failures >= self.patience.attempts:
            self._left_open(job, failure)
            self._settle([], 1)
            return
        wait = self.patience.wait(job.failures) if counts else 0.0
        asyncio.get_running_loop().call_later(wait, self._waiting.put_nowait, job)

    def _check_alive(self) -> None:
        """Raise HeadwayError where nothing more can be expected."""
        said = "; ".join(f"{e.url}: {e.dead or self._last.get(e.url, 'no answer')}" for e in self.endpoints)
        if all(e.dead for e in self.endpoints):
            raise HeadwayError(
                f"no server takes requests ({said}); check --server, --served-model and the key. What was answered is kept"
            )
        if self.serving:
            self._down_since = None
            return
        now = time.monotonic()
        self._down_since = self._down_since if self._down_since is not None else now
        if now - self._down_since >= self.patience.give_up:
            raise HeadwayError(
                f"no server has answered for {now - self._down_since:.0f} s ({said}); start them and run this again. What "
                "was answered is kept"
            )
