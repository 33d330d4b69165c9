"""The settings of ``txmq binlog``: a TOML file, as values.

Each class here is a table of the file (``[source]``, ``[publish]``, ...) and of docs/configuration-binlog.md; the keys
of ``BinlogSettings`` itself stand at the top. A text may be ``{ env = "VARIABLE" }``, so that no file has a password.

Invariants:
    * a key that is not known is refused, naming the nearest known one; a value out of range names key and range;
    * no I/O: the caller reads file and environment.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from txmq.addresses import TlsFiles, without_secret
from txmq.binlog.decoded_changes import TRANSACTION_BYTES_MAX, TRANSACTION_ROWS_MAX, TableName
from txmq.binlog.errors import BinlogError
from txmq.config_sources import near_miss
from txmq.errors import ConfigError
from txmq.log.compression import CODECS
from txmq.model import PARTITIONS_PER_TOPIC_MAX, is_valid_name
from txmq.setting import check_all, number, settings_of, word
from txmq.setting import flag as flag
from txmq.setting import names as words

PAGE = "docs/configuration-binlog.md"
POSITIONS = ".positions"  # topics whose names end so have positions
KEY_LENGTH_MIN = 16
NAME_LENGTH_MAX = 64  # it precedes the database's and the table's name
SNAPSHOT_MODES = ("initial", "never", "only")
_NAME = r"(`(?:[^`]|``)+`|[^.\s`]+)"
_TABLE = re.compile(rf"{_NAME}\.{_NAME}\Z")
_STATE = re.compile(r"[A-Za-z0-9_]{1,64}\Z")
_FOREIGN = re.compile(r"[^A-Za-z0-9_-]")
_PLACES = re.compile(r"\{([a-z]*)\}")
_MIB = 1 << 20
_MADE_ID_MIN, _MADE_IDS = 1 << 31, 1 << 31  # far from what people number


_TLS_CA = (
    "PEM file of the CAs that sign the server's certificate. With it TLS is spoken and nothing else, and the "
    "certificate has to be for host. Empty: no TLS."
)
_TLS_CERTIFICATE = "PEM file of the certificate that is shown to the server, if it asks for one."
_TLS_KEY = "PEM file of that certificate's private key, not encrypted."


def _check_tls(settings: SourceSettings | ApplySettings, place: str) -> None:
    if bool(settings.tls_certificate) is not bool(settings.tls_key):
        raise ConfigError(f"{place}tls_certificate and {place}tls_key go together: give both, or none")
    if settings.tls_certificate and not settings.tls_ca:
        raise ConfigError(f"{place}tls_certificate: {place}tls_ca is empty, and TLS is spoken with it only")
    if settings.tls_ca and settings.unix_socket:
        raise ConfigError(f"{place}tls_ca: a certificate is for a host: leave {place}unix_socket out")


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """``[source]``: the database that is read."""

    host: str = word("127.0.0.1", "Its address.", section="[source]")
    port: int = number(3306, 1, 65535, "Its port.", section="[source]")
    unix_socket: str = word("", "Its socket on this machine; goes before host and port.", section="[source]")
    user: str = word(
        "txmq", "A user with REPLICATION SLAVE and BINLOG MONITOR (MySQL: REPLICATION CLIENT), and with SELECT on the "
        "tables.", section="[source]",
    )  # fmt: skip
    password: str = word("", 'The user\'s password; best { env = "VARIABLE" }.', section="[source]")
    tls_ca: str = word("", _TLS_CA, section="[source]", form="a file, or empty")
    tls_certificate: str = word("", _TLS_CERTIFICATE, section="[source]", form="a file, or empty")
    tls_key: str = word("", _TLS_KEY, section="[source]", form="a file, or empty")
    server_id: int = number(
        0, 0, (1 << 32) - 1, "The reader's own id among the server's replicas: no other replica of it may have the "
        "same. 0: made of name.", section="[source]",
    )  # fmt: skip
    tables: tuple[str, ...] = words(
        ("*.*",),
        "The tables that are published. * is none of the server's own databases. A name with a dot stands in "
        "backquotes.",
        section="[source]",
        form='["database.table", ...], * is any text',
    )
    exclude: tuple[str, ...] = words(
        (), "Tables that are not, of those.", section="[source]", form='["database.table", ...], * is any text'
    )
    start: str = word(
        "now", "Where a reader without a saved position begins, if it takes no snapshot: at the server's end, at the "
        "oldest binlog that it has, or after a GTID.", section="[source]", form="now, earliest or a GTID",
    )  # fmt: skip
    accept_server: bool = flag(
        False, "Go on with a server that is not the one read before, though its GTIDs do not prove that it has the "
        "same transactions.", section="[source]",
    )  # fmt: skip
    cascades: str = word(
        "stop", "Foreign keys that change rows by themselves (ON DELETE CASCADE and the like): the binlog does not "
        "show those changes. stop refuses such tables, pass publishes them without.", section="[source]",
        choices=("stop", "pass"),
    )  # fmt: skip
    connect_timeout_ms: int = number(10_000, 1_000, 600_000, "How long a connection may take.", section="[source]")
    silence_ms_max: int = number(
        10_000, 1_000, 600_000, "The connection counts as lost after this time without a word; an idle server sends "
        "heartbeats.", section="[source]",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_all(self, "source.")
        _check_tls(self, "source.")
        for key in ("tables", "exclude"):
            for pattern in getattr(self, key):
                if not _TABLE.match(pattern):
                    raise ConfigError(f'source.{key}: {pattern!r}: expected "database.table", where * is any text')
        if not self.tables:
            raise ConfigError("source.tables = []: no table would be read")

    @property
    def tls(self) -> TlsFiles | None:
        """How TLS is spoken; None: it is not."""
        return TlsFiles(self.tls_ca, self.tls_certificate, self.tls_key) if self.tls_ca else None


@dataclass(frozen=True, slots=True)
class PublishSettings:
    """``[publish]``: topics, partitions and transactions."""

    mode: str = word(
        "transactional", "transactional: changes and position are one txmq transaction, and the reader waits for a "
        "broker that is away. ordered: they are first stored on this machine, in publish.spool, and it goes on.",
        section="[publish]", choices=("transactional", "ordered"),
    )  # fmt: skip
    spool: str = word(
        "", "A directory of the reader's own, for mode ordered; keep it as you keep a database. Empty: <name>.spool, "
        "where the reader is started.", section="[publish]", form="a directory",
    )  # fmt: skip
    spool_bytes_max: int = number(
        1 << 30, 1 << 20, 1 << 50, "Changes that the spool holds, in bytes. If it is full, the reader waits.",
        section="[publish]",
    )  # fmt: skip
    topic: str = word(
        "{name}.{database}.{table}", "Topic of a table. Without {table} the tables of a database share one.",
        section="[publish]", form="text with {database}, and perhaps {name} and {table}",
    )  # fmt: skip
    partitions: int = number(
        4, 1, PARTITIONS_PER_TOPIC_MAX, "Partitions of a topic that is made. One that is there keeps its own.",
        section="[publish]",
    )  # fmt: skip
    by: str = word(
        "key", "What stays in one partition, in order: the changes of a row (key), of a table (table) or of a "
        "transaction (transaction; a row's changes are then in order within a transaction only).", section="[publish]",
        choices=("key", "table", "transaction"),
    )  # fmt: skip
    ddl: str = word(
        "pass", "Statements that may contradict what consumers know (a dropped column, a changed type): pass publishes "
        "them as events, stop stops before them. Additive ones are always published.", section="[publish]",
        choices=("pass", "stop"),
    )  # fmt: skip
    compression: str = word("none", "Of the messages' batches.", section="[publish]", choices=("none", *sorted(CODECS)))
    linger_ms: int = number(
        5, 0, 60_000, "How long a change waits for others to share its transaction.", section="[publish]"
    )
    session_timeout_ms: int = number(
        6_000, 300, 600_000, "A reader that is silent for so long is taken for dead: one that stands by takes over.",
        section="[publish]",
    )  # fmt: skip
    transaction_timeout_ms: int = number(
        30_000, 100, 900_000, "How long the broker may take for one txmq transaction.", section="[publish]"
    )
    transaction_rows_max: int = number(
        TRANSACTION_ROWS_MAX, 1, 1_000_000, "Changes of one txmq transaction. A larger transaction of the database "
        "becomes several, with markers before and after it.", section="[publish]",
    )  # fmt: skip
    transaction_bytes_max: int = number(
        TRANSACTION_BYTES_MAX, 64 << 10, 64 * _MIB, "Bytes of one txmq transaction, about; at most the broker's "
        "transaction_size_bytes_max.", section="[publish]",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_all(self, "publish.")
        if self.mode == "ordered" and self.spool_bytes_max < 2 * self.transaction_bytes_max:
            raise ConfigError(
                f"publish.spool_bytes_max = {self.spool_bytes_max}: expected at least twice "
                f"publish.transaction_bytes_max ({self.transaction_bytes_max})"
            )
        places = set(_PLACES.findall(self.topic))
        if "database" not in places or not places <= {"name", "database", "table"} or not is_valid_name(
            _PLACES.sub("x", self.topic)
        ):  # fmt: skip
            raise ConfigError(
                f"publish.topic = {self.topic!r}: expected letters, digits, '.', '_' and '-' with {{database}}, and "
                "perhaps {name} and {table}"
            )


@dataclass(frozen=True, slots=True)
class ApplySettings:
    """``[apply]``: the database that gets the changes."""

    host: str = word("127.0.0.1", "Its address.", section="[apply]")
    port: int = number(3306, 1, 65535, "Its port.", section="[apply]")
    unix_socket: str = word("", "Its socket on this machine; goes before host and port.", section="[apply]")
    user: str = word("txmq", "A user with all rights on the tables and on state_database.", section="[apply]")
    password: str = word("", 'The user\'s password; best { env = "VARIABLE" }.', section="[apply]")
    tls_ca: str = word("", _TLS_CA, section="[apply]", form="a file, or empty")
    tls_certificate: str = word("", _TLS_CERTIFICATE, section="[apply]", form="a file, or empty")
    tls_key: str = word("", _TLS_KEY, section="[apply]", form="a file, or empty")
    database: str = word(
        "{database}", "What a database of the source is called there. With another name, statements that name the "
        "source's stop the applier.", section="[apply]", form="text, perhaps with {database}",
    )  # fmt: skip
    state_database: str = word(
        "txmq", "Where the applier keeps its offsets and the statements that it ran; made if it is missing.",
        section="[apply]", form="letters, digits and _",
    )  # fmt: skip
    group: str = word(
        "", "Its consumer group; another target needs another one. Empty: apply-<name>.", section="[apply]"
    )
    topics: tuple[str, ...] = words(
        (), "Topics to apply; none: all those of publish.topic.", section="[apply]", form='["topic", ...]'
    )
    threads: int = number(
        4, 1, 64, "Connections that write at the same time, each the changes of one partition.", section="[apply]"
    )
    batch_rows_max: int = number(500, 1, 1000, "Changes of one transaction there.", section="[apply]")
    on_conflict: str = word(
        "stop", "If a row is not there, or another one is in its place: stop, or overwrite, which makes the row what "
        "the change says.", section="[apply]", choices=("stop", "overwrite"),
    )  # fmt: skip
    conflict_wait_ms: int = number(
        10_000, 0, 600_000, "How long a value that must be unique may be in use by another row: the change that frees "
        "it may be of another partition.", section="[apply]",
    )  # fmt: skip
    session_timeout_ms: int = number(
        6_000, 300, 600_000, "An applier that is silent for so long is taken for dead: one that stands by takes over.",
        section="[apply]",
    )  # fmt: skip
    connect_timeout_ms: int = number(10_000, 1_000, 600_000, "How long a connection may take.", section="[apply]")
    silence_ms_max: int = number(
        60_000, 1_000, 600_000, "The target counts as away after this time without an answer; a statement of the "
        "source, such as ALTER TABLE, may take longer.", section="[apply]",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_all(self, "apply.")
        _check_tls(self, "apply.")
        if not _STATE.match(self.state_database):
            raise ConfigError(f"apply.state_database = {self.state_database[:80]!r}: expected letters, digits and _")
        if not set(_PLACES.findall(self.database)) <= {"database"} or not self.database:
            raise ConfigError(f"apply.database = {self.database[:80]!r}: expected text, perhaps with {{database}}")

    @property
    def tls(self) -> TlsFiles | None:
        """How TLS is spoken; None: it is not."""
        return TlsFiles(self.tls_ca, self.tls_certificate, self.tls_key) if self.tls_ca else None


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """``[snapshot]``: the rows that the database has already."""

    mode: str = word(
        "initial", "Which rows are read before their changes. initial: all, if no position is saved. never: none. "
        "only: as initial, and the reader ends with the snapshot. Tables: these, again, at each start. --snapshot goes "
        "before it.", section="[snapshot]", form="initial, never, only or database.table, ... where * is any text",
    )  # fmt: skip
    chunk_rows: int = number(10_000, 1, 1_000_000, "Rows of one SELECT; fewer if they are large.", section="[snapshot]")
    view_ms_max: int = number(
        10_000, 1, 3_600_000, "How long one consistent read of the database is kept. Changes are published between "
        "two, and a table that is read cannot be altered for so long.", section="[snapshot]",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_all(self, "snapshot.")
        for pattern in self.tables:
            if not _TABLE.match(pattern):
                raise ConfigError(
                    f"snapshot.mode: {pattern!r}: expected initial, never, only or database.table, where * is any text"
                )

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that ``mode`` names."""
        return () if self.mode in SNAPSHOT_MODES else tuple(name.strip() for name in self.mode.split(","))


