"""Heads on the Hugging Face hub: their names, their files, and what its errors mean.

The client is huggingface_hub, which chooses how bytes travel (LFS or xet) and where to (HF_ENDPOINT).
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.heads.common import lora
from headway.heads.common.errors import HeadwayError
from headway.heads.common.redact import REMOVED, hide_secrets

CONFIG, WEIGHTS, CARD, TREE = "config.json", "model.safetensors", "README.md", "tree.json"
FILES = (CONFIG, WEIGHTS, CARD, TREE, lora.CONFIG, lora.WEIGHTS)
"""What goes to the hub and comes from it: a head, a LoRA that lies beside it, and the trees that were tuned for it."""

_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\S+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LIBRARIES = {"huggingface_hub", "hf_xet", "httpx", "httpx2", "httpcore", "httpcore2", "requests"}
_HEADER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{4,}")
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
"""Of an address: uploads are signed in it."""


def parse_id(text: str) -> tuple[str, str | None] | None:
    """Return (owner/name, revision or None) of a hub id `owner/name[@revision]`; None for any other text."""
    found = _ID.fullmatch(text)
    return (found["repo"], found["revision"]) if found else None


def run_head(given: str) -> str:
    """Return `given`, what names a head, or the `head` folder in it when it is a training run."""
    inside = Path(given).expanduser() / "head"
    return str(inside) if (inside / CONFIG).is_file() else given


def is_commit(revision: str | None) -> bool:
    """Whether a revision is the hash of a commit, which never comes to mean another one."""
    return bool(revision and _COMMIT.fullmatch(revision))


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def download(repo: str, revision: str | None, files: tuple[str, ...] = FILES) -> Path:
    """Return the folder, named by its commit, in the client's cache that holds those of `files` which the repository has.

    A hub that is out of reach or in trouble is said on stderr, and the cache is used; with HF_HUB_OFFLINE only that is.
    Raises HeadwayError for what is neither there nor here.
    """
    from huggingface_hub import HfApi, snapshot_download

    ask: dict[str, Any] = {"revision": revision, "allow_patterns": list(files)}
    try:
        if not is_commit(revision):
            HfApi().model_info(repo, revision=revision)  # the client passes over a refusal where it has an old copy
        return Path(snapshot_download(repo, **ask))
    except Exception as e:
        if not from_hub(e):
            raise
        if not (is_offline() or _unreachable(e)):
            raise hub_error(e, repo, revision) from cause(e)
        try:
            folder = Path(snapshot_download(repo, **ask, local_files_only=True))
        except Exception as missing:
            if not from_hub(missing):
                raise
            raise hub_error(e, repo, revision) from cause(e)
        if not is_offline():
            print(f"headway: {say(e)}; taking {repo} from the cache, commit {folder.name[:8]}", file=sys.stderr)
        return folder


def from_hub(error: Exception) -> bool:
    """Whether an error is one of the hub, its client or the network under it (whose library the client changes)."""
    for link in _links(error):
        libraries = {base.__module__.partition(".")[0] for base in type(link).__mro__}
        if libraries & _LIBRARIES:
            return True
        if isinstance(link, OSError) and link.filename is None and link.errno not in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(link, RuntimeError | ValueError) and _raised_in(link) in _LIBRARIES:
            return True
    return False


def hub_error(error: Exception, repo: str, revision: str | None = None, token: str | None = None) -> HeadwayError:
    """Return what a hub's error means to who reads from or writes to `repo`, and the remedy; without any secret."""
    names = {type(link).__name__ for link in _links(error)}
    what, remedy = _by_kind(names, repo, revision) or _by_status(_status(error), repo)
    return HeadwayError(f"{what}: {say(error, token).rstrip('.')}. {remedy}")


def _by_kind(names: set[str], repo: str, revision: str | None) -> tuple[str, str] | None:
    if "OfflineModeIsEnabled" in names or is_offline():
        return f"{repo} is not in the cache, and HF_HUB_OFFLINE is set", "Unset it, or give a local folder"
    if "RevisionNotFoundError" in names:
        return f"{repo} has no revision {revision or 'main'!r}", "Give a branch, tag or commit that it has"
    if "GatedRepoError" in names:
        return f"{repo} is gated", "Ask for access on its page, and log in with `hf auth login`"
    if "RepositoryNotFoundError" in names:
        return (
            f"the hub shows no {repo}",
            "Check the name; where it is private, log in with `hf auth login` or set HF_TOKEN",
        )
    if "HFValidationError" in names:
        return f"{repo!r} is no name of a repository", "Give owner/name"
    return None


def _by_status(status: int | None, repo: str) -> tuple[str, str]:
    owner = repo.partition("/")[0]
    again = "Run the same command again later; what has arrived is not sent twice"
    known = {
        401: ("the hub knows no valid token", "Log in with `hf auth login`, or set HF_TOKEN to a token that may write"),
        402: ("the hub asks for payment", f"Look at the plan of {owner}"),
        403: (
            f"the token may not do this to {repo}",
            f"Use a token with write access to {owner} (`hf auth whoami` says whose it is), or a name of your own",
        ),
        404: (f"the hub has not what was asked of {repo}", "Check the name and the token's rights"),
        409: (f"something else is being done to {repo}", "Nothing was published. Run the same command again"),
        412: (f"somebody else has pushed to {repo} meanwhile", "Nothing was published. Look at it, then push again"),
        413: ("the hub finds a file too large", "Look at the limits of your plan"),
        429: ("the hub asks for a pause", again),
    }
    if status in known:
        return known[status]
    if status is not None and status >= 500:
        return f"the hub is in trouble ({status})", again
    if status is None:
        return "the connection to the hub failed", f"Check network and HF_ENDPOINT. {again}"
    return f"the hub refused ({status})", "Check the name and the token's rights"


def say(error: Exception, token: str | None = None) -> str:
    """Return the telling line of an error, without tokens and signed addresses."""
    last = list(_links(error))[-1]
    text = getattr(last, "server_message", None) or next((x for x in str(last).splitlines() if x.strip()), "")
    return scrub(" ".join(text.split()) or type(last).__name__, token)


def scrub(text: str, token: str | None = None) -> str:
    """Return `text` without this token and the client's, what `hide_secrets` knows, and what a signed address is signed with."""
    from huggingface_hub import get_token

    for secret in {token, get_token(), os.environ.get("HF_TOKEN")}:
        if secret:
            text = text.replace(secret, REMOVED)
    return hide_secrets(_HEADER.sub(rf"\1 {REMOVED}", _QUERY.sub(r"\1", text)))


def cause(error: Exception, token: str | None = None) -> Exception | None:
    """Return the error to chain to one of ours: none where its text holds a secret."""
    return error if all(scrub(str(link), token) == str(link) for link in _links(error)) else None


def _links(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _status(error: Exception) -> int | None:
    for link in _links(error):
        status = getattr(getattr(link, "response", None), "status_code", None)
        if status is not None:
            return int(status)
    return None


def _unreachable(error: Exception) -> bool:
    status = _status(error)
    refused = {"RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"}
    return (status is None or status >= 500) and not refused & {type(link).__name__ for link in _links(error)}


def _raised_in(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
