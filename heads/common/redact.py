"""Keys and passwords that stand in a command, a URL or an error are not written down: by the name before them, or their look."""

from __future__ import annotations

import re
from collections.abc import Sequence

REMOVED = "***"
_SECRET_NAME = re.compile(r"(?:.*[._-])?(?:token|(?:api)?key|password|passwd|secret|credentials?|authorization)", re.I)
"""A name that ends so: hf_token, --api-key; not tokens_per_batch, token_weight or top_k."""
_SECRET_LOOK = re.compile(
    r"\b(?:hf_(?:(?:oauth|jwt)_[\w.-]{8,}|[A-Za-z0-9]{16,})|sk-[\w-]{16,}|ghp_\w{16,}|eyJ[\w-]{16,}\.[\w.-]+)"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_URL_QUERY = re.compile(r"([?&]([\w.-]+)=)[^&#\s]+")


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return the words of a command; the value of `--a-key X`, `--a-key=X` and `a.key=X`, and what looks like one, removed."""
    kept: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            kept.append(REMOVED)
        elif equals and _SECRET_NAME.fullmatch(name.lstrip("-")):
            kept.append(f"{name}={REMOVED}")
        else:
            kept.append(hide_secrets(word))
        hide_next = word.startswith("--") and not equals and bool(_SECRET_NAME.fullmatch(name.lstrip("-")))
    return kept


def hide_secrets(text: str) -> str:
    """Return the text without logins and keys in URLs, and without what looks like a key."""
    text = _URL_LOGIN.sub(f"{REMOVED}@", text)
    text = _URL_QUERY.sub(lambda m: m[1] + REMOVED if _SECRET_NAME.fullmatch(m[2]) else m[0], text)
    return _SECRET_LOOK.sub(REMOVED, text)