@dataclass(frozen=True, slots=True)
class BinlogSettings:
    """The file: keys at its top, and its tables."""

    name: str = word(
        "", "Names this reader: its topics begin with it, and the group of its position is binlog-<name>.",
        section="At the top", form=f"1 to {NAME_LENGTH_MAX} letters, digits, '.', '_' and '-'",
    )  # fmt: skip
    bootstrap: str = word(
        "txmq://127.0.0.1:8123", "Address of a broker, or zk://... of a cluster.", section="At the top"
    )
    statement_key: str = word(
        "", 'A secret of reader and applier, best { env = "VARIABLE" }. The reader marks the statements of its events '
        "with it, and the applier runs those alone. Empty: it runs what names no table but those of the topics that "
        "have it.", section="At the top", form=f"at least {KEY_LENGTH_MIN} characters, or empty",
    )  # fmt: skip
    source: SourceSettings = field(default_factory=SourceSettings)
    publish: PublishSettings = field(default_factory=PublishSettings)
    apply: ApplySettings = field(default_factory=ApplySettings)
    snapshot: SnapshotSettings = field(default_factory=SnapshotSettings)

    def __post_init__(self) -> None:
        check_all(self)
        if not is_valid_name(self.name) or len(self.name) > NAME_LENGTH_MAX:
            raise ConfigError(f"name = {self.name[:80]!r}: expected {_KEYS['']['name'].form}")
        if self.statement_key and len(self.statement_key) < KEY_LENGTH_MIN:
            raise ConfigError(f"statement_key: expected {_KEYS['']['statement_key'].form}")

    @property
    def server_id(self) -> int:
        """The reader's id among the server's replicas."""
        return self.source.server_id or _MADE_ID_MIN + crc32(self.name.encode()) % _MADE_IDS

    @property
    def group(self) -> str:
        """The group whose saved offset is the position."""
        return f"binlog-{self.name}"

    @property
    def apply_group(self) -> str:
        """The group whose offsets are in the target."""
        return self.apply.group or f"apply-{self.name}"

    @property
    def offset_table(self) -> str:
        """The table in the target that has the applier's offsets."""
        return f"{self.apply.state_database}.txmq_offset"

    @property
    def position_topic(self) -> str:
        """The topic that has the positions."""
        return f"{self.name}{POSITIONS}"

    @property
    def spool(self) -> str:
        """The directory of the spool."""
        return self.publish.spool or f"{self.name}.spool"

    @property
    def parked_topic(self) -> str:
        """The topic that has the rows of prepared XA transactions."""
        return f"{self.name}.parked"


