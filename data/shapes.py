"""The shapes a row comes in, and what each becomes: messages in turn, rendered text, or tokens.

OpenAI `messages` (tools, tool calls, tool results and reasoning among them), ShareGPT `conversations`, `turns` (the user's),
`prompt` with `response` or `completion`, alpaca's `instruction`, `input`, `output`, `question` with `answer`, `text` that is
rendered already, `input_ids` that are tokens already. A top-level `system` becomes the system turn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from headway.data.sources import RowError

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": str}, and of an assistant maybe `tool_calls` (OpenAI's, with
`arguments` as an object), `reasoning_content` (str) and `weight` (0 where the answer is not to be learnt)."""

_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response"), "tool"),
}
_PAIRS = (
    ("prompt", ("response", "completion")),
    ("instruction", ("output", "response")),
    ("question", ("answer",)),
)
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask")
_NEXT = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}


@dataclass(frozen=True)
class Row:
    """One usable row: `messages` (system?, user, assistant, user, ... in turn), or `text`, or `token_ids`."""

    id: str
    """Unique within what is read together, and the same at every reading."""
    messages: list[Message] = field(default_factory=list)
    text: str | None = None
    """Text that is rendered already; no template is applied to it."""
    cut: bool = False
    """The last answer was stopped by a length limit, so its end is not the end of a turn."""
    tools: list[dict[str, Any]] | None = None
    """The tools that the template shows to the target, as OpenAI spells them."""
    token_ids: list[int] | None = None
    """Tokens that are made already; neither template nor tokenizer is applied to them."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Of `token_ids`: the half-open ranges that are supervised."""


def row_of(raw: Any, row_id: str, *, answers: bool, tools: bool, repairs: list[str]) -> Row:
    """Return the row, appending to `repairs` what was changed. Raises RowError with the reason it is unusable.

    With `answers` it must hold an answer to learn from, and may be text or tokens. Without `tools` it must have none.
    """
    if isinstance(raw, RowError):
        raise raw
    if not isinstance(raw, dict):
        raise RowError(f"row is a JSON {type(raw).__name__}, not an object")
    for name in _MEDIA:
        if raw.get(name):
            raise RowError(f"multimodal row (field {name!r})")
    made = None if any(raw.get(k) is not None for k in ("messages", "conversations", "turns", "prompt")) else _made(raw)
    if made is not None:
        if not answers:
            raise RowError(f"already {made} (`headway convert` takes it)")
        if made == "tokenised":
            token_ids, spans = _tokens(raw)
            return Row(row_id, token_ids=token_ids, spans=spans)
        if not raw["text"].strip():
            raise RowError("blank text")
        return Row(row_id, text=encodable(raw["text"]))
    messages = _in_turn(_messages(raw), repairs)
    shown = _tools(raw)
    if not tools and (shown or any(m["role"] == "tool" or "tool_calls" in m for m in messages)):
        raise RowError("tools or tool turns (`headway convert` takes them)")
    if answers and all(m["role"] != "assistant" or m.get("weight") == 0 for m in messages):
        raise RowError("no answer")
    cut = raw.get("finish_reason") == "length" and messages[-1]["role"] == "assistant"
    return Row(row_id, messages, cut=cut, tools=shown)


