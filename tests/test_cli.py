"""The command line: what it prints, what it refuses, and that a refusal is one line with exit code 2."""

from __future__ import annotations

import json
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.tiny as tiny
from headway import __version__
from headway.cli import main
from headway.data.dialogs import read_dialogs
from headway.heads.common.checkpoint import save_head
from headway.heads.common.protocol import find_family
from headway.inference.generate import plain
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.unfinished import Unfinished

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, another target `other`, heads `medusa` and `eagle3` of the first, and `prompts.jsonl`."""
    root = tmp_path_factory.mktemp("cli")
    for name, seed, layers in (("target", 0, 8), ("other", 1, 6)):
        tiny.build(seed, num_hidden_layers=layers).save_pretrained(root / name)
        tiny.byte_tokenizer().save_pretrained(root / name)
    target = Target.load(root / "target")
    for family, fields in (("medusa", {"num_heads": 2}), ("eagle3", {})):
        config_class, head_class = find_family(family)
        torch.manual_seed(3)
        head = head_class(config_class.for_target(target.info, draft_vocab_size=200, **fields), target.frozen)
        head.set_draft_vocab(torch.arange(200))
        head.warm_start()
        save_head(head, root / family, target=target.info, metrics={"accepted_length": 1.5})
    rows = [
        {"id": "a", "category": "math", "prompt": "One and one?"},
        {"id": "b", "category": "code", "turns": ["Write a loop.", "Now another."]},
        {"id": "c", "prompt": "Hello"},
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "empty.jsonl").write_text("")
    return root


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in the folder; return exit code, stdout, stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(argv)
        return code, *capfd.readouterr()

    return call


GENERATE = ("generate", "--target", "target", "--max-new-tokens", "12")
DISTILL = ("distill", "-t", "target", "-p", "prompts.jsonl", "--out", "d")
BENCH = ("bench", "--target", "target", "--max-new-tokens", "8")


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"headway {__version__}\n", "")


def test_an_unknown_option_is_a_usage_error(run: Run) -> None:
    code, out, err = run("generate", "--tarket", "x")
    assert (code, out) == (2, "")
    assert "--tarket" in err


@pytest.mark.parametrize("head", [(), ("--head", "medusa", "--tree", "chain:2"), ("--head", "eagle3")])
def test_generate_json(run: Run, head: tuple[str, ...]) -> None:
    code, out, err = run(*GENERATE, *head, "--prompt", "Hello", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert set(answer) == {
        "text", "token_ids", "finish_reason", "new_tokens", "rounds", "accepted_length", "tokens_per_s", "mode", "lossy"
    }  # fmt: skip
    target = Target.load("target")
    prompt = tiny.byte_tokenizer()("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert answer["token_ids"] == plain(target, prompt, Settings(max_new_tokens=12))
    assert answer["new_tokens"] == len(answer["token_ids"])
    assert answer["mode"] == "tree"
    assert answer["lossy"] is False
    assert answer["tokens_per_s"] > 0


def test_compile_is_handed_on_and_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(target: Target) -> None:  # eight layers take long to trace
        target.compile_asked, target.compiled_reason = True, "not today"

    monkeypatch.setattr(Target, "compile", compile)
    monkeypatch.setattr("headway.inference.target.check_compiler", lambda device: None)
    ask = (*GENERATE, "--prompt", "Hello", "--json")
    want = json.loads(run(*ask)[1])
    answer = json.loads(run(*ask, "--compile")[1])
    assert answer["token_ids"] == want["token_ids"]
    assert answer["compiled"] == "not today"
    assert "compiled" not in want
    limits = ("-t", "target", "-p", "prompts.jsonl", "--limit", "1", "-n", "4", "--compile")
    code, out, _ = run("eval", "--head", "medusa", *limits, "--json")
    assert json.loads(out)["compiled"] == "not today"
    code, out, _ = run("bench", *limits)
    assert code == 0
    assert "not compiled" in out


def test_generate_streams_the_text_that_json_holds(run: Run) -> None:
    code, streamed, err = run(*GENERATE, "--prompt", "Hello", "--raw")
    assert code == 0
    assert "tokens/s" in err
    answer = json.loads(run(*GENERATE, "--prompt", "Hello", "--raw", "--json")[1])
    assert streamed == answer["text"] + "\n"


def test_generate_ends_before_a_stop_string(run: Run) -> None:
    ask = (*GENERATE, "--prompt", "12345", "--raw")
    whole = json.loads(run(*ask, "--json")[1])["text"]
    assert "uE" in whole
    answer = json.loads(run(*ask, "--json", "--stop", "uE", "--stop", "never", "--head", "eagle3")[1])
    assert answer["finish_reason"] == "stop_string"
    assert answer["text"] == whole[: whole.index("uE")]
    assert run(*ask, "--stop", "uE")[1] == answer["text"] + "\n"


def test_sampled_tokens_are_the_same_with_any_head(run: Run) -> None:
    sampled = (*GENERATE, "--prompt", "Hello", "--temperature", "0.8", "--top-p", "0.9", "--seed", "5", "--json")
    answers = [json.loads(run(*sampled, *head)[1]) for head in ((), ("--head", "medusa", "--tree", "chain:2"))]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


def test_typical_is_said_to_be_lossy(run: Run) -> None:
    typical = (*GENERATE, "--prompt", "Hello", "--accept", "typical", "--json", "--head", "eagle3")
    assert json.loads(run(*typical, "--temperature", "0.8")[1])["lossy"] is True
    code, out, err = run(*typical)
    assert (code, out) == (2, "")
    assert "--temperature" in err


def test_greedy_overrides_a_temperature_and_says_so(run: Run) -> None:
    code, out, err = run(*GENERATE, "--prompt", "Hi", "--temperature", "0.7", "--accept", "greedy", "--json")
    assert code == 0
    assert "--temperature 0.7 is unused" in err
    assert json.loads(out)["token_ids"] == json.loads(run(*GENERATE, "--prompt", "Hi", "--json")[1])["token_ids"]


def test_prompt_from_a_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("Hello\n")
    from_file = json.loads(run(*GENERATE, "--prompt-file", str(file), "--json")[1])
    assert from_file["token_ids"] == json.loads(run(*GENERATE, "--prompt", "Hello", "--json")[1])["token_ids"]


def _truncated(folder: Path, tmp_path: Path) -> str:
    shutil.copytree(folder / "medusa", tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return str(tmp_path / "cut")


BAD = {
    "dtype": ([*GENERATE, "--prompt", "a", "--dtype", "float7"], "unknown dtype 'float7'; allowed: auto, float32"),
    "device": ([*GENERATE, "--prompt", "a", "--device", "abacus"], "no device 'abacus'"),
    "meta device": ([*GENERATE, "--prompt", "a", "--device", "meta"], "no device 'meta'"),
    "no target": (["generate", "--target", "./nowhere", "--prompt", "a"], "no folder './nowhere'"),
    "no head": ([*GENERATE, "--prompt", "a", "--head", "./nowhere"], "no folder './nowhere'"),
    "no prompt": ([*GENERATE], "--prompt-file"),
    "empty prompt": ([*GENERATE, "--prompt", " "], "the prompt is empty"),
    "no prompt file": ([*GENERATE, "--prompt-file", "nowhere.txt"], "nowhere.txt"),
    "no new tokens": (["generate", "--target", "target", "--prompt", "a", "-n", "0"], "max_new_tokens is 0"),
    "temperature": ([*GENERATE, "--prompt", "a", "--temperature", "-1"], "temperature is -1.0"),
    "accept": ([*GENERATE, "--prompt", "a", "--accept", "all"], "allowed: exact, greedy, typical"),
    "long prompt": ([*GENERATE, "--prompt", "a" * 600], "takes 511 at most"),
    "tree text": ([*GENERATE, "--prompt", "a", "--head", "medusa", "--tree", "bush"], "unknown tree 'bush'"),
    "tree alone": ([*GENERATE, "--prompt", "a", "--tree", "chain:2"], "give --head"),
    "deep tree": ([*GENERATE, "--prompt", "a", "--head", "medusa", "--tree", "chain:5"], "the head drafts 2 tokens"),
    "other target": (
        ["generate", "-t", "other", "--prompt", "a", "--head", "medusa"],
        "num_layers 8, target other has",
    ),
    "bench: no prompts file": ([*BENCH, "--prompts", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
    "bench: empty prompts": ([*BENCH, "--prompts", "empty.jsonl"], "no usable rows"),
    "bench: out": ([*BENCH, "--prompts", "prompts.jsonl", "--out", "empty.jsonl/r.json"], "cannot write"),
    "bench: plot": ([*BENCH, "--prompts", "prompts.jsonl", "--plot"], "give --out"),
    "bench: no new tokens": (["bench", "-t", "target", "-p", "prompts.jsonl", "-n", "0"], "max_new_tokens is 0"),
    "bench: tree alone": ([*BENCH, "--prompts", "prompts.jsonl", "--tree", "chain:2"], "give --head"),
    "bench: deep tree": (
        [*BENCH, "--prompts", "prompts.jsonl", "--head", "medusa", "--tree", "chain:5"],
        "the head drafts 2 tokens",
    ),
    "eval: other target": (["eval", "-t", "other", "--head", "eagle3", "-p", "prompts.jsonl"], "other has"),
    "distill: no prompts": (["distill", "-t", "target", "-p", "empty.jsonl", "--out", "dialogs"], "no usable rows"),
    "distill: out": (["distill", "-t", "target", "-p", "prompts.jsonl", "--out", "empty.jsonl"], "is a file"),
    "distill: top-p": (
        ["distill", "-t", "target", "-p", "prompts.jsonl", "--out", "d", "--top-p", "0"],
        "top_p is 0.0",
    ),
    "distill: minutes": (
        ["distill", "-t", "target", "-p", "prompts.jsonl", "--out", "d", "--minutes", "nan"],
        "--minutes is nan",
    ),
    **{
        f"distill: {' '.join(flag)} beside --server": (
            [*DISTILL, "--server", "http://localhost:1", *flag],
            f"{flag[0]} ",
        )
        for flag in (
            ["--record"],
            ["--batch-size", "8"],
            ["--dtype", "float32"],
            ["--device", "cpu"],
            ["--merge-adapter"],
        )
    },
    **{
        f"distill: {' '.join(flag)} without --server": ([*DISTILL, *flag], f"{flag[0]} says how servers are asked")
        for flag in (
            ["--served-model", "m"],
            ["--api", "chat"],
            ["--concurrency", "32"],
            ["--timeout", "600"],
            ["--request", "{}"],
            ["--api-key-env", "KEY"],
        )
    },
    "distill: two temperatures": (
        [*DISTILL, "--temperature", "0", "--temperature-mix", "1:1"],
        "contradict each other",
    ),
    "demo: minutes": (["demo", "--minutes", "inf", "--out", "d"], "--minutes is inf"),
    "generate: not UTF-8": ([*GENERATE, "--prompt", "a\udcff"], "not UTF-8"),
    "convert: no answers": (["convert", "-t", "target", "-p", "prompts.jsonl", "--out", "d"], "no answer"),
    "tune: no head": (["tune", "-t", "target", "--head", "nobody/none", "-p", "prompts.jsonl"], "give a local one"),
    "tune: held out": (
        ["tune", "-t", "target", "--head", "eagle3", "-p", "prompts.jsonl", "--held-out", "1"],
        "held-out share is 1",
    ),
    "tune: other target": (["tune", "-t", "other", "--head", "eagle3", "-p", "prompts.jsonl"], "other has"),
    "prompts: greedy": (["prompts", "-t", "target", "--count", "3", "--out", "p", "--temperature", "0"], "same prompt"),
    "train: no recipe": (["train", "nowhere.yaml"], "no recipe 'nowhere.yaml'"),
    "push: id": (["push", "medusa", "name"], "give user/name"),
    "push: no run": (["push", "nowhere", "user/name"], "no folder 'nowhere'"),
    "info: misfit": (["info", "other", "--head", "medusa"], "target other has num_layers 6"),
}


@pytest.mark.parametrize("case", BAD, ids=list(BAD))
def test_bad_input_is_one_line(run: Run, folder: Path, case: str) -> None:
    argv, expected = BAD[case]
    before = sorted(folder.rglob("*"))
    code, out, err = run(*argv)
    assert code == 2
    assert out == "" or argv[0] == "info"
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert sorted(folder.rglob("*")) == before


def test_a_truncated_head_is_refused_by_name(run: Run, folder: Path, tmp_path: Path) -> None:
    cut = _truncated(folder, tmp_path)
    for argv in ([*GENERATE, "--prompt", "a", "--head", cut], ["push", cut, "user/name"], ["info", cut]):
        code, out, err = run(*argv)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert "damaged or truncated" in err


def test_a_target_without_chat_template(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "target", tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    ask = ("generate", "-t", str(tmp_path / "base"), "--prompt", "Hi", "-n", "4", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(Target, "load", None)  # it is refused before any weights are read
        code, _, err = run(*ask)
    assert code == 2
    assert "--raw" in err
    template = tmp_path / "chat.jinja"
    template.write_text(tiny.CHATML)
    assert run(*ask, "--raw")[0] == 0
    assert run(*ask, "--chat-template", str(template))[0] == 0


def test_ctrl_c_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headway.inference.target.Target.load", interrupted)
    code, out, err = run(*GENERATE, "--prompt", "Hi")
    assert (code, out, err) == (130, "", "headway: interrupted\n")


def test_ctrl_c_says_what_is_safe_and_how_to_go_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    rows = [{"id": str(i), "messages": said} for i in range(6)]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dialogs = str(tmp_path / "d")
    convert = ("convert", "-t", "target", "-p", str(tmp_path / "said.jsonl"), "--out", dialogs)
    capture = ("capture", "-t", "target", dialogs)
    monkeypatch.setattr("headway.data.capture.SHARD_TOKENS", 80)
    for command, owner, name, unit in (
        (convert, "headway.data.dialogs.DialogWriter", "add", "2 dialogs"),
        (capture, "headway.data.capture", "write_shard", "2 shards"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"{owner}.{name}", interrupting(getattr(pkgutil.resolve_name(owner), name), 3))
            code, _, err = run(*command)
        assert code == 130
        assert f"headway: interrupted: {unit}" in err
        assert err.endswith("run it again to continue\n")
        assert run(*command)[0] == 0
    assert [dialog.id for dialog in read_dialogs(dialogs)] == [str(i) for i in range(6)]


def interrupting(real: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return the function, with Ctrl-C pressed at its call `number`."""
    calls: list[int] = []

    def called(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*given, **named)

    return called


