"""The one error users see."""

from __future__ import annotations


class HeadwayError(ValueError):
    """What was given, what is allowed, and the remedy, in one line. The CLI prints it and exits with code 2."""
