"""One OpenAI-compatible endpoint: what is sent, what may come back, and when to leave it alone.

Whatever goes wrong is a `RequestError` of a named kind. A breaker counts failures in a row: after some of them nothing is sent
for a while, then one request tries, and its success lets the others through.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

try:  # huggingface_hub 2 brings httpx2, and names it so
    from huggingface_hub.utils import httpx
except ImportError:
    import httpx  # type: ignore[no-redef]

from headway.heads.common.errors import HeadwayError
from headway.heads.common.redact import REMOVED

JSON = dict[str, Any]

_LONGEST_PAUSE = 600.0
_FIELDS_BEYOND_OPENAI = (
    "return_token_ids",
    "top_k",
    "min_p",
    "repetition_penalty",
    "skip_special_tokens",
    "min_tokens",
)


class RequestError(Exception):
    """Why a request got no answer."""

    def __init__(self, kind: str, detail: str = "", *, pause: float | None = None, blame: str = "server") -> None:
        """`kind` is what is counted.

        `blame`: `server` (try again, and count it against both), `busy` (try again after `pause` seconds), `gone` (the
        server is not there; no fault of the request), `request` (it will never be answered), `setup` (nothing will).
        """
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.pause, self.blame = kind, pause, blame


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often, and after how long, something is tried again. Times are in seconds."""

    attempts: int = 10
    """Failures after which a request is left open for a later run."""
    first_wait: float = 1.0
    """Before the second attempt; it doubles with each, and is between half of that and all."""
    longest_wait: float = 60.0
    trip: int = 5
    """Failures in a row after which an endpoint is left alone."""
    cool_down: float = 5.0
    """For how long, at first; it doubles up to `longest_wait` while the endpoint does not recover."""
    give_up: float = 900.0
    """All endpoints being left alone for so long ends the run."""

    def wait(self, failures: int) -> float:
        """Return how long to wait after so many failures."""
        return random.uniform(0.5, 1.0) * min(self.longest_wait, self.first_wait * 2.0 ** (failures - 1))


@dataclass
class Breaker:
    """Whether an endpoint is worth asking."""

    patience: Patience
    clock: Callable[[], float] = time.monotonic
    tripped: bool = False
    _in_row: int = 0
    _busy: int = 0
    _cool_down: float = 0.0
    _closed_until: float = 0.0
    _trying: bool = False

    def delay(self) -> float:
        """Return 0 where a request may be sent now, else after how many seconds to ask again."""
        left = self._closed_until - self.clock()
        if left > 0:
            return left
        if not self.tripped:
            return 0.0
        if self._trying:
            return max(0.01, self._cool_down / 4)
        self._trying = True
        return 0.0

    def pause(self, seconds: float) -> None:
        """Send nothing for so long."""
        self._closed_until = max(self._closed_until, self.clock() + seconds)

    def succeeded(self) -> None:
        """Let all through."""
        self.tripped = self._trying = False
        self._in_row, self._busy, self._cool_down = 0, 0, 0.0

    def failed(self) -> None:
        """Count a failure."""
        self._in_row += 1
        if self.tripped and not self._trying:
            return  # sent before it tripped
        if self.tripped or self._in_row >= self.patience.trip:
            self.tripped, self._trying = True, False
            self._cool_down = min(self.patience.longest_wait, 2 * self._cool_down or self.patience.cool_down)
            self.pause(random.uniform(0.75, 1.0) * self._cool_down)

    def busy(self, seconds: float | None) -> None:
        """Send nothing for so long; for longer each time where the endpoint did not say."""
        self._trying = False
        if seconds is None and self._closed_until <= self.clock():  # those under way are told at the same time
            self._busy += 1
            seconds = self.patience.wait(self._busy)
        self.pause(seconds or 0.0)


@dataclass(eq=False)
class Endpoint:
    """A server and how it has done."""

    url: str
    """Up to and including /v1."""
    client: Any
    """An httpx.AsyncClient."""
    timeout: float
    breaker: Breaker
    secret: str | None = field(default=None, repr=False)
    """The API key, which is kept out of what is said."""
    plain: bool | None = None
    """Whether it takes OpenAI's fields only; None until it is known."""
    dead: str = ""
    """Why nothing more is sent to it."""
    answers: int = 0
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    async def ask(self, path: str, body: JSON, tag: str) -> JSON:
        """Return the server's answer to `body`. Raises RequestError for anything that is not a JSON object of status 200.

        A server that refuses the fields beyond OpenAI's is asked without them.
        """
        without = {key: value for key, value in body.items() if key not in _FIELDS_BEYOND_OPENAI}
        if self.plain:
            return await self._post(path, without, tag)
        try:
            answer = await self._post(path, body, tag)
        except RequestError as refused:
            if refused.blame != "request" or self.plain is False:
                raise
            answer = await self._post(path, without, f"{tag}-plain")
            self.plain = True
            return answer
        self.plain = False
        return answer

    async def _post(self, path: str, body: JSON, tag: str) -> JSON:
        send = self.client.post(f"{self.url}/{path}", json=body, headers={"X-Request-Id": tag})
        try:
            response = await asyncio.wait_for(send, self.timeout)
        except (asyncio.TimeoutError, httpx.TimeoutException) as error:
            gone = isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout)
            raise RequestError("timeout", f"{self.timeout:g} s", blame="gone" if gone else "server") from error
        except httpx.ConnectError as error:
            raise RequestError("no connection", str(error), blame="gone") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise RequestError("cut off", str(error)) from error
        self.check_status(response)
        try:
            answer = response.json()
        except (ValueError, RecursionError) as error:
            raise RequestError("not JSON", self._said(response)) from error
        if not isinstance(answer, dict):
            raise RequestError("not JSON", "no object")
        if "headway-" in str(answer.get("id")) and tag not in str(answer.get("id")):
            raise RequestError("another request's answer", str(answer.get("id")))
        return answer

    def check_status(self, response: Any) -> None:
        """Raise RequestError unless the status is 200."""
        status = response.status_code
        if status == 200:
            return
        kind, said = f"http {status}", self._said(response)
        if status in (429, 503):
            raise RequestError(kind, said, pause=_retry_after(response), blame="busy" if status == 429 else "server")
        if status in (400, 413, 422):
            raise RequestError(kind, said, blame="request")
        if status < 500 and status not in (408, 409, 425):
            raise RequestError(kind, said, blame="setup")
        raise RequestError(kind, said)

    def _said(self, response: Any) -> str:
        """Return the beginning of what the server said, without the key if it was repeated there."""
        text = " ".join(response.text.split())
        return (text.replace(self.secret, REMOVED) if self.secret else text)[:200]


def _retry_after(response: Any) -> float | None:
    """Return the seconds of a Retry-After, which is a number of them or a date."""
    given = response.headers.get("Retry-After", "").strip()
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(given).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(max(0.0, seconds), _LONGEST_PAUSE) if seconds == seconds else None


def clean_url(given: str) -> str:
    """Return a server's URL up to and including /v1 (or the path it was given with). Raises HeadwayError for none."""
    try:
        url = httpx.URL(given)
    except (httpx.InvalidURL, TypeError):
        url = None
    if url is None or url.scheme not in ("http", "https") or not url.host:
        raise HeadwayError(f"--server {given!r} is no http:// or https:// address, such as http://localhost:8000/v1")
    if url.userinfo or url.query:
        raise HeadwayError(
            "--server holds a user, a password or a query; give the bare address, and the key in the variable that "
            "--api-key-env names"
        )
    return str(url).rstrip("/") + ("" if url.path.strip("/") else "/v1")
