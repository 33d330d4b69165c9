"""The setting ``TXMQ``: what is wrong is named, with what would be right."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
import uuid
from typing import Any

import pytest
from django.core.serializers.json import DjangoJSONEncoder

from txmq.django.settings import problems
from txmq.errors import ConfigError
from txmq.outbox.outbox import encoder_of


@pytest.mark.parametrize(
    "given",
    [
        {}, {"BOOTSTRAP": "txmq://broker1,broker2:9"}, {"BOOTSTRAP": "zk://one,two/place"}, {"NAME": "shop"},
        {"CODEC": "json"}, {"CODEC": str.encode}, {"CODEC": "txmq.outbox.outbox.as_json"}, {"ROWS_MAX": 1},
        {"DURABILITY": "weak"},
        {"NAME": None, "CODEC": None},
    ],
)  # fmt: skip
def test_what_is_right_has_no_problems(given: dict[str, Any]) -> None:
    assert problems(given) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "TXMQ is a list: expected a dict"),
        ({"CODEX": "json"}, "unknown key 'CODEX'; did you mean 'CODEC'?"),
        ({"bootstrap": ""}, "unknown key 'bootstrap'; did you mean 'BOOTSTRAP'?"),
        ({1: 2}, "known are BOOTSTRAP, NAME, CODEC, ROWS_MAX, UNIT_BYTES_MAX, DURABILITY"),
        ({"BOOTSTRAP": "http://broker1"}, "TXMQ['BOOTSTRAP']: "),
        ({"BOOTSTRAP": 8123}, "TXMQ['BOOTSTRAP'] is a int"),
        ({"NAME": "my shop"}, "expected A-Z a-z 0-9 . _ -"),
        ({"NAME": 1}, "expected A-Z a-z 0-9 . _ -"),
        ({"CODEC": 1}, "expected 'json', a callable, or the dotted path of one"),
        ({"CODEC": "jsn"}, "expected 'json', a callable, or the dotted path of one"),
        ({"CODEC": "txmq.django.settings.none"}, "expected 'json', a callable, or the dotted path of one"),
        ({"ROWS_MAX": 0}, "at least 1"),
        ({"ROWS_MAX": True}, "at least 1"),
        ({"DURABILITY": "strong"}, "expected one of forced, weak"),
    ],
)
def test_what_is_wrong_is_named(given: Any, words: str) -> None:
    [problem] = problems(given)
    assert words in problem


def test_json_is_written_as_django_writes_it() -> None:
    number = uuid.UUID(int=1)
    value = {"at": datetime.date(2026, 11, 29), "total": decimal.Decimal("9.50"), "id": number, "who": "ädä"}
    encode = encoder_of("json", DjangoJSONEncoder)
    assert encode(value).decode() == '{"at":"2026-11-29","total":"9.50","id":"' + str(number) + '","who":"ädä"}'
    with pytest.raises(ConfigError, match="not JSON"):
        encode(b"bytes")


def test_txmq_and_its_outbox_load_nothing_of_django() -> None:
    program = "import sys, txmq; txmq.connect, txmq.LastResource; import txmq.client.relay.relay, txmq.aio; " + (
        "print([name for name in sys.modules if name.partition('.')[0] == 'django'])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout == "[]\n"
