"""The chat template: prompts for the target, and ready-made answers with the spans to learn.

The rule: a sample for turn t is ids(template(messages[:t], generation prompt)) + ids(answer as given) + end-of-turn,
which is what the target sees and emits when it answers. What a template adds to or cuts from an answer cannot get in.

    template(messages[:1], generation prompt)              answer          end-of-turn
    <|im_start|>user Hi<|im_end|> <|im_start|>assistant    Hello there.    <|im_end|>

Where template(messages[:3], generation prompt) begins with exactly these ids, the next answer continues the
sample; where the template rewrote the history, it starts a sample of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from headway.data.prompts import Message
from headway.data.sources import RowError
from headway.heads.common.errors import HeadwayError

_SENTINELS = ("SENTINELQ", "SENTINELA", "SENTINELZ")


@dataclass(frozen=True)
class Sample:
    """Token ids and the half-open spans of the answers in them, end-of-turn tokens included."""

    token_ids: list[int]
    spans: list[tuple[int, int]]


def use_template(tokenizer: PreTrainedTokenizerBase, file: str | Path | None = None) -> None:
    """Give the tokenizer the chat template in `file`, if any, and make sure it has one.

    Call it before a model is loaded. Raises HeadwayError when the file is missing or broken, or there is no template.
    """
    if file is not None:
        try:
            tokenizer.chat_template = Path(file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise HeadwayError(f"cannot read the chat template {str(file)!r}: {error}") from error
    if not tokenizer.chat_template:
        name = getattr(tokenizer, "name_or_path", "") or "this target"
        raise HeadwayError(
            f"the tokenizer of {name} has no chat template (a base model?); give a Jinja file with "
            "--chat-template FILE, or use the instruct model"
        )
    try:
        _render(tokenizer, [{"role": "user", "content": "a"}], generation=True)
    except RowError as error:
        raise HeadwayError(f"{error}; give a working one with --chat-template FILE") from error


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
) -> list[int]:
    """Return the ids the target reads before it answers `messages`, having been shown `tools`.

    Raises RowError when the template refuses them (a system turn, say).
    """
    return _ids(tokenizer, _render(tokenizer, messages, True, tools))


def samples(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], cut: bool = False) -> list[Sample]:
    """Return samples that supervise every answer of a conversation exactly once; a trailing user turn is left out.

    One sample holds all turns while each rendered prompt continues the row before it, and a new one starts where the
    template changed the history. With `cut` the last answer was stopped by a length limit and gets no end-of-turn.
    """
    end = end_of_turn(tokenizer)
    answered = [t for t, message in enumerate(messages) if message["role"] == "assistant"]
    done: list[Sample] = []
    row: list[int] = []
    spans: list[tuple[int, int]] = []
    for t in answered:
        prompt = prompt_ids(tokenizer, messages[:t])
        answer = _ids(tokenizer, messages[t]["content"])
        if not (cut and t == len(messages) - 1):
            answer = [*answer, end]
        if spans and prompt[: len(row)] != row:
            done.append(Sample(row, spans))
            spans = []
        row = prompt + answer
        spans = [*spans, (len(prompt), len(row))]
    return [*done, Sample(row, spans)] if spans else done


def truncate(sample: Sample, max_length: int) -> Sample:
    """Return the sample cut at `max_length` tokens; no end token is invented, and its spans may come out empty."""
    spans = [(start, min(end, max_length)) for start, end in sample.spans if start < max_length]
    return Sample(sample.token_ids[:max_length], spans)


def text_sample(tokenizer: PreTrainedTokenizerBase, text: str) -> Sample:
    """Return already rendered text as it is, no template and no special token added, every token supervised."""
    ids = _ids(tokenizer, text)
    return Sample(ids, [(0, len(ids))])


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends an answer: what the template writes between an answer and the next user turn.

    That is the tokenizer's EOS if it is there, else the first special token there, else the EOS after all.
    """
    question, answer, follow_up = _SENTINELS
    turns = [("user", question), ("assistant", answer), ("user", follow_up)]
    text = _render(tokenizer, [{"role": role, "content": content} for role, content in turns], generation=False)
    after = _ids(tokenizer, text.partition(answer)[2].partition(follow_up)[0])
    eos = tokenizer.eos_token_id
    special = [token for token in after if token in _special_ids(tokenizer)]
    if eos is not None and (eos in after or not special):
        return eos
    if special:
        return special[0]
    raise HeadwayError(
        "neither the chat template nor the tokenizer names an end-of-turn token; set the tokenizer's eos"
    )


@dataclass(frozen=True)
class UserTurn:
    """How the template surrounds the words of a first user turn."""

    prefix_ids: list[int]
    """The rendered template up to where the user's words begin."""
    end_ids: tuple[int, ...]
    """Special tokens that end the turn; empty where plain text ends it."""
    end_text: str
    """The text between the user's words and the answer."""


def user_prefix(tokenizer: PreTrainedTokenizerBase) -> UserTurn:
    """Return what stands before and after the user's words in a conversation of one user turn."""
    text = _render(tokenizer, [{"role": "user", "content": _SENTINELS[0]}], generation=True)
    before, found, after = text.partition(_SENTINELS[0])
    if not found:
        raise HeadwayError(
            "the chat template does not write the user's words; give a working one with --chat-template FILE"
        )
    after_ids = _ids(tokenizer, after)
    special = [token for token in after_ids[:1] if token in _special_ids(tokenizer)]
    return UserTurn(_ids(tokenizer, before), tuple(special), after)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    generation: bool,
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    known: dict[str, Any] = {"tools": list(tools)} if tools else {}
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation, **known)
        )
    except (TemplateError, TypeError) as error:
        raise RowError(f"the chat template refuses the conversation ({error})") from error


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # The template writes BOS itself where the model wants one.
    return tokenizer(text, add_special_tokens=False)["input_ids"]
