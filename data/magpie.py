"""Self-written prompts: the target reads its chat template up to where the user's words begin, and writes them itself.

Xu et al. 2024, "Magpie". Draw i has noise key i and draws are judged in order, so an interrupted run that is continued
writes the prompts that an uninterrupted one would have written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count as counting
from pathlib import Path

from headway.data.chat import UserTurn, use_template, user_prefix
from headway.data.jsonl import AppendLog
from headway.data.manifest import FORMAT, digest, read_json, require_same, settings_json, write_json
from headway.data.progress import Progress
from headway.heads.common.errors import HeadwayError, Interrupted
from headway.inference.generate import Request, Result, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target

DRAW = Settings(max_new_tokens=160, temperature=1.0, top_p=0.95)
"""How prompts are drawn where nothing else is said."""

_HOPELESS_DRAWS = 200


def write_prompts(
    target: Target,
    out: Path | str,
    count: int,
    *,
    settings: Settings = DRAW,
    openers: Sequence[str] = ("",),
    batch_size: int = 8,
    seconds: float | None = None,
    show: bool = True,
) -> Counter[str]:
    """Write up to `count` prompts as rows {"id": draw, "prompt": str} to `out`; return the counts of draws.

    Draw i begins with the words `openers[i % len(openers)]`, which steer it to a subject; "" leaves it free.
    Empty, duplicate (same words) and runaway (never ended) draws are rejected into `out`'s .rejected.jsonl neighbour.
    A file begun with the same target, settings and openers is continued. No draw is begun after `seconds`.

    Raises HeadwayError when `out` was made by anything else, or when nearly all draws are rejected; Interrupted after Ctrl-C.
    """
    assert target.tokenizer is not None, "writing prompts needs the target's tokenizer"
    use_template(target.tokenizer)
    turn = user_prefix(target.tokenizer)
    settings = _until_turn_ends(target, settings, turn)
    path = Path(out)
    openers = tuple(openers) or ("",)
    manifest = _open_manifest(path, target, settings, openers)
    kept, rejected = AppendLog(path), AppendLog(path.with_suffix(".rejected.jsonl"))
    draws = _Draws(target, turn, settings, openers, kept, rejected, count)
    progress = Progress("prompts", count - draws.counts["kept"], seconds=seconds, show=show)
    try:
        results = generate(
            target,
            draws.requests(progress),
            batch_size=batch_size,
            on_tokens=lambda request, tokens: progress.add(tokens=len(tokens)),
        )
        for result in results:
            before = draws.ready
            draws.judge(result)
            progress.add(items=draws.ready - before)
            if draws.full:
                break
            draws.check_hope()
        progress.close(f"{out}: {_spelled(draws.counts)}")
    except KeyboardInterrupt:
        raise Interrupted.with_safe(draws.counts["kept"], "prompts", out) from None
    finally:
        kept.close()
        rejected.close()
        write_json(_manifest_path(path), {**manifest, "counts": dict(draws.counts)})
    return Counter(draws.counts)


class _Draws:
    """Which draws are done, and the judging of new ones in the order of their number."""

    def __init__(
        self,
        target: Target,
        turn: UserTurn,
        settings: Settings,
        openers: tuple[str, ...],
        kept: AppendLog,
        rejected: AppendLog,
        count: int,
    ) -> None:
        self.target, self.turn, self.settings, self.openers = target, turn, settings, openers
        assert target.tokenizer is not None
        opener_ids = [target.tokenizer(words, add_special_tokens=False)["input_ids"] for words in openers]
        self._prefixes = [[*turn.prefix_ids, *ids] for ids in opener_ids]
        self._kept, self._rejected, self.count = kept, rejected, count
        self.counts = Counter({"kept": len(kept.rows)})
        self.counts.update(row["reason"] for row in rejected.rows)
        self._seen = {_normal(row["prompt"]) for row in kept.rows}
        self._done = {row["id"] for row in [*kept.rows, *rejected.rows]}
        self._asked: list[int] = []
        """Draws begun and not judged yet, ascending."""
        self._waiting: dict[int, Result] = {}
        """Draws that finished before an earlier one."""

    @property
    def full(self) -> bool:
        """Whether there are prompts enough."""
        return self.counts["kept"] >= self.count

    @property
    def ready(self) -> int:
        """Prompts kept, and draws that wait for an earlier one to be judged; at most those wanted."""
        return min(self.count, self.counts["kept"] + len(self._waiting))

    def requests(self, progress: Progress) -> Iterator[Request]:
        """Yield draws not done yet, until there are enough or time is up."""
        for draw in counting():
            if self.full or progress.out_of_time:
                return
            if draw not in self._done:
                self._asked.append(draw)
                yield Request(self._prefixes[draw % len(self.openers)], self.settings, id=draw, key=draw)

    def judge(self, result: Result) -> None:
        """Take a finished draw; write this and others as far as no earlier draw is under way."""
        self._waiting[result.id] = result
        while self._asked and self._asked[0] in self._waiting and not self.full:
            draw = self._asked.pop(0)
            prompt, reason = self._verdict(self._waiting.pop(draw))
            self.counts[reason or "kept"] += 1
            if reason:
                self._rejected.append({"id": draw, "reason": reason})
            else:
                self._seen.add(_normal(prompt))
                self._kept.append({"id": draw, "prompt": prompt})

    def _verdict(self, result: Result) -> tuple[str, str]:
        """Return the prompt and the reason to reject it, or ''."""
        if result.finish_reason not in ("stop", "stop_string"):
            return "", "runaway"
        text = str(self.target.tokenizer.decode(result.token_ids, skip_special_tokens=True))  # type: ignore[union-attr]
        text = self.openers[result.id % len(self.openers)] + text
        for stop in self.settings.stop:
            text = text.partition(stop)[0]
        if not _normal(text):
            return "", "empty"
        return text.strip(), "duplicate" if _normal(text) in self._seen else ""

    def check_hope(self) -> None:
        """Raise HeadwayError when next to no draw is a prompt."""
        total = sum(self.counts.values())
        if total >= _HOPELESS_DRAWS and self.counts["kept"] < total / 20:
            raise HeadwayError(
                f"{self.target.info.name} hardly writes prompts of its own ({_spelled(self.counts)}); give prompts"
            )


def _until_turn_ends(target: Target, settings: Settings, turn: UserTurn) -> Settings:
    """Return settings that stop where the template ends a user turn."""
    from dataclasses import replace

    if not turn.prefix_ids:
        raise HeadwayError(
            "the chat template writes nothing before the user's words, so none can be drawn; give a prompts file"
        )
    ends = tuple(dict.fromkeys([*target.eos_ids, *turn.end_ids]))
    stop = (turn.end_text.strip(),) if turn.end_text.strip() and not turn.end_ids else ()
    return replace(settings, eos_ids=ends, stop=stop)


def _open_manifest(path: Path, target: Target, settings: Settings, openers: tuple[str, ...]) -> dict:
    assert target.tokenizer is not None
    manifest = {
        "format": FORMAT,
        "kind": "prompts",
        "target": target.info.name,
        "revision": target.info.revision,
        "template_sha256": digest(target.tokenizer.chat_template),
        "settings": settings_json(settings),
        "openers": list(openers),
    }
    if _manifest_path(path).exists():
        require_same(read_json(_manifest_path(path)), manifest, path)
    elif path.exists():
        raise HeadwayError(f"{path} exists and was not written by the target; give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(_manifest_path(path), manifest)
    return manifest


def _manifest_path(path: Path) -> Path:
    return path.with_suffix(".manifest.json")


def _normal(text: str) -> str:
    """Return the words of a text, for telling duplicates."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _spelled(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())