def encodable(text: str) -> str:
    """Return `text`, or raise RowError where no tokenizer could read it (JSON can spell lone surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError("text holds a lone surrogate") from None
    return text


def _made(raw: dict[str, Any]) -> str | None:
    if _listed(raw.get("input_ids")) is not None or _listed(raw.get("token_ids")) is not None:
        return "tokenised"
    return "rendered text" if isinstance(raw.get("text"), str) and not any(name in raw for name, _ in _PAIRS) else None


def _tokens(raw: dict[str, Any]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return ready tokens and what is supervised of them: by a mask, by labels (-100 is not), by spans, else all of it.
    Padding at the ends, by an attention mask, is cut off."""
    ids = _listed(raw.get("input_ids")) or _listed(raw.get("token_ids")) or []
    if not ids:
        raise RowError("no tokens")
    if not all(type(token) is int and token >= 0 for token in ids):
        raise RowError("tokens that are not ids")
    flags = [True] * len(ids)
    for mask in _masks(raw):
        if len(mask) != len(ids):
            raise RowError("a mask of another length than the tokens")
        flags = [flag and bool(on) for flag, on in zip(flags, mask, strict=True)]
    if raw.get("spans") is not None:
        spanned = _spanned(_listed(raw["spans"]), len(ids))
        flags = [flag and on for flag, on in zip(flags, spanned, strict=True)]
    real = [i for i, on in enumerate(_listed(raw.get("attention_mask")) or [True] * len(ids)) if on] or [0]
    ids, flags = ids[real[0] : real[-1] + 1], flags[real[0] : real[-1] + 1]
    edges = [i for i in range(len(flags) + 1) if (i > 0 and flags[i - 1]) != (i < len(flags) and flags[i])]
    if not edges:
        raise RowError("no supervised token")
    return ids, list(zip(edges[::2], edges[1::2], strict=True))


def _masks(raw: dict[str, Any]) -> list[list[Any]]:
    named = [_listed(raw[name]) or [] for name in (*_MASKS, "attention_mask") if raw.get(name) is not None]
    if raw.get("labels") is not None:
        named.append([label != -100 for label in _listed(raw["labels"]) or []])
    return named


def _spanned(spans: list[Any] | None, size: int) -> list[bool]:
    flags, at = [False] * size, 0
    for span in spans or []:
        whole = isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)
        if not whole or not at <= span[0] < span[1] <= size:
            raise RowError("spans that do not lie in order within the tokens")
        start, at = span
        flags[start:at] = [True] * (at - start)
    return flags


def _listed(value: Any) -> list[Any] | None:
    """Return a list, also where a table spells it as JSON; None for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict) and value and all(isinstance(v, list) for v in value.values()):
        # A list of structs that `datasets` turned into a struct of lists.
        if len({len(v) for v in value.values()}) > 1:
            return None
        value = [dict(zip(value, parts, strict=True)) for parts in zip(*value.values(), strict=True)]
    return value if isinstance(value, list) else None


def _messages(raw: dict[str, Any]) -> list[Message]:
    """Return the messages of a row of any shape, roles and content normalised."""
    given = _given(raw)
    if not given:
        raise RowError("empty conversation")
    messages = [_message(message) for message in given]
    if isinstance(raw.get("system"), str) and raw["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": encodable(raw["system"])})
    return messages


def _given(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages as given, under OpenAI's keys or ShareGPT's."""
    named = next((raw[k] for k in ("messages", "conversations") if raw.get(k) is not None), None)
    if named is None and isinstance(raw.get("prompt"), list):
        answer: Any = next((raw[k] for k in ("completion", "response") if raw.get(k) is not None), [])
        named = [*raw["prompt"], *(answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])]
    if named is not None:
        listed = _listed(named)
        if listed is None or not all(isinstance(m, dict) for m in listed):
            raise RowError("conversation is not a list of messages")
        return listed
    turns = _listed(raw.get("turns"))
    if turns is not None:
        # Turns without answers between them: the target's answers go there.
        return [{"role": "user", "content": turn} for turn in turns]
    for question, answers in _PAIRS:
        if question in raw:
            asked = raw[question]
            if question == "instruction" and isinstance(asked, str) and isinstance(raw.get("input"), str):
                asked = "\n\n".join(part for part in (asked, raw["input"]) if part.strip())
            answer = next((raw[k] for k in answers if raw.get(k) is not None), None)
            said = [] if answer is None else [{"role": "assistant", "content": answer}]
            return [{"role": "user", "content": asked}, *said]
    known = [repr(str(name)[:40])[1:-1] for name in sorted(map(str, raw))[:6]]
    raise RowError(f"no conversation field (has {', '.join(known) or 'nothing'})")


