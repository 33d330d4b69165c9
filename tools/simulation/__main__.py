"""``python -m tools.simulation --seeds N [--seed S] [--homes 3 | --restored]``: histories, one per seed.

See ``run``, ``homes.run`` for histories of several brokers, and ``restored`` for those of one that is restored.
``--hash-check``: traces depend on the seed alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from .homes.run import SITUATIONS_OF_HOMES, simulate_homes
from .replica import SITUATIONS_OF_REPLICAS
from .restored import SITUATIONS_OF_RESTORES, simulate_restored
from .run import Result, simulate, simulate_followed
from .world import SITUATIONS

PROCESSES = 2


class World(NamedTuple):
    """What kind of histories.

    Attributes:
        homes: brokers; more than one share a registry.
        is_restored: the broker is restored from a copy.
        has_users: there are users in every world, else in some.
        is_followed: a replica follows the broker.
    """

    homes: int = 1
    is_restored: bool = False
    has_users: bool = False
    is_followed: bool = False

    @property
    def play(self) -> Callable[[int], Result]:
        """Run one seed."""
        if self.is_restored:
            return simulate_restored
        if self.is_followed:
            return simulate_followed
        if self.homes == 1:
            return partial(simulate, users=self.has_users)
        return partial(simulate_homes, homes=self.homes, users=self.has_users)

    @property
    def situations(self) -> frozenset[str]:
        """Those that must be met."""
        if self.is_restored:
            return SITUATIONS_OF_RESTORES
        if self.is_followed:
            return SITUATIONS_OF_REPLICAS
        return SITUATIONS if self.homes == 1 else SITUATIONS_OF_HOMES

    @property
    def options(self) -> list[str]:
        """Of the command line."""
        if self.is_restored:
            return ["--restored"]
        if self.is_followed:
            return ["--replica"]
        return [*(["--homes", str(self.homes)] if self.homes > 1 else []), *(["--users"] if self.has_users else [])]


LONE = World()


def campaign(
    first: int, count: int, *, verbose: bool = False, world: World = LONE
) -> tuple[list[Result], frozenset[str]]:
    """Run seeds in two processes; the failures, and all situations that were met."""
    failures: list[Result] = []
    met: set[str] = set()
    with ProcessPoolExecutor(PROCESSES) as pool:
        for number, result in enumerate(pool.map(world.play, range(first, first + count), chunksize=5), 1):
            met |= result.met
            if result.error:
                failures.append(result)
                if verbose:
                    print(report(result, world), flush=True)
            if verbose and number % 50 == 0:
                print(f"{number} seeds, {len(failures)} failed", flush=True)
    return failures, frozenset(met)


def report(result: Result, world: World = LONE) -> str:
    """A failure, readable, with the command that repeats it."""
    again = " ".join(["python -m tools.simulation --seed", str(result.seed), *world.options])
    return "\n".join([*result.tail, f"seed {result.seed}: {result.error}", f"again: {again}"])


def digest_elsewhere(seed: int, hash_seed: str, world: World = LONE) -> str:
    """The trace's hash in another process, with another order of sets of strings."""
    command = [sys.executable, "-m", "tools.simulation", "--seed", str(seed), *world.options, "--digest"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--first", type=int, default=1)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--homes", type=int, default=1, help="brokers that share a registry, if more than one")
    kinds.add_argument("--restored", action="store_true", help="the broker is restored from a copy of its directory")
    kinds.add_argument("--replica", action="store_true", help="a replica follows the broker")
    parser.add_argument("--users", action="store_true", help="users in every world, else in three of ten")
    parser.add_argument("--digest", action="store_true", help="print only the hash of the trace, of --seed or of each")
    parser.add_argument("--hash-check", action="store_true")
    options = parser.parse_args()
    if options.users and (options.restored or options.replica):
        parser.error("--users goes with a lone broker, and with --homes")
    world = World(options.homes, options.restored, options.users, options.replica)
    if options.seed is not None:
        result = world.play(options.seed)
        print(result.digest if options.digest else report(result, world))
        return 1 if result.error else 0
    if options.digest:
        for seed in range(options.first, options.first + options.seeds):
            result = world.play(seed)
            print(seed, result.digest, result.error, flush=True)
        return 0
    if options.hash_check:
        different = [s for s in range(1, 6) if digest_elsewhere(s, "1", world) != digest_elsewhere(s, "2", world)]
        print(f"seeds whose trace depends on the hash seed: {different or 'none'}")
        return 1 if different else 0
    failures, met = campaign(options.first, options.seeds, verbose=True, world=world)
    wanted = world.situations
    missing = wanted - met if options.seeds >= 500 else frozenset[str]()
    print(f"{options.seeds} seeds, {len(failures)} failed; never met: {sorted(wanted - met) or 'nothing'}")
    return 1 if failures or missing else 0


if __name__ == "__main__":
    sys.exit(main())
