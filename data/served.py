"""Distil over servers: OpenAI-compatible endpoints (vLLM, SGLang, ...) answer, and the dialogs folder is the same.

Through `chat` the server renders its chat template, and says which ids it read and emitted if it can (vLLM and SGLang
do, asked by `return_token_ids`). Through `completions` it is sent the ids that the template gives here.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from headway.data.chat import Chat, use_template
from headway.data.dialogs import Dialog, DialogWriter
from headway.data.distill import (
    Asked,
    Script,
    adapter_json,
    check_known,
    identity_json,
    prompts_json,
    settings_of,
    settle,
    stable_key,
    summary,
)
from headway.data.endpoint import JSON, Breaker, Endpoint, Patience, RequestError, clean_url, httpx
from headway.data.pool import Job, Pool
from headway.data.progress import Progress
from headway.data.prompts import Message, Row
from headway.data.reply import dialog_ids, read_reply, wire
from headway.data.sources import RowError
from headway.data.turns import History, TemperatureMix, Turn, all_turns, turns_json
from headway.heads.common.errors import HeadwayError, Interrupted
from headway.heads.common.protocol import TargetInfo
from headway.inference.sampling import Settings
from headway.inference.target import usable_positions

KEY_VARIABLE = "HEADWAY_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Endpoints that serve the target, and how they are asked."""

    urls: tuple[str, ...]
    model: str | None = None
    """The target's name there; None takes the target's own, or the only one that is served."""
    api: Literal["chat", "completions"] = "chat"
    concurrency: int = 32
    """Requests under way at once, on each."""
    timeout: float = 600.0
    """Seconds that a whole answer may take."""
    key: str | None = field(default=None, repr=False)
    """Sent as a bearer token; never logged, never written."""
    fields: JSON = field(default_factory=dict)
    """More of each request, such as {"chat_template_kwargs": {"enable_thinking": false}}."""
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        if not self.urls or self.concurrency < 1 or not 0 < self.timeout < float("inf"):
            raise HeadwayError("give at least one server, a concurrency of 1 or more, and a timeout above 0 seconds")
        if self.api not in ("chat", "completions"):
            raise HeadwayError(f"unknown api {self.api!r}; allowed: chat, completions")
        ours = {"model", "messages", "prompt", "n", "stream"} & self.fields.keys()
        if ours:
            raise HeadwayError(f"request fields {sorted(ours)} are set by distilling itself; leave them out")
        object.__setattr__(self, "urls", tuple(dict.fromkeys(clean_url(url) for url in self.urls)))


@dataclass
class ServedReport:
    """What a run over servers came to."""

    counts: Counter[str]
    """Of the whole folder, as `distill` returns them."""
    failures: Counter[str]
    """RequestError requests of this run, by kind; each was tried again, or is in `left_open` or the counts."""
    left_open: dict[str, str]
    """Id -> the last failure of a turn that failed too often; the next run asks it again."""
    per_server: dict[str, dict[str, Any]]
    """URL -> answers, tokens, failures by kind, whether it gave token ids."""

    def __str__(self) -> str:
        lines = []
        for url, did in self.per_server.items():
            failed = ", ".join(f"{kind} {n}" for kind, n in did["failures"].items())
            line = f"  {url}: {did['answers']} answers, {did['tokens']} tokens"
            lines.append(line + (f"; failed {failed}" if failed else "") + (f"; {did['said']}" if did["said"] else ""))
        if self.left_open:
            name, why = next(iter(self.left_open.items()))
            lines.append(f"  left open {len(self.left_open)}: run it again to ask them again ({name}: {why})")
        return "\n".join(lines)


def api_key(variable: str | None) -> str | None:
    """Return the key in an environment variable, HEADWAY_API_KEY where none is named. Raises HeadwayError where a named one
    is empty."""
    key = os.environ.get(variable or KEY_VARIABLE, "").strip()
    if variable is not None and not key:
        raise HeadwayError(f"the environment variable {variable} holds no key; set it, or leave out --api-key-env")
    if not key.isascii() or not key.isprintable():
        raise HeadwayError(f"the environment variable {variable or KEY_VARIABLE} holds no key that a header can carry")
    return key or None


