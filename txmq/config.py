"""The broker's settings: one table that drives TOML keys, environment variables, flags and docs/configuration.md.

The fields of ``BrokerSettings`` are the table (``setting``). ``config_sources`` reads their values.

Invariants:
* A setting that was accepted is inside its range, and the settings fit each other; nothing is clamped silently.
* Units stand last in the name: ``_ms``, ``_bytes``. Numbers are plain integers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from txmq.addresses import is_loopback, is_wildcard, parse_ensemble, split_address, without_secret
from txmq.errors import ConfigError
from txmq.model import PARTITIONS_PER_TOPIC_MAX, RetentionPolicy, Storage, TopicConfig, is_valid_name
from txmq.setting import Setting, check_all, decimal, flag, number, settings_of, word

NAME_LENGTH_MAX = 200
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
ENVIRONMENT_PREFIX = "TXMQ_"
_DAY_MS = 24 * 3600 * 1000
_TIME_MS_MAX = 10**12  # 31 years: far above any real setting, and sums stay far from 2^63


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Every setting of a broker. ``config_sources.load_settings`` builds it, or a test directly: both are checked."""

    data: str = word("var/txmq", "Data directory; created if absent.", section="Broker")
    listen: str = word(
        "127.0.0.1:8123",
        "Address to serve on, HOST:PORT; port 0 takes a free one (see --ready-file).",
        section="Broker",
        form="HOST:PORT",
    )
    broker_name: str = word("", "Name shown in stats and logs; empty: the node id.", section="Broker")
    advertised_address: str = word(
        "", "HOST:PORT at which clients and other brokers reach this one; empty: the address of listen.",
        section="Broker", form="HOST:PORT, or empty",
    )  # fmt: skip
    registry: str = word(
        "", "ZooKeeper ensemble of several brokers, zk://[NAME:PASSWORD@]HOST[:PORT],.../PATH; empty: this broker is "
        "alone.", section="Broker", form="zk://..., or empty",
    )  # fmt: skip
    registry_session_timeout_ms: int = number(
        10_000, 400, 600_000, "Time after which the registry takes a silent broker for dead. The ensemble may grant "
        "another one.", section="Broker",
    )  # fmt: skip
    replica_of: str = word(
        "", "Be a replica of this home of the cluster, by its id or its broker's name: follow its journal, and serve "
        "readers. Empty: this broker leads a home of its own.", section="Replication", form="a home, or empty",
    )  # fmt: skip
    replica_journal_bytes_max: int = number(
        GIB, MIB, 1 << 50, "So much of the journal is kept for a replica that lags; one that lags more must be made "
        "anew.", section="Replication",
    )  # fmt: skip
    replica_reads_ms_max: int = number(
        10_000, 100, 10**9, "A replica that has heard nothing of its leader for so long serves no reader: users may "
        "have been removed meanwhile.", section="Replication",
    )  # fmt: skip
    log_level: str = word(
        "info", "Least severe log line that is written.", section="Broker",
        choices=("debug", "info", "warning", "error"),
    )  # fmt: skip

    tls_certificate: str = word(
        "", "PEM file of this broker's certificate, with those between it and its CA. With it, listen takes TLS only.",
        section="Security", form="a file, or empty",
    )  # fmt: skip
    tls_key: str = word(
        "", "PEM file of the certificate's private key, not encrypted.", section="Security", form="a file, or empty"
    )
    tls_ca: str = word(
        "", "PEM file of the CAs that sign the certificates of clients, and of the other brokers of a cluster. Empty: "
        "the system's, for brokers.", section="Security", form="a file, or empty",
    )  # fmt: skip
    first_administrator: str = word(
        "", "File of the first user, made by txmq broker init --admin NAME. A broker without users takes it from there "
        "before it serves, and does not start without the file: so it never serves without a login.",
        section="Security", form="a file, or empty",
    )  # fmt: skip
    tls_client_certificates: str = word(
        "none", "Whether clients have to show a certificate signed by tls_ca.", section="Security",
        choices=("none", "optional", "required"),
    )  # fmt: skip
    tls_between_brokers: bool = flag(
        True, "With tls_certificate, speak TLS to the other brokers of a cluster, and show the certificate. Turn it "
        "off while some of them have none yet.", section="Security",
    )  # fmt: skip
    listen_plaintext: str = word(
        "", "With tls_certificate, HOST:PORT where connections without TLS are taken; the address of listen: one port "
        "for both. Empty: nowhere.", section="Security", form="HOST:PORT, or empty",
    )  # fmt: skip
    insecure_plaintext: bool = flag(
        False, "Let other machines connect without TLS: whoever sees the network reads and changes what is sent.",
        section="Security",
    )  # fmt: skip
    insecure_anonymous: bool = flag(
        False, "Let other machines connect without a client certificate or a login: whoever reaches the port may do "
        "everything, unless there are users.",
        section="Security",
    )  # fmt: skip

    sync: str = word(
        "always", "When a plain put or local transaction is answered: after the sync of the journal (always), or "
        "before it. With interval a sync follows after sync_interval_messages or sync_interval_ms, and at once if a "
        "reader waits for what was put; with never it follows once a second. Both may lose acknowledged messages when "
        "the machine fails. "
        "Prepares, decisions and everything else are always forced.",
        section="Durability", choices=("always", "interval", "never"),
    )  # fmt: skip
    sync_interval_messages: int = number(
        1000, 1, 10**9, "With sync=interval: sync after this many messages.", section="Durability"
    )
    sync_interval_ms: int = number(
        100, 1, 60_000, "With sync=interval: sync at the latest after this time.", section="Durability"
    )
    mark_idle_ms: int = number(
        50, 1, 60_000, "After this idle time a durable mark is written, so that damage to the last acknowledged "
        "messages is told from a torn tail.", section="Durability",
    )  # fmt: skip

    journal_file_size_bytes: int = number(
        64 * MIB, MIB, 4 * GIB, "Size of one redo journal file; a group commit never spans two.", section="Journal"
    )
    checkpoint_interval_bytes: int = number(
        64 * MIB, 64 * KIB, 64 * GIB, "A checkpoint is taken after this much journal; bounds the restart time.",
        section="Journal",
    )  # fmt: skip
    checkpoint_interval_ms: int = number(
        300_000, 100, _DAY_MS, "A checkpoint is taken at the latest after this time, if anything changed.",
        section="Journal",
    )  # fmt: skip
    group_size_bytes_max: int = number(
        8 * MIB, 64 * KIB, 256 * MIB, "A group commit is closed when it reaches this size.", section="Journal"
    )
    inline_sync_size_bytes: int = number(
        64 * KIB, 0, 16 * MIB, "A group up to this size, with one waiter, may be synced by the event loop itself.",
        section="Journal",
    )  # fmt: skip
    inline_sync_ms: float = decimal(
        1.0, 0.0, 100.0, "The event loop syncs by itself only while recent syncs took less than this.",
        section="Journal",
    )  # fmt: skip

    request_size_bytes_max: int = number(
        16 * MIB, 64 * KIB, 256 * MIB, "Largest body of one request.", section="Limits"
    )
    batch_size_bytes_max: int = number(
        16 * MIB, KIB, 256 * MIB, "Largest record batch, and so the largest message.", section="Limits"
    )
    memory_request_bytes_max: int = number(
        256 * MIB, MIB, 64 * GIB, "Bodies of all requests in work, over all connections.", section="Limits"
    )
    memory_answer_bytes_max: int = number(
        64 * MIB, MIB, 64 * GIB, "Answers that clients have not taken yet, over all connections. Beyond half of it "
        "only clients that took theirs get another long one; beyond all of it long ones wait. If others wait, a client "
        "that has taken nothing for a second is closed.", section="Limits",
    )  # fmt: skip
    connections_max: int = number(10_000, 1, 1_000_000, "Open connections; more are closed at once.", section="Limits")
    connections_per_address_max: int | None = number(
        None, 1, 1_000_000, "Open connections of one address (of IPv6, of one network of 64 bits); more are closed at "
        "once.", section="Limits", none="as many as connections_max",
    )  # fmt: skip
    connects_per_address_per_s_max: int | None = number(
        None, 1, 1_000_000, "New connections of one address a second, which bounds what its handshakes and logins "
        "cost; ten seconds' worth may come at once. More are closed at once.", section="Limits", none="without limit",
    )  # fmt: skip
    pipeline_requests_max: int = number(
        10_000, 1, 1_000_000, "Unanswered requests of one connection; beyond it reading pauses.", section="Limits"
    )
    in_flight_max: int = number(
        8, 1, 64, "Unanswered batches per producer and partition that are told apart from duplicates.", section="Limits"
    )
    sequences_max: int = number(
        500_000, 1, 100_000_000, "Partitions that producers write to, each producer counted for itself: 500 bytes of "
        "memory for each, until its client closes in order, or else as long as its session is kept.", section="Limits",
    )  # fmt: skip
    partitions_max: int = number(10_000, 1, 1_000_000, "Partitions of all topics together.", section="Limits")
    groups_max: int = number(
        10_000, 1, 1_000_000, "Consumer groups that have members or saved offsets. The broker keeps a group "
        "until it is deleted.", section="Limits",
    )  # fmt: skip
    groups_bytes_max: int = number(
        256 * MIB, 1000, 1 << 40, "Memory for all consumer groups together: 500 bytes for each partition that a group "
        "was ever given, and the lists of deferred messages.", section="Limits",
    )  # fmt: skip
    open_files_max: int = number(
        1024, 8, 1_000_000, "Segment files held open at a time. A written file is synced before it is closed: if more "
        "partitions than this are written in turn, most writes cost a sync.", section="Limits",
    )  # fmt: skip
    disk_free_bytes_min: int = number(
        64 * MIB, 0, 1 << 50, "Puts and prepares are refused while less than this, plus what the journal still has to "
        "apply, is free.", section="Limits",
    )  # fmt: skip
    handshake_timeout_ms: int = number(
        5_000, 100, 600_000, "A connection that sent no whole request by then is closed; so is one whose request, once "
        "begun, stands still for so long, or comes at less than 64 KiB a second over it.", section="Limits",
    )  # fmt: skip
    login_timeout_ms: int = number(
        10_000, 100, 600_000, "Once there are users, a connection that has not logged in by then is closed.",
        section="Limits",
    )  # fmt: skip
    write_timeout_ms: int = number(
        30_000, 100, 3_600_000, "A connection that does not take its answers for this long is closed.", section="Limits"
    )

    outcomes_kept: int = number(
        1024, 1, 1_000_000, "Newest outcomes kept per session below the client's floor.", section="Transactions"
    )
    sessions_max: int = number(10_000, 1, 1_000_000, "Sessions of producers that are kept.", section="Transactions")
    session_idle_ms_max: int = number(
        _DAY_MS, 60_000, 365 * _DAY_MS, "A session whose client has been away for this long, and that owes nothing, "
        "ends. The time counts from the broker's start if that was later.", section="Transactions",
    )  # fmt: skip
    transactions_open_max: int = number(
        100_000, 1, 10_000_000, "Transactions open or prepared at a time.", section="Transactions"
    )
    transaction_size_bytes_max: int = number(
        64 * MIB, 64 * KIB, 16 * GIB, "Messages of one transaction.", section="Transactions"
    )
    prepared_bytes_max: int = number(
        256 * MIB, 64 * KIB, 1 << 40, "Messages of all open and prepared transactions together.",
        section="Transactions",
    )  # fmt: skip
    transaction_timeout_ms_max: int = number(
        900_000, 100, _DAY_MS, "Longest time a client may ask for before its transaction is decided.",
        section="Transactions",
    )  # fmt: skip
    queries_max: int = number(
        1000,
        1,
        1_000_000,
        "Queries of parallel writers (Spark) whose committed batches are kept.",
        section="Transactions",
    )
    visibility_hold_ms_max: int = number(
        30_000, 0, _DAY_MS,
        "Messages of a decided XA transaction are shown after this time, from the broker's start at the earliest, even "
        "if a database has not committed yet.",
        section="Transactions",
    )  # fmt: skip

    validate_records: bool = flag(
        False, "Look inside every record batch at the door; otherwise only inside those of users, up to 256 KiB. Of "
        "others, header and CRC are checked.", section="Topics",
    )  # fmt: skip
    retention_check_interval_ms: int = number(
        60_000, 10, _DAY_MS, "How often old segments are looked for.", section="Topics"
    )
    default_partitions: int = number(
        1, 1, PARTITIONS_PER_TOPIC_MAX, "Partitions of a topic that is created without a number.", section="Topics"
    )
    default_storage: str = word(
        "disk", "Where a new topic's messages live; memory is not journaled and is lost with the process.",
        section="Topics", choices=tuple(item.value for item in Storage),
    )  # fmt: skip
    default_retention_ms: int | None = number(
        None, 1, 10**15, "Age at which a new topic's segments go.", section="Topics", none="kept for ever"
    )
    default_retention_size_bytes: int | None = number(
        None, 1, 1 << 50, "Size per partition beyond which a new topic's oldest segments go.", section="Topics",
        none="without limit",
    )  # fmt: skip
    default_retention_policy: str = word(
        "delete", "What happens to a segment that goes: it is deleted, or moved to archive/ in the data directory "
        "and kept there.", section="Topics",
        choices=tuple(item.value for item in RetentionPolicy),
    )  # fmt: skip
    default_segment_size_bytes: int = number(
        128 * MIB, 4096, 4 * GIB, "Size at which a segment is closed and a new one begun.", section="Topics"
    )
    default_segment_age_ms: int | None = number(
        7 * _DAY_MS, 1, 10**15, "Age at which a segment is closed.", section="Topics", none="never by age"
    )

    def __post_init__(self) -> None:
        check_all(self)
        _check_together(self)

    def shown(self) -> dict[str, Any]:
        """All settings by name, for people: without secrets."""
        return {**dataclasses.asdict(self), "registry": without_secret(self.registry)}

    @property
    def plaintext_at(self) -> tuple[str, int] | None:
        """With TLS, where connections without it are taken."""
        return split_address(self.listen_plaintext, "listen_plaintext") if self.listen_plaintext else None

    @property
    def listen_host(self) -> str:
        """The host part of ``listen``, without brackets."""
        return split_address(self.listen)[0]

    @property
    def listen_port(self) -> int:
        """The port part of ``listen``; 0 takes a free one."""
        return split_address(self.listen)[1]

    def new_topic(self, name: str) -> TopicConfig:
        """The settings of a topic for which nothing else was asked."""
        return TopicConfig(
            name=name,
            partitions=self.default_partitions,
            storage=Storage(self.default_storage),
            retention_ms=self.default_retention_ms,
            retention_size_bytes=self.default_retention_size_bytes,
            retention_policy=RetentionPolicy(self.default_retention_policy),
            segment_size_bytes=self.default_segment_size_bytes,
            segment_age_ms=self.default_segment_age_ms,
        )