def _message(given: dict[str, Any]) -> Message:
    spelled = given.get("role") if given.get("role") is not None else given.get("from")
    if not isinstance(spelled, str) or spelled not in _ROLES:
        raise RowError(f"unknown role {repr(spelled)[:40]}")
    content = given.get("content") if given.get("content") is not None else given.get("value")
    message: Message = {"role": _ROLES[spelled]}
    if message["role"] == "assistant":
        calls = content if spelled in ("function_call", "tool_call") else given.get("tool_calls")
        if calls is None and given.get("function_call") is not None:
            calls = [given["function_call"]]
        if calls:
            message["tool_calls"] = _calls(calls)
            content = "" if content is None or calls is content else content
        for name in _REASONING:
            if isinstance(given.get(name), str) and given[name].strip():
                # Templates read one or another of these names.
                message[name] = message["reasoning_content"] = encodable(given[name])
        if given.get("weight") == 0:
            message["weight"] = 0
    message["content"] = _content(content)
    for name in ("name", "tool_call_id"):
        if isinstance(given.get(name), str):
            message[name] = encodable(given[name])
    return message


def _calls(given: Any) -> list[dict[str, Any]]:
    """Return tool calls as OpenAI spells them, arguments as an object."""
    try:
        listed = json.loads(given) if isinstance(given, str) else given
        listed = listed if isinstance(listed, list) else [listed]
        calls = []
        for call in listed:
            function = call.get("function") or call
            arguments = function.get("arguments")
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            if not isinstance(function["name"], str) or not isinstance(arguments, dict | None):
                raise TypeError
            known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
            calls.append(
                {**known, "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
            )
        spelled = json.dumps(calls, ensure_ascii=False)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RowError("malformed tool call") from None
    encodable(spelled)
    return calls


def _tools(raw: dict[str, Any]) -> list[dict[str, Any]] | None:
    if raw.get("tools"):
        tools = _listed(raw["tools"])
    elif raw.get("functions"):
        tools = [{"type": "function", "function": function} for function in _listed(raw["functions"]) or [None]]
    else:
        return None
    if tools is None or not all(
        isinstance(tool, dict) and isinstance(tool.get("function", tool), dict) for tool in tools
    ):
        raise RowError("malformed tools")
    try:
        encodable(json.dumps(tools, ensure_ascii=False))
    except (TypeError, RecursionError):
        raise RowError("malformed tools") from None
    return tools or None


def _content(content: Any) -> str:
    """Return the text of a message; a list of text parts is joined."""
    if content is None:
        raise RowError("null content")
    if isinstance(content, str):
        return encodable(content)
    if not isinstance(content, list):
        raise RowError(f"content is a JSON {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type", "unknown") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text"):
            raise RowError(f"multimodal content (part of type {repr(kind)[:40]})")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise RowError("null content")
        texts.append(text)
    return encodable("".join(texts))


def _in_turn(messages: list[Message], repairs: list[str]) -> list[Message]:
    """Return messages as system?, user, assistant, (tool, ..., assistant,)? user, ...; raise RowError where that cannot
    be."""
    system, rest = [], messages
    if messages[0]["role"] == "system":
        system, rest = messages[:1], messages[1:]
        if not system[0]["content"].strip():
            system = []
            repairs.append("blank system turn left out")
    first_user = next((i for i, m in enumerate(rest) if m["role"] == "user"), None)
    if first_user is None:
        raise RowError("no user turn")
    if first_user > 0:
        repairs.append("used from the first user turn")
    rest = rest[first_user:]
    user_only = all(m["role"] == "user" for m in rest)
    for before, message in zip([None, *rest[:-1]], rest, strict=True):
        if message["role"] == "system":
            raise RowError("system turn inside the conversation")
        _check_blank(message)
        if before is not None and not user_only:
            _check_order(before, message)
    return system + rest


def _check_blank(message: Message) -> None:
    if not message["content"].strip() and message["role"] != "tool" and not message.get("tool_calls"):
        raise RowError("blank user turn" if message["role"] == "user" else "blank answer, nothing to learn")


def _check_order(before: Message, message: Message) -> None:
    if message["role"] not in _NEXT[before["role"]]:
        if message["role"] == "tool":
            raise RowError("tool turn that no call asked for")
        if before["role"] == "tool":
            raise RowError("tool turn without an answer to it")
        raise RowError(f"two {message['role']} turns in a row")
    if before.get("tool_calls") and message["role"] == "user":
        raise RowError("tool call without a result")
