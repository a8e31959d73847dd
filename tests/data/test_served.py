"""Servers that fail: nothing lost, nothing twice, every failure counted by its kind; what comes back kept as it came."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import GENERATION, IM_END, byte_tokenizer
from fake_server import KINDS, Body, FakeServer
from tiny_target import tiny_target

from headway.cli import main
from headway.data.chat import Chat, prompt_ids
from headway.data.dialogs import Dialog, read_dialogs, read_manifest
from headway.data.endpoint import Breaker, Patience, RequestError, clean_url
from headway.data.prompts import Row
from headway.data.reply import CHANGED, NO_END, NO_IDS, dialog_ids, read_reply
from headway.data.served import ServedReport, Servers, api_key, distill_served
from headway.data.turns import TemperatureMix
from headway.heads.common.errors import HeadwayError, Interrupted
from headway.heads.common.protocol import TargetInfo
from headway.inference.sampling import Settings

SETTINGS = Settings(max_new_tokens=30, temperature=1.0, seed=3)
FAST = Patience(first_wait=0.004, longest_wait=0.02, cool_down=0.01, give_up=0.3)
INFO = TargetInfo(
    name="tiny",
    model_type="llama",
    hidden_size=32,
    vocab_size=264,
    num_tokens=264,
    num_layers=2,
    text_config={"max_position_embeddings": 256},
)
REASONS = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<|tool|>' ~ c.function.name ~ (c.function.arguments | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + GENERATION
)


def ask(*prompts: str) -> list[Row]:
    return [Row(f"r{i}", [{"role": "user", "content": prompt}]) for i, prompt in enumerate(prompts)]


def turns(name: str, *texts: str) -> Row:
    return Row(name, [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)])


def run(fake: FakeServer | list[str], rows: list[Row], out: Path, **more: Any) -> ServedReport:
    urls = fake if isinstance(fake, list) else [fake.url]
    tokenizer = byte_tokenizer(more.pop("template")) if "template" in more else byte_tokenizer()
    of_servers = {k: more.pop(k) for k in ("api", "concurrency", "key", "timeout", "patience", "fields") if k in more}
    servers = Servers(urls=tuple(urls), **{"timeout": 5.0, "concurrency": 8, "patience": FAST, **of_servers})
    return distill_served(
        tokenizer, INFO, rows, out, **{"servers": servers, "settings": SETTINGS, "show": False, **more}
    )


def answers(out: Path) -> dict[str, str]:
    """Return the text of the answer of each dialog, each of which is there once."""
    dialogs = read_dialogs(out)
    assert len({d.id for d in dialogs}) == len(dialogs)
    return {d.id: byte_tokenizer().decode(d.token_ids[slice(*d.spans[0])]) for d in dialogs}


def test_a_dozen_ways_to_fail_lose_nothing_and_write_nothing_twice(tmp_path: Path) -> None:
    rows, ways = ask(*(f"question {i}" for i in range(39))), list(KINDS)

    def script(body: Body, attempt: int) -> str:
        number = int(body["messages"][-1]["content"].split()[1])
        return ways[(number + 5 * attempt) % len(ways)] if attempt < 2 else ""

    with FakeServer(script, hang=0.35) as one, FakeServer(script, hang=0.35) as other:
        report = run([one.url, other.url], rows, tmp_path, concurrency=3, timeout=0.3)
        failed = one.failed + other.failed
    assert set(failed) == set(ways)
    expected: Counter[str] = Counter()
    for way, count in failed.items():
        expected[KINDS[way]] += count
    # On a busy machine a request may be given up that the server was about to answer, or to fail in another way: a timeout
    # more, and maybe one less of another kind. Without such, the counts are equal.
    late = report.failures["timeout"] - expected["timeout"]
    assert set(report.failures - expected) <= {"timeout"}
    assert sum((expected - report.failures).values()) <= late
    assert sum(report.failures.values()) == len(one.bodies + other.bodies) - 39
    assert sum((Counter(s["failures"]) for s in report.per_server.values()), Counter()) == report.failures
    assert answers(tmp_path) == {f"r{i}": f"re: question {i}<|im_end|>" for i in range(39)}
    assert [d.id for d in read_dialogs(tmp_path)] == [row.id for row in rows]  # whole, so in order
    assert not report.left_open
    assert report.counts == {"dialogs": 39, "tokens": report.counts["tokens"], "stop": 39}
    assert all(f"{kind} {n}" in str(report) for s in report.per_server.values() for kind, n in s["failures"].items())


def test_prompt_and_answer_are_the_ids_that_the_server_says(tmp_path: Path) -> None:
    with FakeServer() as fake:
        run(fake, ask("a", "b"), tmp_path)
    for dialog, text in zip(read_dialogs(tmp_path), "ab", strict=True):
        prompt = prompt_ids(byte_tokenizer(), [{"role": "user", "content": text}])
        emitted = [*byte_tokenizer()(f"re: {text}", add_special_tokens=False)["input_ids"], IM_END]
        assert dialog == Dialog(
            dialog.id,
            prompt + emitted,
            [(len(prompt), len(prompt) + len(emitted))],
            "stop",
            {"role": "assistant", "content": f"re: {text}"},
        )


def test_a_server_with_a_template_of_its_own_is_believed_and_noted(tmp_path: Path) -> None:
    with FakeServer(template="{{ '<|bos|>' ~ messages[-1].content }}") as fake:
        counts = run(fake, ask("a"), tmp_path).counts
        assert counts["note: prompt as the server rendered it"] == 1
        assert read_dialogs(tmp_path)[0].token_ids[:2] == [257, 64]
        assert run(fake, ask("a", "b"), tmp_path).counts["dialogs"] == 2  # and is continued


def test_without_ids_they_are_made_of_the_text_and_changes_are_counted(tmp_path: Path) -> None:
    def script(body: Body, attempt: int) -> Body:
        text = body["messages"][-1]["content"]
        more = {"merged": {"completion_tokens": 3}, "cut": {"finish_reason": "length"}}.get(text, {})
        return {"content": f"to {text}", **more}

    with FakeServer(script, ids=False) as fake:
        counts = run(fake, ask("a", "merged", "cut"), tmp_path).counts
    assert counts[f"note: {NO_IDS}"] == 3
    assert counts[f"note: {CHANGED}"] == 1
    assert answers(tmp_path) == {"r0": "to a<|im_end|>", "r1": "to merged<|im_end|>", "r2": "to cut"}
    assert [d.finish for d in read_dialogs(tmp_path)] == ["stop", "stop", "length"]
    assert read_manifest(tmp_path)["counts"] == dict(counts)


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
REASONED = {"content": "1", "reasoning_content": "so"}
CALLED = {"content": None, "tool_calls": [CALL], "finish_reason": "tool_calls"}


@pytest.mark.parametrize("ids", [True, False])
def test_reasoning_and_calls_are_kept(tmp_path: Path, ids: bool) -> None:
    spelt = {"think": "<think>\nso\n</think>\n\n1", "call": '<|tool|>add{"a": 1}'}
    said = {"think": REASONED, "call": CALLED}

    def script(body: Body, attempt: int) -> Body:
        text = body["messages"][-1]["content"]
        return {**said[text], "emitted": spelt[text]} if text in said else {"content": "ok"}

    rows = [turns("think", "think", "given", "then"), turns("call", "call", "given", "then")]
    with FakeServer(script, ids=ids, template=REASONS) as fake:
        counts = run(fake, rows, tmp_path, template=REASONS).counts
        asked = {body["messages"][0]["content"]: body["messages"] for body in fake.bodies if len(body["messages"]) == 3}
    assert answers(tmp_path)["think"] == f"{spelt['think']}<|im_end|>"
    assert answers(tmp_path)["call"] == f"{spelt['call']}<|im_end|>"
    assert asked["think"][1] == {"role": "assistant", **REASONED}
    assert asked["call"][1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert counts["dialogs"] == 4


def test_reasoning_that_cannot_be_spelt_is_dropped_and_counted(tmp_path: Path) -> None:
    with FakeServer(lambda body, attempt: {"content": "1", "reasoning": "so"}, ids=False) as fake:
        counts = run(fake, ask("a"), tmp_path).counts
    (dropped,) = (k for k in counts if k.startswith("dropped"))
    assert "does not write reasoning" in dropped


LIES: list[tuple[str, Any]] = [
    ("choices.0.finish_reason", ["stop"]),
    ("choices.0.finish_reason", {"a": 1}),
    ("choices.0.message.content", "\ud800"),
    ("choices.0.message.reasoning_content", "so\udfff"),
    ("choices.0.message.tool_calls", [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]),
    ("choices.0.message.tool_calls", [{"function": {"name": "\ud800"}}]),
    ("choices.0.message.tool_calls", [[]]),
    ("choices.0.message", "hello"),
    ("choices.0", None),
    ("sglext", {"output_ids": 1.5}),
    ("sglext", {"output_ids": {"a": 1}}),
    ("sglext", {"output_ids": [5]}),
    ("usage", [1]),
]


@pytest.mark.parametrize(("place", "value"), LIES, ids=[f"{place} {value!r}"[:50] for place, value in LIES])
def test_what_a_server_makes_up_is_an_error_of_its_own_or_harmless(place: str, value: Any) -> None:
    answer: Any = {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}]}
    *way, last = [int(part) if part.isdecimal() else part for part in place.split(".")]
    at = answer
    for part in way:
        at = at[part]
    at[last] = value
    messages = [{"role": "user", "content": "a"}]
    chat = Chat(byte_tokenizer(REASONS))
    try:
        reply = read_reply(answer, "tiny", 264)
        _, ids, _ = dialog_ids(reply, chat, messages, None, prompt_ids(chat.tokenizer, messages), {IM_END})
    except RequestError:
        return
    assert ids[-1] == IM_END


def test_arguments_nested_without_end_stay_text() -> None:
    deep = "[" * 100_000
    message = {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    reply = read_reply({"choices": [{"finish_reason": "stop", "message": message}]}, "tiny", 264)
    assert reply.message["tool_calls"][0]["function"]["arguments"] == deep


def test_a_body_nested_without_end_is_no_json(tmp_path: Path) -> None:
    with FakeServer() as fake:
        send, bodies = fake.send, iter([b"[" * 100_000])

        def lie(to: Any, status: int, what: Any, *more: Any) -> None:
            send(to, status, next(bodies, what) if "choices" in what else what, *more)

        fake.send = lie  # type: ignore[method-assign]
        report = run(fake, ask("a"), tmp_path)
    assert report.failures == {"not JSON": 1}
    assert answers(tmp_path) == {"r0": "re: a<|im_end|>"}


def test_a_template_that_takes_no_answers_is_one_error(tmp_path: Path) -> None:
    template = "{{ raise_exception('no') if messages | length > 1 }}{{ messages[0].content }}"
    with (
        FakeServer() as fake,
        pytest.raises(HeadwayError, match=r"refuses the conversation \(no\); give a working one"),
    ):
        run(fake, ask("a"), tmp_path / "out", template=template)
    assert not (tmp_path / "out").exists()


def test_an_end_that_the_server_cut_off_is_put_back(tmp_path: Path) -> None:
    script = lambda body, attempt: {"content": "done"}  # noqa: E731
    with FakeServer(script) as fake:
        whole = fake.completion
        fake.completion = lambda *a: (r := whole(*a), r["choices"][0]["token_ids"].pop())[0]  # type: ignore[method-assign]
        counts = run(fake, ask("a"), tmp_path).counts
    assert counts[f"note: {NO_END}"] == 1
    assert answers(tmp_path) == {"r0": "done<|im_end|>"}


def test_strict_servers_are_asked_in_openais_words_only(tmp_path: Path) -> None:
    with FakeServer(strict=True) as fake:
        report = run(fake, ask(*"abcd"), tmp_path / "a", concurrency=1)
        assert report.counts["dialogs"] == report.counts[f"note: {NO_IDS}"] == 4
        assert len(fake.bodies) == 5  # one was refused
        assert "OpenAI's fields only" in str(report)
        with pytest.raises(HeadwayError, match="takes no top_k"):
            run(fake, ask("a"), tmp_path / "b", settings=Settings(temperature=1.0, top_k=5))


def test_turns_follow_own_or_given_answers(tmp_path: Path) -> None:
    rows = [turns("a", "one", "given 1", "two", "given 2", "three"), turns("b", "lone")]
    with FakeServer() as fake:
        run(fake, rows, tmp_path / "own")
        own = [[m["content"] for m in body["messages"]] for body in fake.bodies]
        fake.bodies.clear()
        run(fake, rows, tmp_path / "given", history="given")
        given = [[m["content"] for m in body["messages"]] for body in fake.bodies]
    assert sorted(own, key=len)[2:] == [["one", "re: one", "two"], ["one", "re: one", "two", "re: two", "three"]]
    assert sorted(given, key=len)[2:] == [["one", "given 1", "two"], ["one", "given 1", "two", "given 2", "three"]]
    for folder in ("own", "given"):
        assert [d.id for d in read_dialogs(tmp_path / folder)] == ["a", "a turn 2", "a turn 3", "b"]
    with FakeServer() as fake, pytest.raises(HeadwayError, match="history was 'given', now None"):
        run(fake, rows, tmp_path / "given")


def test_tool_turns_stay_as_they_are(tmp_path: Path) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "sum?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "given"},
        {"role": "user", "content": "sure?"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with FakeServer(template=REASONS) as fake:
        run(fake, [Row("t", messages, tools=tools)], tmp_path, template=REASONS)
    first, second = fake.bodies
    assert [m["content"] for m in first["messages"]] == ["sum?", "", "2"]
    assert first["messages"][1]["tool_calls"] == [CALL]  # arguments as text, as OpenAI has them
    assert first["tools"] == tools
    assert [m["content"] for m in second["messages"]] == ["sum?", "", "2", "re: 2", "sure?"]
    assert [d.id for d in read_dialogs(tmp_path)] == ["t", "t turn 2"]


def test_completions_are_sent_ids(tmp_path: Path) -> None:
    row = turns("a", "x", "given", "y")
    with FakeServer(lambda body, attempt: {"content": "<think>so</think>1"}) as fake:
        run(fake, [row], tmp_path, api="completions", concurrency=1)
    history = [row.messages[0], {"role": "assistant", "content": "<think>so</think>1"}, row.messages[2]]
    assert [body["prompt"] for body in fake.bodies] == [prompt_ids(byte_tokenizer(), m) for m in (history[:1], history)]
    assert all(body["skip_special_tokens"] is False for body in fake.bodies)
    assert answers(tmp_path)["a"] == "<think>so</think>1<|im_end|>"
    assert read_dialogs(tmp_path)[0].answer is None


def test_a_run_is_continued_and_asks_the_rest_only(tmp_path: Path) -> None:
    rows = [turns(f"r{i}", f"q{i}", "given", f"z{i}") for i in range(6)]
    mix = TemperatureMix.parse("0:1,0.7:1,1.5:2")
    with FakeServer() as fake:
        run(fake, rows, tmp_path / "a", max_tokens_total=20, concurrency=1, mix=mix)
        begun = set(answers(tmp_path / "a"))
        first = list(fake.bodies)
        assert 0 < len(begun) < 12
        run(fake, rows, tmp_path / "a", mix=mix)
        assert len(fake.bodies) == 12
        run(fake, rows, tmp_path / "b", mix=mix)
        again = fake.bodies[12:]
    assert len(answers(tmp_path / "a")) == 12
    for name in ("dialogs.jsonl", "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    key = lambda body: json.dumps(body, sort_keys=True)  # noqa: E731  # temperature and seed are in it
    assert sorted(map(key, again)) == sorted(map(key, [*first, *fake.bodies[len(first) : 12]]))
    assert len({body["temperature"] for body in again}) > 1
    with FakeServer() as fake, pytest.raises(HeadwayError, match="temperature_mix"):
        run(fake, rows, tmp_path / "a")


def test_a_turn_that_always_fails_is_left_open_for_the_next_run(tmp_path: Path) -> None:
    bad = lambda body, attempt: "500" if "bad" in body["messages"][-1]["content"] else ""  # noqa: E731
    patience = Patience(attempts=3, first_wait=0.001, longest_wait=0.01, cool_down=0.01)
    with FakeServer(bad) as fake:
        report = run(fake, ask("a", "bad", "c"), tmp_path, patience=patience)
    assert list(report.left_open) == ["r1"]
    assert report.failures == {"http 500": 3}
    assert "left open 1" in str(report)
    assert set(answers(tmp_path)) == {"r0", "r2"}
    with FakeServer() as fake:
        assert not run(fake, ask("a", "bad", "c"), tmp_path, patience=patience).left_open
    assert list(answers(tmp_path)) == ["r0", "r1", "r2"]


def test_a_row_that_the_server_refuses_is_dropped_with_its_status(tmp_path: Path) -> None:
    refuse = lambda body, attempt: "refuse 400" if "bad" in body["messages"][-1]["content"] else ""  # noqa: E731
    with FakeServer(refuse) as fake:
        counts = run(fake, ask("a", "bad"), tmp_path / "a", concurrency=1).counts
        assert counts["dropped: refused by the server, http 400"] == counts["dialogs"] == 1
        # Where nothing was ever answered, the requests may be at fault: nothing is dropped.
        report = run(fake, ask("bad"), tmp_path / "b", patience=Patience(attempts=2, first_wait=0.001))
        assert (list(report.left_open), report.counts) == (["r0"], {})


def test_a_prompt_too_long_for_the_server_is_not_sent(tmp_path: Path) -> None:
    with FakeServer() as fake:
        counts = run(fake, ask("x" * 230, "y" * 200), tmp_path).counts
    assert counts["dropped: prompt too long for the context"] == counts["dialogs"] == 1
    (body,) = fake.bodies
    assert body["max_tokens"] == 240 - len(prompt_ids(byte_tokenizer(), body["messages"])) < SETTINGS.max_new_tokens


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_dead_server_is_left_alone_and_the_others_work(tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with FakeServer(slow=0.005) as fake:
        patience = Patience(trip=3, cool_down=0.2)
        report = run([dead, fake.url], ask(*map(str, range(60))), tmp_path, concurrency=2, patience=patience)
    assert report.counts["dialogs"] == 60
    assert 3 <= report.failures["no connection"] < 10
    assert set(report.failures) == {"no connection"}


def test_no_server_at_all_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"no server answers.*Connect"):
        run([f"http://127.0.0.1:{free_port()}"], ask("a"), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with FakeServer(lambda body, attempt: "reset") as fake, pytest.raises(HeadwayError, match=r"has answered for 0"):
        run(fake, ask("a"), tmp_path / "b", patience=Patience(first_wait=0.001, cool_down=0.1, trip=2, give_up=0.2))
    assert read_manifest(tmp_path / "b")["counts"] == {}


def test_the_key_is_sent_and_never_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    key = api_key("MY_KEY")
    with FakeServer() as fake:
        run(fake, ask("a"), tmp_path / "a", key=key, show=True)
        assert fake.headers[0]["Authorization"] == "Bearer sk-secret"
    with FakeServer(lambda body, attempt: "refuse 401") as fake, pytest.raises(HeadwayError, match="http 401") as error:
        run(fake, ask("a"), tmp_path / "b", key=key, show=True)
    err = capsys.readouterr().err
    said = [str(error.value), err, repr(Servers(urls=("http://h",), key=key))]
    said += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert "***" in said[0]
    assert not any("sk-secret" in text for text in said)
    with pytest.raises(HeadwayError, match="MY_OTHER_KEY holds no key"):
        api_key("MY_OTHER_KEY")


def test_no_more_than_so_many_at_once(tmp_path: Path) -> None:
    with FakeServer(slow=0.01) as fake:
        run(fake, ask(*map(str, range(20))), tmp_path, concurrency=3)
    assert fake.most_at_once == 3


def test_a_breaker_lets_one_try_after_each_cool_down() -> None:
    now = 0.0
    breaker = Breaker(Patience(trip=2, cool_down=8, longest_wait=16), clock=lambda: now)
    assert breaker.delay() == 0
    breaker.failed()
    assert breaker.delay() == 0
    breaker.failed()
    assert 6 <= breaker.delay() <= 8
    now = 8
    assert breaker.delay() == 0  # the try
    assert breaker.delay() > 0  # all others
    breaker.failed()
    assert 12 <= breaker.delay() <= 16
    now = 30
    assert breaker.delay() == 0
    breaker.succeeded()
    assert breaker.delay() == breaker.delay() == 0
    breaker.busy(5)
    assert breaker.delay() == 5


def test_an_interrupted_run_says_what_is_safe(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts with &

    def script(body: Body, attempt: int) -> str:
        if body["messages"][-1]["content"] == "3":
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
            return "hang"
        return ""

    with FakeServer(script) as fake:
        try:
            with pytest.raises(Interrupted, match="3 dialogs are safe"):
                run(fake, ask(*map(str, range(8))), tmp_path, concurrency=1, timeout=5.0)
        finally:
            signal.signal(signal.SIGINT, before)
        fake.script = lambda body, attempt: ""
        assert run(fake, ask(*map(str, range(8))), tmp_path).counts["dialogs"] == 8


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("http://h/proxy/v1", "http://h/proxy/v1"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert clean_url(given) == url


@pytest.mark.parametrize("given", ["h:8000", "ftp://h", "http://", "http://me:pass@h", "http://h/v1?key=1", ""])
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(HeadwayError, match="--server") as error:
        clean_url(given)
    assert "pass@" not in str(error.value)


def test_a_model_that_is_not_served_is_named(tmp_path: Path) -> None:
    with FakeServer() as fake:
        servers = Servers(urls=(fake.url,), model="big")
        with pytest.raises(HeadwayError, match=r"do not all serve 'big' \(they serve tiny\)"):
            distill_served(byte_tokenizer(), INFO, ask("a"), tmp_path, servers=servers, settings=SETTINGS)


@pytest.mark.parametrize("text", ["", "a", "1.0:0", "-1:1", "1:1,1:2", "nan", "0.5:inf"])
def test_mixes_that_are_none(text: str) -> None:
    with pytest.raises(HeadwayError, match="temperature"):
        TemperatureMix.parse(text)


def test_a_mix_keeps_its_weights() -> None:
    mix = TemperatureMix.parse("0.6:0.3,1.0:0.7")
    drawn = Counter(mix.of(f"row {i}") for i in range(2000))
    assert abs(drawn[0.6] / 2000 - 0.3) < 0.03
    assert [mix.of("x") for _ in range(3)] == [mix.of("x")] * 3


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of config and tokenizer, and no weights: servers have those."""
    folder = tmp_path_factory.mktemp("target")
    tiny_target().model.config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_the_command(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_API_KEY", "sk-secret")
    prompts, out = tmp_path / "p.jsonl", tmp_path / "dialogs"
    prompts.write_text("".join(json.dumps({"id": i, "turns": [f"a{i}", "b"]}) + "\n" for i in range(3)))
    argv = ["distill", "-t", str(target_folder), "-p", str(prompts), "--out", str(out), "-n", "20"]
    argv += ["--temperature-mix", "0.6:1,1.0:1", "--request", '{"reasoning_effort": "low"}']
    ways = iter(("500", "busy", "html"))
    with FakeServer(lambda body, attempt: next(ways, "")) as fake:
        argv += ["--server", fake.url, "--concurrency", "2"]
        assert main(argv) == 0
        assert fake.headers[-1]["Authorization"] == "Bearer sk-secret"
    err = capfd.readouterr().err
    assert f"{fake.url}/v1: 6 answers" in err
    assert "failed http 429 1, http 500 1, not JSON 1" in err
    assert len(answers(out)) == 6
    assert {body["temperature"] for body in fake.bodies} <= {0.6, 1.0}
    assert all(body["reasoning_effort"] == "low" for body in fake.bodies)
    manifest = read_manifest(out)
    assert manifest["servers"] == [f"{fake.url}/v1"]
    assert manifest["failures"] == {"http 429": 1, "http 500": 1, "not JSON": 1}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--server", "nowhere"], "no http:// or https:// address"),
        (["--server", "http://h", "--record"], "--record"),
        (["--server", "http://h", "--api", "both"], "chat, completions"),
        (["--server", "http://h", "--request", "[1]"], "no JSON object"),
        (["--server", "http://h", "--request", '{"n": 2}'], "set by distilling"),
        (["--server", "http://h", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY holds no key"),
        (["--served-model", "m"], "give --server too"),
        (["--history", "none"], "own (the target's answers)"),
        (["--temperature-mix", "warm"], "0.6:0.3,1.0:0.7"),
        (["--temperature-mix", "1:1", "--temperature", "1"], "contradict"),
    ],
)
def test_the_command_refuses(more: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["distill", "-t", "t", "-p", "p.jsonl", "--out", str(tmp_path / "out"), *more]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
