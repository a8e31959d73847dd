"""The chat template: prompts for the target, and ready-made answers with the spans to learn.

The rule: what is supervised is what the target emits after the generation prompt. For a ready-made answer the template is
rendered twice, and the answer is what the second adds to the first:

    template(messages[:t], generation prompt)   <|im_start|>user Hi<|im_end|> <|im_start|>assistant
    template(messages[:t + 1])                  <|im_start|>user Hi<|im_end|> <|im_start|>assistant Hello there.<|im_end|>
    a sample for turn t                         the ids of the first ...................... and of  Hello there.<|im_end|>

What a template puts before the words only where the turn is the last one (an empty reasoning block) is not emitted, and
stays out; what it puts there always (a space, a channel's name) is. Where the words are not found at the end of the second
render, because the template rewrites them, the answer is taken as given. The end-of-turn token is known per template,
also where it is written with the next turn only.

Where template(messages[:3], generation prompt) begins with exactly the ids of the sample so far, the next answer continues
it; where the template rewrote the history, it starts a sample of its own.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from headway.data.prompts import Message
from headway.data.sources import RowError
from headway.heads.common.errors import HeadwayError

NO_TOOLS = "tools that the chat template does not show"
"""A note."""
# What a template's own code may raise, besides what it raises on purpose.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
_SENTINELS = ("SENTINELQ", "SENTINELA", "SENTINELZ")
_TAG = re.compile(r"<([A-Za-z_]+)>")


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

    Raises RowError when the template refuses them (a system turn, say), or leaves out the calls of tools in them.
    """
    text = _render(tokenizer, messages, True, tools)
    if any(call["function"]["name"] not in text for m in messages for call in m.get("tool_calls", ())):
        raise RowError("the chat template does not write tool calls")
    return _ids(tokenizer, text)


def shows_tools(text: str, tools: Sequence[dict[str, Any]] | None) -> bool:
    """Return whether a rendered prompt names all tools that it should show: a template may know nothing of tools."""
    return all(str(tool.get("function", tool).get("name")) in text for tool in tools or ())


