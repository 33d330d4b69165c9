"""The file of a reader: every key is known, in range, and named by the error."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from txmq.binlog import config
from txmq.binlog.config import ApplySettings, BinlogSettings, PublishSettings, SourceSettings, read_settings
from txmq.errors import ConfigError
from txmq.setting import settings_of

FILE = """
name = "shop"
[source]
host = "db"
password = { env = "PASS" }
tables = ["shop.*", "crm.customer"]
[publish]
partitions = 8
by = "table"
"""


def test_what_a_file_does_not_name_has_its_default() -> None:
    settings = read_settings(FILE, {"PASS": "secret"})
    assert (settings.name, settings.group) == ("shop", "binlog-shop")
    assert (settings.position_topic, settings.parked_topic) == ("shop.positions", "shop.parked")
    source = SourceSettings(host="db", password="secret", tables=("shop.*", "crm.customer"))
    assert settings.source == source
    assert settings.publish == PublishSettings(partitions=8, by="table")


def test_no_password_is_shown() -> None:
    settings = replace(read_settings(FILE, {"PASS": "secret"}), bootstrap="zk://me:secret@zoo1/prod")
    assert "secret" not in str(config.shown(settings))
    assert config.shown(settings)["bootstrap"] == "zk://***@zoo1/prod"
    assert config.shown(settings)["source"]["host"] == "db"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name = ", ["TOML"]),
        ("", ["name = ''", "letters"]),
        ("name = 'a b'", ["name = 'a b'"]),
        (f"name = '{'x' * 65}'", ["name"]),
        ("name = 's'\nbootstra = 'x'", ["'bootstra'", "did you mean 'bootstrap'"]),
        ("name = 's'\n[sorce]\nhost = 'x'", ["'sorce'", "did you mean 'source'"]),
        ("name = 's'\nsource = 1", ["source = '1'", "[source]"]),
        ("name = 's'\n[source]\nprot = 1", ["'source.prot'", "did you mean 'port'"]),
        ("name = 's'\n[source]\nport = 0", ["source.port = '0'", "1 to 65_535"]),
        ("name = 's'\n[source]\nport = '1'", ["source.port = '1'", "without quotes"]),
        ("name = 's'\n[source]\ntables = 'shop.*'", ["source.tables", "database.table"]),
        ("name = 's'\n[source]\ntables = []", ["source.tables", "no table"]),
        ("name = 's'\n[source]\ntables = ['orders']", ["source.tables", "'orders'"]),
        ("name = 's'\n[source]\nexclude = [1]", ["source.exclude"]),
        ("name = 's'\n[source]\npassword = { env = 'PASS' }", ["source.password", "no variable PASS"]),
        ("name = 's'\n[source]\npassword = { file = 'x' }", ["source.password", "env"]),
        ("name = 's'\n[publish]\nby = 'row'", ["publish.by = 'row'", "key, table or transaction"]),
        ("name = 's'\n[publish]\ntopic = '{name}.{table}'", ["publish.topic", "{database}"]),
        ("name = 's'\n[publish]\ntopic = '{database}/{table}'", ["publish.topic"]),
        ("name = 's'\n[publish]\ntopic = '{database}.{tabel}'", ["publish.topic"]),
        ("name = 's'\n[publish]\nlinger_ms = true", ["publish.linger_ms"]),
        ("name = 's'\n[apply]\ndatabase = '{table}'", ["apply.database", "{database}"]),
        ("name = 's'\n[apply]\ndatabase = ''", ["apply.database"]),
        ("name = 's'\n[apply]\nstate_database = 'a b'", ["apply.state_database", "letters"]),
    ],
)
def test_what_is_wrong_is_named(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(text, {})
    for part in parts:
        assert part in str(caught.value)


def test_variable_of_an_unused_table_may_be_missing() -> None:
    text = "name = 's'\n[source]\npassword = { env = 'A' }\n[apply]\npassword = { env = 'B' }"
    assert read_settings(text, {"A": "a"}, unused="apply").apply.password == ""
    assert read_settings(text, {"A": "a", "B": "b"}, unused="apply").apply.password == "b"
    with pytest.raises(ConfigError, match=r"source\.password: the environment has no variable A"):
        read_settings(text, {"B": "b"}, unused="apply")


@pytest.mark.parametrize("table", [SourceSettings, PublishSettings, ApplySettings])
def test_every_field_of_a_table_is_a_setting(table: type[object]) -> None:
    fields = {field.name for field in dataclasses.fields(table)}  # type: ignore[arg-type]
    assert fields == set(settings_of(table))


def test_every_key_is_read_as_its_default() -> None:
    text = ["name = 's'"]
    for name, table in (("source", SourceSettings), ("publish", PublishSettings), ("apply", ApplySettings)):
        text.append(f"[{name}]")
        for setting in settings_of(table).values():
            value = setting.default
            shown = list(value) if isinstance(value, tuple) else value
            text.append(f"{setting.name} = {str(shown).lower() if isinstance(shown, bool) else repr(shown)}")
    assert read_settings("\n".join(text), {}) == BinlogSettings(name="s")