SETTINGS: dict[str, Setting] = settings_of(BrokerSettings)


def _check_together(settings: BrokerSettings) -> None:
    """Check the settings that limit each other."""
    _check_addresses(settings)
    if not settings.data.strip() or "\0" in settings.data:
        raise ConfigError(f"data = {settings.data[:80]!r}: expected a directory")
    if not settings.broker_name.isprintable() or len(settings.broker_name) > NAME_LENGTH_MAX:
        raise ConfigError(
            f"broker_name = {settings.broker_name[:80]!r}: expected at most {NAME_LENGTH_MAX} printable characters"
        )  # it stands in lines that people and programs read
    if settings.registry and settings.broker_name and not is_valid_name(settings.broker_name):
        raise ConfigError(
            f"broker_name = {settings.broker_name!r}: with a registry, letters, digits, '.', '_' and '-' are allowed"
        )
    _check_at_most(settings, "batch_size_bytes_max", settings.request_size_bytes_max, "request_size_bytes_max")
    _check_at_most(settings, "request_size_bytes_max", settings.memory_request_bytes_max, "memory_request_bytes_max")
    room = settings.journal_file_size_bytes - MIB // 2  # headers and framing, generously
    if settings.group_size_bytes_max + settings.request_size_bytes_max > room:
        raise ConfigError(
            f"journal_file_size_bytes = {settings.journal_file_size_bytes}: one group commit must fit a file: at least "
            f"group_size_bytes_max + request_size_bytes_max + {MIB // 2} "
            f"= {settings.group_size_bytes_max + settings.request_size_bytes_max + MIB // 2}"
        )


