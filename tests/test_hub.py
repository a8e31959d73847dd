"""Heads to the hub and from it, against a server that speaks the hub's API to an unmodified client."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import logging as hub_logging

import tests.tiny as tiny
from headway.cli import main
from headway.heads.common.checkpoint import head_folder, load_head, read_config, save_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.hub import scrub
from headway.heads.common.protocol import find_family
from headway.hub import pull_from_hub, push_to_hub
from headway.inference.target import Target
from tests.hub_server import TOKEN, HubServer

FILES = {"config.json", "model.safetensors", "README.md"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, a run folder `run` whose head is of it, and another head `newer`."""
    root = tmp_path_factory.mktemp("hub")
    tiny.build(0, num_hidden_layers=4).save_pretrained(root / "target")
    tiny.byte_tokenizer().save_pretrained(root / "target")
    target = Target.load(root / "target")
    config_class, head_class = find_family("medusa")
    torch.manual_seed(3)
    for folder in (root / "run" / "head", root / "newer"):
        head = head_class(config_class.for_target(target.info, num_heads=2, draft_vocab_size=200), target.frozen)
        head.set_draft_vocab(torch.arange(200))
        for parameter in head.parameters():
            parameter.data.normal_(std=0.1)
        save_head(head, folder, target=target.info, metrics={"accepted_length": 1.5}, data={"dialogs": 12})
    return root


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "run", tmp_path / "run"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its protocol is not spoken here
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield server
        assert server.tokens_astray == 0


def test_a_push_is_one_commit_of_the_whole_head(hub: HubServer, run: Path) -> None:
    pushed = push_to_hub(run, "me/medusa", private=True)
    repo = hub.repos["me/medusa"]
    assert repo.private
    assert len(repo.messages) == 2  # the hub's own, and ours
    assert set(repo.files) == FILES | {".gitattributes"}
    assert repo.files["model.safetensors"] == (run / "head" / "model.safetensors").read_bytes()
    assert (pushed.address, pushed.commit, pushed.uploaded) == (f"{hub.url}/me/medusa", repo.refs["main"], True)
    assert hub.asked("PUT", "/lfs/") == 1
    assert hub.asked("POST", "/verify") == 1


