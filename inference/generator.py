"""Decoding for programs: answers, streams and async streams, from one target and one continuous batch.

    generator = Generator(target, head, batch_size=8)
    generator.generate("Name three rivers.", max_new_tokens=64).text

    for chunk in generator.stream("Name three rivers."):
        print(chunk.text, end="")

    async for chunk in generator.astream([{"role": "user", "content": "Name three rivers."}], temperature=0.7):
        ...

Calls of several threads and tasks are answered together, up to `batch_size` rows at a time, in the order they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import index
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from transformers import GenerationConfig

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.inference.drafter import Drafter, as_drafter
from headway.inference.economy import Economy
from headway.inference.engine import Engine, Job, Piece
from headway.inference.generate import Request, Result, check
from headway.inference.generation_config import settings_of
from headway.inference.sampling import Settings
from headway.inference.stream import TextStream
from headway.inference.target import Target
from headway.inference.tree import Policy

Prompt = str | Sequence[dict[str, Any]] | Sequence[int]
"""A user's words, which the tokenizer's chat template surrounds where it has one and which are continued as they are where
it has none; the messages of a chat; or token ids, taken as they are."""
BESIDE_CONFIG = ("seed", "accept", "epsilon", "delta")
"""Settings that a GenerationConfig has no field for; they may be given beside one."""


@dataclass(frozen=True)
class Chunk:
    """What a stream gives at a time. All chunks joined are the result's tokens and text."""

    token_ids: list[int]
    text: str
    """Whole characters only; empty while a character or a stop string may be half there, and without a tokenizer."""


class Generator:
    """Answers prompts with a target, and a head or another drafter; any number of threads and tasks may use it.

    A background thread runs the target while there is something to answer. Another Generator of the same target waits
    until this one has nothing left. A program ends when the answers under way are done, or the generator is closed.
    """

    def __init__(
        self,
        target: Target,
        head: Head | Drafter | None = None,
        policy: Policy | None = None,
        *,
        batch_size: int = 1,
        economy: Economy | None = None,
    ) -> None:
        """`policy`, `batch_size` and `economy` are those of `headway.generate`.

        Raises HeadwayError for a tree deeper than the head, or a drafter that cannot draft for the target.
        """
        if batch_size < 1:
            raise HeadwayError(f"batch_size is {batch_size}; it must be at least 1")
        drafter = as_drafter(head, policy)
        if drafter is not None and target.mode != "plain":
            drafter = drafter.fit(target)
        self.target = target
        self._engine = Engine(target, drafter, batch_size, economy)

    def generate(
        self,
        prompt: Prompt,
        settings: Settings | GenerationConfig | None = None,
        *,
        streamer: Any = None,
        **fields: Any,
    ) -> Result:
        """Return the answer to one prompt, under `settings` or the fields of Settings given by name (`temperature=0.7`).

        A GenerationConfig means what it means to `model.generate`. `streamer` is one of transformers' (a TextStreamer, say):
        it is given the prompt, then each token, and ended also when the answer fails.

        Raises HeadwayError for a prompt or settings that cannot be answered.
        """
        request = self._request(prompt, settings, fields)
        with Stream(self, request) as stream:
            if streamer is None:
                for _ in stream:
                    pass
            else:
                _show(stream, request, streamer)
        assert stream.result is not None
        return stream.result

    def generate_all(
        self, prompts: Sequence[Prompt], settings: Settings | GenerationConfig | None = None, **fields: Any
    ) -> list[Result]:
        """Return the answers in the order of the prompts; see `generate`. Prompt n draws its own numbers under a seed.

        Raises before anything is answered where one prompt cannot be.
        """
        if isinstance(prompts, str):
            raise HeadwayError("prompts is one string; give a list of prompts, or use generate")
        requests = [replace(self._request(p, settings, fields), id=n, key=n) for n, p in enumerate(prompts)]
        streams = Stream.several(self, requests)
        try:
            for stream in streams:
                for _ in stream:
                    pass
        finally:
            for stream in streams:
                stream.close()
        return [stream.result for stream in streams if stream.result is not None]

    def stream(self, prompt: Prompt, settings: Settings | GenerationConfig | None = None, **fields: Any) -> Stream:
        """Return the answer as it grows; see `generate`. The work begins at once and does not wait for the reader.

        Closing the stream, or dropping it as a `break` does, ends the work.
        """
        return Stream(self, self._request(prompt, settings, fields))

    def astream(
        self, prompt: Prompt, settings: Settings | GenerationConfig | None = None, **fields: Any
    ) -> AsyncStream:
        """Return the answer as it grows, for `async for`; see `stream`. To be called in a running event loop.

        A task that is cancelled while it waits for a chunk ends the work; `async with` does so in any case.
        """
        return AsyncStream(self, self._request(prompt, settings, fields))

    def close(self) -> None:
        """End what is under way, with a HeadwayError for those who wait for it; nothing can be asked any more."""
        self._engine.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, settings: Settings | GenerationConfig | None, fields: dict[str, Any]) -> Request:
        """Return the request, known to be one that can be answered."""
        ids = _prompt_ids(self.target, prompt)
        check(self.target, Request(ids))
        request = Request(ids, _settings(self.target, ids, settings, fields))
        check(self.target, request)
        return request