def _check_addresses(settings: BrokerSettings) -> None:
    host, _ = split_address(settings.listen)
    _check_tls(settings)
    _check_doors(settings)
    advertised = settings.advertised_address
    if advertised and split_address(advertised, "advertised_address")[1] == 0:
        raise ConfigError(f"advertised_address = {advertised!r}: no client can reach port 0")
    if not settings.registry:
        if settings.replica_of:
            raise ConfigError("replica_of: a replica finds its leader in ZooKeeper; give registry, too")
        return
    if settings.first_administrator and (reason := why_no_users(settings)):
        raise ConfigError(f"first_administrator: {reason}")
    ensemble = parse_ensemble(settings.registry)
    if ensemble.user or ensemble.password_file:
        raise ConfigError("registry: user and password_file are for clients; brokers know each other without")
    if ensemble.broker_tls and settings.registry.startswith("zk://"):
        raise ConfigError("registry: tls=brokers is for clients; this broker's own TLS is tls_certificate and tls_key")
    if not advertised and is_wildcard(host):
        raise ConfigError(
            f"listen = {settings.listen!r}: that names no address of this machine; say with advertised_address where "
            "clients and other brokers reach this one"
        )


def why_no_users(settings: BrokerSettings) -> str:
    """Why users would not be safe in this broker's registry; empty: they are, or there is none."""
    if not settings.registry:
        return ""
    ensemble = parse_ensemble(settings.registry)
    if ensemble.credentials is None:
        return (
            "users of a cluster are in ZooKeeper, and who may write them there may do everything: give the registry's "
            "address a name and a password, zk://NAME:PASSWORD@..., at every broker (docs/how-to/secure.md)"
        )
    is_near = all(is_loopback(split_address(host, "registry")[0]) for host in ensemble.hosts.split(","))
    if ensemble.tls is None and not is_near and not settings.insecure_plaintext:
        return (
            "users of a cluster are in ZooKeeper, and the registry's password and their keys would travel to it in "
            "plaintext: use zks://, or say --insecure-plaintext if the network is yours"
        )
    return ""


