"""The three sources of the broker's settings; the later one wins:

    TOML file  <  environment (``TXMQ_<KEY>``)  <  flags (``--set key=value`` and the named ones)

Invariants:
* A key that is not known is refused wherever it comes from, naming the nearest known one. Variables of other parts of
  txmq (``TXMQ_BOOTSTRAP``, ...) are listed here, so that a misspelt setting is not taken for one of them. So are those
  that Kubernetes sets for a Service named txmq, or txmq-...: by name and form.
* No I/O: the caller reads the file and hands over its text.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping

from txmq.config import ENVIRONMENT_PREFIX, SETTINGS, BrokerSettings
from txmq.errors import ConfigError
from txmq.setting import Setting, parse_value

# Variables with our prefix that are not settings of the broker: of clients, crash points, tests and benchmarks.
OTHER_VARIABLES = ("TXMQ_BOOTSTRAP", "TXMQ_CRASH", "TXMQ_NEW_PASSWORD", "TXMQ_PASSWORD")
OTHER_PREFIXES = ("TXMQ_TEST_", "TXMQ_BENCH_")
_OF_SERVICE = re.compile(  # Source: Kubernetes, "Service", environment variables; kubelet's envvars.go
    r"""TXMQ_(\w+_)?(
        SERVICE_HOST=[0-9a-f.:]+
      | SERVICE_PORT(_\w+)?=[0-9]+
      | PORT(_[0-9]+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://.+
      | PORT_[0-9]+_(TCP|UDP|SCTP)_(PROTO=(tcp|udp|sctp)|PORT=[0-9]+|ADDR=[0-9a-f.:]+)
    )""",
    re.VERBOSE,
)


def load_settings(toml_text: str | None, environment: Mapping[str, str], flags: Mapping[str, object]) -> BrokerSettings:
    """Merge the three sources and check the result.

    Args:
        toml_text: the configuration file's text, or None.
        environment: all environment variables; those without our prefix are passed over.
        flags: by setting name; text is parsed, other values are taken as they are; None means not given.

    Raises:
        ConfigError: names the key, its source, the value and what is allowed, or the nearest known key.
    """
    values: dict[str, object] = {}
    if toml_text is not None:
        values.update(_from_toml(toml_text))
    values.update(_from_environment(environment))
    for name, value in flags.items():
        if value is not None:
            setting = _known(name, "flag")
            values[name] = parse_value(setting, value) if isinstance(value, str) else value
    return BrokerSettings(**values)  # type: ignore[arg-type]


def parse_assignments(words: Iterable[str]) -> dict[str, object]:
    """Turn ``key=value`` words of ``--set`` into flags.

    Raises:
        ConfigError: not of that form, unknown, or given twice.
    """
    flags: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word}: expected key=value")
        _known(name, "--set")
        if name in flags:
            raise ConfigError(f"--set {name} is given twice; give it once")
        flags[name] = value
    return flags


def _from_toml(text: str) -> dict[str, object]:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of 5,000 digits, and brackets by the thousand
        raise ConfigError(f"the configuration file is not valid TOML: {error}") from None
    for name, value in document.items():
        if isinstance(value, dict) and name not in SETTINGS:
            raise ConfigError(
                f"unknown setting {name[:80]!r} (configuration file): a table; settings stand at the top, in no table"
            )
    return {
        name: None if value == "none" and _known(name, "configuration file").none is not None else value
        for name, value in document.items()
        if _known(name, "configuration file")
    }


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable.startswith(OTHER_PREFIXES) or _OF_SERVICE.fullmatch(f"{variable}={text}"):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        setting = _known(name, f"environment variable {variable}")
        meant = ENVIRONMENT_PREFIX + setting.name.upper()
        if variable != meant:  # two spellings of one key would be the same key twice
            raise ConfigError(f"unknown environment variable {variable[:80]!r}; did you mean {meant!r}?")
        values[name] = parse_value(setting, text)
    return values


def _known(name: str, source: str) -> Setting:
    setting = SETTINGS.get(name)
    if setting is None:
        hint = near_miss(name.lower(), SETTINGS) or "docs/configuration.md lists them"
        raise ConfigError(f"unknown setting {name[:80]!r} ({source}); {hint}")
    return setting


def near_miss(word: str, known: Iterable[str]) -> str | None:
    """The question after the known word that was most likely meant; None if none is near."""
    near = difflib.get_close_matches(word[:80], list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else None