def test_a_second_push_sends_nothing(hub: HubServer, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = push_to_hub(run, "me/medusa")
    second = push_to_hub(run, "me/medusa")
    assert (second.commit, second.uploaded) == (first.commit, False)
    assert hub.asked("PUT", "/lfs/") == hub.asked("POST", "/commit/") == 1
    assert "holds a head (medusa, for " in capsys.readouterr().err


def test_a_head_that_takes_anothers_place_takes_its_tree_away(hub: HubServer, root: Path, run: Path) -> None:
    tuned = {"policy": "chain:2", "expected_accepted_length": 1.7, "expected_ratio_vs_plain": 1.31, "candidates": []}
    (run / "head" / "tree.json").write_text(json.dumps({"cpu float32": tuned}))
    push_to_hub(run, "me/medusa")
    repo = hub.repos["me/medusa"]
    assert "| cpu float32 | chain:2 | 1.7 | 1.31 |" in repo.files["README.md"].decode()
    other = root / "newer"
    pushed = push_to_hub(other, "me/medusa")
    assert set(repo.files) == FILES | {".gitattributes"}
    assert repo.files["model.safetensors"] == (other / "model.safetensors").read_bytes()
    assert repo.refs["main"] == pushed.commit
    assert len(repo.messages) == 3


CUTS = {
    "upload": [("PUT", "/lfs/", "cut", 9)],
    "upload refused": [("PUT", "/lfs/", 500, 9)],
    "verify": [("POST", "/verify", 403, 1)],
    "commit": [("POST", "/commit/", 503, 1)],
    "conflict": [("POST", "/commit/", 409, 1)],
    "preupload": [("POST", "/preupload/", 500, 9)],
    "batch": [("POST", "/objects/batch", 401, 1)],
    "card": [("POST", "/validate-yaml", 500, 1)],
    "look": [("GET", "/api/models/me/medusa", 502, 1)],
    "create": [("POST", "/repos/create", 403, 1)],
}


@pytest.mark.parametrize("case", CUTS)
def test_a_push_that_fails_publishes_nothing_and_is_continued(
    hub: HubServer, run: Path, case: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for method, part, how, times in CUTS[case]:
        hub.fail(method, part, how, times)
    hub.echo = True
    assert main(["push", str(run), "me/medusa"]) == 2
    _, err = capfd.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert ". " in line  # what went wrong, and what to do
    assert TOKEN not in err + caplog.text
    assert "secretsignature" not in line
    repo = hub.repos.get("me/medusa")
    assert repo is None or set(repo.files) == {".gitattributes"}
    arrived = bool(hub.large)
    hub.failures.clear()
    hub.log.clear()
    pushed = push_to_hub(run, "me/medusa")
    repo = hub.repos["me/medusa"]
    assert set(repo.files) == FILES | {".gitattributes"}
    assert len(repo.messages) == 2
    assert hub.asked("PUT", "/lfs/") == (0 if arrived else 1)  # what had arrived is not sent again
    assert arrived == (case in ("verify", "commit", "conflict"))
    assert pushed.uploaded


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub: HubServer, run: Path) -> None:
    hub.fail("POST", "/commit/", "cut")
    with pytest.raises(HeadwayError, match=r"Run the same command again"):
        push_to_hub(run, "me/medusa")
    assert not push_to_hub(run, "me/medusa").uploaded
    assert len(hub.repos["me/medusa"].messages) == 2


def test_a_push_between_look_and_commit_is_not_mixed_with_ours(
    hub: HubServer, root: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_to_hub(run, "me/medusa")
    repo, other = hub.repos["me/medusa"], root / "newer"

    def first(*given: Any) -> str:
        repo.commit({**repo.files, "config.json": b"{}"}, "theirs")
        return "card"

    monkeypatch.setattr("headway.hub._card", first)
    with pytest.raises(HeadwayError, match=r"somebody else.*push again"):
        push_to_hub(other, "me/medusa")
    assert repo.messages[-1] == "theirs"


REFUSED = {
    "no token": ({}, "", r"no valid token.*hf auth login"),
    "wrong token": ({}, "hf_SomethingElse123", r"no valid token.*hf auth login"),
    "anothers": ({"you/head": {"a.txt": b""}}, TOKEN, r"write access to you"),
    "anothers name": ({}, TOKEN, r"write access to you"),
    "a model": ({"me/head": {"config.json": b'{"model_type": "llama"}', "model.safetensors": b""}}, TOKEN, "no head"),
    "weights": ({"me/head": {"model.safetensors": b""}}, TOKEN, "no head"),
    "leaves out": ({"me/head": {".gitignore": b"model.safetensors"}}, TOKEN, r"without model\.safetensors.*gitignore"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hub_does_not_take_is_said_with_the_remedy(
    hub: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    repos, token, message = REFUSED[case]
    for name, files in repos.items():
        hub.create(name, files)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HeadwayError, match=message) as caught:
        push_to_hub(run, "you/head" if case.startswith("anothers") else "me/head")
    assert "hf_" not in str(caught.value)
    assert not hub.asked("PUT", "/lfs/")


def test_private_does_not_publish_to_what_is_public(hub: HubServer, run: Path) -> None:
    hub.create("me/head", {})
    with pytest.raises(HeadwayError, match=r"exists and is public"):
        push_to_hub(run, "me/head", private=True)
    assert not hub.asked("POST", "")
    push_to_hub(run, "me/head")


def test_offline_is_said_before_anything_is_asked(hub: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HeadwayError, match=r"HF_HUB_OFFLINE is set.*unset it"):
        push_to_hub(run, "me/medusa")
    with pytest.raises(HeadwayError, match=r"not in the cache, and HF_HUB_OFFLINE is set.*Unset it"):
        head_folder("me/medusa")
    assert hub.log == []


def test_only_a_whole_head_is_pushed(hub: HubServer, run: Path, tmp_path: Path) -> None:
    (tmp_path / "begun" / "state").mkdir(parents=True)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text('{"headway": {"layout": "vllm"}, "model_type": "eagle"}')
    cut = Path(shutil.copytree(run / "head", tmp_path / "cut")) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-5])
    config = Path(shutil.copytree(run / "head", tmp_path / "mixed")) / "config.json"
    config.write_text(config.read_text().replace('"num_heads": 2', '"num_heads": 3'))
    for name, message in (
        ("begun", "kept no head yet"),
        ("export", "export for another engine"),
        ("cut", "damaged or truncated"),
        ("mixed", "lacks tensor"),
        ("none", "no folder"),
    ):
        with pytest.raises(HeadwayError, match=message):
            push_to_hub(tmp_path / name, "me/medusa")
    for name in ("medusa", "me/medusa@v1", "a/b/c", "me/"):
        with pytest.raises(HeadwayError, match="give user/name"):
            push_to_hub(run, name)
    assert hub.log == []


def test_an_adapter_that_stays_behind_is_said(
    hub: HubServer, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    path = run / "head" / "config.json"
    config = json.loads(path.read_text())
    push_to_hub(run, "me/medusa")
    assert "adapter" not in capsys.readouterr().err
    config["target"]["adapter"] = {"name": str(folder), "sha256": "0" * 64, "base": None}
    path.write_text(json.dumps(config))
    push_to_hub(run, "me/medusa")
    assert f"not uploaded with it: {folder}" in capsys.readouterr().err


# What the card says


def report(head: str, target: str) -> dict[str, Any]:
    row = {"tokens_per_s": 20.0, "ratio_vs_transformers": 1.0, "ratio_vs_plain": 0.8, "accepted_length": 1.0}
    return {
        "target": target,
        "settings": {"temperature": 0.0, "batch_size": 1},
        "environment": {"dtype": "bfloat16", "device": "cpu: Z", "date": "2026-01-02"},
        "prompts": {"count": 8, "categories": ["math"], "files": ["/home/me/secret.jsonl"]},
        "rows": [
            {"name": "transformers", **row},
            {"name": head, **row, "ratio_vs_plain": 1.27},
            {"name": "xyz", **row},
        ],
    }


def test_the_card_shows_measurements_and_the_licence(
    hub: HubServer, root: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    target = read_config(run / "head")["target"]["name"]
    rows = [{"category": "all", "prompts": 4, "accepted_length": 1.625, "tokens": 99, "rounds": 61}]
    evaluated = {"target": target, "head": str(run / "head"), "dtype": "float32", "tree": "chain:3", "rows": rows}
    for name, content in {
        "bench": report("run", target),
        "eval": evaluated,
        "other": report("run", "another/model"),
        "theirs": report("somebody", target),
        "broken": {"target": target, "rows": [{"name": "run"}], "environment": {}},
    }.items():
        (run / f"{name}.json").write_text(json.dumps(content))
    push_to_hub(run, "me/medusa")
    card = hub.repos["me/medusa"].files["README.md"].decode()
    assert "1.27" in card
    assert "1.62" in card
    assert "xyz" not in card
    assert card.count("headway bench, ") == card.count("headway eval, ") == 1
    assert "/home/me" not in card
    assert str(root) not in card + hub.repos["me/medusa"].messages[-1]
    assert "# medusa head for target\n" in card
    assert "config.json names the target by its place on this machine" in capsys.readouterr().err
    assert 'load_head("me/medusa", target)' in card
    assert "--head me/medusa " in card
    assert "| licence of the target | unknown: its files name none |" in card
    assert "FOLDER_OR_HUB_ID" not in card


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("license: apache-2.0", "apache-2.0 (as its card says)"),
        ("license: other\nlicense_name: llama9", "llama9 (as its card says)"),
        ("tags: [a]", "unknown: its card names none"),
        (None, "unknown: the hub does not show its card"),
    ],
)
def test_the_licence_of_a_target_on_the_hub(hub: HubServer, run: Path, front: str | None, said: str) -> None:
    path = run / "head" / "config.json"
    config = json.loads(path.read_text())
    config["target"] |= {"name": "you/target", "revision": None}
    path.write_text(json.dumps(config))
    if front is not None:
        hub.create("you/target", {"README.md": f"---\n{front}\n---\n".encode()})
    push_to_hub(run, "me/medusa")
    card = hub.repos["me/medusa"].files["README.md"].decode()
    assert f"| licence of the target | {said} |" in card
    assert "base_model: you/target" in card


def test_a_licence_in_the_targets_own_files(hub: HubServer, root: Path, run: Path, tmp_path: Path) -> None:
    path = run / "head" / "config.json"
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "README.md").write_text("---\nlicense: mit\n---\n")
    path.write_text(path.read_text().replace(str(root / "target"), str(tmp_path / "t")))
    push_to_hub(run, "me/medusa")
    assert "mit (as its own files say)" in hub.repos["me/medusa"].files["README.md"].decode()


def test_a_card_that_somebody_edited_stays(hub: HubServer, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = run / "head" / "README.md"
    card.write_text(card.read_text().replace("A draft head", "My draft head"))
    push_to_hub(run, "me/medusa")
    pushed = hub.repos["me/medusa"].files["README.md"].decode()
    assert "My draft head" in pushed
    assert "--head me/medusa " in pushed
    assert "was edited" in capsys.readouterr().err


# From the hub


@pytest.fixture
def published(hub: HubServer, root: Path, run: Path) -> HubServer:
    """me/medusa with the run's head at v1, and another at main."""
    push_to_hub(run, "me/medusa")
    hub.repos["me/medusa"].refs["v1"] = hub.repos["me/medusa"].refs["main"]
    push_to_hub(root / "newer", "me/medusa")
    hub.log.clear()
    return hub


def test_a_head_comes_from_the_hub_at_its_revision(published: HubServer, root: Path, run: Path) -> None:
    target = Target.load(root / "target")
    first, newest = load_head(run / "head", target), load_head(root / "newer", target)
    repo = published.repos["me/medusa"]
    for head, revision in ((first, "v1"), (newest, None), (newest, "main"), (first, repo.refs["v1"])):
        for source, named in ((f"me/medusa@{revision}" if revision else "me/medusa", None), ("me/medusa", revision)):
            loaded = load_head(source, target, revision=named)
            assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), head.parameters(), strict=True))
    assert published.asked("GET", "/cdn/") == 2  # each once
    with pytest.raises(HeadwayError, match="give one of them"):
        load_head("me/medusa@v1", target, revision="v2")
    with pytest.raises(HeadwayError, match=r"no revision 'v9'.*Give a branch"):
        load_head("me/medusa@v9", target)


