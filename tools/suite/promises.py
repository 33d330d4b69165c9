"""What an error of a test says of a promise that was broken: lost, twice, torn, out of order, damaged, wrong outcome.

Three things say it: the type of the error, the words of an assertion (rules of the checkers have numbers,
``tools/checkers/history.py``), and a comparison of messages or outcomes that differ. A doubt counts as broken:
what is called unsteady by mistake would land.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set

from txmq.errors import CorruptRecordError, HeuristicError
from txmq.model import Message, Outcome, SendResult

BROKEN_TYPES = (CorruptRecordError, HeuristicError)
# Rules about how long something takes are left out: A4, A9 and G5.
RULE = re.compile(r"\b(?!A4\b|A9\b|G5\b)(?:P10|P[1-9]|[LA]\d{1,2}|[GUHO]\d) [a-z][\w:-]*")
WORDS = re.compile(
    r"(?<!connection )\b(?:lost|twice|torn|out of order|damaged|duplicates?|overtook|overtaken|wrong outcome)\b",
    re.IGNORECASE,
)
_STORED = (bytes, Message, Outcome, SendResult)
_LOOKED_AT_MAX = 1000


def broken_promise(error: BaseException, difference: str = "") -> str:
    """What it says; empty if nothing.

    Args:
        error: what ended the test. Its causes and, of a group, its members are asked, too.
        difference: of the last comparison that failed, by ``difference_of``.
    """
    return next(filter(None, (_of_one(one, difference) for one in _all(error))), "")


def difference_of(left: object, right: object) -> str:
    """How messages or outcomes differ; empty if it is something else that was compared."""
    if isinstance(left, Outcome) and isinstance(right, Outcome):
        return "" if Outcome.UNKNOWN in (left, right) else f"wrong outcome: {left.name}, not {right.name}"
    if not (_is_collection(left) and _is_collection(right)) or not (_holds_stored(left) or _holds_stored(right)):
        return ""
    there, wanted = (Counter(map(repr, _members(side))) for side in (left, right))
    missing, surplus = (wanted - there).total(), (there - wanted).total()
    return f"messages differ: {missing} missing, {surplus} too many" if missing or surplus else "out of order"


def _of_one(error: BaseException, difference: str) -> str:
    if isinstance(error, BROKEN_TYPES):
        return f"{type(error).__name__}: {error}"
    if not isinstance(error, AssertionError):
        return ""
    text = str(error)
    said = RULE.search(text) or WORDS.search(text)
    if said is not None:
        return f"says {said[0]!r}"
    return difference if text.startswith("assert ") or "\nassert " in text else ""


def _all(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            todo += one.exceptions


def _is_collection(value: object) -> bool:
    return isinstance(value, (list, tuple, Set, Mapping))


def _members(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.items()
    return value if isinstance(value, Iterable) else ()


def _holds_stored(value: object) -> bool:
    """Whether a message, an outcome or a payload is in it, at whatever depth."""
    todo, looked_at = [value], 0
    while todo and looked_at < _LOOKED_AT_MAX:
        one = todo.pop()
        looked_at += 1
        if isinstance(one, _STORED):
            return True
        if _is_collection(one):
            todo += _members(one)
    return False
