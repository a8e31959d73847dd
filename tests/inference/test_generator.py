"""The Generator: its answers are transformers' own, its streams join to them, and many callers share one batch."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, TextIteratorStreamer, TextStreamer

from headway import Generator, Settings
from headway.heads.common.errors import HeadwayError
from headway.inference.drafters.ngram import NgramDrafter
from headway.inference.generate import Request, Result, generate
from headway.inference.generation_config import settings_of
from headway.inference.generator import AsyncStream, Chunk
from headway.inference.target import Target
from tests.inference.helpers import NO_EOS, POLICIES, PROMPTS, encode, random_head
from tests.tiny import byte_tokenizer, llama12, target

TEXT = "né — 日本語 🙂🙃 ok"
"""Characters of one to four tokens."""
FREE: dict[str, Any] = {"eos_ids": ()}


@pytest.fixture(scope="module")
def twelve() -> Target:
    return target(llama12())


@pytest.fixture
def generator(twelve: Target) -> Iterator[Generator]:
    with Generator(twelve, random_head("eagle3", twelve), POLICIES["dynamic"], batch_size=4) as made:
        yield made


def spell(text: str) -> list[int]:
    """Return the ids that the tokenizer gives a text."""
    return list(byte_tokenizer()(text).input_ids)


def engines() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "headway-engine"]


def until(done: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.005)
    return done()


def writes(text: str, prompt: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a processor under which the answer to the prompt is the text."""
    wanted = spell(text)

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        at = ids.shape[1] - len(prompt)
        only = torch.full_like(scores, -torch.inf)
        only[0, wanted[at] if at < len(wanted) else 260] = 0.0
        return only

    return process


