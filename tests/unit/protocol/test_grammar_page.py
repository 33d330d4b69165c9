"""docs/protocol.md says what the grammar and the errors say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from txmq.errors import BrokerError
from txmq.protocol.grammar import (
    LINE_SIZE_BYTES_MAX,
    OPAQUE_SIZE_MAX,
    VERBS,
    GrammarError,
    Verb,
    help_text,
    parse_line,
    usage,
)
from txmq.protocol.group_rows import ROWS_MAX

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "protocol.md").read_text("utf-8")
HEADINGS = re.findall(r"^#### `(.*)`$", PAGE, re.MULTILINE)
EXAMPLES = re.findall(r"Example(?: \(.*?\))?: `(.*)`", PAGE)
_EACH_VERB = pytest.mark.parametrize("verb", list(VERBS.values()), ids=lambda verb: verb.name.decode())


def test_page_has_each_verb_once_written_as_table_has_it() -> None:
    assert sorted(HEADINGS) == sorted(usage(verb) for verb in VERBS.values())


def test_page_has_a_sendable_example_for_each_verb() -> None:
    assert sorted(parse_line(example.encode()).verb for example in EXAMPLES) == sorted(VERBS)


def test_the_first_conversation_can_be_typed() -> None:
    typed = [line[2:] for line in PAGE.splitlines() if line.startswith("> ")]
    verbs = [parse_line(line.encode()).verb for line in typed if line != "hello"]
    assert verbs == [b"topic", b"put", b"offset", b"get", b"quit"]


def test_the_page_names_every_error_with_its_code() -> None:
    classes: list[type[BrokerError]] = [BrokerError]
    for cls in classes:
        classes += cls.__subclasses__()
    known = {(cls.code, cls.wire_name) for cls in classes}
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", PAGE, re.MULTILINE)
    assert {(int(code), name) for code, names in rows for name in re.findall(r"`(.*?)`", names)} == known


def test_the_page_states_the_limits() -> None:
    assert f"at most {LINE_SIZE_BYTES_MAX} bytes" in PAGE
    assert f"1 to {OPAQUE_SIZE_MAX} of" in PAGE


def test_the_page_states_what_each_verb_takes_as_a_body() -> None:
    rows = re.findall(r"^\| ((?:`[a-z]+` ?)+) \| (.*) \|$", PAGE, re.MULTILINE)
    stated = {verb: text for verbs, text in rows for verb in re.findall(r"`(.*?)`", verbs)}
    assert set(stated) == {verb.name.decode() for verb in VERBS.values() if verb.has_body}
    for name, text in stated.items():
        verb = VERBS[name.encode()]
        assert bool(verb.body_size_bytes_max) == text.startswith(f"{verb.body_size_bytes_max} bytes")
        for extension, most in verb.number_max.items():
            assert f"`{extension.decode()}=` {most} bytes and {ROWS_MAX} rows" in text
    assert f"{ROWS_MAX} rows" in stated["group"]


@_EACH_VERB
def test_help_teaches_each_verb(verb: Verb) -> None:
    assert help_text(verb.name.decode()).startswith(usage(verb) + "\n")
    assert usage(verb) in help_text()
    assert verb.teaches in help_text()


@_EACH_VERB
def test_an_example_in_help_can_be_sent(verb: Verb) -> None:
    _, colon, example = verb.teaches.partition(": ")
    if colon and example.startswith(verb.name.decode()):
        assert parse_line(example.encode()).verb == verb.name


def test_help_on_an_unknown_verb_reports_it() -> None:
    assert "nosuch" in help_text("nosuch")


@_EACH_VERB
def test_verb_with_extra_or_missing_word_is_refused_with_usage(verb: Verb) -> None:
    example = next(example for example in EXAMPLES if example.split(" ")[0].encode() == verb.name)
    for line in (f"{example} extra word more", verb.name.decode() + " =", f"{verb.name.decode()} "):
        with pytest.raises(GrammarError) as caught:
            parse_line(line.encode())
        assert usage(verb) in str(caught.value)
