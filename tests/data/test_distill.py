"""Distilling: ids as emitted, each prompt once whatever happens, endings told truly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import CHATML, IM_END, THINK, byte_tokenizer
from fake_server import FakeServer
from tiny_target import Script, tiny_target

import headway.data.distill
from headway.data.chat import prompt_ids
from headway.data.convert import convert
from headway.data.dialogs import read_dialogs, read_manifest
from headway.data.distill import distill, stable_key
from headway.data.prompts import Row
from headway.heads.common.errors import HeadwayError, Interrupted
from headway.inference.generate import Request, plain
from headway.inference.sampling import Settings

TALK = {"role": "assistant", "content": "yes"}
SETTINGS = Settings(max_new_tokens=12, temperature=1.0, seed=3)


def ask(*prompts: str) -> list[Row]:
    return [Row(f"r{i}", [{"role": "user", "content": prompt}]) for i, prompt in enumerate(prompts)]


def use(monkeypatch: pytest.MonkeyPatch, script: Script) -> Script:
    monkeypatch.setattr(headway.data.distill, "generate", script)
    return script


def by_id(script_rows: dict[str, tuple[str, str]]) -> Script:
    return Script(lambda request: script_rows[request.id])


def test_ids_are_those_the_target_emits(tmp_path: Path) -> None:
    target, rows = tiny_target(), ask("a", "bb", "a longer question")
    counts = distill(target, rows, tmp_path, settings=SETTINGS, batch_size=2, show=False)
    dialogs = {d.id: d for d in read_dialogs(tmp_path)}
    assert counts["dialogs"] == len(dialogs) == 3
    for row in rows:
        prompt = prompt_ids(target.tokenizer, row.messages)  # type: ignore[arg-type]
        emitted = plain(target, prompt, SETTINGS, stable_key(row.id))
        assert dialogs[row.id].token_ids == prompt + emitted
        assert dialogs[row.id].spans == [(len(prompt), len(prompt) + len(emitted))]
        assert (dialogs[row.id].finish == "stop") == (emitted[-1] == IM_END)


def test_finish_is_told_truly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["done.", "never end", "also done", "", "cut mid wor"]
    reasons = ["stop", "length", "stop", "stop", "context"]
    use(monkeypatch, by_id({f"r{i}": pair for i, pair in enumerate(zip(texts, reasons, strict=True))}))
    counts = distill(tiny_target(), ask(*"pppqp"), tmp_path, settings=SETTINGS, show=False)
    dialogs = {d.id: d for d in read_dialogs(tmp_path)}
    assert {name for name, d in dialogs.items() if d.token_ids[-1] == IM_END} == {"r0", "r2"}
    assert {name: d.finish for name, d in dialogs.items()} == {
        "r0": "stop",
        "r2": "stop",
        "r1": "length",
        "r4": "length",
    }
    assert (counts["stop"], counts["length"], counts["dropped: empty answer, stop"]) == (2, 2, 1)
    assert read_manifest(tmp_path)["counts"] == dict(counts)


def test_tools_that_the_template_does_not_show_are_noted_and_calls_are_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Script(lambda request: ("yes", "stop")))
    tools = [{"type": "function", "function": {"name": "find"}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "find"}}]}
    asked = {"role": "user", "content": "find it"}
    rows = [
        Row("tools", [{"role": "user", "content": "a"}], tools=tools),
        Row("calls", [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "b"}]),
        Row("plain", [asked]),
    ]
    counts = distill(tiny_target(), rows, tmp_path, settings=SETTINGS, show=False)
    assert counts["note: tools that the chat template does not show"] == 1
    assert counts["dropped: the chat template does not write tool calls"] == 1
    assert {d.id: len(d.notes) for d in read_dialogs(tmp_path)} == {"tools": 1, "plain": 0}
    target = tiny_target()
    target.tokenizer.chat_template = "{{ tools | tojson if tools }}" + CHATML  # type: ignore[union-attr]
    counts = distill(target, rows[:1], tmp_path / "shown", settings=SETTINGS, show=False)
    assert not any(k.startswith("note") for k in counts)
    counts = convert(byte_tokenizer(), [Row("r", [asked, TALK], tools=tools)], tmp_path / "c", target=target.info)
    assert not any(k.startswith("note") for k in counts)  # its words name the tool, which is all that can be told
    said = [Row("r", [{"role": "user", "content": "a"}, TALK], tools=tools)]
    counts = convert(byte_tokenizer(), said, tmp_path / "c2", target=target.info)
    assert counts["note: tools that the chat template does not show"] == 1


def test_prompt_longer_than_the_context_is_dropped(tmp_path: Path) -> None:
    counts = distill(tiny_target(), ask("x" * 300, "y"), tmp_path, settings=SETTINGS, show=False)
    assert counts["dropped: prompt too long for the context"] == counts["dialogs"] == 1


def test_interrupt_loses_only_what_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ask(*"abcdefgh")
    script = use(monkeypatch, Script(lambda request: (f"answer to {request.id}", "stop"), interrupt_after=3))
    with pytest.raises(Interrupted, match="3 dialogs are safe"):
        distill(tiny_target(), rows, tmp_path, settings=SETTINGS, batch_size=2, show=False)
    first = {d.id for d in read_dialogs(tmp_path)}
    assert len(first) == read_manifest(tmp_path)["counts"]["dialogs"] == 3
    script.interrupt_after = None
    asked = len(script.requests)
    distill(tiny_target(), rows, tmp_path, settings=SETTINGS, batch_size=2, show=False)
    assert sorted(d.id for d in read_dialogs(tmp_path)) == [row.id for row in rows]
    assert not first & {request.id for request in script.requests[asked:]}


RUN = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from byte_tokenizer import byte_tokenizer
from tiny_target import tiny_target
from headway.data.distill import distill
from headway.data.prompts import Row
from headway.data.served import Servers, distill_served
from headway.data.turns import TemperatureMix
from headway.inference.sampling import Settings

turn = lambda role, i: {{"role": role, "content": "q" * (i % 7 + 1)}}
rows = [Row(f"r{{i}}", [turn("user", i), *([turn("user", i + 1)] * (i % 3 == 0))]) for i in range(24)]
rows.insert(5, Row("long", [turn("user", 0), {{"role": "user", "content": "x" * 300}}]))
settings, mix = Settings(max_new_tokens=12, temperature=1.0, eos_ids=()), TemperatureMix.parse("0.8:1,1.2:1")
given = [Row(r.id, [m for u in r.messages for m in (u, turn("assistant", 2))]) for r in rows]
target = tiny_target()

def work(kind, out):
    if kind == "local":
        distill(target, given, out, settings=settings, mix=mix, history="given", batch_size=4, show=False)
    else:
        servers = Servers(urls=(kind,), concurrency=3)
        distill_served(byte_tokenizer(), target.info, rows, out, servers=servers, settings=settings, mix=mix, show=False)

def killed(kind, out, moment):
    if moment == "rename":  # between the ordered copy and its taking the old one's place
        replace = Path.replace
        die = lambda a, b: os.kill(os.getpid(), 9) if Path(b).name == "dialogs.jsonl" else replace(a, b)
        Path.replace = die
    work(kind, out)

def survive(kind, out, moment):
    child = os.fork()
    if child == 0:
        try:
            killed(kind, out, moment)
        finally:
            os._exit(3)  # it was not killed
    log = out / "dialogs.jsonl"
    while moment != "rename" and (not log.exists() or log.stat().st_size < int(moment)):
        time.sleep(0.001)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "too late"
    if moment != "rename":
        os.kill(child, 9)
    assert os.waitpid(child, 0)[1] == 9, moment

for kind in ("local", {url!r}):
    folder = Path({out!r}) / kind.partition(":")[0]
    for moment in ("1", "700", "2500", "rename"):
        survive(kind, folder / "killed", moment)
    work(kind, folder / "killed")
    work(kind, folder / "whole")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and kill -9")
def test_kill_9_at_any_moment_then_resume_gives_the_same_files(tmp_path: Path) -> None:
    """A process that forks is killed at several sizes of its log, and once as the folder is put in order."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with FakeServer(slow=0.002) as fake:
        code = RUN.format(tests=str(Path(__file__).parent), url=fake.url, out=str(tmp_path))
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
        answers = 24 + 8 + 1
        # What was asked more than once was under way when it was killed: three requests at most, three times.
        assert 2 * answers <= len(fake.bodies) <= 2 * answers + 9
    for kind in ("local", "http"):
        whole, killed = ({p.name: p.read_bytes() for p in (tmp_path / kind / n).iterdir()} for n in ("whole", "killed"))
        assert sorted(whole) == ["dialogs.jsonl", "dropped.jsonl", "manifest.json"]
        assert whole == killed
        assert len(read_dialogs(tmp_path / kind / "killed")) == answers
        assert read_manifest(tmp_path / kind / "killed")["counts"]["dropped: prompt too long for the context"] == 1


