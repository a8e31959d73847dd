"""Heads to the hub and from it: `headway push` and `headway pull`.

A push is one commit on top of the commit that was looked at: weights, config, card and trees appear together or not at all.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.foreign import read_saved
from headway.heads.common.aside import folder_aside
from headway.heads.common.card import PLACE, is_on_hub, is_sealed, model_card, report_table, tuned_table
from headway.heads.common.checkpoint import check_head_folder, head_folder, plain_name, read_config
from headway.heads.common.errors import HeadwayError
from headway.heads.common.hub import (
    CARD,
    CONFIG,
    FILES,
    WEIGHTS,
    cause,
    from_hub,
    hub_error,
    is_offline,
    parse_id,
    run_head,
)
from headway.heads.formats.damage import NOTE
from headway.inference.tune import read_policies
from headway.inputs import head_name

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo


@dataclass(frozen=True)
class Pushed:
    """What a push left on the hub."""

    address: str
    """Of the repository."""
    commit: str
    """The commit that holds the head."""
    files: tuple[str, ...]
    """Those that the head on the hub has."""
    uploaded: bool
    """False where the hub had all of it already, and no commit was made."""


def push_to_hub(folder: Path | str, repo_id: str, private: bool = False, token: str | None = None) -> Pushed:
    """Upload a head (or the head of a training run) to the hub, creating the repository where needed.

    The card is written anew for the hub unless somebody edited it. What is said goes to stderr. Run again after a failure it
    uploads what is missing. Raises HeadwayError for what is no whole head, a repository that holds something else, and
    whatever the hub answers; nothing is then published by half.
    """
    on_hub = parse_id(repo_id)
    if on_hub is None or on_hub[1] is not None:
        raise HeadwayError(f"{repo_id!r} is no repository id; give user/name")
    source = Path(run_head(str(folder))).expanduser()
    config = _whole(source)
    if is_offline():
        raise HeadwayError(f"HF_HUB_OFFLINE is set, so nothing can be pushed to {repo_id}; unset it and push again")
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        before = _look(api, repo_id, private)
        if before is None:
            api.create_repo(repo_id, private=private)
            before = api.model_info(repo_id)
        return _commit(api, repo_id, before, source, config)
    except Exception as e:
        if isinstance(e, HeadwayError) or not from_hub(e):
            raise
        raise hub_error(e, repo_id, token=token) from cause(e, token)


def pull_from_hub(source: str, out: Path) -> str:
    """Download the head `owner/name[@revision]` to a folder and return what is to be said of it; whole or not at all.

    A folder that holds this head already is left as it is. Raises HeadwayError for one that holds anything else, for a
    repository without a whole head, and for what the hub answers.
    """
    on_hub = parse_id(source)
    if on_hub is None:
        raise HeadwayError(f"{source!r} is no head on the hub; give user/name or user/name@revision")
    if Path(source).expanduser().is_dir():
        raise HeadwayError(f"{source} is a folder here, so it would not be asked of the hub; run this elsewhere")
    check_head_folder(out)
    folder = head_folder(source)
    config = _whole(folder)
    what = f"{config['family']} head for {config['target']['name']}, {on_hub[0]} at commit {folder.name}"
    if out.is_dir() and any(out.iterdir()):
        if all(cmp(folder / name, out / name, shallow=False) for name in (CONFIG, WEIGHTS) if (out / name).is_file()):
            return f"{out} holds it already: {what}"
        raise HeadwayError(f"{out} holds another head, which would be lost; give a new folder")
    with folder_aside(out) as aside:
        for name in FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, aside / name)
    return f"{out}: {what}"


def _whole(folder: Path) -> dict[str, Any]:
    """Return the config of a head after checking that every tensor is there, of its shape, and finite."""
    if not folder.is_dir():
        raise HeadwayError(f"no folder {str(folder)!r}; give a head folder, or a run folder of `headway train`")
    if not (folder / CONFIG).is_file() and ((folder / "state").is_dir() or (folder / "run.json").is_file()):
        raise HeadwayError(f"the run {folder} has kept no head yet; let it come to its end, or to an evaluation")
    _refuse_export(folder)
    read_saved(str(folder))
    read_policies(folder)
    return read_config(folder)


def _refuse_export(folder: Path) -> None:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(config, dict) and NOTE in config and "format" not in config:
        raise HeadwayError(
            f"{folder} is an export for another engine; push the head it was made of, or `hf upload user/name {folder}`"
        )


def _look(api: HfApi, repo_id: str, private: bool) -> ModelInfo | None:
    """Return what the repository is, or None where there is none. Raises HeadwayError where it is not for this head."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        found = api.model_info(repo_id)
    except RepositoryNotFoundError as e:
        if type(e) is not RepositoryNotFoundError:  # a gated one
            raise
        return None
    if private and not found.private:
        raise HeadwayError(
            f"{repo_id} exists and is public, --private would not change that; make it private in its settings first "
            f"(`hf repos settings {repo_id} --private`), or push without --private"
        )
    names = _names(found)
    if not names & {CONFIG, WEIGHTS}:
        return found
    kept = Path(api.hf_hub_download(repo_id, CONFIG, revision=found.sha)).parent if CONFIG in names else None
    try:
        held = read_config(kept) if kept is not None else None
    except HeadwayError:
        held = None
    if held is None:
        raise HeadwayError(f"{repo_id} holds something that is no head of headway; push to another name")
    _say(
        f"{repo_id} holds a head ({held['family']}, for {held['target']['name']}); it stays in the history ({found.sha})"
    )
    return found