def _prompt_ids(target: Target, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        tokenizer = _tokenizer(target, "a prompt in words")
        if not tokenizer.chat_template:
            return [int(i) for i in tokenizer(prompt)["input_ids"]]
        prompt = [{"role": "user", "content": prompt}]
    parts: list[Any] = list(prompt) if isinstance(prompt, Iterable) else [prompt]
    if parts and all(isinstance(part, dict) for part in parts):
        tokenizer = _tokenizer(target, "a chat")
        if not tokenizer.chat_template:
            raise HeadwayError(
                "the tokenizer has no chat template (a base model?); give the text as one string, or token ids"
            )
        try:
            text = tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            raise HeadwayError(f"the chat template refuses the messages: {error}") from error
        # The template writes the BOS itself where the model wants one.
        return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    try:
        return [index(part) for part in parts]
    except TypeError as error:
        raise HeadwayError(
            f"the prompt is {type(prompt).__name__} with a {type(parts[0]).__name__}; a prompt is a string, a list of "
            "messages or a list of token ids, and generate_all takes several"
        ) from error


def _tokenizer(target: Target, what: str) -> Any:
    if target.tokenizer is None:
        raise HeadwayError(f"{what} needs the target's tokenizer; load the target with one, or give token ids")
    return target.tokenizer


def _settings(
    target: Target, ids: list[int], settings: Settings | GenerationConfig | None, given: dict[str, Any]
) -> Settings:
    allowed = tuple(field.name for field in fields(Settings))
    if isinstance(settings, GenerationConfig):
        allowed, settings = BESIDE_CONFIG, settings_of(settings, target, ids)
    unknown = [name for name in given if name not in allowed]
    if unknown:
        raise HeadwayError(f"unknown setting {unknown[0]!r}; known here: {', '.join(allowed)}")
    return replace(settings if settings is not None else Settings(), **given)


def _show(stream: Stream, request: Request, streamer: Any) -> None:
    """Read the stream and have the streamer show it, a token at a time as `model.generate` does."""
    try:
        streamer.put(torch.tensor([request.prompt_ids]))
        for chunk in stream:
            for token in chunk.token_ids:
                streamer.put(torch.tensor([token]))
    finally:
        streamer.end()


class _Reading:
    """What both kinds of stream are: pieces of the engine, made chunks, and the result of the last one."""

    _job: Job

    def __init__(self, target: Target, settings: Settings) -> None:
        eos = target.eos_ids if settings.eos_ids is None else settings.eos_ids
        self._text = None if target.tokenizer is None else TextStream(target.tokenizer, eos, settings.stop)
        self._over = False
        self.result: Result | None = None
        """The whole answer; None before the last chunk is read and the end seen, and after an early close."""

    def _chunk(self, piece: Piece | None) -> Chunk | None:
        """Return the piece as a chunk, None where there is nothing to show: None is a stream that was closed. Raises the
        error that it is."""
        if piece is None:
            return None
        if isinstance(piece, BaseException):
            raise piece
        if isinstance(piece, Result):
            self._over = True
            rest = "" if self._text is None else self._text.finish()
            text = None if self._text is None else self._text.text
            self.result = replace(piece, id=self._job.request.id, text=text)
            return Chunk([], rest) if rest else None
        return Chunk(piece, "" if self._text is None else self._text.feed(piece))

    def _end(self) -> None:
        self._over = True
        self._job.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_job"):
            self._job.cancel()


class Stream(_Reading, Iterator[Chunk]):
    """The chunks of an answer, and when they are all read its `result`. Made by `Generator.stream`."""

    def __init__(self, generator: Generator, request: Request, *, submit: bool = True) -> None:
        super().__init__(generator.target, request.settings)
        pieces: SimpleQueue[Piece | None] = SimpleQueue()
        self._pieces, self._job = pieces, Job(request, pieces.put)
        if submit:
            generator._engine.submit([self._job])

    @staticmethod
    def several(generator: Generator, requests: list[Request]) -> list[Stream]:
        """Return the streams of requests that are asked all at once."""
        streams = [Stream(generator, request, submit=False) for request in requests]
        generator._engine.submit([stream._job for stream in streams])
        return streams

    def __next__(self) -> Chunk:
        while not self._over:
            try:
                chunk = self._chunk(self._pieces.get())
            except BaseException:
                self.close()
                raise
            if chunk is not None:
                return chunk
        raise StopIteration

    def close(self) -> None:
        """End the work; what was not read is lost. A thread that waits for a chunk gets the end."""
        self._end()
        self._pieces.put(None)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(_Reading, AsyncIterator[Chunk]):
    """The chunks of an answer, and when they are all read its `result`. Made by `Generator.astream`."""

    def __init__(self, generator: Generator, request: Request) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(generator.target, request.settings)
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        pieces = self._pieces

        def put(piece: Piece) -> None:
            try:
                loop.call_soon_threadsafe(pieces.put_nowait, piece)
            except RuntimeError:  # the loop is closed, nobody waits
                job.cancel()

        self._job = job = Job(request, put)
        generator._engine.submit([job])

    async def __anext__(self) -> Chunk:
        while not self._over:
            try:
                chunk = self._chunk(await self._pieces.get())
            except BaseException:
                self._close()
                raise
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the work; what was not read is lost."""
        self._close()

    def _close(self) -> None:
        self._end()
        self._pieces.put_nowait(None)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