_TABLES: dict[str, type[Any]] = {
    "source": SourceSettings, "publish": PublishSettings, "apply": ApplySettings, "snapshot": SnapshotSettings,
}  # fmt: skip
_KEYS = {"": settings_of(BinlogSettings), **{name: settings_of(table) for name, table in _TABLES.items()}}

BINLOG_SETTINGS = tuple(setting for known in _KEYS.values() for setting in known.values())


def read_settings(toml_text: str, environment: Mapping[str, str], unused: str = "") -> BinlogSettings:
    """The settings that a file holds.

    Args:
        unused: a table that the caller does not need: a variable that it names may be missing, and is an empty text.

    Raises:
        ConfigError: names the key, the value and what is allowed, or the nearest known key.
    """
    try:
        document = tomllib.loads(toml_text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid TOML: {error}") from None
    top: dict[str, Any] = {}
    for key, value in document.items():
        if key in _TABLES:
            if not isinstance(value, dict):
                raise ConfigError(f"{key} = {str(value)[:80]!r}: expected a table: [{key}]")
            known = defaultdict(str, environment) if key == unused else environment
            top[key] = _TABLES[key](**_values(value, key, known))
        else:
            top |= _values({key: value}, "", environment)
    return BinlogSettings(**top)


def _values(table: Mapping[str, Any], name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    known, place = _KEYS[name], f"{name}." if name else ""
    values = {}
    for key, value in table.items():
        if key not in known:
            names = [*known, *(() if name else _TABLES)]
            raise ConfigError(
                f"unknown setting {(place + key)[:80]!r}; {near_miss(key, names) or f'{PAGE} lists them'}"
            )
        if isinstance(value, dict):
            value = _from_environment(value, place + key, environment)
        values[key] = tuple(value) if isinstance(value, list) else value
    return values


def _from_environment(value: Mapping[str, Any], key: str, environment: Mapping[str, str]) -> str:
    variable = value.get("env")
    if set(value) != {"env"} or not isinstance(variable, str):
        raise ConfigError(f'{key}: expected a value or {{ env = "VARIABLE" }}')
    try:
        return environment[variable]
    except KeyError:
        raise ConfigError(f"{key}: the environment has no variable {variable}: set it") from None


def topic_of(pattern: str, name: str, table: TableName) -> str:
    """A table's topic.

    Raises:
        BinlogError: no topic can have that name.
    """
    fields = {"name": name, "database": escaped(table.database), "table": escaped(table.name)}
    topic = pattern.format(**fields)
    if not is_valid_name(topic):
        raise BinlogError(f"{table}: no topic can be named {topic[:80]!r}: set publish.topic, or source.exclude it")
    return topic


def named_by(pattern: str) -> tuple[str, str]:
    """Database and name of a pattern ``database.table``; what has a dot or a space is in backquotes."""
    match = _TABLE.match(pattern)
    if match is None:
        raise ConfigError(f'{pattern!r}: expected "database.table", where * is any text')
    database, name = (found[1:-1].replace("``", "`") if found[0] == "`" else found for found in match.groups())
    return database, name


def escaped(name: str) -> str:
    """A name of a database or table as it stands in a topic's: what may not stand there is ``_u<hex>_``."""
    return _FOREIGN.sub(lambda match: f"_u{ord(match[0]):x}_", name)


def topics_named(pattern: str, **known: str) -> re.Pattern[str]:
    """The topics that a pattern may name; a field that is not known stands for any text.

    Args:
        known: fields of the pattern, as they stand in topics.
    """
    pieces = _PLACES.split(pattern)  # texts, and between them names of fields
    fields = [re.escape(known[name]) if name in known else "[A-Za-z0-9_-]+" for name in pieces[1::2]]
    texts = [re.escape(text) for text in pieces[::2]]
    return re.compile("".join(text + field for text, field in zip(texts, [*fields, ""], strict=True)) + r"\Z")


def shown(settings: BinlogSettings) -> dict[str, Any]:
    """All settings for people: without secrets."""
    fields = {**dataclasses.asdict(settings), "bootstrap": without_secret(settings.bootstrap)}
    for table, key in ((fields, "statement_key"), (fields["source"], "password"), (fields["apply"], "password")):
        table[key] = "***" if table[key] else ""
    return fields