def _commit(api: HfApi, repo_id: str, before: ModelInfo, source: Path, config: dict[str, Any]) -> Pushed:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    names = tuple(name for name in FILES if name == CARD or (source / name).is_file())
    card = _card(api, repo_id, source, config).encode()
    add = [CommitOperationAdd(name, card if name == CARD else source / name) for name in names]
    stale = [CommitOperationDelete(name) for name in FILES if name in _names(before) and name not in names]
    target = config["target"]
    if not is_on_hub(target):
        _say(
            f"config.json names the target by its place on this machine, {target['name']}, and that is published with it"
        )
    adapter = target.get("adapter")
    if adapter is not None and Path(adapter["name"]).exists():
        _say(
            f"the head is refused without the target's adapter, which is not uploaded with it: {adapter['name']}. Give it a "
            f"repository of its own: hf upload user/adapter {adapter['name']}"
        )
    left = sorted(path.name for path in source.iterdir() if path.name not in FILES)
    if left:
        _say(f"not uploaded: {', '.join(left)}")
    made = api.create_commit(
        repo_id,
        [*add, *stale],
        commit_message=f"{config['family']} head for {target['name'] if is_on_hub(target) else plain_name(target['name'])}",
        parent_commit=before.sha,
    )
    missing = set(names) - _names(api.model_info(repo_id, revision=made.oid))
    if missing:
        raise HeadwayError(
            f"{repo_id} took the head without {', '.join(sorted(missing))}; its .gitignore leaves that out, change it there"
        )
    return Pushed(f"{api.endpoint}/{repo_id}", made.oid, names, made.oid != before.sha)


def _names(info: ModelInfo) -> set[str]:
    return {file.rfilename for file in info.siblings or ()}


def _card(api: HfApi, repo_id: str, source: Path, config: dict[str, Any]) -> str:
    """Return the card to be published: made anew, or the one in the folder where somebody edited it."""
    path = source / CARD
    kept = path.read_text(encoding="utf-8") if path.is_file() else ""
    if kept and not is_sealed(kept):
        _say(f"{path} was edited, and is pushed as it is")
        return kept.replace(PLACE, repo_id)
    measured = [*tuned_table(read_policies(source)), *_reports(source, config)]
    return model_card(config, place=repo_id, licence=_licence(api, config["target"]), measured=measured)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _reports(source: Path, config: dict[str, Any]) -> list[str]:
    """Return tables of what `headway bench` and `headway eval` wrote of this head, in its folder or in that of its run.

    Of a bench the rows of other heads are left out; a report that cannot be this head's, or is not whole, counts for nothing.
    """
    places = [source, *([source.parent] if source.name == "head" else [])]
    found = []
    for path in sorted(file for place in places for file in place.glob("*.json")):
        report = _json(path)
        if path.name in FILES or not isinstance(report, dict):
            continue
        batches = report.get("batches")
        for one in batches if isinstance(batches, list) else [report]:
            mine = _mine(one, head_name(str(source)), config["target"]["name"])
            if mine is not None:
                _say(f"the card shows {path}")
                found.append(mine)
    return found


def _mine(report: Any, name: str, target: str) -> str | None:
    """Return the table of what a report says of the head called `name`, or None."""
    try:
        rows = report["rows"]
        if plain_name(report["target"]) != plain_name(target):
            return None
        if "environment" in report:
            if all(row["name"] != name for row in rows):
                return None
            report = {**report, "rows": [row for row in rows if row["name"] in ("transformers", "plain", name)]}
        elif head_name(report["head"]) != name:
            return None
        return report_table(report)
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def _licence(api: HfApi, target: dict[str, Any]) -> str:
    """Return the licence that the target's own card or config names, with where that is said; never a guess."""
    folder = Path(target["name"]).expanduser()
    if folder.exists():
        named = _named(folder) if folder.is_dir() else None
        return f"{named} (as its own files say)" if named else "unknown: its files name none"
    if parse_id(target["name"]) is None:
        return "unknown: its files are not here"
    try:
        card = api.model_info(target["name"], revision=target["revision"]).card_data
    except Exception as e:
        if not from_hub(e):
            raise
        return "unknown: the hub does not show its card"
    named = None if card is None else card.get("license")
    if named == "other" and card is not None:
        named = card.get("license_name") or named
    return f"{named} (as its card says)" if named else "unknown: its card names none"


def _named(folder: Path) -> str | None:
    """Return the `license` of a model folder's card, or of its config."""
    from huggingface_hub import ModelCard

    path = folder / CARD
    if path.is_file():
        try:
            named = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.get("license")
        except ValueError:
            named = None
        if named:
            return str(named)
    config = _json(folder / CONFIG)
    named = config.get("license") if isinstance(config, dict) else None
    return named if isinstance(named, str) and named else None


def _say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr)