def test_other_settings_target_or_prompts_are_refused(tmp_path: Path) -> None:
    distill(tiny_target(), ask("a", "b"), tmp_path, settings=SETTINGS, show=False)
    with pytest.raises(HeadwayError, match=r"settings.temperature was 1.0, now 0.0"):
        distill(tiny_target(), ask("a", "b"), tmp_path, settings=Settings(max_new_tokens=12, seed=3), show=False)
    with pytest.raises(HeadwayError, match="target was 'tiny', now 'other'"):
        distill(tiny_target("other"), ask("a", "b"), tmp_path, settings=SETTINGS, show=False)
    with pytest.raises(HeadwayError, match="id 'r1' asked something else"):
        distill(tiny_target(), ask("a", "c"), tmp_path, settings=SETTINGS, show=False)
    with pytest.raises(HeadwayError, match="1 ids that are not among"):
        distill(tiny_target(), ask("a"), tmp_path, settings=SETTINGS, show=False)
    before = read_dialogs(tmp_path)
    counts = distill(tiny_target(), ask("a", "b", "c"), tmp_path, settings=SETTINGS, show=False)
    assert counts["dialogs"] == 3
    assert read_dialogs(tmp_path)[:2] == before


def test_turns_follow_the_targets_own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = {"role": "system", "content": "S."}
    users = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    given = {"role": "assistant", "content": "not the target's"}
    rows = [Row("long", [system, users[0], given, *users[1:]]), Row("short", users[:1]), Row("cut", users[:2])]
    answers = {"long": "<think>\nhm\n</think>\n\n1", "short": "s", "long turn 2": "2", "long turn 3": "3", "cut": "c"}
    use(monkeypatch, Script(lambda request: (answers[request.id], "length" if request.id == "cut" else "stop")))
    target = tiny_target()
    counts = distill(target, rows, tmp_path, settings=SETTINGS, show=False)
    dialogs = {d.id: d for d in read_dialogs(tmp_path)}
    assert set(dialogs) == set(answers)
    assert counts["dropped: an earlier turn has no whole answer"] == 1
    third = dialogs["long turn 3"]
    history = [system, users[0], {"role": "assistant", "content": answers["long"]}]
    history += [users[1], {"role": "assistant", "content": "2"}, users[2]]
    assert third.token_ids[: third.spans[0][0]] == prompt_ids(target.tokenizer, history)  # type: ignore[arg-type]
    assert target.tokenizer.decode(third.token_ids[slice(*third.spans[0])]) == "3<|im_end|>"  # type: ignore[union-attr]
    assert distill(target, rows, tmp_path, settings=SETTINGS, show=False) == counts


