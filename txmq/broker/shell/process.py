"""The broker as a process: settings in, exit status out; signals, ready file, logs."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import signal
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from txmq.addresses import TlsFiles, join_address, split_address
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.commit.data_directory import Joins, Recovered, is_lacking, open_store
from txmq.broker.core import Core
from txmq.broker.following_core import FollowingCore
from txmq.broker.shell.cluster_membership import ClusterMembership
from txmq.broker.shell.first_administrator import introduce
from txmq.broker.shell.leader_link import LeaderLink, Peer
from txmq.broker.shell.replica_membership import ReplicaMembership
from txmq.broker.shell.server import Server
from txmq.broker.shell.tls_transport import BrokerTls
from txmq.config import BrokerSettings
from txmq.errors import ConfigError, JournalFullError
from txmq.registry.cluster_metadata import HomeEntry
from txmq.runtime import os_process
from txmq.runtime.clocks import OSClock, OSRandom, SteadyClock
from txmq.runtime.logging import get_logger
from txmq.runtime.os_disk import OSDisk
from txmq.runtime.os_process import collect_young_only
from txmq.runtime.ports import Clock
from txmq.runtime.tls import ClientTls, ServerTls

log = get_logger()
ROOM_RETRY_S = 1.0


def run(settings: BrokerSettings, *, ready_file: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        ready_file: written, holding ``host:port``, once the broker serves; removed when it ends.

    Returns:
        0 after a clean stop, 1 where the storage failed.

    Raises:
        RegistryError: the registry refuses this broker; the text says what to do.
        ConfigError: a file of TLS cannot be read, or the system allows too few open files.
        TxmqError: the data directory cannot be opened.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # one that comes early waits until the loop takes it
    tls = _tls(settings)
    settings, backlog = _within_descriptors(settings)
    collect_young_only()
    clock, random, disk = SteadyClock(OSClock()), OSRandom(), _data_directory(settings.data)
    membership: ClusterMembership | ReplicaMembership | None = None
    joins: Joins | None = None
    if settings.replica_of:
        membership = replica = ReplicaMembership(settings, disk, clock, random, None if tls is None else tls.to_brokers)
        joins = replica.joins()
    elif settings.registry:
        membership = member = ClusterMembership(settings, disk, clock, random)
        cluster = member.take_cluster()
        joins = None if cluster is None else Joins(cluster)
    started = clock.monotonic()
    recovered = _when_there_is_room(clock, lambda: open_store(
        disk, clock, random, settings, is_member=membership is not None,
        joins=joins, files_lock=threading.Lock(),
        on_progress=lambda text: log.info("recovering", progress=text),
    ))  # fmt: skip
    log.info(
        "recovered", data=settings.data, records=recovered.records, journal_bytes=recovered.journal_bytes,
        epoch=recovered.store.journal.epoch, seconds=round(clock.monotonic() - started, 3), notes=recovered.notes,
    )  # fmt: skip
    return _run_loop(_serve(recovered, settings, clock, backlog, ready_file, membership, tls))


def _when_there_is_room(clock: Clock, opening: Callable[[], Recovered]) -> Recovered:
    """Open the data directory; where space or descriptors lack, wait for them as a running broker does."""
    while True:
        try:
            return opening()
        except (OSError, JournalFullError) as error:
            if not (isinstance(error, JournalFullError) or is_lacking(error)):
                raise
            log.warning("cannot recover yet; tried again", error=str(error), seconds=ROOM_RETRY_S)
        clock.sleep(ROOM_RETRY_S)


def _tls(settings: BrokerSettings) -> BrokerTls | None:
    """What was configured, read before the journal is: a wrong file is told at once."""
    if not settings.tls_certificate:
        return None
    files = TlsFiles(settings.tls_ca, settings.tls_certificate, settings.tls_key)
    to_clients = ServerTls(files, settings.tls_client_certificates)
    speaks_it = settings.registry and settings.tls_between_brokers
    return BrokerTls(to_clients, ClientTls(files) if speaks_it else None)


def _data_directory(path: str) -> OSDisk:
    try:
        return OSDisk(path)
    except OSError as error:
        raise ConfigError(
            f"cannot open the data directory {path}: {error.strerror or error}; name another with --data DIR"
        ) from error


def _within_descriptors(settings: BrokerSettings) -> tuple[BrokerSettings, int]:
    """Settings that fit the limit on open files, and the listener's backlog (see ``runtime.descriptors``)."""
    limit = os_process.raise_descriptor_limit(os_process.needed(settings.connections_max, settings.open_files_max))
    budget = os_process.divide_descriptors(limit, settings.connections_max, settings.open_files_max)
    if budget is None:
        raise ConfigError(f"ulimit -n is {limit}: too few open files for a broker; allow at least 64, better 4096")
    if (budget.connections, budget.files) != (settings.connections_max, settings.open_files_max):
        log.warning(
            "fewer connections and open files than configured: the limit on open files (ulimit -n) is low",
            limit=limit, connections_max=budget.connections, open_files_max=budget.files,
        )  # fmt: skip
    fitting = dataclasses.replace(settings, connections_max=budget.connections, open_files_max=budget.files)
    return fitting, budget.backlog


