"""A tokenizer with one token per UTF-8 byte (ids 0-255) and eight special tokens, so spans can be counted by hand."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|tool|>"]
IM_END = 256 + SPECIAL.index("<|im_end|>")

GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}" + GENERATION
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content ~ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content ~ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + GENERATION
)
THINK = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in c %}"
    "{% set c = '<think>\n\n</think>\n\n' ~ c %}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ c ~ '<|im_end|>\n' }}{% endfor %}" + GENERATION
)
END_IN_NEXT = (
    "{% for m in messages %}{% if not loop.first %}{{ '<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|>\n<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = CHATML, pad: str = "<|pad|>", eos: str = "<|im_end|>", more: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Return the tokenizer with the given chat template; `more` special tokens follow, from id 264."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *more)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<|bos|>", eos_token=eos, pad_token=pad)
    tokenizer.chat_template = chat_template
    return tokenizer
