"""What a server's answer says: the message, how it ended, and the token ids, where vLLM or SGLang gives them.

    {"id", "model", "choices": [{"message": {...} or "text", "finish_reason", token ids}], token ids of the prompt}

Where there are no ids, they are those of the text, or, for an answer with reasoning or calls of tools, of what the chat
template writes for it after the prompt (chat.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from headway.data.chat import Chat, text_sample
from headway.data.distill import OTHER_PROMPT
from headway.data.endpoint import JSON, RequestError
from headway.data.prompts import Message
from headway.data.sources import RowError

NO_IDS = "ids made of the text"
CHANGED = "ids made of the text, other than those emitted"
NO_END = "end-of-turn token put back"

_ENDED = {"stop": "stop", "eos": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length"}


@dataclass
class Reply:
    """A server's answer, checked for its form."""

    message: Message
    """content, and reasoning_content and tool_calls where there are any."""
    finish: str
    """`stop` or `length`."""
    prompt_ids: list[int] | None
    answer_ids: list[int] | None
    num_tokens: int | None
    """Tokens emitted, by the server's own count."""

    @property
    def parsed(self) -> bool:
        """Whether the server took the text apart."""
        return bool(self.message.get("reasoning_content") or self.message.get("tool_calls"))


def read_reply(answer: JSON, model: str, vocab_size: int) -> Reply:
    """Return what the answer says. Raises RequestError for one of no known form, of another model, or of strange ids."""
    if answer.get("model") not in (model, None):
        raise RequestError("another model's answer", f"asked {model!r}, answered by {answer['model']!r}")
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise RequestError("no choices")
    choice = choices[0]
    finish = choice.get("finish_reason")
    if finish == "content_filter":
        raise RequestError("withheld by a filter", blame="request")
    if not isinstance(finish, str) or finish not in _ENDED:
        raise RequestError("no whole answer", f"finish_reason {finish!r}")
    extension = _object(answer.get("sglext"))
    # vLLM; SGLang's chat; SGLang's extension, which lists the ids of each choice.
    emitted = choice.get("token_ids") or choice.get("response_token_ids") or _first(extension.get("output_ids"))
    prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or extension.get("input_ids")
    count = _object(answer.get("usage")).get("completion_tokens")
    return Reply(
        _message(choice),
        _ENDED[finish],
        _checked(prompt, vocab_size),
        _checked(emitted, vocab_size),
        count if type(count) is int else None,
    )


def _object(value: Any) -> JSON:
    return value if isinstance(value, dict) else {}


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


def _message(choice: JSON) -> Message:
    given = choice.get("message") if "message" in choice else {"content": choice.get("text")}
    if not isinstance(given, dict):
        raise RequestError("no choices", "the first has no message")
    content, reasoning = given.get("content"), given.get("reasoning_content", given.get("reasoning"))
    calls = given.get("tool_calls")
    if (
        not isinstance(content, str | None)
        or not isinstance(reasoning, str | None)
        or not isinstance(calls, list | None)
    ):
        raise RequestError("no choices", "the message is of no known form")
    message: Message = {"role": "assistant", "content": content or ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_with_arguments(call, json.loads) for call in calls]
    try:
        json.dumps(message, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        raise RequestError("text that cannot be written", "a lone surrogate, or nested too deep") from None
    return message


def _checked(ids: Any, vocab_size: int) -> list[int] | None:
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise RequestError("token ids outside the vocabulary")
    return ids


def dialog_ids(
    reply: Reply,
    chat: Chat,
    messages: Sequence[Message],
    tools: Sequence[JSON] | None,
    prompt: list[int],
    ends: Collection[int],
) -> tuple[list[int], list[int], tuple[str, ...]]:
    """Return the ids of the prompt, of the answer, and notes on how they came about.

    `prompt` is the prompt as rendered here, `ends` are all ids that end an answer. Raises RequestError where the ids do not
    spell the text, RowError where an answer without ids cannot be spelt in tokens.
    """
    notes, tokenizer = [], chat.tokenizer
    if reply.answer_ids is not None:
        answer = list(reply.answer_ids)
        _check_spells(answer, reply, tokenizer)
        if reply.finish == "stop" and answer[-1] not in ends:
            answer.append(chat.end)
            notes.append(NO_END)
        if reply.prompt_ids is not None and reply.prompt_ids != prompt:
            prompt = reply.prompt_ids
            notes.append(OTHER_PROMPT)
        return prompt, answer, tuple(notes)
    cut = reply.finish == "length"
    if reply.parsed:
        answer = _rendered(chat, messages, reply.message, tools, prompt, cut)
    else:
        answer = text_sample(tokenizer, reply.message["content"]).token_ids
        answer = answer if cut or not answer or answer[-1] in ends else [*answer, chat.end]
    # What ended the answer is in some servers' count and not in others'.
    emitted = {len(answer), len(answer) - (not cut)}
    changed = reply.num_tokens is not None and reply.num_tokens not in emitted
    return prompt, answer, (NO_IDS, *([CHANGED] if changed else []))


def _rendered(
    chat: Chat,
    messages: Sequence[Message],
    answer: Message,
    tools: Sequence[JSON] | None,
    prompt: list[int],
    cut: bool,
) -> list[int]:
    """Return the ids that the template writes for `answer` after the prompt, its end included.

    Raises RowError where it writes something else there or leaves a part out, and for an answer that was `cut` by a length
    limit, which ended inside its markup.
    """
    if cut:
        raise RowError("cut inside reasoning or a call of a tool, and no token ids were given")
    before, ids = chat.answer([*messages, answer], tools)
    written = _bare(str(chat.tokenizer.decode(ids)))
    calls = [call["function"]["name"] for call in answer.get("tool_calls", ())]
    parts = [answer.get("reasoning_content"), answer["content"], *calls]
    if before != prompt or any(part and _bare(str(part)) not in written for part in parts):
        raise RowError("the chat template does not write reasoning or calls as given, and no token ids were given")
    return ids


def wire(message: Message) -> Message:
    """Return a message as OpenAI spells it: the arguments of calls as text, and nothing of our own."""
    sent = {key: value for key, value in message.items() if key != "weight"}
    if message.get("tool_calls"):
        sent["tool_calls"] = [_with_arguments(call, json.dumps) for call in message["tool_calls"]]
    return sent


def _with_arguments(call: Any, convert: Callable[[Any], Any]) -> JSON:
    """Return a call of a tool with its arguments as an object or as text. Raises RequestError for no such call."""
    function = _object(_object(call).get("function"))
    if not isinstance(function.get("name"), str):
        raise RequestError("no choices", "a call of a tool has no name")
    arguments = function.get("arguments") or ("{}" if convert is json.loads else {})
    if isinstance(arguments, str) == (convert is json.loads):
        with suppress(ValueError, RecursionError):  # what the target wrote may be no JSON; it stays as it is
            arguments = convert(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _check_spells(ids: list[int], reply: Reply, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise RequestError unless the ids hold the text: they may be another request's, or of another tokenizer."""
    if reply.message.get("tool_calls"):
        return  # taken apart, and maybe written anew
    spelt = _bare(str(tokenizer.decode(ids)))
    if any(_bare(reply.message.get(part) or "") not in spelt for part in ("content", "reasoning_content")):
        raise RequestError("token ids that do not spell the text")


def _bare(text: str) -> str:
    """Return the text without white space and broken characters, which decoders treat differently."""
    return "".join(text.replace("\ufffd", "").split())