def _run_loop(serving: Coroutine[None, None, int]) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serving)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serving)


def _why_not_listening(address: str, error: OSError) -> str:
    hint = {
        errno.EADDRINUSE: "is another broker running there? choose another address with --listen HOST:PORT",
        errno.EADDRNOTAVAIL: "this machine has no such address; --listen takes one of its own, or 0.0.0.0 for all",
        errno.EACCES: "ports below 1024 are for root; choose another one with --listen HOST:PORT",
    }.get(error.errno or 0, "--listen HOST:PORT takes an address of this machine")
    return f"cannot listen on {address}: {error.strerror or error}; {hint}"


async def _serve(
    recovered: Recovered, settings: BrokerSettings, clock: SteadyClock, backlog: int, ready_file: Path | None,
    membership: ClusterMembership | ReplicaMembership | None, tls: BrokerTls | None,
) -> int:  # fmt: skip
    core = _core(recovered, settings, clock, membership)
    server = Server(core, recovered.store, settings, clock, tls)
    path = settings.first_administrator if membership is None else ""  # else the cluster gets it, if it has no users
    if path and (name := introduce(core.context, path)):
        log.info("first administrator", user=name)
    address = await _listen(server, settings, backlog)
    stopping, refusals = asyncio.Event(), list[Exception]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, _reload, None if tls is None else tls.to_clients)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    core.context.address = advertised = settings.advertised_address or address

    def serves() -> None:
        if ready_file is not None:
            _write_ready_file(ready_file, address)
        who = recovered.identity
        log.info("serving", address=advertised, cluster=f"{who.cluster:016x}", home=f"{who.node:016x}")

    def refused(reason: Exception) -> None:
        refusals.append(reason)
        if core.context.is_serving or core.context.leads_never:
            server.fail(reason)
        else:
            stopping.set()

    if membership is None:
        serves()
    elif isinstance(membership, ClusterMembership):
        membership.start(server, recovered, advertised, serves, refused)
    else:
        _follow(server, recovered, membership, tls, refused, advertised)
        serves()
    failure = await _stopped(server, stopping)
    if membership is not None:
        membership.stop()
    recovered.store.close()
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    log.info("stopped", clean=failure is None)
    if refusals:
        raise refusals[0]
    return 0 if failure is None else 1


def _core(
    recovered: Recovered, settings: BrokerSettings, clock: Clock,
    membership: ClusterMembership | ReplicaMembership | None,
) -> Core:  # fmt: skip
    view = None if membership is None else ClusterView(membership.address)
    who, state, now_ms = recovered.identity, recovered.state, clock.now_ms()
    if isinstance(membership, ReplicaMembership) and view is not None:
        return FollowingCore(who, settings, state, now_ms, OSRandom(), view)
    return Core(who, settings, state, now_ms, OSRandom(), cluster=view)


def _follow(
    server: Server, recovered: Recovered, membership: ReplicaMembership, tls: BrokerTls | None,
    refused: Callable[[Exception], None], address: str,
) -> None:  # fmt: skip
    """Have a replica follow the leader of its home, wherever the registry says that it is."""
    core = server.core
    assert isinstance(core, FollowingCore)
    link = LeaderLink(
        core, recovered.store, recovered.incarnation, server.clock, server.received, refused,
        None if tls is None else tls.to_brokers,
    )  # fmt: skip
    server.leader = link

    def told(homes: list[HomeEntry], peer: Peer) -> None:
        core.context.joined_cluster().set_homes(homes)
        link.set_peer(peer)

    membership.start(
        recovered.incarnation,
        address,
        lambda homes, peer: server.post(partial(told, homes, peer)),
        lambda error: server.post(partial(refused, error)),
    )


def _reload(tls: ServerTls | None) -> None:
    """Certificates may have been replaced."""
    if tls is None:
        log.info("nothing to reload: no certificates are configured")
        return
    try:
        tls.reload()
    except ConfigError as error:
        log.error("certificates were not reloaded; new connections get what was read before", error=str(error))
    else:
        log.info("certificates reloaded, for new connections")


async def _listen(server: Server, settings: BrokerSettings, backlog: int) -> str:
    host, port = split_address(settings.listen)
    try:
        return join_address(*await server.start(host, port, backlog, plaintext_at=settings.plaintext_at))
    except OSError as error:
        asked = " and ".join(filter(None, (settings.listen, settings.listen_plaintext)))
        raise ConfigError(_why_not_listening(asked, error)) from error


async def _stopped(server: Server, stopping: asyncio.Event) -> BaseException | None:
    """Wait until the broker is asked to stop, or fails; why it failed."""
    stop: asyncio.Future[Any] = asyncio.ensure_future(stopping.wait())
    ended: asyncio.Future[Any] = server.stopped
    await asyncio.wait([stop, ended], return_when=asyncio.FIRST_COMPLETED)
    if not server.stopped.done():
        log.info("stopping")
        await server.stop()
    stop.cancel()
    return server.stopped.result()


def _write_ready_file(path: Path, address: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(address + "\n")
        temporary.rename(path)
    except OSError as error:
        raise ConfigError(f"cannot write the ready file {path}: {error.strerror or error}") from error
