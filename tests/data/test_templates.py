"""The render boundary, on chat templates of every shape: what is supervised is what the target emits."""

from __future__ import annotations

from typing import Any

import pytest
from byte_tokenizer import CHATML, byte_tokenizer
from template_shapes import CHANNEL_TOKENS, CHANNELS, HISTORY_WITHOUT_THOUGHT, OPENS_THOUGHT, SHAPES, Shape, each, gen
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from headway.data.chat import Chat, prompt_ids
from headway.data.prompts import Message
from headway.data.sources import RowError

TALK = [
    {"role": ("user", "assistant")[i % 2], "content": words} for i, words in enumerate(("Hi", "Hello.", "2+2?", "4"))
]


def chat_of(shape: Shape) -> Chat:
    return Chat(byte_tokenizer(shape.template, eos=shape.eos, more=shape.more))


def emitted(chat: Chat, messages: list[Message], **more: Any) -> list[str]:
    made = chat.samples(messages, **more)
    return [chat.tokenizer.decode(s.token_ids[start:end]) for s in made for start, end in s.spans]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_answer_is_what_the_target_would_emit(shape: Shape) -> None:
    chat = chat_of(shape)
    assert emitted(chat, TALK) == list(shape.spans)
    assert len(chat.samples(TALK)) == shape.samples
    # The last sample is what the target reads, up to its answer, unless the template opens a thought.
    sample = chat.samples(TALK)[-1]
    read = prompt_ids(chat.tokenizer, TALK[:3])
    opens = "answers without the reasoning that the generation prompt opens" in chat.notes
    assert (sample.token_ids[: sample.spans[-1][0]] == read) != opens
    for one in chat.samples(TALK):
        assert chat.tokenizer.bos_token_id not in one.token_ids[1:] or "llama-2" in shape.name
        # What is not supervised holds neither answer whole.
        assert [t for start, end in one.spans for t in one.token_ids[start:end]].count(chat.end) == len(one.spans)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_blanks_around_an_answer_are_as_the_template_writes_them(shape: Shape) -> None:
    chat = chat_of(shape)
    (span,) = emitted(chat, [TALK[0], {"role": "assistant", "content": " Hello.\n"}])
    assert span == shape.trimmed + chat.tokenizer.decode([chat.end])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_answers_of_one_letter_are_not_mistaken_for_the_template(shape: Shape) -> None:
    chat = chat_of(shape)
    prompts = set()
    for word in ("a", "s", "t", "m", "<", "</", "4"):
        messages = [TALK[0], {"role": "assistant", "content": word}]
        assert emitted(chat, messages) == [shape.spans[1].replace("4", word)]
        (sample,) = chat.samples(messages)
        prompts.add(tuple(sample.token_ids[: sample.spans[0][0]]))
    assert len(prompts) == 1


def test_an_answer_that_holds_the_thought_the_prompt_opens() -> None:
    chat = Chat(byte_tokenizer(OPENS_THOUGHT, eos="<|eos|>", more=("<|User|>", "<|Assistant|>")))
    messages = [TALK[2], {"role": "assistant", "content": "<think>\nadd</think>\n\n4"}]
    assert emitted(chat, messages) == ["add</think>\n\n4<|eos|>"]
    sample = chat.samples(messages)[0]
    assert sample.token_ids[: sample.spans[0][0]] == prompt_ids(chat.tokenizer, messages[:1])
    assert chat.tokenizer.decode(sample.token_ids).count("<think>") == 1


def test_a_template_that_writes_more_before_the_first_turn_when_it_is_to_answer() -> None:
    chat = Chat(byte_tokenizer(each("{{ m.content ~ eos_token }}", gen("<hint>"), gen("<think>"))))
    (sample,) = chat.samples(TALK[:2])
    assert chat.tokenizer.decode(sample.token_ids) == "<hint>Hi<|im_end|><think>Hello.<|im_end|>"


