"""Convert: conversations that already hold answers become dialogs; no model is needed, only its tokenizer.

Policy: of a conversation every answer and its end-of-turn token is supervised. Of rendered `text` every token is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from headway.data.chat import Sample, samples, text_sample, truncate, use_template
from headway.data.dialogs import Dialog, DialogWriter
from headway.data.manifest import digest
from headway.data.prompts import Row
from headway.data.sources import RowError
from headway.heads.common.protocol import TargetInfo


def convert(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    out: Path | str,
    *,
    target: TargetInfo,
    max_length: int | None = None,
    source: str = "",
) -> Counter[str]:
    """Write the answers of `rows` into the dialogs folder `out` and return its counts.

    `rows` come from `read_rows(..., answers=True)`. Samples are cut at `max_length` tokens (counted as `truncated`);
    one that has no supervised token left is dropped and counted. Run again, it continues.

    Raises HeadwayError without a chat template, or when the folder was made from anything else.
    """
    if any(row.text is None for row in rows):
        use_template(tokenizer)
    identity = {
        "target": target.name,
        "revision": target.revision,
        "vocab_size": target.vocab_size,
        "template_sha256": digest(tokenizer.chat_template),
        "settings": {"max_length": max_length},
        "prompts": {"source": source, "rows": len(rows), "sha256": digest([[r.id, r.messages, r.text] for r in rows])},
    }
    truncated = 0
    with DialogWriter(out, identity) as writer:
        for row in rows:
            try:
                made = _samples(tokenizer, row)
            except RowError as error:
                if row.id not in writer.done:
                    writer.drop(row.id, str(error))
                continue
            for k, whole in enumerate(made):
                sample = whole if max_length is None else truncate(whole, max_length)
                truncated += bool(sample.spans) and len(sample.token_ids) < len(whole.token_ids)
                sample_id = row.id if k == 0 else f"{row.id} part {k + 1}"
                if sample_id in writer.done:
                    continue
                if sample.spans:
                    writer.add(Dialog(sample_id, sample.token_ids, sample.spans, "given"))
                else:
                    writer.drop(sample_id, "no supervised token within max_length")
        writer.counts["truncated"] = truncated
    return Counter(writer.counts)


def _samples(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[Sample]:
    if row.text is not None:
        return [text_sample(tokenizer, row.text)]
    return samples(tokenizer, row.messages, row.cut)