def test_bench_prints_a_table_and_writes_the_report(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.json"
    argv = [*BENCH, "--prompts", "prompts.jsonl", "--head", "medusa,eagle3", "--tree", "chain:2", "--out", str(out)]
    code, printed, err = run(*argv, "--plot")
    assert code == 0, err
    assert "eagle3" in printed
    report = json.loads(out.read_text())
    assert [row["name"] for row in report["rows"]] == ["transformers", "plain", "medusa", "eagle3"]
    assert report["prompts"]["categories"] == ["code", "math", "prompts"]
    assert [row["identical"] for row in report["rows"]] == [None, 1.0, 1.0, 1.0]
    assert out.with_suffix(".png").stat().st_size > 1000
    assert sorted(p.name for p in out.parent.iterdir()) == ["report.json", "report.png"]


def test_bench_throughput(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    argv = [*BENCH, "--prompts", "prompts.jsonl", "--throughput", "--batch", "2", "--out", str(out)]
    code, printed, err = run(*argv)
    assert code == 0, err
    assert "2 at once" in printed
    report = json.loads(out.read_text())
    assert [row["name"] for row in report["rows"]] == ["transformers", "plain"]
    assert report["rows"][0]["tokens"] == report["rows"][1]["tokens"] > 0
    assert report["rows"][1]["identical"] == 1.0
    code, _, err = run(*argv, "--head", "medusa")
    assert code == 2
    assert "--head" in err


def test_eval_by_category(run: Run, tmp_path: Path) -> None:
    argv = ["eval", "-t", "target", "--head", "eagle3", "-p", "prompts.jsonl", "-n", "8", "--json"]
    report = json.loads(run(*argv, "--out", str(tmp_path / "e.json"))[1])
    assert [row["category"] for row in report["rows"]] == ["code", "math", "prompts", "all"]
    assert report["rows"][-1]["prompts"] == 3
    assert report["tree"] == "chain:3"
    assert json.loads((tmp_path / "e.json").read_text()) == report
    assert json.loads(run(*argv, "--batch", "3")[1]) == report
    assert "accepted length" in run(*argv[:-1])[1]


def test_tune_keeps_the_tree_that_auto_then_uses(run: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "medusa", tmp_path / "medusa")
    argv = [
        "tune",
        "-t",
        "target",
        "--head",
        str(tmp_path / "medusa"),
        "-p",
        "prompts.jsonl",
        "--limit",
        "1",
        "-n",
        "4",
    ]
    code, out, err = run(*argv)
    assert code == 0
    assert "expected of the best trees" in out
    assert "tree.json" in err
    kept = json.loads((tmp_path / "medusa" / "tree.json").read_text())["cpu float32"]
    report = json.loads(
        run("eval", "-t", "target", "--head", str(tmp_path / "medusa"), "-p", "prompts.jsonl", "-n", "4", "--json")[1]
    )
    drafting = [row for row in kept["candidates"] if row["policy"] != "off"]  # which of a random head may pay nowhere
    assert report["tree"] == max(drafting, key=lambda row: row["tokens_per_ms"])["policy"]
    assert json.loads(run(*argv, "--json")[1])["policy"]


def test_convert(run: Run, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    rows = [{"id": "a", "messages": said}, {"id": "b", "messages": said[:1]}]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run("convert", "-t", "target", "-p", str(tmp_path / "said.jsonl"), "--out", str(tmp_path / "d"))
    assert code == 0
    assert "1 dialogs" in err
    assert "no answer" in err  # the other row is counted
    assert [dialog.id for dialog in read_dialogs(tmp_path / "d")] == ["a"]
    code, out, _ = run("data", "inspect", str(tmp_path / "d"))
    assert code == 0
    assert "{+Hello there" in out
    assert "1 dialogs" in out
    code, out, _ = run("data", "inspect", str(tmp_path / "said.jsonl"), "-t", "target", "--show", "0")
    assert code == 0
    assert "1 of 2 rows used" in out
    code, _, err = run("data", "inspect", str(tmp_path / "none.jsonl"), "-t", "target")
    assert code == 2
    assert "does not exist" in err


def test_train_makes_a_head(run: Run, tmp_path: Path) -> None:
    assert run("distill", "-t", "target", "-p", "prompts.jsonl", "--out", str(tmp_path / "d"), "-n", "12")[0] == 0
    recipe = str(Path(__file__).parents[1] / "recipes" / "tiny" / "medusa.yaml")
    given = ("target=target", f"dialogs={tmp_path / 'd'}", f"out={tmp_path / 'run'}", "max_steps=2")
    assert run("train", recipe, *given, "max_stepz=3")[0] == 2
    assert run("train", recipe, *given)[0] == 0
    assert json.loads(run("info", str(tmp_path / "run"), "--json")[1])["head"]["family"] == "medusa"


def test_bench_of_drafters_and_batches(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    drafts = ("--draft", "ngram", "--draft", "model:target@dynamic:depth=2,top_k=2,nodes=5", "--draft", "hybrid")
    # A tree that is named is drafted in every round, whatever it costs.
    argv = [*BENCH, "--prompts", "prompts.jsonl", "--head", "eagle3", "--tree", "chain:3", *drafts, "--batch", "2,1"]
    code, printed, err = run(*argv, "--out", str(out), "--plot")
    assert code == 0, err
    assert "larger batches have no row of it" in err
    assert "by prompts at once" in printed
    one, two = json.loads(out.read_text())["batches"]
    ours = ["plain", "eagle3", "n-gram", "model target", "n-gram or eagle3"]
    assert [row["name"] for row in one["rows"]] == [
        "transformers",
        "transformers lookup",
        "transformers assisted",
        *ours,
    ]
    assert [row["name"] for row in two["rows"]] == ["transformers", *ours]
    for report in (one, two):
        assert not report["errors"]
        assert all(row["identical"] in (None, 1.0) for row in report["rows"])
        rows = {row["name"]: row for row in report["rows"]}
        assert rows["model target"]["accepted_length"] > 2  # of at most 3: it drafts with the target itself
        assert rows["plain"]["itl_p95_ms"] >= rows["plain"]["itl_ms"]
        assert rows["plain"]["passes_per_answer"] == rows["plain"]["row_passes"] / 3
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert one["rows"][2]["accepted_length"] >= 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--draft", "magic"), "unknown --draft 'magic'"),
        (("--draft", "model:"), "unknown --draft 'model:'"),
        (("--draft", "ngram:3"), "unknown --draft 'ngram:3'"),
        (("--draft", "model:target@chains:2"), "unknown tree 'chains:2'"),
        (("--draft", "hybrid"), "give --head"),
        (("--batch", "1,x"), "--batch is '1,x'"),
        (("--batch", "0"), "--batch is '0'"),
        (("--throughput", "--draft", "ngram"), "leave out"),
        (("--throughput", "--batch", "1,2"), "leave out"),
    ],
)
def test_bench_refuses(run: Run, given: tuple[str, ...], words: str) -> None:
    code, out, err = run(*BENCH, "--prompts", "prompts.jsonl", *given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_generate_with_drafters(run: Run) -> None:
    plain = json.loads(run(*GENERATE, "--prompt", "Hi", "--json")[1])
    for draft in (("ngram",), ("model:target",), ("hybrid", "--head", "eagle3")):
        code, out, err = run(*GENERATE, "--prompt", "Hi", "--json", "--draft", *draft)
        assert code == 0, err
        assert json.loads(out)["token_ids"] == plain["token_ids"]
    assert json.loads(run(*GENERATE, "--prompt", "Hi", "--json", "--draft", "model:target")[1])["accepted_length"] > 2
    code, _, err = run(*GENERATE, "--prompt", "Hi", "--draft", "ngram", "--head", "eagle3")
    assert code == 2
    assert "leave out --head" in err


def test_an_interrupted_bench_writes_what_it_has(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.inference import bench as measure

    real, calls = measure._headway_run, []

    def headway_run(*given: Any) -> Any:
        answer = real(*given)

        def once(*asked: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:  # the warm-up, the first prompt, the second
                raise KeyboardInterrupt
            return answer(*asked)

        return once

    monkeypatch.setattr(measure, "_headway_run", headway_run)
    code, out, err = run(*BENCH, "--prompts", "prompts.jsonl", "--out", str(tmp_path / "r.json"))
    assert code == 130
    assert "transformers" in out
    assert "interrupted after 1 prompts" in err
    assert "the same command measures the others" in err
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["prompts"]["interrupted"], report["prompts"]["left_out"]) == (True, 2)
    monkeypatch.setattr(measure, "_headway_run", real)
    code, out, err = run(*BENCH, "--prompts", "prompts.jsonl", "--out", str(tmp_path / "r.json"))
    assert code == 0
    assert "1 part was measured before" in err
    report = json.loads((tmp_path / "r.json").read_text())
    assert [report["prompts"][key] for key in ("count", "continued", "interrupted")] == [3, 1, False]
    assert "measured before" not in run(*BENCH, "--prompts", "prompts.jsonl")[2]


@pytest.mark.parametrize("command", ["eval", "tune", "throughput"])
def test_an_interrupted_measurement_is_continued(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after two parts; the same command makes the others, and another dtype none of them."""
    asked = {
        "eval": ("eval", "-t", "target", "--head", "eagle3", "--prompts", "prompts.jsonl", "-n", "8", "--json"),
        "tune": ("tune", "-t", "target", "--head", "eagle3", "--prompts", "prompts.jsonl", "-n", "8", "--json"),
        "throughput": ("bench", "-t", "target", "--throughput", "--prompts", "prompts.jsonl", "-n", "8"),
    }[command]
    keep, parts = Unfinished.keep, []

    def keep_two(self: Unfinished, part: str, value: Any) -> None:
        if len(parts) == 2:
            raise KeyboardInterrupt
        parts.append(part)
        keep(self, part, value)

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "keep", keep_two)
        code, out, err = run(*asked)
    assert (code, out) == (130, "")
    assert "interrupted: 2 parts are kept; the same command measures the others" in err
    assert "measured before" not in run(*asked, "--dtype", "bfloat16")[2]
    again: list[str] = []
    monkeypatch.setattr(Unfinished, "keep", lambda self, part, value: (again.append(part), keep(self, part, value)))
    code, out, err = run(*asked)
    assert code == 0, err
    assert "2 parts were measured before" in err
    assert again
    assert not set(again) & set(parts)
    if command != "throughput":
        done = json.loads(out)
        whole = json.loads(run(*asked)[1])
        key = {"eval": "rows", "tune": "rounds_recorded"}[command]
        assert done[key] == whole[key]


def test_a_damaged_target_is_one_line(run: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "target", tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, out, err = run("generate", "-t", str(tmp_path / "cut"), "--prompt", "a")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot load target" in err


def test_a_target_of_another_name(run: Run, folder: Path, tmp_path: Path) -> None:
    """The same shape, other weights: refused, unless it is asked for."""
    tiny.build(7).save_pretrained(tmp_path / "twin")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "twin")
    argv = ("generate", "-t", str(tmp_path / "twin"), "--prompt", "a", "-n", "4", "--head", "medusa", "--json")
    code, _, err = run(*argv)
    assert code == 2
    assert "--other-target" in err
    assert run(*argv, "--other-target")[0] == 0


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_goes_from_distilling_to_decoding(run: Run, folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = str(tmp_path / "adapter")
    torch.manual_seed(5)
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(tiny.build(0), lora).save_pretrained(adapter)
    with_it = ("-t", "target", "--target-adapter", adapter)
    dialogs, out, head = str(tmp_path / "d"), str(tmp_path / "run"), str(tmp_path / "run" / "head")
    code, _, err = run("distill", *with_it, "-p", "prompts.jsonl", "--out", dialogs, "-n", "6")
    assert code == 0, err
    fields = {"family": "medusa", "target": "target", "dialogs": dialogs, "out": out, "max_steps": 1, "eval_prompts": 1}
    fields |= {"head": {"num_heads": 2, "draft_vocab_size": 200}}
    (tmp_path / "r.yaml").write_text(json.dumps(fields))
    code, _, err = run("train", str(tmp_path / "r.yaml"))
    assert (code, "made with adapter" in err) == (2, True)
    code, _, err = run("train", str(tmp_path / "r.yaml"), f"target_adapter={adapter}")
    assert code == 0, err

    ask = ("--prompt", "a", "-n", "8", "--json")
    said = [run("generate", *which, *ask)[1] for which in (("-t", "target"), with_it)]
    without, plain_ids = (json.loads(text)["token_ids"] for text in said)
    assert without != plain_ids
    for more in ((), ("--merge-adapter",)):
        code, text, err = run("generate", *with_it, *more, "--head", head, *ask)
        assert code == 0, err
        assert json.loads(text)["token_ids"] == plain_ids
    for argv, words in (
        (("-t", "target", "--head", head), f"--target-adapter {adapter}"),
        ((*with_it, "--head", "medusa"), "made with the bare target"),
        (("-t", "target", "--merge-adapter"), "give --target-adapter"),
        (("-t", adapter), "is a PEFT adapter, no target"),
    ):
        code, _, err = run("generate", *argv, *ask)
        assert (code, words in err) == (2, True), err
    assert run("generate", *with_it, "--head", "medusa", "--other-target", *ask)[0] == 0
    assert run("info", "target", "--head", head)[0] == 2
    assert run("info", "target", "--head", head, "--target-adapter", adapter)[0] == 0
    argv = (
        "audit",
        *with_it,
        "--head",
        head,
        "-p",
        "prompts.jsonl",
        "--limit",
        "1",
        "-n",
        "4",
        "--draws",
        "64",
        "--json",
    )
    code, text, err = run(*argv)
    assert code == 0, err
    assert json.loads(text)["environment"]["adapter"].startswith(adapter)
    argv = ("train", str(tmp_path / "r.yaml"), "--estimate", "--json", f"init_from={head}", "lora.rank=2", "out=runs/x")
    weights = [json.loads(run(*argv, *more)[1])["head"]["weights"] for more in ((), ("lora.rank=4",))]
    assert weights == [2 * 2 * (64 + 64), 2 * 4 * (64 + 64)]


def test_an_error_of_the_system_is_one_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device", "dialogs.jsonl")

    monkeypatch.setattr("headway.data.distill.distill", full)
    code, _, err = run("distill", "-t", "target", "-p", "prompts.jsonl", "--out", str(tmp_path / "d"))
    assert code == 2
    assert err.splitlines()[-1] == "error: dialogs.jsonl: No space left on device"


def test_info(run: Run) -> None:
    head = json.loads(run("info", "medusa", "--json")[1])["head"]
    assert (head["family"], head["taps"], head["draft_vocab"]) == ("medusa", "last", 200)
    assert head["target"].endswith("target")
    target = json.loads(run("info", "target", "--json")[1])["target"]
    assert (target["layers"], target["context"], target["vocab_size"]) == (8, 512, 272)
    assert target["parameters"] == sum(p.numel() for p in tiny.build(0).parameters())
    code, printed, _ = run("info", "target", "--head", "medusa")
    assert code == 0
    assert "fit: yes" in printed


def test_prompts_and_distill(run: Run, tmp_path: Path) -> None:
    dialogs = tmp_path / "dialogs"
    argv = ["distill", "-t", "target", "-p", "prompts.jsonl", "--out", str(dialogs), "-n", "6", "--batch-size", "2"]
    assert run(*argv)[0] == 0
    assert len((dialogs / "dialogs.jsonl").read_text().splitlines()) >= 3
    assert run(*argv, "--temperature", "0.5")[0] == 2  # other settings, same folder
    argv = ["prompts", "-t", "target", "--count", "2", "--out", str(tmp_path / "p.jsonl"), "-n", "3"]
    code, _, err = run(*argv, "--opener", "", "--opener", "How many")
    assert code in (0, 2), err  # random weights hardly ever end a turn
    assert json.loads((tmp_path / "p.manifest.json").read_text())["openers"] == ["", "How many"]
    assert "Traceback" not in err


def test_a_run_folder_stands_for_its_head(run: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "medusa", tmp_path / "mine" / "head")
    assert json.loads(run("info", str(tmp_path / "mine"), "--json")[1])["head"]["family"] == "medusa"


def test_capture_and_estimates(run: Run, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    (tmp_path / "said.jsonl").write_text(json.dumps({"id": "a", "messages": said}) + "\n")
    assert run("convert", "-t", "target", "-p", str(tmp_path / "said.jsonl"), "--out", str(tmp_path / "d"))[0] == 0
    argv = ("capture", str(tmp_path / "d"), "-t", "target", "--taps", "1,3,4,last", "--store", "int8")
    code, printed, _ = run(*argv, "--estimate")
    assert code == 0
    assert "int8 fits" in printed
    assert not (tmp_path / "d" / "features").exists()
    code, _, err = run(*argv)
    assert (code, "1 made" in err) == (0, True)
    assert run(*argv, "--verify")[2].strip().endswith("1 kept")
    for bad, named in (("1,x", "--taps is '1,x'"), ("99,last", "head.taps has 99"), ("1,2", "'last': add it")):
        code, _, err = run(*argv, "--taps", bad)
        assert code == 2
        assert named in err
    recipe = f"family: eagle3\ntarget: target\ndialogs: {tmp_path / 'd'}\nout: {tmp_path / 'r'}\nmax_steps: 1\n"
    (tmp_path / "r.yaml").write_text(recipe)
    code, printed, _ = run(
        "train", str(tmp_path / "r.yaml"), "--estimate", "--rows", "10", "--mean-tokens", "20", "--json"
    )
    assert code == 0
    assert json.loads(printed)["data"]["rows"] == 10
    assert run("train", str(tmp_path / "r.yaml"), "--rows", "10")[0] == 2
