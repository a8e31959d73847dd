"""Distil: the target answers prompts; its token ids are kept as emitted, and they are what a head learns.

A row with several turns becomes one dialog per turn: turn t is asked after the target's own answers to the turns before
it (or, as asked, after those that the row holds), and only its answer is supervised.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from headway.data.chat import NO_TOOLS, prompt_ids, shows_tools, use_template
from headway.data.dialogs import Dialog, DialogWriter
from headway.data.manifest import digest, settings_json
from headway.data.progress import Progress
from headway.data.prompts import Message, Row
from headway.data.recorded import FeatureWriter, Recorded
from headway.data.sources import RowError
from headway.data.turns import History, TemperatureMix, Turn, all_turns, turns_json
from headway.heads.common.errors import HeadwayError, Interrupted
from headway.heads.common.protocol import Tap, TargetInfo
from headway.inference.generate import Request, Result, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target

OTHER_PROMPT = "prompt as the server rendered it"
"""A note: the prompt's ids are those that the server says it read, and differ from the template rendered here."""


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
    history: History = "own",
    mix: TemperatureMix | None = None,
    show: bool = True,
) -> Counter[str]:
    """Answer every turn of `rows` into the dialogs folder `out`, and return the counts of the whole folder.

    A folder begun with the same target and settings is continued: ids it holds are not done again, and `rows` may have
    grown. No new answer is begun once the folder holds `max_tokens_total` tokens or `seconds` have passed; those under
    way are finished, so that short answers are not preferred. An interrupted run loses only the answers under way, and
    a folder that is whole is in the order of the rows, however often it was interrupted.
    The features of the taps in `record` are kept beside the dialogs (recorded.py), 2 bytes a number. `history` says
    whose answers stand before a later turn; `mix` gives each row a temperature in place of that of `settings`.

    Raises HeadwayError when the folder was made from another target, settings or prompts, naming the difference; and for
    `record` on a target in plain mode, whose own forward shows no taps. Interrupted after Ctrl-C.
    """
    if record and target.mode == "plain":
        raise HeadwayError(
            f"{target.info.name} decodes in plain mode ({target.mode_reason}), where no features are recorded; distil "
            "without --record, training then computes them"
        )
    assert target.tokenizer is not None, "distilling needs the target's tokenizer"
    use_template(target.tokenizer)
    identity = identity_json(target.tokenizer, target.info, settings, turns_json(history, mix))
    turns = all_turns(rows)
    with (
        DialogWriter(out, identity, {**_facts(target, batch_size), **prompts_json(rows, source)}) as writer,
        FeatureWriter(out, target, record) if record else nullcontext() as features,
    ):
        check_known(writer, turns)
        left = sum(map(len, turns)) - len(writer.done)
        progress = Progress("distill: answers", left, seconds=seconds, show=show)
        script = Script(target.tokenizer, writer, history, target.eos_ids, target.max_positions)
        try:
            for number in range(max(map(len, turns), default=0)):
                prompts: dict[str, Asked] = {}
                due = (of_row[number] for of_row in turns if number < len(of_row))
                requests = _until_spent(
                    _requests(script, due, settings, mix, prompts), writer, progress, max_tokens_total
                )
                emitted = lambda request, tokens: progress.add(tokens=len(tokens))  # noqa: E731
                for result in generate(target, requests, batch_size=batch_size, on_tokens=emitted, record=record):
                    dialog = _keep(target, writer, result, prompts.pop(result.id))
                    if dialog and features is not None and result.feature_TF is not None:
                        features.add(dialog.id, dialog.token_ids, result.feature_TF)
                    progress.add(items=1)
        except KeyboardInterrupt:
            writer.close()
            raise Interrupted.with_safe(writer.counts["dialogs"], "dialogs", out) from None
        settle(writer, turns)
        progress.close(summary(writer))
    if record and show:
        missing = writer.counts["dialogs"] - len(Recorded(out, target))
        if missing > 0:  # a shard is written when it is full, and at the end; a kill loses what waits
            print(f"headway: {missing} dialogs have no features; `headway capture {out}` makes them", file=sys.stderr)
    return Counter(writer.counts)


class Asked(NamedTuple):
    """What the target reads before one answer."""

    messages: list[Message]
    prompt: list[int]
    notes: tuple[str, ...]
    """For the dialog that comes of it."""