def test_commands_take_a_head_by_its_revision(
    published: HubServer, root: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    ask = ("generate", "-t", "target", "--prompt", "Hi", "-n", "6", "--json", "--head")
    assert main([*ask, "me/medusa@v1"]) == 0
    there = json.loads(capfd.readouterr().out)
    assert main([*ask, str(run)]) == 0
    here = json.loads(capfd.readouterr().out)
    assert [there[k] for k in ("token_ids", "rounds")] == [here[k] for k in ("token_ids", "rounds")]
    assert main(["info", "me/medusa@v1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["head"]["parameters"] > 0
    (root / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    out = ("eval", "-t", "target", "-p", "p.jsonl", "-n", "4", "--json", "--head", "me/medusa@v1")
    assert main([*out]) == 0
    assert json.loads(capfd.readouterr().out)["head"] == f"me/medusa@{published.repos['me/medusa'].refs['v1']}"
    assert main(["export", "me/medusa@v1", "--to", "medusa", "--out", str(run / "medusa"), "-t", "target"]) == 0


def test_pull_is_whole_or_nothing(published: HubServer, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "pulled"
    published.fail("GET", "/cdn/", "cut", times=99)
    with pytest.raises(HeadwayError, match=r"Run the same command again"):
        pull_from_hub("me/medusa@v1", out)
    assert not out.exists()
    published.failures.clear()
    assert "medusa head" in pull_from_hub("me/medusa@v1", out)
    assert {path.name for path in out.iterdir()} == FILES
    assert (out / "model.safetensors").read_bytes() == (run / "head" / "model.safetensors").read_bytes()
    (out / "tree.json").write_text("{}")
    assert "already" in pull_from_hub("me/medusa@v1", out)
    with pytest.raises(HeadwayError, match="another head, which would be lost"):
        pull_from_hub("me/medusa", out)
    assert (out / "tree.json").exists()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(HeadwayError, match="holds no head"):
        pull_from_hub("me/medusa", tmp_path / "notes")


def test_a_download_that_is_cut_once_goes_on(published: HubServer, tmp_path: Path) -> None:
    published.fail("GET", "/cdn/", "cut")
    pull_from_hub("me/medusa@v1", tmp_path / "pulled")
    assert published.asked("GET", "/cdn/") == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [(401, "no valid token"), (403, "may not do this"), (503, "in trouble"), (429, "pause")],
)
def test_a_refused_download_says_what_to_do(published: HubServer, how: int, message: str) -> None:
    published.fail("GET", "/api/models/", how, 99)
    published.echo = True
    with pytest.raises(HeadwayError, match=message) as caught:
        head_folder("me/medusa")
    assert TOKEN not in str(caught.value)


def test_a_hub_in_trouble_is_said_and_the_cache_is_used(
    published: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = head_folder("me/medusa")
    published.fail("GET", "/api/models/", 503, 99)
    assert head_folder("me/medusa") == folder
    assert "from the cache" in capsys.readouterr().err
    published.failures.clear()
    published.fail("GET", "/api/models/", 401, 99)
    with pytest.raises(HeadwayError, match="no valid token"):  # access that was taken away is not passed over
        head_folder("me/medusa")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert head_folder("me/medusa") == folder
    assert capsys.readouterr().err == ""


def test_of_what_is_no_head_nothing_large_is_fetched(hub: HubServer, root: Path) -> None:
    hub.create("you/target", {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(999)})
    hub.create("you/empty", {})
    with pytest.raises(HeadwayError, match="describes no head"):
        head_folder("you/target")
    with pytest.raises(HeadwayError, match=r"holds no config\.json"):
        head_folder("you/empty")
    with pytest.raises(HeadwayError, match=r"shows no you/none.*Check the name"):
        head_folder("you/none")
    assert not any("safetensors" in path for _, path, _ in hub.log)


def test_the_clients_loudest_log_has_no_token(
    hub: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_DEBUG", True)
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_debug()
    heard = io.StringIO()
    logger, listener = hub_logging.get_logger("huggingface_hub"), logging.StreamHandler(heard)
    logger.addHandler(listener)
    hub.echo = True
    hub.fail("POST", "/commit/", 403)
    try:
        with pytest.raises(HeadwayError, match=r"may not do this"):
            push_to_hub(run, "me/medusa")
    finally:
        logger.removeHandler(listener)
        hub_logging.set_verbosity(verbosity)
    out, err = capfd.readouterr()
    assert "<TOKEN>" in heard.getvalue()
    assert TOKEN not in out + err + heard.getvalue()


def test_hf_endpoint_in_a_process_of_its_own(published: HubServer, tmp_path: Path) -> None:
    env = os.environ | {"HF_ENDPOINT": published.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HOME": str(tmp_path / "home"), "HF_DEBUG": "1"}
    ask = "from headway.heads.common.hub import download; print(download('me/medusa', 'v1'))"
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert {path.name for path in folder.iterdir()} == FILES
    assert folder.name == published.repos["me/medusa"].refs["v1"]
    assert "<TOKEN>" in done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_secrets_are_scrubbed() -> None:
    text = "PUT https://u:pw@s3.example/x?X-Amz-Signature=abc Bearer abcdefgh hf_AbCdEfGhIjAbCdEfGhIj and mytoken"
    assert scrub(text, "mytoken") == "PUT https://***@s3.example/x Bearer *** *** and ***"
    assert scrub("hf_oauth_a.b-c_d1 sk-" + "a" * 20, "mytoken") == "*** ***"
    assert scrub("GET https://host/v1?api_key=x of hf_transfer", "mytoken") == "GET https://host/v1 of hf_transfer"