def _check_tls(settings: BrokerSettings) -> None:
    if bool(settings.tls_certificate) is not bool(settings.tls_key):
        raise ConfigError("tls_certificate and tls_key go together: give both, or none")
    if settings.tls_client_certificates != "none" and not (settings.tls_certificate and settings.tls_ca):
        raise ConfigError(
            f"tls_client_certificates = {settings.tls_client_certificates!r}: needs tls_certificate and tls_key, and "
            "tls_ca, which says whose signature counts"
        )
    if settings.listen_plaintext:
        split_address(settings.listen_plaintext, "listen_plaintext")
        if not settings.tls_certificate:
            raise ConfigError(
                "listen_plaintext is for brokers with TLS: without tls_certificate, listen takes plaintext itself"
            )


def _check_doors(settings: BrokerSettings) -> None:
    """Other machines reach this broker by TLS and with certificates, or by what was allowed by name."""
    is_public = not is_loopback(settings.listen_host)
    is_open = settings.tls_client_certificates != "required" and not settings.first_administrator
    if not settings.tls_certificate:
        _check_door("listen", settings.listen, settings)
    elif is_public and is_open and not settings.insecure_anonymous:
        raise ConfigError(
            f"listen = {settings.listen!r}: other machines could reach this broker, and it would not ask who they are; "
            "set tls_client_certificates to required, or first_administrator (txmq broker init --admin NAME), or say "
            "--insecure-anonymous if the network is yours"
        )
    if settings.listen_plaintext:
        _check_door("listen_plaintext", settings.listen_plaintext, settings)


def _check_door(name: str, address: str, settings: BrokerSettings) -> None:
    """A door for plaintext, which is anonymous, too."""
    missing = [
        flag
        for flag, is_given in (
            ("--insecure-plaintext", settings.insecure_plaintext),
            ("--insecure-anonymous", settings.insecure_anonymous or settings.first_administrator),
        )
        if not is_given
    ]  # fmt: skip
    if missing and not is_loopback(split_address(address, name)[0]):
        raise ConfigError(
            f"{name} = {address!r}: other machines could reach this broker, without encryption and without proof of "
            "who they are. Listen on 127.0.0.1; or set tls_certificate, tls_key, tls_ca and tls_client_certificates = "
            f'"required" (docs/how-to/secure.md); or say {" ".join(missing)} if the network is yours'
        )


def _check_at_most(settings: BrokerSettings, name: str, limit: int, limit_name: str) -> None:
    value = getattr(settings, name)
    if value > limit:
        raise ConfigError(f"{name} = {value}: expected at most {limit_name} = {limit}")
