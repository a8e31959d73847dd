"""Distil: the target answers prompts; its token ids are kept as emitted, and they are what a head learns.

A row with several user turns becomes one dialog per turn: turn t is asked after the target's own answers to the turns
before it, and only its answer is supervised. Answers that a row already holds are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from headway.data.chat import prompt_ids, use_template
from headway.data.dialogs import Dialog, DialogWriter
from headway.data.manifest import digest, settings_json
from headway.data.progress import Progress
from headway.data.prompts import Message, Row
from headway.data.recorded import FeatureWriter
from headway.data.sources import RowError
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Tap
from headway.inference.generate import Request, Result, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target


def distill(
    target: Target,
    rows: Sequence[Row],
    out: Path | str,
    *,
    settings: Settings,
    batch_size: int = 8,
    source: str = "",
    max_tokens_total: int | None = None,
    seconds: float | None = None,
    record: Sequence[Tap] = (),
    show: bool = True,
) -> Counter[str]:
    """Answer every user turn of `rows` into the dialogs folder `out`, and return the counts of the whole folder.

    A folder begun with the same target and settings is continued: ids it holds are not done again, and `rows` may have
    grown. No new answer is begun once the folder holds `max_tokens_total` tokens or `seconds` have passed; those under
    way are finished, so that short answers are not preferred. An interrupted run loses only the answers under way.
    The features of the taps in `record` are kept beside the dialogs (recorded.py), 2 bytes a number.

    Raises HeadwayError when the folder was made from another target, settings or prompts, naming the difference; and for
    `record` on a target in plain mode, whose own forward shows no taps.
    """
    if record and target.mode == "plain":
        raise HeadwayError(
            f"{target.info.name} decodes in plain mode ({target.mode_reason}), where no features are recorded; distil "
            "without --record, training then computes them"
        )
    assert target.tokenizer is not None, "distilling needs the target's tokenizer"
    use_template(target.tokenizer)
    turns = [[m for m in row.messages if m["role"] == "user"] for row in rows]
    with (
        DialogWriter(out, _identity(target, settings), _facts(target, rows, source, batch_size)) as writer,
        FeatureWriter(out, target, record) if record else nullcontext() as features,
    ):
        _check_known(writer, rows, turns)
        left = sum(map(len, turns)) - len(writer.done)
        progress = Progress("distill: answers", left, seconds=seconds, show=show)
        queue = _Queue(target, writer, rows, turns, settings)
        try:
            for turn in range(max(map(len, turns), default=0)):
                prompts: dict[str, list[int]] = {}
                requests = _until_spent(queue.requests(turn, prompts), writer, progress, max_tokens_total)
                emitted = lambda request, tokens: progress.add(tokens=len(tokens))  # noqa: E731
                for result in generate(target, requests, batch_size=batch_size, on_tokens=emitted, record=record):
                    dialog = _keep(target, writer, result, prompts.pop(result.id))
                    if dialog and features is not None and result.feature_TF is not None:
                        features.add(dialog.id, dialog.token_ids, result.feature_TF)
                    progress.add(items=1)
        except KeyboardInterrupt:
            writer.close()
            progress.close(
                f"interrupted: {writer.counts['dialogs']} dialogs are safe in {out}; run it again to continue"
            )
            raise
        progress.close(_summary(writer, out))
    return Counter(writer.counts)


class _Queue:
    """Makes the requests of one turn of all rows, from the answers so far."""

    def __init__(
        self, target: Target, writer: DialogWriter, rows: Sequence[Row], turns: list[list[Message]], settings: Settings
    ) -> None:
        self.target, self.writer, self.rows, self.turns, self.settings = target, writer, rows, turns, settings

    def requests(self, turn: int, prompts: dict[str, list[int]]) -> Iterator[Request]:
        """Yield a request for each row that has this turn and has not done it; its prompt is put into `prompts`."""
        for row, users in zip(self.rows, self.turns, strict=True):
            if turn >= len(users):
                continue
            turn_id = _turn_id(row, turn)
            done = self.writer.done.get(turn_id)
            if done is None and turn_id in self.writer.done:
                continue
            if turn > 0 and _turn_id(row, turn - 1) not in self.writer.done:
                continue  # time ran out before the turn above it was asked
            try:
                ids = self._prompt(row, users, turn)
            except RowError as error:
                self.writer.drop(turn_id, str(error))
                continue
            if done is not None:
                self._check_same_prompt(done, ids)
            elif len(ids) >= self.target.max_positions:
                self.writer.drop(turn_id, "prompt too long for the context")
            else:
                prompts[turn_id] = ids
                yield Request(ids, self.settings, id=turn_id, key=stable_key(turn_id))

    def _prompt(self, row: Row, users: list[Message], turn: int) -> list[int]:
        tokenizer = self.target.tokenizer
        assert tokenizer is not None
        messages = [m for m in row.messages[:1] if m["role"] == "system"]
        for earlier in range(turn):
            dialog = self.writer.done.get(_turn_id(row, earlier))
            if dialog is None or dialog.finish != "stop":
                raise RowError("an earlier turn has no whole answer")
            start, end = dialog.spans[-1]
            answer = tokenizer.decode(_without_end(self.target, dialog.token_ids[start:end], self.settings))
            messages += [users[earlier], {"role": "assistant", "content": str(answer)}]
        return prompt_ids(tokenizer, [*messages, users[turn]])

    def _check_same_prompt(self, done: Dialog, ids: list[int]) -> None:
        if done.token_ids[: done.spans[0][0]] != ids:
            raise HeadwayError(
                f"{self.writer.folder} was made from other prompts: id {done.id!r} asked something else. Continue it "
                "with the same prompts (more may follow), or give another --out"
            )


def _until_spent(
    requests: Iterator[Request], writer: DialogWriter, progress: Progress, max_tokens_total: int | None
) -> Iterator[Request]:
    """Yield requests while there is time and token budget left."""
    for request in requests:
        if progress.out_of_time or (max_tokens_total is not None and writer.counts["tokens"] >= max_tokens_total):
            return
        yield request


def _keep(target: Target, writer: DialogWriter, result: Result, prompt: list[int]) -> Dialog | None:
    """Write one answer as a dialog and return it, or drop it as empty."""
    assert target.tokenizer is not None
    whole = result.finish_reason in ("stop", "stop_string")
    if not str(target.tokenizer.decode(result.token_ids, skip_special_tokens=True)).strip():
        writer.drop(result.id, f"empty answer, {'stop' if whole else 'length'}")
        return None
    ids = [*prompt, *result.token_ids]
    dialog = Dialog(result.id, ids, [(len(prompt), len(ids))], "stop" if whole else "length")
    writer.add(dialog)
    return dialog


def _check_known(writer: DialogWriter, rows: Sequence[Row], turns: list[list[Message]]) -> None:
    """Raise HeadwayError when the folder holds dialogs of ids that are not among the rows."""
    known = {_turn_id(row, t) for row, users in zip(rows, turns, strict=True) for t in range(len(users))}
    strange = [turn_id for turn_id in writer.done if turn_id not in known]
    if strange:
        raise HeadwayError(
            f"{writer.folder} was made from other prompts: it holds {len(strange)} ids that are not among the "
            f"{len(rows)} rows given ({strange[0]!r} is one). Give the same prompts (more may follow), or another --out"
        )


def _without_end(target: Target, ids: list[int], settings: Settings) -> list[int]:
    ends = target.eos_ids if settings.eos_ids is None else settings.eos_ids
    return ids[:-1] if ids and ids[-1] in ends else ids


def _turn_id(row: Row, turn: int) -> str:
    return row.id if turn == 0 else f"{row.id} turn {turn + 1}"


def stable_key(row_id: str) -> int:
    """Return the noise key of an id: the same in every process, so that a continued run draws the same answers."""
    return int(digest(row_id)[:8], 16)


def _identity(target: Target, settings: Settings) -> dict:
    assert target.tokenizer is not None
    return {
        "target": target.info.name,
        "revision": target.info.revision,
        "vocab_size": target.info.vocab_size,
        "template_sha256": digest(target.tokenizer.chat_template),
        "settings": settings_json(settings),
    }


def _facts(target: Target, rows: Sequence[Row], source: str, batch_size: int) -> dict:
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "batch_size": batch_size,
        "prompts": {"source": source, "rows": len(rows), "sha256": digest([[row.id, row.messages] for row in rows])},
    }


def _summary(writer: DialogWriter, out: Path | str) -> str:
    counts = writer.counts
    dropped = {k: n for k, n in counts.items() if k.startswith("dropped: ")}
    text = f"{out}: {counts['dialogs']} dialogs, {counts['tokens']} tokens; ended by stop {counts['stop']}, "
    text += f"length {counts['length']}" + "".join(f"; {k} {n}" for k, n in dropped.items())
    return text