def passes(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each pass of the target."""
    rows: list[int] = []
    forward = target.forward

    def counted(token_BN: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(token_BN))
        return forward(token_BN, *args, **kwargs)

    monkeypatch.setattr(target, "forward", counted)
    return rows


CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 16},
    "min_length": {"min_length": 24},
    "bad_words": {"bad_words_ids": [[134], [93, 48]]},
    "suppress": {"suppress_tokens": list(range(0, 250, 3))},
    "begin_suppress": {"begin_suppress_tokens": list(range(0, 250, 2))},
    "forced_bos": {"forced_bos_token_id": 8},
    "forced_eos": {"forced_eos_token_id": 9},
    "sequence_bias": {"sequence_bias": [[[158], -20.0], [[17], 3.0]], "repetition_penalty": 1.3},
    "decay": {"exponential_decay_length_penalty": (3, 1.5)},
    "max_length": {"max_length": 20, "max_new_tokens": None},
    "defaults": {"max_new_tokens": None},
    "greedy with a sampler": {"do_sample": False, "typical_p": 0.5, "top_k": 3},
    "stop_strings": {"stop_strings": ["k", "|"]},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt", PROMPTS[:2], ids=["long", "one token"])
def test_a_config_means_what_it_means_to_transformers(
    twelve: Target, generator: Generator, name: str, prompt: str
) -> None:
    ids = torch.tensor([encode(prompt)])
    inputs = {"inputs": ids, "attention_mask": torch.ones_like(ids), "tokenizer": twelve.tokenizer}
    free = twelve.model.generate(**inputs, do_sample=False, max_new_tokens=20, eos_token_id=NO_EOS, pad_token_id=0)
    ends = [int(free[0, -8]), 271]
    fields = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": ends} | CONFIGS[name]
    fields = {key: value for key, value in fields.items() if value is not None}
    config = GenerationConfig(**fields)
    want = twelve.model.generate(**inputs, generation_config=config)[0, ids.shape[1] :].tolist()
    result = generator.generate(encode(prompt), config)
    assert result.token_ids == want
    if name in ("stop_strings", "nothing"):
        assert len(want) < 20


def test_what_settings_have_becomes_settings(twelve: Target) -> None:
    fields = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    config = GenerationConfig(max_new_tokens=9, eos_token_id=[3, 4], min_new_tokens=2, stop_strings="x", **fields)
    torch.manual_seed(3)
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(3)
    del fields["do_sample"]
    want = Settings(max_new_tokens=9, eos_ids=(3, 4), min_new_tokens=2, stop=("x",), seed=seed, **fields)
    assert settings_of(config, twelve, [1, 2]) == want
    # transformers' own defaults: it samples among the 50 best.
    plain = settings_of(GenerationConfig(do_sample=True, max_new_tokens=9), twelve, [1, 2])
    assert (plain.temperature, plain.top_k, plain.top_p, plain.eos_ids) == (1.0, 50, 1.0, (260,))


def test_samplers_apply_in_sampling(twelve: Target, generator: Generator) -> None:
    """So small a typical set has one token, which need not be the best one."""
    config = GenerationConfig(do_sample=True, typical_p=1e-6, max_new_tokens=12, top_k=0, eos_token_id=NO_EOS)
    ids = torch.tensor([encode(PROMPTS[0])])
    want = twelve.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, pad_token_id=0)
    got = generator.generate(encode(PROMPTS[0]), config)
    assert got.token_ids == want[0, ids.shape[1] :].tolist()
    assert got.token_ids != generator.generate(encode(PROMPTS[0]), max_new_tokens=12, **FREE).token_ids


def test_the_seed_of_a_config_is_torchs_unless_given(generator: Generator) -> None:
    config = GenerationConfig(do_sample=True, max_new_tokens=12, eos_token_id=NO_EOS)
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(generator.generate("a", config).token_ids)
    assert answers[0] == answers[1] != answers[2]
    assert generator.generate("a", config, seed=5).token_ids == generator.generate("a", config, seed=5).token_ids
    with pytest.raises(HeadwayError, match="temperature"):
        generator.generate("a", config, temperature=0.3)


REFUSED: dict[str, Any] = {
    "assistant_early_exit": 2,
    "cache_implementation": "static",
    "dola_layers": "low",
    "early_stopping": True,
    "encoder_repetition_penalty": 1.5,
    "guidance_scale": 1.5,
    "max_time": 1.0,
    "no_such_field": 3,
    "num_beams": 2,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "penalty_alpha": 0.6,
    "top_p": 0.0,
    "prompt_lookup_num_tokens": 3,
    "return_dict_in_generate": True,
    "token_healing": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(generator: Generator, name: str) -> None:
    config = GenerationConfig(max_new_tokens=4, do_sample=True)
    setattr(config, name, REFUSED[name])
    with pytest.raises(HeadwayError, match=f"^{name} is "):
        generator.generate("a", config)


def test_a_field_of_the_models_own_config_counts_too(
    twelve: Target, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twelve.model.generation_config, "num_beams", 3)
    with pytest.raises(HeadwayError, match="num_beams is 3"):
        generator.generate("a", GenerationConfig(max_new_tokens=4))
    monkeypatch.setattr(twelve.model.generation_config, "chat_format", "own", raising=False)
    monkeypatch.setattr(twelve.model.generation_config, "num_beams", None)
    assert generator.generate("a", twelve.model.generation_config).new_tokens == 20


def test_settings_by_name_or_whole(twelve: Target, generator: Generator) -> None:
    (want,) = generate(twelve, [Request([5, 6], Settings(max_new_tokens=9, temperature=0.8, seed=2))])
    assert generator.generate([5, 6], max_new_tokens=9, temperature=0.8, seed=2).token_ids == want.token_ids
    whole = Settings(max_new_tokens=30, temperature=0.8, seed=2)
    assert generator.generate([5, 6], whole, max_new_tokens=9).token_ids == want.token_ids
    with pytest.raises(HeadwayError, match="'num_beams'.*max_new_tokens"):
        generator.generate([5, 6], num_beams=2)
    with pytest.raises(HeadwayError, match="temperature is -1"):
        generator.generate([5, 6], temperature=-1)


def test_prompts(twelve: Target, generator: Generator) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    ids = twelve.tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids
    want = generator.generate(ids, max_new_tokens=6)
    assert generator.generate(chat, max_new_tokens=6).token_ids == want.token_ids
    assert generator.generate("Hi", max_new_tokens=6).token_ids == want.token_ids
    assert generator.generate(torch.tensor(ids), max_new_tokens=6).token_ids == want.token_ids  # type: ignore[arg-type]
    bare = Target(twelve.model, byte_tokenizer(chat_template=None), "bare", mode="tree")
    with Generator(bare) as other:
        assert (
            other.generate("Hi", max_new_tokens=6).token_ids
            == generator.generate(spell("Hi"), max_new_tokens=6).token_ids
        )
        with pytest.raises(HeadwayError, match="no chat template"):
            other.generate(chat)
    with Generator(Target(twelve.model, None, "mute", mode="tree")) as mute:
        assert mute.generate(ids, max_new_tokens=6).text is None
        assert [chunk.text for chunk in mute.stream(ids, max_new_tokens=2)] == ["", ""]
        with pytest.raises(HeadwayError, match="tokenizer"):
            mute.generate("Hi")
    wrong: list[tuple[Any, str]] = [([], "empty"), ([1, 999], "999"), (["a", "b"], "generate_all"), (None, "NoneType")]
    for prompt, said in wrong:
        with pytest.raises(HeadwayError, match=said):
            generator.generate(prompt)


@pytest.mark.parametrize("mode", ["tree", "chain", "plain"])
def test_streams_join_to_the_answer(twelve: Target, mode: str) -> None:
    model = Target(twelve.model, byte_tokenizer(), "tiny", mode=mode)
    with Generator(model, random_head("medusa", model)) as generator:
        for settings in ({}, {"temperature": 1.0, "seed": 4}):
            want = generator.generate("Hi", max_new_tokens=20, **settings)
            (alone,) = generate(twelve, [Request(_chat(twelve, "Hi"), Settings(max_new_tokens=20, **settings))])
            assert want.token_ids == alone.token_ids
            assert (want.finish_reason, want.rounds, want.id) == (
                alone.finish_reason,
                alone.rounds,
                0,
            ) or mode != "plain"
            stream = generator.stream("Hi", max_new_tokens=20, **settings)
            assert stream.result is None
            chunks = list(stream)
            assert [token for chunk in chunks for token in chunk.token_ids] == want.token_ids
            assert "".join(chunk.text for chunk in chunks) == want.text
            assert stream.result == want
            assert len(chunks) > 3
            assert list(stream) == []


def _chat(target: Target, text: str) -> list[int]:
    ids = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True
    ).input_ids
    return list(ids)


def test_a_drafter_in_place_of_a_head(twelve: Target, generator: Generator) -> None:
    prompt = encode("abcabcabc")
    with Generator(twelve, NgramDrafter()) as other:
        got = other.generate(prompt, max_new_tokens=30, **FREE)
    assert got.token_ids == generator.generate(prompt, max_new_tokens=30, **FREE).token_ids


def test_no_chunk_shows_half_a_character(generator: Generator) -> None:
    prompt = encode("Hi")
    stream = generator.stream(prompt, processors=(writes(TEXT, prompt),))
    chunks = list(stream)
    assert stream.result is not None
    assert stream.result.text == "".join(chunk.text for chunk in chunks) == TEXT
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert stream.result.finish_reason == "stop"
    assert stream.result.token_ids == [*spell(TEXT), 260]
    stopped = generator.stream(prompt, processors=(writes(TEXT, prompt),), stop=["語 🙂🙃"])
    assert "".join(chunk.text for chunk in stopped) == "né — 日本"
    assert stopped.result is not None
    assert stopped.result.finish_reason == "stop_string"
    # Cut by length within a character.
    assert generator.generate(prompt, processors=(writes("aé", prompt),), max_new_tokens=2).text == "a"


def test_generate_all_keeps_the_order(twelve: Target, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [encode(prompt) for prompt in PROMPTS]
    rows = passes(twelve, monkeypatch)
    settings = Settings(max_new_tokens=15, temperature=0.9, seed=3)
    results = generator.generate_all(prompts, settings)
    assert max(rows) == 4
    assert [result.id for result in results] == [0, 1, 2, 3]
    for n, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        (want,) = generate(twelve, [Request(prompt, settings, key=n)])
        assert result.token_ids == want.token_ids
    assert generator.generate_all([]) == []
    with pytest.raises(HeadwayError, match="one string"):
        generator.generate_all("Hi")
    rows.clear()
    with pytest.raises(HeadwayError, match="empty"):
        generator.generate_all([[1], []])
    assert rows == []


def test_an_early_close_ends_the_work(twelve: Target, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = passes(twelve, monkeypatch)
    for way in ("close", "with", "drop", "break"):
        rows.clear()
        if way == "break":
            for _ in generator.stream("Hi", max_new_tokens=400, **FREE):
                break
        else:
            stream = generator.stream("Hi", max_new_tokens=400, **FREE)
            next(stream)
            if way == "close":
                stream.close()
                assert list(stream) == []
            elif way == "with":
                with stream:
                    pass
            assert stream.result is None
            del stream
        assert until(lambda: not engines())
        assert 0 < len(rows) < 200, way
    assert generator.generate("Hi", max_new_tokens=3).new_tokens == 3


async def read(stream: AsyncStream) -> tuple[list[Chunk], Result | None]:
    return [chunk async for chunk in stream], stream.result


def test_concurrent_astreams_share_passes(
    twelve: Target, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [*PROMPTS, "one more", "and another"]
    want = [generator.generate(prompt, max_new_tokens=20, temperature=0.5, **FREE) for prompt in prompts]
    rows = passes(twelve, monkeypatch)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async def main() -> list[tuple[list[Chunk], Result | None]]:
        ticking = asyncio.create_task(tick())
        streams = (generator.astream(prompt, max_new_tokens=20, temperature=0.5, **FREE) for prompt in prompts)
        done = await asyncio.gather(*map(read, streams))
        ticking.cancel()
        return done

    for (chunks, result), alone in zip(asyncio.run(main()), want, strict=True):
        assert result is not None
        assert result.token_ids == alone.token_ids == [token for chunk in chunks for token in chunk.token_ids]
        assert result.text == alone.text == "".join(chunk.text for chunk in chunks)
    assert max(rows) == 4
    assert ticks > 5
    assert until(lambda: not engines())


def test_a_request_enters_while_others_run(
    twelve: Target, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = passes(twelve, monkeypatch)
    first = generator.stream("Hi", max_new_tokens=300, **FREE)
    next(first)
    second = generator.generate("a", max_new_tokens=5, **FREE)  # is answered before the first one is
    assert first._job in generator._engine._running
    assert second.new_tokens == 5
    assert 2 in rows
    first.close()


def test_a_cancelled_task_ends_its_row(twelve: Target, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = passes(twelve, monkeypatch)

    async def main(held: bool) -> Result | None:
        stream = generator.astream("Hi", max_new_tokens=400, **FREE)

        async def consume() -> None:
            async for _ in stream if held else generator.astream("Hi", max_new_tokens=400, **FREE):
                pass

        task = asyncio.create_task(consume())
        other = asyncio.create_task(read(generator.astream("a", max_new_tokens=9, **FREE)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if not held:
            await stream.aclose()
        return (await other)[1]

    for held in (True, False):
        rows.clear()
        result = asyncio.run(main(held))
        assert result is not None
        assert result.new_tokens == 9
        gc.collect()
        assert until(lambda: not engines())
        assert len(rows) < 200


def test_a_closed_loop_ends_the_row(twelve: Target, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = passes(twelve, monkeypatch)
    kept = []

    async def main() -> None:
        kept.append(generator.astream("Hi", max_new_tokens=400, **FREE))
        await anext(kept[0])

    asyncio.run(main())
    assert until(lambda: not engines())
    assert len(rows) < 200


class BrokenError(RuntimeError):
    pass


def breaks(ids: Tensor, scores: Tensor) -> Tensor:
    if ids.shape[1] > 12:
        raise BrokenError("the processor broke")
    return scores


def test_an_error_reaches_all_rows_that_ran(generator: Generator) -> None:
    async def main() -> list[Any]:
        bad = generator.astream(encode("Hello"), max_new_tokens=20, processors=(breaks,), **FREE)
        # Four run and two wait.
        good = [generator.astream(prompt, max_new_tokens=40, **FREE) for prompt in "abcde"]
        return await asyncio.gather(*map(read, [bad, *good]), return_exceptions=True)

    first = generator.stream(encode("Hello"), max_new_tokens=20, processors=(breaks,), **FREE)
    second = generator.stream(encode("Hi"), max_new_tokens=400, **FREE)
    for stream in (first, second):
        with pytest.raises(BrokenError, match="the processor broke"):
            list(stream)
        assert list(stream) == []
    answers = asyncio.run(main())
    assert [isinstance(answer, BrokenError) for answer in answers] == [True] * 4 + [False] * 2
    assert answers[4][1].token_ids == generator.generate("d", max_new_tokens=40, **FREE).token_ids
    assert until(lambda: not engines())
    assert generator.generate("Hi", max_new_tokens=5, **FREE).new_tokens == 5


def test_a_reader_whose_stream_is_closed_elsewhere_goes_on(generator: Generator) -> None:
    """Even where the request still waits for its place."""
    busy = [generator.stream(encode(text), max_new_tokens=400, **FREE) for text in "abcd"]
    waiting = generator.stream(encode("Hello"), max_new_tokens=20, **FREE)
    read: list[list[Any]] = []
    reader = threading.Thread(target=lambda: read.append(list(waiting)), daemon=True)
    reader.start()
    waiting.close()
    reader.join(20)
    assert not reader.is_alive()
    assert waiting.result is None
    for stream in busy:
        stream.close()

    async def main() -> list[Any]:
        busy = [generator.astream(encode(text), max_new_tokens=400, **FREE) for text in "abcd"]
        waiting = generator.astream(encode("Hello"), max_new_tokens=20, **FREE)
        task = asyncio.ensure_future(anext(waiting, None))
        await asyncio.sleep(0)
        await waiting.aclose()
        found = await asyncio.wait_for(task, 20)
        for stream in busy:
            await stream.aclose()
        return [found, waiting.result]

    assert asyncio.run(main()) == [None, None]


def test_close_does_not_wait_for_another_generator(twelve: Target) -> None:
    busy, other = Generator(twelve), Generator(twelve)
    with busy.stream(encode("Hello"), max_new_tokens=400, **FREE) as stream:
        next(stream)
        waiting = other.stream(encode("Hi"), max_new_tokens=4, **FREE)
        closing = threading.Thread(target=other.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
        assert stream.result is None
        with pytest.raises(HeadwayError, match="closed"):
            list(waiting)
    busy.close()


def test_threads_get_their_own_answers(twelve: Target, generator: Generator) -> None:
    prompts = [encode(prompt) for prompt in PROMPTS]
    want = [generator.generate(prompt, max_new_tokens=25, **FREE).token_ids for prompt in prompts]
    other = Generator(twelve)  # of the same target
    got: Queue[tuple[int, list[int]]] = Queue()

    def ask(n: int) -> None:
        for made in (generator, other, generator):
            got.put((n, made.generate(prompts[n], max_new_tokens=25, **FREE).token_ids))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    answers = [got.get_nowait() for _ in range(3 * len(prompts))]
    assert all(tokens == want[n] for n, tokens in answers)
    other.close()


def test_close(twelve: Target) -> None:
    generator = Generator(twelve)
    running, waiting = (generator.stream("Hi", max_new_tokens=400, **FREE) for _ in range(2))
    next(running)
    generator.close()
    assert not engines()
    for stream in (running, waiting):
        with pytest.raises(HeadwayError, match="closed"):
            list(stream)
    with pytest.raises(HeadwayError, match="closed"):
        generator.generate("Hi")
    generator.close()
    with pytest.raises(HeadwayError, match="batch_size is 0"):
        Generator(twelve, batch_size=0)


@pytest.mark.parametrize("skip", [False, True])
def test_streamers_show_what_transformers_shows(
    twelve: Target, generator: Generator, capsys: pytest.CaptureFixture[str], skip: bool
) -> None:
    ids = torch.tensor([encode("Hello you")])
    config = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=NO_EOS)
    inputs: dict[str, Any] = {"inputs": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    twelve.model.generate(**inputs, generation_config=config, streamer=TextStreamer(twelve.tokenizer, skip_prompt=skip))
    want = capsys.readouterr().out
    result = generator.generate(ids[0].tolist(), config, streamer=TextStreamer(twelve.tokenizer, skip_prompt=skip))
    assert capsys.readouterr().out == want
    assert result.new_tokens == 30

    pieces = []
    for run in (
        lambda streamer: twelve.model.generate(**inputs, generation_config=config, streamer=streamer),
        lambda streamer: generator.generate(ids[0].tolist(), config, streamer=streamer),
    ):
        streamer = TextIteratorStreamer(twelve.tokenizer, skip_prompt=skip, timeout=30)
        thread = threading.Thread(target=run, args=(streamer,))
        thread.start()
        pieces.append(list(streamer))
        thread.join(30)
    assert pieces[0] == pieces[1]


def test_a_streamer_ends_when_the_answer_fails(generator: Generator) -> None:
    streamer = TextIteratorStreamer(byte_tokenizer(), timeout=30)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            generator.generate(spell("Hello"), streamer=streamer, processors=(breaks,), **FREE)
        except BrokenError as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert "".join(streamer).startswith("Hello")
    thread.join(30)
    assert len(failed) == 1


def test_requests_may_come_while_rows_run(twelve: Target) -> None:
    """The hook of `generate` by itself: None for none at the moment."""
    long, short = Settings(max_new_tokens=20, **FREE), Settings(max_new_tokens=3, **FREE)
    asked: list[int] = []

    def arriving() -> Iterator[Request | None]:
        yield None
        yield Request([1], long, id="first")
        for n in range(5):
            asked.append(n)
            yield None
        yield Request([2], short, id="second")
        while asked.pop():
            yield None

    order = [result.id for result in generate(twelve, arriving(), batch_size=2)]
    assert order == ["second", "first"]
    assert generate(twelve, iter([None, None]), batch_size=2).__next__ is not None
    assert list(generate(twelve, iter([None, None]), batch_size=2)) == []
    plain = Target(twelve.model, None, "plain", mode="plain")
    assert [result.id for result in generate(plain, iter([None, Request([1], short, id=7), None]))] == [7]


def test_targets_around_one_model_take_turns(twelve: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass changes the model's modules while it runs: two at once would read one another's features."""
    twin = Target(twelve.model, twelve.tokenizer, "twin", mode="tree")
    running, most = 0, []
    forward = Target.forward

    def counted(self: Target, *args: Any, **kwargs: Any) -> Any:
        nonlocal running
        running += 1
        most.append(running)
        time.sleep(0.002)
        try:
            return forward(self, *args, **kwargs)
        finally:
            running -= 1

    monkeypatch.setattr(Target, "forward", counted)
    head = random_head("eagle3", twelve)
    with Generator(twelve, head) as first, Generator(twin, head) as second:
        streams = [made.stream("Hi", max_new_tokens=20, **FREE) for made in (first, second)]
        texts = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
    assert max(most) == 1
    assert texts[0] == texts[1]
