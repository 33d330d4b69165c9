"""``python -m tools.simulation --seeds N [--seed S] [--homes 3] [--hash-check]``: histories, one per seed.

See ``run``, and ``homes.run`` for histories of several brokers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from .homes.run import SITUATIONS_OF_HOMES, simulate_homes
from .run import Result, simulate
from .world import SITUATIONS

PROCESSES = 2


def campaign(first: int, count: int, *, verbose: bool = False, homes: int = 1) -> tuple[list[Result], frozenset[str]]:
    """Run seeds in two processes; the failures, and all situations that were met."""
    play = simulate if homes == 1 else partial(simulate_homes, homes=homes)
    failures: list[Result] = []
    met: set[str] = set()
    with ProcessPoolExecutor(PROCESSES) as pool:
        for number, result in enumerate(pool.map(play, range(first, first + count), chunksize=5), 1):
            met |= result.met
            if result.error:
                failures.append(result)
                if verbose:
                    print(report(result, homes), flush=True)
            if verbose and number % 50 == 0:
                print(f"{number} seeds, {len(failures)} failed", flush=True)
    return failures, frozenset(met)


def report(result: Result, homes: int = 1) -> str:
    """A failure, readable, with the command that repeats it."""
    of_homes = f" --homes {homes}" if homes > 1 else ""
    again = f"python -m tools.simulation --seed {result.seed}{of_homes}"
    return "\n".join([*result.tail, f"seed {result.seed}: {result.error}", f"again: {again}"])


def digest_elsewhere(seed: int, hash_seed: str, homes: int = 1) -> str:
    """The trace's hash in another process, with another order of sets of strings."""
    command = [sys.executable, "-m", "tools.simulation", "--seed", str(seed), "--homes", str(homes), "--digest"]
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
    parser.add_argument("--homes", type=int, default=1, help="brokers that share a registry, if more than one")
    parser.add_argument("--digest", action="store_true", help="print only the hash of the trace, of --seed or of each")
    parser.add_argument("--hash-check", action="store_true")
    options = parser.parse_args()
    homes = options.homes
    play = simulate if homes == 1 else partial(simulate_homes, homes=homes)
    if options.seed is not None:
        result = play(options.seed)
        print(result.digest if options.digest else report(result, homes))
        return 1 if result.error else 0
    if options.digest:
        for seed in range(options.first, options.first + options.seeds):
            result = play(seed)
            print(seed, result.digest, result.error, flush=True)
        return 0
    if options.hash_check:
        different = [s for s in range(1, 6) if digest_elsewhere(s, "1", homes) != digest_elsewhere(s, "2", homes)]
        print(f"seeds whose trace depends on the hash seed: {different or 'none'}")
        return 1 if different else 0
    failures, met = campaign(options.first, options.seeds, verbose=True, homes=homes)
    wanted = SITUATIONS if homes == 1 else SITUATIONS_OF_HOMES
    missing = wanted - met if options.seeds >= 500 else frozenset[str]()
    print(f"{options.seeds} seeds, {len(failures)} failed; never met: {sorted(wanted - met) or 'nothing'}")
    return 1 if failures or missing else 0


if __name__ == "__main__":
    sys.exit(main())
