"""Manifests: what made a file or folder, compared before it is continued; and JSON written aside, then renamed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.heads.common.aside import file_aside
from headway.heads.common.errors import HeadwayError

if TYPE_CHECKING:
    from headway.inference.sampling import Settings

FORMAT = 1


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON aside and rename it into place."""
    with file_aside(path) as aside, aside.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)


def check_writable(path: Path) -> None:
    """Raise HeadwayError unless a file can be made at `path`, with the folders that are still missing above it."""
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise HeadwayError(f"cannot write {path}: {parent} is not a folder that can be written; give another place")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises HeadwayError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadwayError(f"{path} does not exist; is {path.parent} the folder you mean?") from None
    except NotADirectoryError:
        raise HeadwayError(f"{path.parent} is a file; give the folder that it lies in") from None
    except OSError as e:
        raise HeadwayError(f"cannot read {path}: {e.strerror}") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise HeadwayError(f"{path} is no JSON object; make {path.parent} again")
    return value


def require_same(saved: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Raise HeadwayError naming what differs, unless every entry of `wanted` is in `saved` with the same value."""
    # The saved side went through JSON, so tuples and the like are compared as JSON would spell them.
    wanted = json.loads(json.dumps(wanted))
    differ = _differences(saved, wanted)
    if differ:
        raise HeadwayError(
            f"{where} was made with other settings: {'; '.join(differ)}. Continue it with the same "
            "ones, or give another --out"
        )


def _differences(saved: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> list[str]:
    differ = []
    for key, value in wanted.items():
        old = saved.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            differ += _differences(old, value, f"{prefix}{key}.")
        elif old != value:
            differ.append(f"{prefix}{key} was {old!r}, now {value!r}")
    return differ


def settings_json(settings: Settings) -> dict[str, Any]:
    """Return the settings as plain JSON."""
    fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    fields["processors"] = [type(p).__name__ for p in settings.processors]
    for name in ("min_new_tokens", "processors"):  # folders made before there were these know nothing of them
        if not fields[name]:
            del fields[name]
    return json.loads(json.dumps(fields))


def digest(*parts: Any) -> str:
    """Return the sha256 of some JSON-ready values."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode("utf-8")).hexdigest()


def digest_file(path: Path) -> str:
    """Return the sha256 of a file's bytes. Raises HeadwayError where it cannot be read."""
    try:
        found = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    except OSError as error:
        raise HeadwayError(f"cannot read {path}: {error.strerror}") from None
    return found.hexdigest()