def distill_served(
    tokenizer: PreTrainedTokenizerBase,
    info: TargetInfo,
    rows: Sequence[Row],
    out: Path | str,
    *,
    servers: Servers,
    settings: Settings,
    end_ids: Collection[int] = (),
    source: str = "",
    max_tokens_total: int | None = None,
    seconds: float | None = None,
    history: History = "own",
    mix: TemperatureMix | None = None,
    show: bool = True,
) -> ServedReport:
    """Have servers answer every turn of `rows` into the dialogs folder `out`; all as `distill` does.

    A request that fails is sent again, after a while and maybe to another server; a turn that fails too often is left
    open, neither written nor dropped. `end_ids` end an answer, besides the template's end of a turn.

    Raises HeadwayError where no server is left, and for settings that servers do not know; Interrupted after Ctrl-C.
    """
    if settings.processors or settings.accept != "exact":
        raise HeadwayError("servers take neither processors nor typical acceptance; distil with the local engine")
    use_template(tokenizer)
    return asyncio.run(
        _distill(
            _Asked(tokenizer, info, servers, settings, end_ids, history, mix),
            rows,
            Path(out),
            source=source,
            max_tokens_total=max_tokens_total,
            seconds=seconds,
            show=show,
        )
    )


@dataclass
class _Asked:
    """What a run asks for."""

    tokenizer: PreTrainedTokenizerBase
    info: TargetInfo
    servers: Servers
    settings: Settings
    end_ids: Collection[int]
    history: History
    mix: TemperatureMix | None
    model: str = ""
    max_positions: int = 0

    def __post_init__(self) -> None:
        self.chat = Chat(self.tokenizer)
        self.ends = {*self.end_ids, self.chat.end}
        self.max_positions = usable_positions(self.info.text_config)

    def body(self, turn: Turn, messages: list[Message], prompt: list[int]) -> tuple[str, JSON]:
        """Return path and body of the request for a turn."""
        settings = settings_of(turn, self.settings, self.mix)
        body: JSON = {
            "model": self.model,
            "max_tokens": min(settings.max_new_tokens, self.max_positions - len(prompt)),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            # Said even where they are off: servers take what is not said from the model's own generation config.
            "top_k": settings.top_k or -1,
            "min_p": settings.min_p,
            "repetition_penalty": settings.repetition_penalty,
            "seed": (settings.seed + stable_key(turn.id)) % 2**31,
            "return_token_ids": True,
        }
        if settings.min_new_tokens:
            body["min_tokens"] = settings.min_new_tokens
        if settings.stop:
            body["stop"] = list(settings.stop)
        if self.servers.api == "completions":
            return "completions", {**body, "prompt": prompt, "skip_special_tokens": False, **self.servers.fields}
        if turn.row.tools:
            body["tools"] = turn.row.tools
        return "chat/completions", {**body, "messages": [wire(m) for m in messages], **self.servers.fields}

    def check_plain(self) -> None:
        """Raise RequestError where an endpoint that takes OpenAI's fields only would answer by other settings."""
        settings = self.settings
        if settings.top_k or settings.min_p or settings.repetition_penalty != 1.0 or settings.min_new_tokens:
            raise RequestError("settings not taken", "it takes no top_k, min_p or the like", blame="setup")


