"""Turns: which answers a row asks for, and what the target reads before each of them.

    system  user  call  result  assistant  user  assistant
    |------ asked ------------|  given     asked   given        one answer for each `asked`

A call of a tool whose results follow it is not asked for again, since other words might not fit the results: both stay
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from headway.data.manifest import digest
from headway.data.prompts import Message, Row
from headway.data.sources import RowError
from headway.heads.common.errors import HeadwayError

History = Literal["own", "given"]
"""What stands for the answers before a turn: the target's own, or those that the row holds."""


@dataclass(frozen=True)
class Exchange:
    """What is said before one answer, and the answer that the row holds, if it does."""

    asked: list[Message]
    given: Message | None = None


@dataclass(frozen=True)
class Turn:
    """One answer that a row asks for."""

    row: Row
    number: int
    exchanges: list[Exchange]
    """All of the row."""

    @property
    def id(self) -> str:
        """Name the dialog of this turn."""
        return self._id(self.number)

    @property
    def before(self) -> str | None:
        """Name the dialog of the turn above; None for the first."""
        return self._id(self.number - 1) if self.number else None

    @property
    def after(self) -> Turn | None:
        """Return the next turn of the row; None for the last."""
        return Turn(self.row, self.number + 1, self.exchanges) if self.number + 1 < len(self.exchanges) else None

    def messages(self, history: History, own: Callable[[str], Message]) -> list[Message]:
        """Return what is read before the answer; `own` gives the target's answer of a dialog's id.

        Raises RowError where an answer above is missing.
        """
        read: list[Message] = []
        for number, exchange in enumerate(self.exchanges[: self.number]):
            answer = exchange.given if history == "given" else own(self._id(number))
            if answer is None:
                raise RowError("an earlier turn has no answer to keep")
            read += [*exchange.asked, answer]
        return read + self.exchanges[self.number].asked

    def _id(self, number: int) -> str:
        return self.row.id if number == 0 else f"{self.row.id} turn {number + 1}"


def turns_of(row: Row) -> list[Turn]:
    """Return the turns of a row in order."""
    exchanges: list[Exchange] = []
    asked: list[Message] = []
    for at, message in enumerate(row.messages):
        following = row.messages[at + 1]["role"] if at + 1 < len(row.messages) else None
        if message["role"] == "assistant" and following != "tool":
            exchanges.append(Exchange(asked, message))
            asked = []
            continue
        asked = [*asked, message]
        if message["role"] in ("user", "tool") and following in ("user", None):
            exchanges.append(Exchange(asked))
            asked = []
    return [Turn(row, number, exchanges) for number in range(len(exchanges))]


def check_history(history: str) -> History:
    """Return `history`. Raises HeadwayError for one there is not."""
    if history not in get_args(History):
        raise HeadwayError(f"unknown history {history!r}; allowed: own (the target's answers), given (the row's)")
    return history  # type: ignore[return-value]


@dataclass(frozen=True)
class TemperatureMix:
    """Temperatures with weights; which of them a row gets is a function of its id alone, so that a run can be continued."""

    parts: tuple[tuple[float, float], ...]
    """(temperature, weight)."""

    def __post_init__(self) -> None:
        fits = all(0 <= temperature < float("inf") and 0 < weight < float("inf") for temperature, weight in self.parts)
        if not self.parts or not fits or len(dict(self.parts)) < len(self.parts):
            raise HeadwayError(
                f"temperatures with weights are {self.parts!r}; give different ones of 0 (greedy) or more, with weights above 0"
            )

    @classmethod
    def parse(cls, text: str) -> TemperatureMix:
        """Return the mix of `0.6:0.3,1.0:0.7`. Raises HeadwayError for anything else."""
        pairs = [part.partition(":") for part in text.split(",")]
        try:
            return cls(tuple((float(temperature), float(weight or 1)) for temperature, _, weight in pairs))
        except HeadwayError:
            raise
        except ValueError:
            raise HeadwayError(
                f"a temperature mix is {text!r}; give temperatures with weights, such as 0.6:0.3,1.0:0.7"
            ) from None

    def of(self, row_id: str) -> float:
        """Return the temperature of a row."""
        at = int(digest("temperature", row_id)[:12], 16) / 16**12 * sum(weight for _, weight in self.parts)
        for temperature, weight in self.parts:
            at -= weight
            if at < 0:
                return temperature
        return self.parts[-1][0]


def turns_json(history: History, mix: TemperatureMix | None) -> dict[str, Any]:
    """Return what a manifest says of the turns; the usual is null, as folders made before there was a choice read."""
    return {
        "history": None if history == "own" else history,
        "temperature_mix": None if mix is None else [list(part) for part in mix.parts],
    }


def all_turns(rows: Sequence[Row]) -> list[list[Turn]]:
    """Return the turns of each row."""
    return [turns_of(row) for row in rows]
