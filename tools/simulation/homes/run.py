"""One seed of several homes: they join one cluster, live under faults, heal, and are checked together.

The registry is the one that ships, on a simulated ZooKeeper; so are the worker that speaks to it, the broker's core and
the commit pipeline. What befalls them: deaths and pauses of brokers, also between the steps of joining and leading;
ZooKeeper away, a broker cut off from it, sessions that expire, answers that are lost, servers that lag behind; clients
cut off from single homes.

Besides the promises of a broker that is alone (``promises``), these hold, at the end and many of them at every event:

    R1  every home has the topics of the registry's map, and the partitions that are its own there
    R2  no partition is in two homes; none that was acknowledged is in none
    R3  a topic is gone only if it was deleted: what the registry does not show deletes nothing
    R4  a topic that was deleted is gone everywhere, and its tombstone with it
    R5  one process leads a home: a copied directory, or a restored one, does not start as a second one
    R6  every home is announced, under the epoch that its journal has

In three worlds of ten there are users: see ``users`` for what must hold of them.
"""

from __future__ import annotations

from functools import partial

from tools.simulation.application import Program, ResolverProgram
from tools.simulation.client import Process
from tools.simulation.history import Shared
from tools.simulation.promises import Told, check_promises
from tools.simulation.run import Result, await_ends, heal, inhabited, played
from tools.simulation.stream import Network
from tools.simulation.threads import Threads
from tools.simulation.world import SITUATIONS, Simulation, Violation
from txmq.broker.shell.cluster_membership import REFRESH_S

from . import users as users_of_homes
from .ensemble import Ensemble
from .home import PORT, Home
from .operator import Operator
from .population import Founder, programs, sinks
from .rules import check_homes, watch_owners
from .sink import check_sink, small_chunks

HOMES = 3
START_S = 60.0
SECONDS, SECONDS_OF_USERS = 3.0, 4.5
HEAL_S = REFRESH_S + 5.0  # asks of clients that have gone are carried out; brokers read the registry once more
SITUATIONS_OF_HOMES = frozenset(
    {
        "ZooKeeper was away", "a broker was cut off from ZooKeeper", "a session expired",
        "a broker died behind a call of ZooKeeper",
        "a server lagged behind", "an answer of ZooKeeper was lost", "an empty directory joined",
        "a home asked another one",
        "a client was cut off from a home", "a topic was created", "a topic was altered", "a topic was deleted",
        "not the owner", "acknowledged at its home", "broker killed", "power lost", "died at a crash point",
        "a batch was committed over homes", "a driver died behind its decision, and told no home",
        "a former driver of the sink was fenced",
        "recovery crashed", "broker paused", "link lost", "client died at a crash point",
        "a user was removed", "a grant was revoked", "a removed user was refused", "a former certificate was refused",
        "a home that began behind a removal refused", "a home that stood still during a removal refused",
        "a stranger was refused", "a handshake was completed",
    }
)  # fmt: skip


def simulate_homes(seed: int, homes: int = HOMES, *, users: bool = False) -> Result:
    """Run one seed; ``users`` as of ``Simulation``."""
    world = Simulation(seed, users=users, situations=SITUATIONS | SITUATIONS_OF_HOMES)
    return played(seed, world, partial(_simulate, count=homes))


def _simulate(world: Simulation, count: int) -> None:
    threads, ensemble = Threads(world), Ensemble(world)
    by_name: dict[str, Home] = {}
    homes = [Home(world, threads, ensemble, number, by_name) for number in range(count)]
    network = Network(homes[0], by_name)
    with small_chunks(), inhabited(threads, homes, network) as (shared, told):
        shared.addresses = [(home.name, PORT) for home in homes]
        _live(shared, threads, homes, ensemble, told)


def _live(shared: Shared, threads: Threads, homes: list[Home], ensemble: Ensemble, told: Told) -> None:
    world = shared.world
    for home in homes:
        world.after(world.rng.uniform(0.0, 0.1), home.start)
    _plan_faults(world, homes, ensemble)
    world.run(START_S, until=lambda: all(home.is_serving for home in homes))
    if not all(home.is_serving for home in homes):
        raise Violation(f"liveness: not every home is led after {START_S:.0f} s")
    Founder(shared, homes)
    world.run(START_S, until=lambda: bool(shared.history.topics))
    drivers = sinks(shared, threads, told)
    world.run(START_S, until=lambda: any(driver.has_opened for driver in drivers))  # operators keep the registry busy
    _plan_faults(world, homes, ensemble)
    # A warden has its changes from the registry, too: it is kept less busy.
    operators = [Operator(shared, f"op{n}", homes) for n in range(1 if world.has_users else 4)]
    running = [*drivers, *programs(shared, threads, told)]
    guests = users_of_homes.population(shared, homes)
    watch_owners(world, homes)
    _plan_deaths(world, running)
    world.run(SECONDS_OF_USERS if world.has_users else SECONDS)
    heal(shared)
    ensemble.heal()
    finite: list[Program | Process] = [one for one in running if not isinstance(one, ResolverProgram)]
    finite += guests
    await_ends(world, finite)
    world.run(HEAL_S)
    visible = check_promises(shared, told)
    check_sink(shared, visible)
    check_homes(shared, ensemble, operators)


def _plan_deaths(world: Simulation, running: list[Program]) -> None:
    for _ in range(world.rng.randint(0, 3)):
        world.after(world.rng.uniform(0, SECONDS), world.rng.choice(running).die)


def _plan_faults(world: Simulation, homes: list[Home], ensemble: Ensemble) -> None:
    rng = world.rng

    def later(call: object, most: int) -> None:
        for _ in range(rng.randint(0, most)):
            world.after(rng.uniform(0, SECONDS), call)  # type: ignore[arg-type]

    def cut_session() -> None:
        if ensemble.sessions:
            rng.choice(ensemble.sessions).cut_off(rng.uniform(0.05, 1.0))

    later(lambda: rng.choice(homes).end(), 2)
    later(lambda: rng.choice(homes).pause(rng.uniform(0.05, 0.7)), 2)
    later(cut_session, 2)
    later(lambda: ensemble.go_away(rng.uniform(0.05, 0.6)), 1)
    later(lambda: rng.choice(homes).cut_from(rng.choice(("op0", "op1", "a", "home", "")), rng.uniform(0.05, 0.6)), 3)