class Chat:
    """A tokenizer's chat template, and what was learnt of it once.

    `notes` counts what the template did to answers, for the user to see. Raises HeadwayError as `end_of_turn` does, and
    where the template takes no answers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.notes: Counter[str] = Counter()
        self._special = _special_ids(tokenizer)
        try:
            self.end = end_of_turn(tokenizer)
            self._lead, self._tail = _surroundings(tokenizer)
        except RowError as error:
            raise HeadwayError(f"{error}; give a working one with --chat-template FILE") from error
        marked = self._tail.lstrip()
        # Blanks that the template writes between the words and the end-of-turn token are emitted with it.
        written = marked.startswith(str(tokenizer.decode([self.end])))
        self._gap = self._tail[: len(self._tail) - len(marked)] if written else ""

    def samples(
        self, messages: Sequence[Message], cut: bool = False, tools: Sequence[dict[str, Any]] | None = None
    ) -> list[Sample]:
        """Return samples that supervise every answer of a conversation exactly once; a trailing user turn is left out.

        One sample holds all turns while each rendered prompt continues the row before it, and a new one starts where the
        template changed the history. With `cut` the last answer was stopped by a length limit and gets no end-of-turn.
        Raises RowError where the template refuses the conversation, or does not write what an answer holds.
        """
        done: list[Sample] = []
        row: list[int] = []
        spans: list[tuple[int, int]] = []
        for t, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            prompt, answer = self._turn(messages[: t + 1], tools, cut and t == len(messages) - 1)
            if spans and prompt[: len(row)] != row:
                done.append(Sample(row, spans))
                spans = []
            row = prompt + answer
            spans = [*spans, (len(prompt), len(row))]
        if spans and not shows_tools(str(self.tokenizer.decode(row)), tools):
            self.notes[NO_TOOLS] += 1
        return [*done, Sample(row, spans)] if spans else done

    def answer(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the ids before the last of the messages, an answer, and those that the target emits for it, its end included.

        Raises RowError as `samples` does.
        """
        return self._turn(messages, tools, cut=False)

    def _turn(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, cut: bool
    ) -> tuple[list[int], list[int]]:
        """Return what the target reads before the last of the messages, and what it emits for it, its end included."""
        prompt = _render(self.tokenizer, messages[:-1], True, tools)
        whole = _render(self.tokenizer, messages, False, tools)
        shared = len(os.path.commonprefix([prompt, whole]))
        before = shared if shared == len(prompt) else len(_render(self.tokenizer, messages[:-1], False, tools))
        if "tool_calls" in messages[-1] or "reasoning_content" in messages[-1]:
            if shared < min(before, len(prompt)):
                raise RowError("the chat template rewrites what stands before the answer")
            self._check_written(messages[-1], whole[shared:])
            prompt_ids, ids = self._split(prompt[:shared], whole[shared:])
            return prompt_ids, self._until_end(ids, cut, calls="tool_calls" in messages[-1])
        prompt, words = self._words(messages[-1]["content"], prompt, whole, shared, before)
        prompt_ids, ids = self._split(prompt, words if cut else words + self._gap)
        return prompt_ids, ids if cut else [*ids, self.end]

    def _words(self, content: str, prompt: str, whole: str, shared: int, before: int) -> tuple[str, str]:
        """Return the prompt, and the words of an answer of nothing but content, as the template writes them.

        `shared` characters begin both the prompt and the whole render; `before` of them come before the generation prompt.
        """
        written = next(
            (
                c
                for c in (content, content.rstrip(), content.lstrip(), content.strip())
                if whole.endswith(c + self._tail)
            ),
            None,
        )
        overlap = _overlap(prompt, content)
        if written is None:
            self.notes["answers that the template rewrites, taken as given"] += 1
            return prompt, content[overlap:] if overlap else self._lead + content
        at = len(whole) - len(self._tail) - len(written)
        if shared < len(prompt):
            if overlap:
                return prompt, content[overlap:]  # it begins with the reasoning that the prompt has opened already
            shared = min(shared, at)
            if not (before <= shared and _opens(prompt[shared:])):
                return prompt, self._lead + written
            self.notes["answers without the reasoning that the generation prompt opens"] += 1
            prompt = prompt[:shared]
        if written != content:
            self.notes["answers whose blanks at the ends the template trims"] += 1
        if at <= shared:
            return prompt, whole[shared : at + len(written)]
        lead = whole[shared:at]
        if lead.strip() and lead != self._lead:
            self.notes["answers before which the template writes something of its own, left out"] += 1
            lead = self._lead
        return prompt, lead + written

    def _check_written(self, message: Message, text: str) -> None:
        """Raise RowError where tool calls are not in what the template wrote; note where the reasoning is not."""
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                raise RowError("the chat template does not write tool calls")
        if message.get("reasoning_content", "").strip() not in text:
            self.notes["answers whose reasoning the template does not write"] += 1

    def _split(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the ids of the prompt, and those that follow it, as they are tokenised together where that leaves the
        prompt's ids as they are: a tokenizer may put a blank before a text that begins one."""
        before, both = _ids(self.tokenizer, prompt), _ids(self.tokenizer, prompt + answer)
        if both[: len(before)] == before:
            return before, both[len(before) :]
        return before, _ids(self.tokenizer, answer)

    def _until_end(self, ids: list[int], cut: bool, calls: bool) -> list[int]:
        """Return ids as far as the last end-of-turn token, which is added where there is none."""
        if self.end in ids:
            at = len(ids) - 1 - ids[::-1].index(self.end)
            return ids[: at if cut else at + 1]
        last = max((i for i, token in enumerate(ids) if token in self._special), default=-1)
        if last >= 0 and not str(self.tokenizer.decode(ids[last + 1 :])).strip():
            return ids[: last if cut else last + 1]
        if calls:
            self.notes["tool calls whose end the template does not mark, left without one"] += 1
        return ids if cut or calls else [*ids, self.end]


def samples(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], cut: bool = False) -> list[Sample]:
    """Return the samples of one conversation; see Chat, which to keep where there are many."""
    return Chat(tokenizer).samples(messages, cut)


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

    That is the tokenizer's EOS if it is there, or directly after the last answer; else the first special token there, else
    the EOS after all. Raises HeadwayError where there is none of these.
    """
    question, answer, follow_up = _SENTINELS
    turns = [("user", question), ("assistant", answer), ("user", follow_up)]
    messages = [{"role": role, "content": content} for role, content in turns]
    text = _render(tokenizer, messages, generation=False)
    after = _ids(tokenizer, text.partition(answer)[2].partition(follow_up)[0])
    last = _ids(tokenizer, _render(tokenizer, messages[:2], generation=False).partition(answer)[2])
    eos, specials = tokenizer.eos_token_id, _special_ids(tokenizer)
    special = [token for token in after if token in specials]
    if eos is not None and (eos in after or not special or [t for t in last if t in specials][:1] == [eos]):
        return eos
    if special:
        return special[0]
    raise HeadwayError(
        "neither the chat template nor the tokenizer names an end-of-turn token; set the tokenizer's eos"
    )


def _surroundings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return what the template writes between the generation prompt and the words of an answer that is not the last, and
    what it writes after the words of the last."""
    question, answer, follow_up = _SENTINELS
    turns = [("user", question), ("assistant", answer), ("user", follow_up)]
    messages = [{"role": role, "content": content} for role, content in turns]
    prompt = _render(tokenizer, messages[:1], generation=True)
    early, late = (_render(tokenizer, messages[:k], generation=False) for k in (3, 2))
    shared = len(os.path.commonprefix([prompt, early]))
    before = len(_render(tokenizer, messages[:1], generation=False))
    lead = early[shared:].partition(answer)[0] if before <= shared or shared == len(prompt) else ""
    return lead, late.partition(answer)[2]


def _overlap(prompt: str, answer: str) -> int:
    """Return how many characters at the start of the answer end the prompt already, blanks alone not counting."""
    sizes = range(min(len(prompt), len(answer), 64), 0, -1)
    size = next((k for k in sizes if prompt.endswith(answer[:k])), 0)
    return size if answer[:size].strip() and _opens(answer[:size]) else 0


def _opens(text: str) -> bool:
    """Return whether a text opens a tag, such as <think>, that it does not close."""
    return any(f"</{name}>" not in text[found.end() :] for found in _TAG.finditer(text) for name in [found[1]])


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
    except _REFUSALS as error:
        said = str(error) or type(error).__name__
        raise RowError(f"the chat template refuses the conversation ({said[:200]})") from error


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # The template writes BOS itself where the model wants one.
    return tokenizer(text, add_special_tokens=False)["input_ids"]