class Script:
    """What the target reads for each turn, from what the folder holds so far."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        writer: DialogWriter,
        history: History,
        end_ids: Collection[int],
        max_positions: int,
    ) -> None:
        self.tokenizer, self.writer, self.history = tokenizer, writer, history
        self.end_ids, self.max_positions = end_ids, max_positions

    def read(self, turn: Turn) -> Asked | None:
        """Return what is asked for a turn; None where there is nothing to ask.

        That is where the turn was dealt with, cannot be asked (it is dropped then, counted), or waits for the one above.
        Raises HeadwayError where the folder's answer to it was to another prompt.
        """
        done = self.writer.dialog(turn.id)
        if done is None and turn.id in self.writer.done:
            return None
        if self.history == "own" and turn.before is not None and turn.before not in self.writer.done:
            return None  # time ran out before the turn above it was asked
        try:
            messages = turn.messages(self.history, self._own)
            ids = prompt_ids(self.tokenizer, messages, turn.row.tools)
        except RowError as error:
            if done is None:
                self.writer.drop(turn.id, str(error))
            return None
        if done is not None:
            self._check_same_prompt(done, ids)
            return None
        if len(ids) >= self.max_positions:
            self.writer.drop(turn.id, "prompt too long for the context")
            return None
        shown = shows_tools(str(self.tokenizer.decode(ids)) if turn.row.tools else "", turn.row.tools)
        return Asked(messages, ids, () if shown else (NO_TOOLS,))

    def _own(self, dialog_id: str) -> Message:
        dialog = self.writer.dialog(dialog_id)
        if dialog is None or dialog.finish != "stop":
            raise RowError("an earlier turn has no whole answer")
        if dialog.answer is not None:
            return dialog.answer
        start, end = dialog.spans[-1]
        ids = dialog.token_ids[start:end]
        text = self.tokenizer.decode(ids[:-1] if ids[-1] in self.end_ids else ids)
        return {"role": "assistant", "content": str(text)}

    def _check_same_prompt(self, done: Dialog, ids: list[int]) -> None:
        if done.token_ids[: done.spans[0][0]] != ids and OTHER_PROMPT not in done.notes:
            raise HeadwayError(
                f"{self.writer.folder} was made from other prompts: id {done.id!r} asked something else. Continue it "
                "with the same prompts (more may follow), or give another --out"
            )


def _requests(
    script: Script, turns: Iterable[Turn], settings: Settings, mix: TemperatureMix | None, prompts: dict[str, Asked]
) -> Iterator[Request]:
    """Yield a request for each turn that is to be asked; what is asked is put into `prompts`."""
    for turn in turns:
        read = script.read(turn)
        if read is not None:
            prompts[turn.id] = read
            yield Request(read.prompt, settings_of(turn, settings, mix), id=turn.id, key=stable_key(turn.id))


def settings_of(turn: Turn, settings: Settings, mix: TemperatureMix | None) -> Settings:
    """Return the settings of a turn: `settings`, at the temperature that `mix` gives its row."""
    return settings if mix is None else replace(settings, temperature=mix.of(turn.row.id))


def _until_spent(
    requests: Iterator[Request], writer: DialogWriter, progress: Progress, max_tokens_total: int | None
) -> Iterator[Request]:
    """Yield requests while there is time and token budget left."""
    for request in requests:
        if progress.out_of_time or (max_tokens_total is not None and writer.counts["tokens"] >= max_tokens_total):
            return
        yield request


def _keep(target: Target, writer: DialogWriter, result: Result, asked: Asked) -> Dialog | None:
    """Write one answer as a dialog and return it, or drop it as empty."""
    assert target.tokenizer is not None
    whole = result.finish_reason in ("stop", "stop_string")
    if not str(target.tokenizer.decode(result.token_ids, skip_special_tokens=True)).strip():
        writer.drop(result.id, f"empty answer, {'stop' if whole else 'length'}")
        return None
    ids = [*asked.prompt, *result.token_ids]
    spans = [(len(asked.prompt), len(ids))]
    dialog = Dialog(result.id, ids, spans, "stop" if whole else "length", notes=asked.notes)
    writer.add(dialog)
    return dialog


def check_known(writer: DialogWriter, turns: list[list[Turn]]) -> None:
    """Raise HeadwayError when the folder holds dialogs of ids that are not among the turns."""
    known = {turn.id for of_row in turns for turn in of_row}
    strange = [turn_id for turn_id in writer.done if turn_id not in known]
    if strange:
        raise HeadwayError(
            f"{writer.folder} was made from other prompts: it holds {len(strange)} ids that are not among the "
            f"{len(turns)} rows given ({strange[0]!r} is one). Give the same prompts (more may follow), or another --out"
        )


def settle(writer: DialogWriter, turns: list[list[Turn]]) -> None:
    """Put the folder in the order of the rows, if every turn was dealt with."""
    ids = [turn.id for of_row in turns for turn in of_row]
    if len(writer.done) == len(ids):
        writer.put_in_order(ids)


def stable_key(row_id: str) -> int:
    """Return the noise key of an id: the same in every process, so that a continued run draws the same answers."""
    return int(digest(row_id)[:8], 16)


def identity_json(
    tokenizer: PreTrainedTokenizerBase, info: TargetInfo, settings: Settings, more: dict[str, Any]
) -> dict[str, Any]:
    """Return what must be the same for a folder to be continued; `more` overrides."""
    return {
        "target": info.name,
        "revision": info.revision,
        "adapter": None if info.adapter is None else {"sha256": info.adapter.sha256},
        "vocab_size": info.vocab_size,
        "template_sha256": digest(tokenizer.chat_template),
        "settings": settings_json(settings),
        "server": None,
        **more,
    }


def adapter_json(info: TargetInfo) -> dict[str, Any]:
    """Return what a manifest says of the adapter on the target, beside what must be the same."""
    return {} if info.adapter is None else {"adapter": asdict(info.adapter)}


def prompts_json(rows: Sequence[Row], source: str) -> dict[str, Any]:
    """Return what a manifest says of the prompts."""
    said = [[row.id, row.messages, *([row.tools] if row.tools else [])] for row in rows]
    return {"prompts": {"source": source, "rows": len(rows), "sha256": digest(said)}}


def _facts(target: Target, batch_size: int) -> dict[str, Any]:
    return {"dtype": target.dtype_name, "batch_size": batch_size, **adapter_json(target.info)}


def summary(writer: DialogWriter) -> str:
    """Return what a folder holds, in a line."""
    counts = writer.counts
    more = {k: n for k, n in sorted(counts.items()) if k.startswith(("dropped: ", "note: "))}
    text = f"{writer.folder}: {counts['dialogs']} dialogs, {counts['tokens']} tokens; ended by stop {counts['stop']}, "
    return text + f"length {counts['length']}" + "".join(f"; {k.removeprefix('note: ')} {n}" for k, n in more.items())
