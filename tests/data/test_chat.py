"""Masks: what is supervised is what the target would have emitted, for templates of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_tokenizer import CHATML, END_IN_NEXT, GENERATION, IM_END, TAGGED, THINK, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from headway.data.chat import Sample, end_of_turn, prompt_ids, samples, truncate, use_template, user_prefix
from headway.data.convert import convert
from headway.data.dialogs import read_dialogs, read_manifest
from headway.data.prompts import Message, Row
from headway.data.sources import RowError
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import TargetInfo

INFO = TargetInfo(name="tiny", model_type="llama", hidden_size=8, vocab_size=264, num_tokens=264, num_layers=1)


def talk(*contents: str, system: str = "") -> list[Message]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def spans_of(tokenizer: PreTrainedTokenizerFast, made: list[Sample]) -> list[str]:
    return [tokenizer.decode(s.token_ids[start:end]) for s in made for start, end in s.spans]


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["plain", "tagged"])
def test_every_answer_with_its_end_and_nothing_else(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    made = samples(tokenizer, talk("Hi", "Hello there.", "2+2?", "4"))
    assert len(made) == 1
    assert spans_of(tokenizer, made) == ["Hello there.<|im_end|>", "4<|im_end|>"]
    assert sum(end - start for start, end in made[0].spans) == 15
    made = samples(tokenizer, talk("Name a colour.", "Blue\nor red.", system="Be brief."))
    assert spans_of(tokenizer, made) == ["Blue\nor red.<|im_end|>"]


def test_tagged_and_plain_template_give_the_same_sample() -> None:
    plain, tagged = (samples(byte_tokenizer(t), talk("alpha", "beta")) for t in (CHATML, TAGGED))
    assert plain == tagged
    assert plain[0].spans[0][1] - plain[0].spans[0][0] == 5


def test_rewritten_history_gives_each_turn_its_own_sample() -> None:
    tokenizer = byte_tokenizer(THINK)
    messages = talk("1+1?", "<think>\nadd\n</think>\n\n2", "3+3?", "<think>\nsum\n</think>\n\n6")
    made = samples(tokenizer, messages)
    assert spans_of(tokenizer, made) == [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert len(made) == 2
    for sample, t in zip(made, (1, 3), strict=True):
        answer = tokenizer(messages[t]["content"], add_special_tokens=False)["input_ids"]
        assert sample.token_ids == prompt_ids(tokenizer, messages[:t]) + answer + [IM_END]


def test_text_of_the_template_is_not_supervised() -> None:
    tokenizer = byte_tokenizer(THINK)
    assert "<think>" in tokenizer.apply_chat_template(talk("Hi", "Hello"), tokenize=False)
    made = samples(tokenizer, talk("Hi", "Hello"))
    assert spans_of(tokenizer, made) == ["Hello<|im_end|>"]
    assert "<think>" not in tokenizer.decode(made[0].token_ids)


def test_end_token_written_by_the_next_message() -> None:
    tokenizer = byte_tokenizer(END_IN_NEXT)
    made = samples(tokenizer, talk("u1", "r1", "u2", "r2"))
    assert len(made) == 1
    assert spans_of(tokenizer, made) == ["r1<|im_end|>", "r2<|im_end|>"]
    assert tokenizer.decode(made[0].token_ids).count("r1<|im_end|>\n<|im_start|>user") == 1


def test_cut_answer_gets_no_end() -> None:
    tokenizer = byte_tokenizer()
    assert spans_of(tokenizer, samples(tokenizer, talk("q", "r", "q", "cut mid wor"), cut=True)) == [
        "r<|im_end|>",
        "cut mid wor",
    ]


def test_trailing_user_turn_is_left_out() -> None:
    tokenizer = byte_tokenizer()
    assert samples(tokenizer, talk("a", "b", "c")) == samples(tokenizer, talk("a", "b"))


def test_pad_that_is_the_end_token_is_told_by_position(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(pad="<|im_end|>")
    rows = [Row("a", talk("a", "bb")), Row("b", talk("a", "bbbbbbbbbb"))]
    convert(tokenizer, rows, tmp_path, target=INFO)
    dialogs = read_dialogs(tmp_path)
    assert tokenizer.pad_token_id == IM_END
    assert sum(sum(d.supervised()) for d in dialogs) == 14
    for dialog in dialogs:
        assert [t for t, on in zip(dialog.token_ids, dialog.supervised(), strict=True) if on][-1] == IM_END


def test_truncation_is_counted_and_invents_no_end(tmp_path: Path) -> None:
    rows = [Row("long", talk("x" * 200, "answer")), Row("cut", talk("y" * 40, "z" * 200)), Row("ok", talk("q", "r"))]
    counts = convert(byte_tokenizer(), rows, tmp_path, target=INFO, max_length=128)
    cut, whole = read_dialogs(tmp_path)
    assert (cut.id, whole.id) == ("cut", "ok")
    assert counts["dropped: no supervised token within max_length"] == counts["truncated"] == 1
    assert counts["dialogs"] == 2
    assert len(cut.token_ids) == 128
    assert cut.token_ids[-1] == byte_tokenizer()("z")["input_ids"][0]
    assert whole.token_ids[-1] == IM_END
    assert read_manifest(tmp_path)["counts"] == dict(counts)


def test_truncate_drops_spans_beyond_the_end() -> None:
    sample = Sample(list(range(10)), [(2, 4), (6, 9)])
    assert truncate(sample, 7).spans == [(2, 4), (6, 7)]
    assert truncate(sample, 6).spans == [(2, 4)]
    assert truncate(sample, 2) == Sample([0, 1], [])


def test_rendered_text_is_used_as_is(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(None)  # no template is needed for it
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    convert(tokenizer, [Row("a", text=text), Row("b", text="no markers")], tmp_path, target=INFO)
    a, b = read_dialogs(tmp_path)
    assert tokenizer.decode(a.token_ids) == text
    assert all(a.supervised())
    assert tokenizer.decode(b.token_ids) == "no markers"


def test_no_template_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no chat template.*--chat-template FILE"):
        use_template(byte_tokenizer(None))
    with pytest.raises(HeadwayError, match="no chat template"):
        convert(byte_tokenizer(None), [Row("a", talk("hi", "yo"))], tmp_path / "out", target=INFO)
    assert not (tmp_path / "out").exists()


def test_template_from_a_file(tmp_path: Path) -> None:
    tokenizer, file = byte_tokenizer(None), tmp_path / "chat.jinja"
    file.write_text(CHATML, encoding="utf-8")
    use_template(tokenizer, file)
    assert samples(tokenizer, talk("hi", "yo")) == samples(byte_tokenizer(), talk("hi", "yo"))
    with pytest.raises(HeadwayError, match="cannot read"):
        use_template(tokenizer, tmp_path / "none.jinja")
    file.write_text("{{ broken", encoding="utf-8")
    with pytest.raises(HeadwayError, match="chat template refuses"):
        use_template(tokenizer, file)


REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML


def test_refusing_template_drops_the_row_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="no system"):
        prompt_ids(byte_tokenizer(REFUSES_SYSTEM), talk("a", system="S"))
    rows = [Row("a", talk("a", "b", system="S")), Row("b", talk("a", "b"))]
    counts = convert(byte_tokenizer(REFUSES_SYSTEM), rows, tmp_path, target=INFO)
    assert counts["dialogs"] == 1
    assert counts["dropped: the chat template refuses the conversation (no system)"] == 1


@pytest.mark.parametrize("fault", ["1 // 0", "range(10 ** 9)", "'%d' % m.content", "m.content.index('?')", "'a' + 1"])
def test_a_template_that_breaks_on_some_rows_drops_them(fault: str) -> None:
    template = CHATML.replace(
        "{{ '<|im_start|>'", "{% if m.content == 'bad' %}{{ " + fault + " }}{% endif %}{{ '<|im_start|>'"
    )
    with pytest.raises(RowError, match="the chat template refuses"):
        prompt_ids(byte_tokenizer(template), [{"role": "user", "content": "bad"}])


def test_a_template_that_refuses_any_answer_is_one_error(tmp_path: Path) -> None:
    template = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('ask first') }}{% endif %}" + CHATML
    with pytest.raises(HeadwayError, match="ask first.*--chat-template FILE"):
        convert(byte_tokenizer(template), [Row("a", talk("a", "b"))], tmp_path / "out", target=INFO)
    assert not (tmp_path / "out").exists()


def test_end_of_turn_is_what_the_template_writes() -> None:
    assert end_of_turn(byte_tokenizer()) == IM_END
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|eos|>"
    assert end_of_turn(tokenizer) == IM_END
    tokenizer.chat_template = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}" + GENERATION
    assert end_of_turn(tokenizer) == tokenizer.eos_token_id != IM_END


def test_user_prefix_stops_where_the_words_begin() -> None:
    for template, after in ((CHATML, "<|im_end|>\n"), (END_IN_NEXT, "<|im_end|>\n")):
        tokenizer = byte_tokenizer(template)
        turn = user_prefix(tokenizer)
        assert tokenizer.decode(turn.prefix_ids) == "<|im_start|>user\n"
        assert turn.end_ids == (IM_END,)
        assert turn.end_text.startswith(after)
    bare = byte_tokenizer("{% for m in messages %}{{ 'USER: ' ~ m.content ~ ' BOT:' }}{% endfor %}")
    assert user_prefix(bare).end_ids == ()
    assert user_prefix(bare).end_text == " BOT:"
