"""An OpenAI-compatible server on loopback that answers by a script, and fails on request in a dozen ways."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from byte_tokenizer import IM_END, byte_tokenizer

from headway.data.chat import prompt_ids

Body = dict[str, Any]

KINDS = {
    "500": "http 500",
    "busy": "http 429",
    "hang": "timeout",
    "cut": "cut off",
    "reset": "cut off",
    "other id": "another request's answer",
    "twice": "not JSON",
    "html": "not JSON",
    "empty": "no choices",
    "other model": "another model's answer",
    "strange ids": "token ids outside the vocabulary",
    "other ids": "token ids that do not spell the text",
    "aborted": "no whole answer",
}
"""Way to fail -> what it is counted as."""


class FakeServer:
    """Serves the model `tiny` in a thread while it is entered.

    `script(body, attempt)` returns a way to fail (a key of KINDS, or "refuse N" for that status), "" to answer
    "re: " and the last message, or the message to answer with, maybe with `finish_reason`. `attempt` counts the requests
    of the same messages from 0.
    """

    def __init__(
        self,
        script: Callable[[Body, int], str | Body] = lambda body, attempt: "",
        *,
        ids: bool = True,
        template: str | None = None,
        slow: float = 0.0,
        strict: bool = False,
        hang: float = 0.3,
    ) -> None:
        self.script, self.ids, self.slow, self.strict, self.hang = script, ids, slow, strict, hang
        self.tokenizer = byte_tokenizer(template) if template else byte_tokenizer()
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.failed: Counter[str] = Counter()
        self.most_at_once = 0
        self._now = 0
        self._attempts: Counter[str] = Counter()
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # headers and body in one packet

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                fake.send(self, 200, {"data": [{"id": "tiny", "max_model_len": 240}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._lock:
                    fake._now += 1
                    fake.most_at_once = max(fake.most_at_once, fake._now)
                try:
                    fake.answer(self, body)
                finally:
                    with fake._lock:
                        fake._now -= 1

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients hang up, as they should
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, to: BaseHTTPRequestHandler, body: Body) -> None:
        key = json.dumps(body.get("messages", body.get("prompt")))
        with self._lock:
            attempt = self._attempts[key]
            self._attempts[key] += 1
            self.bodies.append(body)
            self.headers.append(dict(to.headers))
        if self.strict and "return_token_ids" in body:
            self.send(to, 400, {"error": {"message": "Unknown field: return_token_ids"}})
            return
        what = self.script(body, attempt)
        time.sleep(self.slow)
        if isinstance(what, str) and what:
            with self._lock:
                self.failed[what] += 1
            self._fail(to, body, what)
            return
        self.send(to, 200, self.completion(to, body, what or None))

    def completion(self, to: BaseHTTPRequestHandler, body: Body, message: Body | None) -> Body:
        """Return a whole answer."""
        if message is None:
            last = body["messages"][-1]["content"] if "messages" in body else self.tokenizer.decode(body["prompt"])
            message = {"content": f"re: {last[-40:]}"}
        message = dict(message)
        finish, emitted = message.pop("finish_reason", "stop"), message.pop("emitted", None)
        count = message.pop("completion_tokens", None)
        text = emitted if emitted is not None else message["content"]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [IM_END] * (finish != "length")
        choice: Body = {"index": 0, "finish_reason": finish}
        if "messages" in body:
            prompt = prompt_ids(self.tokenizer, body["messages"], body.get("tools"))
            choice["message"] = {"role": "assistant", **message}
        else:
            prompt = body["prompt"]
            choice["text"] = message["content"]
        usage = {"completion_tokens": len(ids) if count is None else count}
        whole: Body = {"id": f"chatcmpl-{to.headers['X-Request-Id']}", "model": "tiny", "usage": usage}
        if self.ids and body.get("return_token_ids"):
            choice["token_ids"], whole["prompt_token_ids"] = ids, prompt
        return {**whole, "choices": [choice, choice]}  # one too many, which nobody asked for

    def _fail(self, to: BaseHTTPRequestHandler, body: Body, way: str) -> None:
        whole = self.completion(to, body, None)
        if way.startswith("refuse"):
            self.send(to, int(way.split()[1]), {"error": f"no, not with {to.headers['Authorization']}"})
        elif way == "500":
            self.send(to, 500, {"error": "engine died"})
        elif way == "busy":
            self.send(to, 429, {}, {"Retry-After": "0.02"})
        elif way == "hang":
            time.sleep(self.hang)
        elif way == "cut":
            data = json.dumps(whole).encode()
            self.send(to, 200, data[: len(data) // 2], {"Content-Length": str(len(data))})
        elif way == "reset":
            to.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            to.close_connection = True
            for stream in (to.rfile, to.wfile, to.connection):
                stream.close()  # the last one resets
        elif way == "twice":
            self.send(to, 200, json.dumps(whole).encode() * 2)
        elif way == "html":
            self.send(to, 200, b"<html>gateway</html>")
        else:
            choice = whole["choices"][0]
            changes: dict[str, Callable[[], Any]] = {
                "other id": lambda: whole.update(id="chatcmpl-headway-00000000-1-ff"),
                "empty": lambda: whole.update(choices=[]),
                "other model": lambda: whole.update(model="large"),
                "strange ids": lambda: choice.update(token_ids=[5, 10**9]),
                "other ids": lambda: choice.update(token_ids=[70, 71, IM_END]),
                "aborted": lambda: choice.update(finish_reason=None),
            }
            changes[way]()
            self.send(to, 200, whole)

    def send(
        self, to: BaseHTTPRequestHandler, status: int, what: Body | bytes, more: dict[str, str] | None = None
    ) -> None:
        data = what if isinstance(what, bytes) else json.dumps(what).encode()
        to.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(more or {})}.items():
            to.send_header(name, value)
        to.end_headers()
        to.wfile.write(data)
        if more and "Content-Length" in more:
            to.wfile.flush()
            to.close_connection = True

    def __enter__(self) -> FakeServer:
        threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.01), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
