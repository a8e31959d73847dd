"""Text of an answer as it grows: whole characters only, without the end token, cut before a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

_HALF = "\ufffd"
_LONGEST_HALF = 3  # bytes of a UTF-8 character that can be there without its last one


class TextStream:
    """Turns tokens into text piece by piece; the pieces joined are `text`.

    A character whose bytes lie in several tokens is held back until it is whole, and what may begin a stop string until
    it is known not to. Special tokens are left out, unless there are stop strings, which may hold them.
    """

    def __init__(self, tokenizer: Any, eos_ids: Collection[int] = (), stop: Sequence[str] = ()) -> None:
        self.text = ""
        """What was returned so far."""
        self._tokenizer, self._eos, self._stop = tokenizer, frozenset(eos_ids), tuple(stop)
        self._ids: list[int] = []
        # ids[prefix:read] are known as whole text and give ids[read:] its context (a leading space may depend on it).
        self._prefix = self._read = 0
        self._known = 0
        """Characters of the decoded window that are in `_whole` already."""
        self._whole = ""
        """All whole characters; `text` may lag behind it by the beginning of a stop string."""
        self._ended = False

    def feed(self, tokens: Sequence[int]) -> str:
        """Take new tokens and return the text that they make certain."""
        for token in tokens:
            if self._ended:
                break
            if token in self._eos:
                self._ended = True
                break
            self._ids.append(token)
            self._decode()
            self._cut()
        return self._release(last=False)

    def finish(self) -> str:
        """Return what was held back, but for half a character; the answer is over."""
        return self._release(last=True)

    def _decode(self) -> None:
        window = self._text_of(self._ids[self._prefix :])
        whole = window
        if window.endswith(_HALF):
            bare = window.rstrip(_HALF)
            whole = window[: max(len(bare), len(window) - _LONGEST_HALF)]
        if len(whole) > self._known:
            self._whole += whole[self._known :]
            self._known = len(whole)
        if whole == window and window:
            self._prefix, self._read = self._read, len(self._ids)
            self._known = len(self._text_of(self._ids[self._prefix : self._read]))

    def _text_of(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=not self._stop))

    def _cut(self) -> None:
        """End the text before the first stop string in it."""
        if not self._stop:
            return
        since = max(0, len(self.text) - max(map(len, self._stop)))
        found = [at for at in (self._whole.find(s, since) for s in self._stop) if at >= 0]
        if found:
            self._whole, self._ended = self._whole[: min(found)], True
            self._prefix = self._read = len(self._ids)

    def _release(self, last: bool) -> str:
        safe = len(self._whole)
        if not (last or self._ended):
            safe -= max((_overlap(self._whole, s) for s in self._stop), default=0)
        piece = self._whole[len(self.text) : safe]
        self.text += piece
        return piece


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
