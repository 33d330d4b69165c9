"""Settings: the table, the three sources, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from txmq.addresses import is_loopback, join_address, split_address
from txmq.config import ENVIRONMENT_PREFIX, SETTINGS, BrokerSettings
from txmq.config_sources import load_settings, parse_assignments
from txmq.errors import ConfigError
from txmq.model import TopicConfig

INSECURE = {"insecure_plaintext": True, "insecure_anonymous": True}


def test_without_any_source_the_defaults_hold() -> None:
    assert load_settings(None, {}, {}) == BrokerSettings()


def test_environment_overrides_the_file_and_a_flag_overrides_both() -> None:
    text = 'sync = "never"\nconnections_max = 1\nopen_files_max = 11\n'
    environment = {"TXMQ_CONNECTIONS_MAX": "2", "TXMQ_OPEN_FILES_MAX": "12", "PATH": "/bin"}
    settings = load_settings(text, environment, {"open_files_max": "13"})
    assert (settings.sync, settings.connections_max, settings.open_files_max) == ("never", 2, 13)


def test_a_flag_that_is_not_given_changes_nothing() -> None:
    assert load_settings('sync = "never"', {}, {"sync": None}).sync == "never"


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_setting_is_read_from_each_source_as_its_default(setting: object) -> None:
    assert isinstance(setting, type(SETTINGS["sync"]))
    value = setting.default
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    in_toml = f'"{text}"' if value is None or isinstance(value, str) else text
    for settings in (
        load_settings(f"{setting.name} = {in_toml}", {}, {}),
        load_settings(None, {ENVIRONMENT_PREFIX + setting.name.upper(): text}, {}),
        load_settings(None, {}, parse_assignments([f"{setting.name}={text}"])),
    ):
        assert getattr(settings, setting.name) == value


NUMBERS = [setting for setting in SETTINGS.values() if setting.low is not None]


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("side", ["low", "high"])
def test_number_out_of_range_is_refused_naming_key_and_range(setting: object, side: str) -> None:
    assert isinstance(setting, type(SETTINGS["sync"]))
    assert setting.low is not None
    assert setting.high is not None
    value = int(setting.low) - 1 if side == "low" else int(setting.high) + 1
    with pytest.raises(ConfigError) as caught:
        load_settings(f"{setting.name} = {value}", {}, {})
    for part in (setting.name, str(value), setting.allowed):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SYNC = 1", "'SYNC' (configuration file); did you mean 'sync'?"),
        ('broker_name = "a\\nb"', "expected at most 200 printable characters"),
        (f'broker_name = "{"n" * 201}"', "expected at most 200 printable characters"),
        ("synk = 1", "'synk' (configuration file); did you mean 'sync'?"),
        ("foo = 1", "'foo' (configuration file); docs/configuration.md lists them"),
        ("sync = 1", "sync = '1': expected always, interval or never"),
        ('sync = "sometimes"', "sync = 'sometimes': expected always, interval or never"),
        ("connections_max = true", "connections_max = 'True': expected 1 to 1_000_000"),
        ("connections_max = 1.0", "connections_max = '1.0'"),
        ('connections_max = "5"', "connections_max = '5'"),
        ("connections_max = -1", "connections_max = '-1'"),
        ("connections_max = 99999999999999999999999999", "connections_max = '99999999999999999999999999'"),
        ("connections_max = 1\nconnections_max = 2", "not valid TOML"),
        ("connections_max = ", "not valid TOML"),
        ("[limits]\nconnections_max = 1", "unknown setting 'limits'"),
        ('connections_max = "none"', "connections_max = 'none'"),
        ("insecure_plaintext = 1", "insecure_plaintext = '1': expected true or false"),
        ("inline_sync_ms = nan", "inline_sync_ms = 'nan'"),
        ('data = ""', "data = ''"),
        ('data = "a\\u0000b"', "expected a directory"),
    ],
)
def test_a_bad_file_is_refused_saying_why(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(text, {}, {})
    assert said in str(caught.value)


def test_misspelt_variable_is_refused_and_foreign_ones_are_ignored() -> None:
    others = {"TXMQ_BOOTSTRAP": "x", "TXMQ_PASSWORD": "z", "TXMQ_CRASH": "y", "TXMQ_TEST_SEED": "1", "HOME": "/"}
    assert load_settings(None, others, {}) == BrokerSettings()
    with pytest.raises(ConfigError, match=r"variable TXMQ_SYNK.*did you mean 'sync'"):
        load_settings(None, {"TXMQ_SYNK": "never"}, {})


OF_SERVICE = {  # of a Service txmq with two ports, as kubelet makes them
    "TXMQ_SERVICE_HOST": "10.0.171.239", "TXMQ_SERVICE_PORT": "8123", "TXMQ_SERVICE_PORT_CLIENTS": "8123",
    "TXMQ_PORT": "tcp://10.0.171.239:8123", "TXMQ_PORT_8123_TCP": "tcp://10.0.171.239:8123",
    "TXMQ_PORT_8123_TCP_PROTO": "tcp", "TXMQ_PORT_8123_TCP_PORT": "8123", "TXMQ_PORT_8123_TCP_ADDR": "10.0.171.239",
    "TXMQ_PORT_53_UDP": "udp://[fd00::1]:53", "TXMQ_PORT_53_UDP_ADDR": "fd00::1",
    "TXMQ_NODE_0_SERVICE_HOST": "fd00::1", "TXMQ_NODE_0_PORT": "tcp://[fd00::1]:8123",
}  # fmt: skip


def test_what_kubernetes_says_of_services_is_no_setting() -> None:
    assert load_settings(None, OF_SERVICE, {}) == BrokerSettings()
    assert load_settings(None, {**OF_SERVICE, "TXMQ_SYNC": "never"}, {}).sync == "never"


@pytest.mark.parametrize(("variable", "text"), [("PORT", "8123"), ("SERVICE_HOST", "a b"), ("SERVICE_PORT", "x")])
def test_what_only_looks_like_a_services_variable_is_refused(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable TXMQ_{variable}"):
        load_settings(None, {f"TXMQ_{variable}": text}, {})


def test_variable_in_another_case_is_refused_as_a_duplicate_key() -> None:
    with pytest.raises(ConfigError, match=r"'TXMQ_Sync'; did you mean 'TXMQ_SYNC'"):
        load_settings(None, {"TXMQ_SYNC": "always", "TXMQ_Sync": "never"}, {})


@pytest.mark.parametrize("text", ["x", "", "1e3", "٣", "1" * 41, "0x10"])
def test_text_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="connections_max"):
        load_settings(None, {"TXMQ_CONNECTIONS_MAX": text}, {})


def test_none_lifts_a_limit_if_the_table_allows_it() -> None:
    settings = load_settings('default_segment_age_ms = "none"', {}, {})
    assert settings.default_segment_age_ms is None
    assert load_settings(None, {"TXMQ_DEFAULT_SEGMENT_AGE_MS": "none"}, {}).default_segment_age_ms is None


@pytest.mark.parametrize(("word", "said"), [("sync", "expected key=value"), ("a=1", "unknown setting 'a'")])
def test_an_assignment_that_is_none_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_assignments([word])


def test_an_assignment_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        parse_assignments(["sync=never", "sync=always"])


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:65535", ("::1", 65535)), ("localhost:8123", ("localhost", 8123))],
)
def test_addresses_are_split(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address
    assert join_address(*address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "host",
        "host:",
        "host:65536",
        "host:-1",
        "::1:80",
        "[host]:1",
        "a b:1",
        "h:１",
        "a..b:1",
        ".a:1",
        f"{'x' * 64}:1",
        "ä..b:1",
        "\udcff:1",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        split_address(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "[::]", "example.org", "localhost.example.org"])
def test_an_address_that_others_reach_needs_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="say --insecure-plaintext --insecure-anonymous if"):
        load_settings(None, {}, {"listen": f"{host}:8123"})
    for one in INSECURE:
        missing = next(name for name in INSECURE if name != one).replace("_", "-")
        with pytest.raises(ConfigError, match=f"say --{missing} if"):
            load_settings(None, {}, {"listen": f"{host}:8123", one: True})
    assert load_settings(None, {}, {"listen": f"{host}:8123", **INSECURE}).insecure_plaintext


TLS = {"tls_certificate": "broker.pem", "tls_key": "broker.key"}
CERTIFICATES = {**TLS, "tls_ca": "ca.pem", "tls_client_certificates": "required"}


def test_other_machines_need_certificates_or_a_name_for_less() -> None:
    flags = {"listen": "0.0.0.0:8123"}
    with pytest.raises(ConfigError, match=r"would not ask who they are.*--insecure-anonymous"):
        load_settings(None, {}, {**flags, **CERTIFICATES, "tls_client_certificates": "optional"})
    assert load_settings(None, {}, {**flags, **CERTIFICATES})
    assert load_settings(None, {}, {**flags, **TLS, "insecure_anonymous": True})
    assert load_settings(None, {}, {**flags, **TLS, "first_administrator": "administrator.json"})
    with pytest.raises(ConfigError, match=r"say --insecure-plaintext if"):
        load_settings(None, {}, {**flags, "first_administrator": "administrator.json"})
    with pytest.raises(ConfigError, match=r"listen_plaintext = '0\.0\.0\.0:8124'.*--insecure-plaintext --insecure-ano"):
        load_settings(None, {}, {**flags, **CERTIFICATES, "listen_plaintext": "0.0.0.0:8124"})
    assert load_settings(None, {}, {**flags, **CERTIFICATES, "listen_plaintext": "127.0.0.1:8124"}).plaintext_at


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"tls_certificate": "a"}, "go together"),
        ({"tls_key": "a"}, "go together"),
        ({**TLS, "tls_client_certificates": "required"}, "needs tls_certificate and tls_key, and tls_ca"),
        ({"tls_client_certificates": "optional", "tls_ca": "a"}, "needs tls_certificate"),
        ({"listen_plaintext": "127.0.0.1:1"}, "without tls_certificate, listen takes plaintext itself"),
        ({**TLS, "listen_plaintext": "here"}, "listen_plaintext = 'here': expected HOST:PORT"),
        ({"registry": "zk://a?tls=brokers"}, "tls=brokers is for clients"),
        ({"registry": "zk://a?user=b"}, "user and password_file are for clients"),
        (
            {"registry": "zk://a", "first_administrator": "a"},
            "first_administrator: .* give the registry's address a name",
        ),
        (
            {"registry": "zk://b:c@a,127.0.0.1", "first_administrator": "a"},
            "would travel to it in plaintext: use zks://",
        ),
    ],
)
def test_settings_of_tls_that_do_not_go_together(flags: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_settings(None, {}, flags)


def test_settings_are_shown_without_the_registrys_password() -> None:
    settings = load_settings('registry = "zk://me:secret@a/prod"', {}, {})
    assert settings.shown()["registry"] == "zk://***@a/prod"
    assert settings.shown()["listen"] == settings.listen


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"advertised_address": "host"}, "advertised_address = 'host': expected HOST:PORT"),
        ({"advertised_address": "host:0"}, "no client can reach port 0"),
        ({"registry": "a"}, "registry = 'a': expected zk://"),
        ({"listen": "0.0.0.0:1"}, "say with advertised_address"),
        ({"listen": "[::]:1"}, "say with advertised_address"),
        ({"broker_name": "a b"}, "letters, digits"),
    ],
)
def test_broker_of_a_cluster_says_where_others_reach_it(flags: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_settings(None, {}, {"registry": "zk://a", **INSECURE, **flags})


def test_broker_that_listens_everywhere_advertises_one_address() -> None:
    flags = {"registry": "zk://a", **INSECURE, "listen": "0.0.0.0:1", "advertised_address": "host:1"}
    assert load_settings(None, {}, flags).advertised_address == "host:1"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_this_machine_only(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "flags",
    [
        {"batch_size_bytes_max": 1 << 21, "request_size_bytes_max": 1 << 20},
        {"request_size_bytes_max": 1 << 21, "batch_size_bytes_max": 1024, "memory_request_bytes_max": 1 << 20},
        {"journal_file_size_bytes": 1 << 20},
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"expected at most|at least"):
        load_settings(None, {}, flags)


def test_settings_built_directly_are_checked() -> None:
    with pytest.raises(ConfigError):
        BrokerSettings(connections_max=0)


def test_a_new_topic_has_the_defaults_of_the_model() -> None:
    assert BrokerSettings().new_topic("orders") == TopicConfig("orders")
    assert dataclasses.replace(BrokerSettings(), default_partitions=7).new_topic("orders").partitions == 7


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("connections_max = " + "9" * 5000, "not valid TOML"),
        ("x = " + "[" * 5000, "not valid TOML"),
        ("connections_max = 1\nconnections_max = 2", "not valid TOML: Cannot overwrite a value"),
        ("connections_max = 99999999999999999999", "expected 1 to 1_000_000"),
        ("connections_max = 5.0", "expected 1 to 1_000_000"),
        ("connections_max = true", "expected 1 to 1_000_000"),
        ("connections_max = [1]", "expected 1 to 1_000_000"),
        ("connections_max.x = 1", "expected 1 to 1_000_000"),
        ('connections_max = "5"', "expected 1 to 1_000_000, without quotes"),
        ('insecure_plaintext = "true"', "expected true or false, without quotes"),
        ('insecure_plaintext = "yes"', "expected true or false$"),
        ("insecure_plaintext = 1", "expected true or false$"),
        ("inline_sync_ms = nan", "expected 0.0 to 100.0"),
        ("inline_sync_ms = inf", "expected 0.0 to 100.0"),
        ("sync = 1", "expected always, interval or never"),
        ("data = 1979-05-27", "expected text"),
        (
            "[limits]\nconnections_max = 5",
            "unknown setting 'limits' .*: a table; settings stand at the top, in no table",
        ),
        ('[[topics]]\nname = "a"', "unknown setting 'topics'"),
    ],
    ids=lambda text: text[:30],
)
def test_file_that_is_not_right_is_refused_with_one_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        load_settings(text, {}, {})
    assert "\n" not in str(caught.value)