async def _distill(
    asked: _Asked,
    rows: Sequence[Row],
    out: Path,
    *,
    source: str,
    max_tokens_total: int | None,
    seconds: float | None,
    show: bool,
) -> ServedReport:
    servers = asked.servers
    headers = {"Authorization": f"Bearer {servers.key}"} if servers.key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    times = httpx.Timeout(servers.timeout, connect=min(10.0, servers.timeout))
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=times) as client:
        endpoints = [
            Endpoint(url, client, servers.timeout, Breaker(servers.patience), servers.key) for url in servers.urls
        ]
        await _agree(endpoints, asked)
        turns = all_turns(rows)
        more = {"server": {"api": servers.api, "model": asked.model, "fields": servers.fields}}
        identity = identity_json(
            asked.tokenizer, asked.info, asked.settings, {**turns_json(asked.history, asked.mix), **more}
        )
        facts = {"servers": list(servers.urls), **prompts_json(rows, source), **adapter_json(asked.info)}
        with DialogWriter(out, identity, facts) as writer:
            check_known(writer, turns)
            before = Counter(writer.saved.get("failures", {}))
            run = _Run(asked, writer, turns, endpoints, max_tokens_total)
            left = sum(map(len, turns)) - len(writer.done)
            run.progress = Progress("distill: answers", left, seconds=seconds, show=show, more=run.spell)
            try:
                await run.pool.run(run.jobs(), run.ask)
            except (KeyboardInterrupt, asyncio.CancelledError):
                raise Interrupted.with_safe(writer.counts["dialogs"], "dialogs", out) from None
            finally:
                writer.record(failures=dict(sorted((before + run.pool.failures).items())))
            settle(writer, turns)
            report = run.report()
            run.progress.close(f"{summary(writer)}\n{report}")
    return report


class _Run:
    """One run of a folder: its jobs, what becomes of each, and the account."""

    def __init__(
        self,
        asked: _Asked,
        writer: DialogWriter,
        turns: list[list[Turn]],
        endpoints: list[Endpoint],
        max_tokens_total: int | None,
    ) -> None:
        self.asked, self.writer, self.turns, self.max_tokens_total = asked, writer, turns, max_tokens_total
        self.script = Script(asked.tokenizer, writer, asked.history, asked.ends, asked.max_positions)
        self.left_open: dict[str, str] = {}
        self.pool = Pool(
            endpoints,
            asked.servers.concurrency,
            asked.servers.patience,
            refused=self._refuse,
            left_open=self._leave_open,
        )
        self.progress = Progress("", 0, show=False)

    def jobs(self) -> Iterator[Job]:
        """Yield the first turn to be asked of each row; with given answers all turns."""
        for number, of_row in enumerate(self.turns):
            for turn in of_row if self.asked.history == "given" else of_row[:1]:
                yield from self._job(number, turn)

    def _job(self, number: int, turn: Turn | None) -> list[Job]:
        """Return the job of a turn, or of the next one of its row that is to be asked; none after the time is spent."""
        while turn is not None and not self._spent:
            read = self.script.read(turn)
            if read is not None:
                return [Job(number, (turn, read))]
            turn = turn.after if self.asked.history == "own" else None
        return []

    @property
    def _spent(self) -> bool:
        limit = self.max_tokens_total
        return self.progress.out_of_time or (limit is not None and self.writer.counts["tokens"] >= limit)

    async def ask(self, endpoint: Endpoint, job: Job) -> list[Job]:
        """Ask an endpoint for a turn and keep the answer; return the job of the next turn."""
        turn, read = job.what
        messages, prompt, _ = read
        asked = self.asked
        path, body = asked.body(turn, messages, prompt)
        if endpoint.plain:
            asked.check_plain()
        tag = f"headway-{stable_key(turn.id):08x}-{job.attempts}-{os.urandom(4).hex()}"
        answer = await endpoint.ask(path, body, tag)
        if endpoint.plain:
            asked.check_plain()
        reply = read_reply(answer, asked.model, asked.info.vocab_size)
        if asked.servers.api == "completions" and reply.prompt_ids not in (None, prompt):
            raise RequestError("another request's answer", "the prompt's ids are not those sent")
        whole = reply.finish == "stop"
        endpoint.answers += 1
        spoken = any(
            str(reply.message.get(part) or "").strip() for part in ("content", "reasoning_content", "tool_calls")
        )
        if not spoken:
            self.writer.drop(turn.id, f"empty answer, {'stop' if whole else 'length'}")
        else:
            self._keep(endpoint, turn, read, reply)
        self.progress.add(items=1)
        following = turn.after if asked.history == "own" else None
        return self._job(job.number, following)

    def _keep(self, endpoint: Endpoint, turn: Turn, of: Asked, reply: Any) -> None:
        asked = self.asked
        try:
            read, emitted, notes = dialog_ids(reply, asked.chat, of.messages, turn.row.tools, of.prompt, asked.ends)
        except RowError as error:
            self.writer.drop(turn.id, str(error))
            return
        if not emitted:
            self.writer.drop(turn.id, f"empty answer, {reply.finish}")  # of nothing that the tokenizer knows
            return
        ids = [*read, *emitted]
        kept = reply.message if asked.servers.api == "chat" else None
        self.writer.add(Dialog(turn.id, ids, [(len(read), len(ids))], reply.finish, kept, (*of.notes, *notes)))
        endpoint.tokens += len(emitted)
        self.progress.add(tokens=len(emitted))

    def _refuse(self, job: Job, failure: RequestError) -> list[Job]:
        turn = job.what[0]
        self.writer.drop(turn.id, f"refused by the server, {failure.kind}")
        self.progress.add(items=1)
        return self._job(job.number, turn.after if self.asked.history == "own" else None)

    def _leave_open(self, job: Job, failure: RequestError) -> None:
        self.left_open[job.what[0].id] = str(failure)

    def spell(self) -> str:
        """Return the end of the progress line."""
        pool, failed = self.pool, sum(self.pool.failures.values())
        servers = f"; {pool.serving} of {len(pool.endpoints)} servers, {pool.under_way} under way"
        return servers + (f", {failed} requests failed" if failed else "")

    def report(self) -> ServedReport:
        """Return the account."""
        per_server = {
            e.url: {
                "answers": e.answers,
                "tokens": e.tokens,
                "failures": dict(sorted(e.failures.items())),
                "said": e.dead or ("it takes OpenAI's fields only" if e.plain else ""),
            }
            for e in self.pool.endpoints
        }
        return ServedReport(Counter(self.writer.counts), self.pool.failures, self.left_open, per_server)


