"""The one error users see, and Ctrl-C with words to it."""

from __future__ import annotations

from pathlib import Path


class HeadwayError(ValueError):
    """What was given, what is allowed, and the remedy, in one line. The CLI prints it and exits with code 2."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C was pressed: what is safe, and how to go on. The CLI prints it and exits with code 130."""

    @classmethod
    def with_safe(cls, count: int, what: str, where: Path | str) -> Interrupted:
        """Return one that says how many of what are safe, and that running it again continues."""
        return cls(f"interrupted: {count} {what} are safe in {where}; run it again to continue")


def spell_os_error(error: OSError) -> str:
    """Return an error of the system as a user would say it: the file, and what went wrong."""
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename else what
