"""Convert: conversations that already hold answers become dialogs; no model is needed, only its tokenizer.

Policy: of a conversation every answer and its end-of-turn token is supervised. Of rendered `text` every token is, and of
tokens what came with them says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from headway.data.chat import Chat, Sample, text_sample, truncate, use_template
from headway.data.dialogs import Dialog, DialogWriter
from headway.data.manifest import digest
from headway.data.prompts import Intake, Row
from headway.data.sources import RowError
from headway.heads.common.errors import Interrupted
from headway.heads.common.protocol import TargetInfo


@dataclass(frozen=True)
class Made:
    """What one row gave: a dialog, or the reason why none."""

    id: str
    dialog: Dialog | None
    reason: str = ""
    truncated: bool = False


class Converter:
    """Makes dialogs of rows that hold answers; `notes` counts what the chat template did to answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, target: TargetInfo, max_length: int | None = None) -> None:
        self.tokenizer, self.target, self.max_length = tokenizer, target, max_length
        self._chat: Chat | None = None

    @property
    def notes(self) -> Counter[str]:
        return Counter() if self._chat is None else self._chat.notes

    def check(self, row: Row) -> None:
        """Raise HeadwayError when the row needs a chat template, and there is none or one that takes no answers."""
        if row.messages and self._chat is None:
            use_template(self.tokenizer)
            self._chat = Chat(self.tokenizer)

    def __call__(self, row: Row) -> list[Made]:
        """Return what the row gives: a dialog, several where the template rewrites the history, or the reason for none.

        Raises HeadwayError as `check` does.
        """
        self.check(row)
        try:
            samples = self._samples(row)
        except RowError as error:
            return [Made(row.id, None, str(error))]
        made = []
        for k, whole in enumerate(samples):
            sample = whole if self.max_length is None else truncate(whole, self.max_length)
            sample_id = row.id if k == 0 else f"{row.id} part {k + 1}"
            if sample.spans:
                dialog = Dialog(sample_id, sample.token_ids, sample.spans, "given")
                made.append(Made(sample_id, dialog, truncated=len(sample.token_ids) < len(whole.token_ids)))
            else:
                made.append(Made(sample_id, None, "no supervised token within max_length"))
        return made

    def _samples(self, row: Row) -> list[Sample]:
        if row.token_ids is not None:
            if max(row.token_ids) >= self.target.vocab_size:
                raise RowError(f"a token beyond the target's vocabulary of {self.target.vocab_size}")
            return [Sample(row.token_ids, row.spans)]
        if row.text is not None:
            return [text_sample(self.tokenizer, row.text)]
        assert self._chat is not None
        return self._chat.samples(row.messages, row.cut, row.tools)


def convert(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row] | Intake,
    out: Path | str,
    *,
    target: TargetInfo,
    max_length: int | None = None,
    source: str = "",
    on_row: Callable[[int], None] = lambda tokens: None,
) -> Counter[str]:
    """Write the answers of `rows` into the dialogs folder `out` and return its counts.

    `rows` come from `read_rows(..., answers=True)`, or are an Intake, of which one row at a time is in memory. Samples are
    cut at `max_length` tokens (counted as `truncated`); one that has no supervised token left is dropped and counted. Run
    again, it continues. `on_row` is called after each row with the tokens it gave.

    Raises HeadwayError without a chat template, or when the folder was made from anything else; Interrupted after Ctrl-C.
    """
    make = Converter(tokenizer, target, max_length)
    wanted = _peek(rows, make)
    identity = {
        "target": target.name,
        "revision": target.revision,
        "vocab_size": target.vocab_size,
        "template_sha256": digest(tokenizer.chat_template),
        "settings": {"max_length": max_length},
        "prompts": rows.identity() if isinstance(rows, Intake) else _identity(rows, source),
    }
    truncated = 0
    with DialogWriter(out, identity) as writer:
        try:
            for row in wanted:
                tokens = 0
                for made in make(row):
                    truncated += made.truncated
                    tokens += 0 if made.dialog is None else len(made.dialog.token_ids)
                    _keep(writer, made)
                on_row(tokens)
        except KeyboardInterrupt:
            raise Interrupted.with_safe(writer.counts["dialogs"], "dialogs", out) from None
        writer.counts["truncated"] = truncated
        writer.counts.update({f"note: {note}": count for note, count in make.notes.items()})
        if isinstance(rows, Intake):
            writer.record(intake=rows.report.to_json())
    return Counter(writer.counts)


def _keep(writer: DialogWriter, made: Made) -> None:
    """Write what a row gave, unless the folder has it."""
    if made.id in writer.done:
        return
    if made.dialog is not None:
        writer.add(made.dialog)
    else:
        writer.drop(made.id, made.reason)


def _peek(rows: Iterable[Row], make: Converter) -> Iterator[Row]:
    """Return the rows, the first of them checked, before anything is written."""
    wanted = iter(rows)
    first = next(wanted, None)
    if first is None:
        return iter(())
    make.check(first)
    return chain([first], wanted)


def _identity(rows: Sequence[Row], source: str) -> dict[str, Any]:
    said = [[r.id, r.messages, r.text] + ([r.token_ids, r.spans] if r.token_ids else []) for r in rows]
    return {"source": source, "rows": len(rows), "sha256": digest(said)}