async def _agree(endpoints: list[Endpoint], asked: _Asked) -> None:
    """Settle the model's name and the longest context, from what the endpoints say they serve.

    One that does not answer may come up later. Raises HeadwayError where none answers, or none serves the target.
    """
    listings = await asyncio.gather(*map(_models, endpoints))
    known = [listing for listing in listings if isinstance(listing, dict)]
    if not known:
        said = "; ".join(f"{e.url}: {why}" for e, why in zip(endpoints, listings, strict=True))
        raise HeadwayError(f"no server answers ({said}); start one, or correct --server, and run this again")
    names = sorted(set.intersection(*map(set, known)))
    wanted = asked.servers.model
    if wanted is None:
        wanted = asked.info.name if asked.info.name in names else names[0] if len(names) == 1 else None
    if wanted not in names:
        served = ", ".join(sorted(set.union(*map(set, known)))) or "nothing"
        raise HeadwayError(
            f"the servers do not all serve {asked.servers.model or asked.info.name!r} (they serve {served}); name the target "
            "as they do with --served-model"
        )
    asked.model = wanted
    lengths = [length for listing in known if type(length := listing[wanted]) is int and length > 0]
    asked.max_positions = min([asked.max_positions, *lengths])


async def _models(endpoint: Endpoint) -> dict[str, Any] | str:
    """Return model -> longest context (None where it is not said), or why there is no list."""
    try:
        response = await asyncio.wait_for(endpoint.client.get(f"{endpoint.url}/models"), min(10.0, endpoint.timeout))
        endpoint.check_status(response)
        return {str(m["id"]): m.get("max_model_len") for m in response.json()["data"]}
    except RequestError as failure:
        return str(failure)
    except (asyncio.TimeoutError, httpx.HTTPError) as error:
        return f"{type(error).__name__} {error}".strip()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its /models is no list of models"