def test_reasoning_is_supervised_where_the_template_writes_it() -> None:
    chat = Chat(byte_tokenizer(each(HISTORY_WITHOUT_THOUGHT, last=gen("<|im_start|>assistant\n"))))
    messages = [dict(m) for m in TALK]
    for message, thought in zip(messages[1::2], ("greet", "add"), strict=True):
        message["reasoning_content"] = thought
    assert emitted(chat, messages) == [
        "<think>\ngreet\n</think>\n\nHello.<|im_end|>",
        "<think>\nadd\n</think>\n\n4<|im_end|>",
    ]
    assert not chat.notes
    plain = Chat(byte_tokenizer(CHATML))
    assert emitted(plain, messages) == ["Hello.<|im_end|>", "4<|im_end|>"]
    assert dict(plain.notes) == {"answers whose reasoning the template does not write": 2}


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLS = (
    "{% if tools %}{{ '<|im_start|>system\n' ~ tools | tojson ~ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' ~ call.function | tojson ~ '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + gen("<|im_start|>assistant\n")
)


def test_tool_calls_and_what_follows_them() -> None:
    chat = Chat(byte_tokenizer(CALLS))
    messages = [TALK[2], CALL, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]
    made = chat.samples(messages, tools=TOOLS)
    assert emitted(chat, messages, tools=TOOLS) == [
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call><|im_end|>',
        "It is 4.<|im_end|>",
    ]
    assert len(made) == 1
    assert chat.tokenizer.decode(made[0].token_ids).startswith('<|im_start|>system\n[{"type": "function"')
    with pytest.raises(RowError, match="does not write tool calls"):
        Chat(byte_tokenizer(CHATML)).samples(messages)


def test_a_tool_call_that_ends_with_a_token_of_its_own() -> None:
    chat = Chat(byte_tokenizer(CHANNELS, eos="<|return|>", more=CHANNEL_TOKENS))
    thought = {**CALL, "reasoning_content": "sum"}
    assert emitted(chat, [TALK[2], thought]) == [
        "<|channel|>analysis<|message|>sum<|end|><|start|>assistant to=add<|channel|>commentary<|message|>"
        '{"a": 2, "b": 2}<|call|>'
    ]


def test_the_end_of_a_thought_is_not_the_end_of_the_answer() -> None:
    template = each(
        "{{ '<|start|>' ~ m.role }}{% if m.reasoning_content %}{{ '<think>' ~ m.reasoning_content ~ '<|end|>' }}{% endif %}"
        "{{ m.content ~ '<|end|>' }}",
        last=gen("<|start|>assistant"),
    )
    chat = Chat(byte_tokenizer(template, eos="<|end|>", more=("<|start|>", "<|end|>")))
    assert emitted(chat, [TALK[2], {**TALK[3], "reasoning_content": "add"}]) == ["<think>add<|end|>4<|end|>"]


def test_an_answer_of_weight_zero_is_read_and_not_learnt() -> None:
    chat = Chat(byte_tokenizer())
    messages = [dict(m) for m in TALK]
    messages[1]["weight"] = 0
    assert emitted(chat, messages) == ["4<|im_end|>"]
    assert "Hello." in chat.tokenizer.decode(chat.samples(messages)[0].token_ids)


def test_no_second_bos_from_the_tokenizer() -> None:
    tokenizer = byte_tokenizer("{{ bos_token }}" + CHATML)
    bos = ("<|bos|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    assert tokenizer("a")["input_ids"][0] == bos[1]  # so it would, if asked
    (sample,) = Chat(tokenizer).samples(TALK)
    assert sample.token_ids.count(bos[1]) == 1


def test_a_tokenizer_that_puts_a_blank_before_a_text() -> None:
    bare = Tokenizer(models.WordLevel({"\u2581Q": 0, "Q": 1, "\u2581A": 2, "A": 3, "?": 4}, unk_token="?"))
    bare.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bare.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<b>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>")
    tokenizer.chat_template = each("{{ m.content ~ ('<b>' if m.role == 'user' else eos_token) }}")
    (sample,) = Chat(tokenizer).samples([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}])
    assert tokenizer.convert_ids_to_tokens(tokenizer("A", add_special_tokens=False)["input_ids"]) == ["\u2581A"]
    assert tokenizer.convert_ids_to_tokens(sample.token_ids) == ["\u2581Q", "<b>", "A", "</s>"]


def test_a_cut_answer_has_no_end_in_any_shape() -> None:
    for shape in SHAPES:
        chat = chat_of(shape)
        span = emitted(chat, TALK[:2], cut=True)[0]
        assert span.endswith("Hello."), shape.name
