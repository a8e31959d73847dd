"""Chat templates of the shapes that models have, in few words: what stands where, who trims, who inserts, who ends."""

from __future__ import annotations

from dataclasses import dataclass

from byte_tokenizer import CHATML, END_IN_NEXT, GENERATION


@dataclass(frozen=True)
class Shape:
    """A template, the tokens it needs, and what is supervised of `Hi`, `Hello.`, `2+2?`, `4`."""

    name: str
    template: str
    spans: tuple[str, str]
    eos: str = "<|im_end|>"
    more: tuple[str, ...] = ()
    samples: int = 1
    """How many the conversation gives."""
    trimmed: str = " Hello.\n"
    """What is supervised of the answer " Hello.\\n", without its end."""


def each(body: str, first: str = "", last: str = "") -> str:
    return first + "{% for m in messages %}" + body + "{% endfor %}" + last


def gen(text: str) -> str:
    return "{% if add_generation_prompt %}{{ '" + text + "' }}{% endif %}"


BOS = "{{ bos_token }}"
INST_ELSE = "{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ USER }}{% else %}{{ ANSWER }}{% endif %}"


def inst(user: str, answer: str) -> str:
    return INST_ELSE.replace("USER", f"'{user}'").replace("ANSWER", answer)


TRIMS_AND_RENAMES = (
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ m.content | trim ~ '<end_of_turn>\n' }}"
)
HISTORY_WITHOUT_THOUGHT = (
    "{% set c = m.content %}{% set r = m.reasoning_content | default('') %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' ~ r ~ '\n</think>\n\n' }}{% endif %}"
    "{{ c ~ '<|im_end|>\n' }}"
)
OPENS_THOUGHT = each(
    "{% if m.role == 'user' %}{{ '<|User|>' ~ m.content }}"
    "{% else %}{{ '<|Assistant|>' ~ m.content.split('</think>')[-1] ~ '<|eos|>' }}{% endif %}",
    BOS,
    gen("<|Assistant|><think>\n"),
)
CHANNELS = each(
    "{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.last %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.reasoning_content ~ '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ '<|start|>assistant to=' ~ f.name ~ '<|channel|>commentary<|message|>' ~ f.arguments | tojson ~ '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ ('<|return|>' if loop.last else '<|end|>') }}"
    "{% endif %}{% else %}{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}",
    last=gen("<|start|>assistant"),
)
CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")

SHAPES = [
    Shape("chatml", CHATML, ("Hello.<|im_end|>", "4<|im_end|>")),
    Shape(
        "llama-3: header, trims",
        each(
            "{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content | trim ~ '<|eot_id|>' }}",
            BOS,
            gen("<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ),
        ("Hello.<|eot_id|>", "4<|eot_id|>"),
        eos="<|eot_id|>",
        more=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        trimmed="Hello.",
    ),
    Shape(
        "llama-2: blanks around a trimmed answer",
        each(
            "{% if m.role == 'user' %}{{ bos_token }}{% endif %}" + inst(" [/INST]", "' ' ~ m.content | trim ~ ' </s>'")
        ),
        (" Hello. </s>", " 4 </s>"),
        eos="</s>",
        more=("</s>", "[INST]", "[/INST]"),
        trimmed=" Hello. ",
    ),
    Shape(
        "mistral: a blank before the answer",
        each(inst("[/INST]", "' ' ~ m.content ~ '</s>'"), BOS),
        (" Hello.</s>", " 4</s>"),
        eos="</s>",
        more=("</s>", "[INST]", "[/INST]"),
        trimmed="  Hello.\n",
    ),
    Shape(
        "gemma: renames the role, trims, refuses a system turn",
        each(TRIMS_AND_RENAMES, BOS, gen("<start_of_turn>model\n")),
        ("Hello.<end_of_turn>", "4<end_of_turn>"),
        eos="<|eos|>",
        more=("<start_of_turn>", "<end_of_turn>"),
        trimmed="Hello.",
    ),
    Shape(
        "phi-3: another end after the last answer",
        each(
            "{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}",
            last="{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ),
        ("Hello.<|end|>", "4<|end|>"),
        eos="<|eos|>",
        more=("<|user|>", "<|assistant|>", "<|end|>"),
    ),
    Shape(
        "deepseek: the generation prompt opens a thought that the history has not",
        OPENS_THOUGHT,
        ("Hello.<|eos|>", "4<|eos|>"),
        eos="<|eos|>",
        more=("<|User|>", "<|Assistant|>"),
    ),
    Shape(
        "qwen-3: an empty thought in the last turn, none in the history",
        each(HISTORY_WITHOUT_THOUGHT, last=GENERATION),
        ("Hello.<|im_end|>", "4<|im_end|>"),
    ),
    Shape(
        "smollm-3: an empty thought in the generation prompt, none in the history",
        each(
            "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}",
            last=gen("<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ),
        ("Hello.<|im_end|>", "4<|im_end|>"),
        samples=2,
    ),
    Shape(
        "zephyr: the eos ends every turn",
        each("{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ eos_token ~ '\n' }}", last=gen("<|assistant|>\n")),
        ("Hello.<|eos|>", "4<|eos|>"),
        eos="<|eos|>",
    ),
    Shape(
        "vicuna: plain words between turns",
        each(
            "{% if m.role == 'user' %}{{ 'USER: ' ~ m.content ~ ' ' }}{% else %}{{ 'BOT: ' ~ m.content ~ eos_token }}{% endif %}",
            last=gen("BOT:"),
        ),
        (" Hello.<|eos|>", " 4<|eos|>"),
        eos="<|eos|>",
        trimmed="  Hello.\n",
    ),
    Shape("the end stands in the next turn", END_IN_NEXT, ("Hello.<|im_end|>", "4<|im_end|>")),
    Shape(
        "glm-4: the next turn's name ends the answer",
        each("{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}", "[gMASK]<sop>", gen("<|assistant|>\n")),
        ("Hello.<|user|>", "4<|user|>"),
        eos="<|eos|>",
        more=("<|user|>", "<|assistant|>"),
    ),
    Shape(
        "gpt-oss: channels, and another end in the history",
        CHANNELS,
        ("<|channel|>final<|message|>Hello.<|return|>", "<|channel|>final<|message|>4<|return|>"),
        eos="<|return|>",
        more=CHANNEL_TOKENS,
        samples=2,
        trimmed="<|channel|>final<|message|> Hello.\n",
    ),
    Shape(
        "command-r: a token for the role",
        each("{{ '<|turn|><|' ~ m.role ~ '|>' ~ m.content ~ '<|end_turn|>' }}", BOS, gen("<|turn|><|assistant|>")),
        ("Hello.<|end_turn|>", "4<|end_turn|>"),
        eos="<|end_turn|>",
        more=("<|turn|>", "<|end_turn|>"),
    ),
    Shape(
        "alpaca: headings, no token between turns",
        each(
            "{% if m.role == 'user' %}{{ '### Instruction:\n' ~ m.content ~ '\n\n' }}"
            "{% else %}{{ '### Response:\n' ~ m.content ~ '\n\n' }}{% endif %}",
            last=gen("### Response:\n"),
        ),
        ("Hello.<|eos|>", "4<|eos|>"),
        eos="<|eos|>",
        samples=2,
    ),
]
