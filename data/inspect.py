"""Inspect: dialogs on the screen, with what is supervised in colour, and the counts of all of them.

On a terminal supervised text is green and the rest dim. Elsewhere it stands between {+ and +}, as in `git diff --word-diff`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from headway.data.chat import use_template
from headway.data.convert import Converter
from headway.data.dialogs import Dialog, each_dialog, read_manifest
from headway.data.jsonl import each_line
from headway.data.prompts import Intake
from headway.heads.common.errors import HeadwayError
from headway.inference.target import load_info, load_tokenizer

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Counts:
    """What a set of dialogs holds."""

    def __init__(self) -> None:
        self.dialogs = self.tokens = self.supervised = self.spans = self.longest = 0
        self.finish: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        """Reason -> rows or answers that gave no dialog."""
        self.truncated = 0
        self.notes: Counter[str] = Counter()

    def add(self, dialog: Dialog) -> None:
        """Count one dialog."""
        self.dialogs += 1
        self.tokens += len(dialog.token_ids)
        self.supervised += sum(end - start for start, end in dialog.spans)
        self.spans += len(dialog.spans)
        self.longest = max(self.longest, len(dialog.token_ids))
        self.finish[dialog.finish] += 1

    def __str__(self) -> str:
        share = self.supervised / self.tokens if self.tokens else 0.0
        ended = ", ".join(f"{name} {count}" for name, count in sorted(self.finish.items()))
        lines = [
            f"{self.dialogs} dialogs, {self.tokens} tokens (longest {self.longest}), of them {self.supervised} supervised "
            f"({share:.1%}) in {_answers(self.spans)}; ended by {ended or 'nothing'}"
        ]
        lines += [f"truncated {self.truncated}"] if self.truncated else []
        lines += [f"dropped {count}: {reason}" for reason, count in self.dropped.most_common()]
        lines += [f"noted {count}: {note}" for note, count in self.notes.most_common()]
        return "\n".join(lines)


def inspect(
    rows: Intake,
    *,
    target: str | None = None,
    show_rows: int = 3,
    only: str | None = None,
    max_length: int | None = None,
    chat_template: str | None = None,
    revision: str | None = None,
) -> Counts:
    """Print the first dialogs of a dialogs folder, or those that `headway convert` would make of rows, and the counts of
    all; return the counts. No weights are read.

    Raises HeadwayError for a missing target or source, or where `only`, the id of a dialog, is none of them.
    """
    console, counts = Console(highlight=False), Counts()
    folder = Path(rows.sources[0]).expanduser()
    dialogs: Iterator[Dialog]
    if len(rows.sources) == 1 and (folder / "dialogs.jsonl").is_file():
        made_by = read_manifest(folder)
        if any(rows.chosen.values()) or max_length is not None or chat_template is not None:
            raise HeadwayError(
                f"{folder} holds dialogs that are made already; --limit, --dedupe, --hold-out, --max-length and "
                "--chat-template say how rows become dialogs: leave them out"
            )
        if target is None and not isinstance(made_by.get("target"), str):
            raise HeadwayError(f"the manifest of {folder} names no target; say with --target for which model it is")
        tokenizer = load_tokenizer(target or str(made_by["target"]), revision=revision or made_by.get("revision"))
        dialogs = folder_dialogs(folder, counts)
    elif target is None:
        raise HeadwayError(f"{', '.join(rows.sources)} holds no dialogs yet; say with --target for which model")
    else:
        tokenizer = load_tokenizer(target, revision=revision)
        if chat_template is not None:
            use_template(tokenizer, chat_template)
        info = load_info(target, revision=revision)
        dialogs = row_dialogs(rows, Converter(tokenizer, info, max_length), counts)
    shown = show(dialogs, tokenizer, show_rows, console, only)
    said = f"{rows.report}\n{counts}" if rows.report.rows else str(counts)
    console.print(Text(_plain(said)), soft_wrap=True)
    if only is not None and not shown and show_rows:
        raise HeadwayError(f"no dialog has the id {only!r}; ids are printed before their dialogs")
    return counts


def folder_dialogs(folder: Path | str, counts: Counts) -> Iterator[Dialog]:
    """Yield the dialogs of a folder, counting them; raises HeadwayError as `read_dialogs` does."""
    folder = Path(folder)
    known = read_manifest(folder).get("counts")
    known = known if isinstance(known, dict) else {}
    counts.truncated = known.get("truncated", 0)
    counts.notes.update({k.removeprefix("note: "): n for k, n in known.items() if k.startswith("note: ")})
    counts.dropped.update(str(row.get("reason")) for row in each_line(folder / "dropped.jsonl"))
    for dialog in each_dialog(folder):
        counts.add(dialog)
        yield dialog


def row_dialogs(rows: Intake, make: Converter, counts: Counts) -> Iterator[Dialog]:
    """Yield the dialogs that `headway convert` would make of the rows, counting them and what was dropped."""
    for row in rows:
        for made in make(row):
            counts.truncated += made.truncated
            if made.dialog is None:
                counts.dropped[made.reason] += 1
            else:
                counts.add(made.dialog)
                yield made.dialog
    counts.notes.update(make.notes)


def show(
    dialogs: Iterable[Dialog], tokenizer: PreTrainedTokenizerBase, limit: int, console: Console, only: str | None = None
) -> int:
    """Print the first `limit` dialogs, of those whose id is `only` where it is given; read all, and return how many were
    printed."""
    shown = 0
    for dialog in dialogs:
        if shown >= limit or (only is not None and dialog.id != only):
            continue
        shown += 1
        size = sum(end - start for start, end in dialog.spans)
        facts = f"{len(dialog.token_ids)} tokens, {size} supervised in {_answers(len(dialog.spans))}, ended by {dialog.finish}"
        console.print(Text(f"{shown}. {_plain(dialog.id)}: {facts}", "bold"), soft_wrap=True)
        console.print(marked(dialog, tokenizer, colour=console.is_terminal), soft_wrap=True)
        console.print()
    return shown


def marked(dialog: Dialog, tokenizer: Any, *, colour: bool) -> Text:
    """Return the dialog's text, special tokens included, with what is supervised in colour, or between {+ and +}."""
    text, at = Text(), 0
    for start, end in dialog.spans:
        text.append(_words(tokenizer, dialog.token_ids[at:start]), "dim")
        words = _words(tokenizer, dialog.token_ids[start:end])
        text.append(words if colour else f"{{+{words}+}}", "green")
        at = end
    return text.append(_words(tokenizer, dialog.token_ids[at:]), "dim")


def _answers(count: int) -> str:
    return f"{count} answer{'' if count == 1 else 's'}"


def _words(tokenizer: Any, ids: list[int]) -> str:
    return _plain(str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)))


def _plain(text: str) -> str:
    # Rows come from anywhere, and a terminal obeys what it is sent.
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