def test_turns_after_one_that_time_cut_off_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ask(*"ab") + [Row(name, [{"role": "user", "content": name}] * 2) for name in "cd"]
    use(monkeypatch, Script(lambda request: ("yes", "stop")))
    counts = distill(tiny_target(), rows, tmp_path, settings=SETTINGS, batch_size=1, max_tokens_total=8, show=False)
    assert counts == {"dialogs": 2, "tokens": 8, "stop": 2}
    counts = distill(tiny_target(), rows, tmp_path, settings=SETTINGS, batch_size=1, show=False)
    assert counts == {"dialogs": 6, "tokens": 24, "stop": 6}


def test_time_budget_starts_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Script(lambda request: ("yes", "stop")))
    assert distill(tiny_target(), ask(*"ab"), tmp_path, settings=SETTINGS, seconds=0, show=False) == {}
    assert distill(tiny_target(), ask(*"ab"), tmp_path, settings=SETTINGS, seconds=60, show=False)["dialogs"] == 2


def test_no_template_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    target = tiny_target()
    target.tokenizer.chat_template = None  # type: ignore[union-attr]
    with pytest.raises(HeadwayError, match="--chat-template FILE"):
        distill(target, ask("a"), tmp_path / "out", settings=SETTINGS, show=False)
    assert not (tmp_path / "out").exists()


def test_progress_tells_rate_and_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headway.data.progress import Progress

    progress = Progress("answers", 10)
    progress._start -= 20
    progress._next = 0
    progress.add(items=2, tokens=400)
    assert capsys.readouterr().err == "answers 2/10, 400 tokens, 20 tokens/s, 1:20 left\n"
    use(monkeypatch, Script(lambda request: ("yes", "stop")))
    distill(tiny_target(), ask(*"ab"), tmp_path, settings=SETTINGS)
    assert "2 dialogs, 8 tokens; ended by stop 2, length 0" in capsys.readouterr().err


def test_progress_past_its_total_or_its_time_leaves_no_negative_time() -> None:
    from headway.data.progress import Progress

    progress = Progress("prompts", 2)
    progress._start -= 20
    progress.done = 3
    assert str(progress) == "prompts 3/2, 0 tokens, 0 tokens/s, 0:00 left"
    progress = Progress("prompts", 100, seconds=10)
    progress._start -= 20
    progress.done = 3
    assert str(progress) == "prompts 3, 0 tokens, 0 tokens/s, time is up: what is under way is finished"


def test_history_keeps_reasoning_for_the_template_to_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    target.tokenizer.chat_template = THINK  # type: ignore[union-attr]
    script = use(monkeypatch, Script(lambda request: ("<think>\nhm\n</think>\n\n1", "stop")))
    rows = [Row("a", [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])]
    distill(target, rows, tmp_path, settings=SETTINGS, show=False)
    second: Request = script.requests[1]
    assert "hm" not in target.tokenizer.decode(second.prompt_ids)  # type: ignore[union-attr]
    assert "1<|im_end|>" in target.tokenizer.decode(second.prompt_ids)  # type: ignore[union-attr]
