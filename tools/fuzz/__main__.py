"""``python -m tools.fuzz``: random first bytes at a broker's door for plaintext and TLS, while others are served.

After that, for as long, odd values in sound requests, which the broker keeps for others (``kept``).

Exit 0: the broker lives, has logged no error, answered a witness (in plaintext and by TLS) all the time, and gave back
memory and descriptors; what is kept was refused, or stopped no reader. 1: what was not so. The same seed sends
the same bytes.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import txmq
from tools.fuzz import kept
from tools.fuzz.strangers import Strangers
from txmq.addresses import TlsFiles
from txmq.runtime.tls import ClientTls
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess, address_of, free_port

WARM_UP: Final = 300  # strangers, after which the memory is judged
GROWTH_MIB_MAX: Final = 32.0
WITNESS_S_MAX: Final = 10.0
_EVERY: Final = 20  # strangers, between two looks
_HANDSHAKE_MS: Final = 500


class FuzzError(Exception):
    """Somebody else suffered."""


def fuzz(directory: Path, seed: int, seconds: float, say: Callable[[str], None] = print) -> Counter[str]:
    """Returns how many strangers there were of each kind.

    Raises:
        FuzzError: says what it cost whom.
    """
    files = CertificateAuthority(directory / "tls").issue("both")
    listen = f"127.0.0.1:{free_port()}"
    settings = {
        "listen_plaintext": listen,
        "handshake_timeout_ms": _HANDSHAKE_MS,
        "tls_client_certificates": "optional",
    }
    with ExitStack() as stack:
        broker = stack.enter_context(BrokerProcess(directory / "broker", listen=listen, settings=settings, tls=files))
        plain = stack.enter_context(txmq.connect(f"txmq://{listen}"))
        witnesses = [plain, stack.enter_context(txmq.connect(address_of([broker])))]
        plain.topics.create("t")
        tls = [ClientTls(files), ClientTls(TlsFiles(files.ca))]
        strangers = Strangers(broker.host, broker.port, tls, random.Random(seed))
        kinds, memory = Counter[str](), 0.0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            kinds.update(strangers.comes() for _ in range(_EVERY))
            _look(broker, witnesses)
            if not memory and kinds.total() >= WARM_UP:
                memory = _memory_mib(broker)
        eventually(lambda: _sockets(broker) <= 4, "sockets are given back", WITNESS_S_MAX, FuzzError)
        grown = _memory_mib(broker) - memory if memory else 0.0
        say(f"{kinds.total()} strangers in {seconds:g} s; memory grew by {grown:.1f} MiB")
        if grown > GROWTH_MIB_MAX:
            raise FuzzError(f"memory grew by {grown:.1f} MiB, at most {GROWTH_MIB_MAX}")
        if broker.stop() != 0:
            raise FuzzError(f"the broker stopped with {broker.returncode}")
    return kinds


def fuzz_kept(seed: int, seconds: float, say: Callable[[str], None] = print) -> int:
    """Histories of ``kept``, from this seed on. Returns how many there were.

    Raises:
        FuzzError: says which one, and what somebody met.
    """
    until, histories, values = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        try:
            values += kept.history(seed + histories)
        except Exception as error:
            raise FuzzError(f"values kept for others, history {seed + histories}: {error!r}") from error
        histories += 1
    say(f"{histories} histories of {kept.GUESTS} guests in {seconds:g} s; {values} requests with odd values were kept")
    return histories


def _look(broker: BrokerProcess, witnesses: Sequence[txmq.Client]) -> None:
    """Whether everybody else is served, and nothing is logged that an operator should look at."""
    if not broker.is_running:
        raise FuzzError(f"the broker ended with {broker.returncode}: {broker.logs()[-2000:]}")
    for witness in witnesses:
        asked = time.monotonic()
        witness.ping()
        if time.monotonic() - asked > WITNESS_S_MAX:
            raise FuzzError(f"a witness waited for {time.monotonic() - asked:.1f} s")
    errors = [line for line in broker.logs().splitlines() if '"level": "error"' in line or not line.startswith("{")]
    if errors:
        raise FuzzError(f"the broker logged {errors[0]}")


def _memory_mib(broker: BrokerProcess) -> float:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{broker.pid}/status").read_text("ascii").splitlines())
    return int(status["VmRSS"].split()[0]) / 1024


def _sockets(broker: BrokerProcess) -> int:
    """Of connections: one of each witness and what uvloop has are left."""
    with txmq.connect(f"txmq://{broker.host}:{broker.port}") as client:
        figures = dict(line.split(" ", 1) for line in client.stats().splitlines())
    return int(figures["connections"])


def main() -> int:
    """Run, and keep the directory where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="half of it for each part (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if arguments.seed is None else arguments.seed
    directory = Path(tempfile.mkdtemp(prefix="txmq-fuzz-"))
    print(f"seed {seed}, in {directory}", flush=True)
    try:
        for kind, count in sorted(fuzz(directory, seed, arguments.seconds / 2).items()):
            print(f"  {kind.replace('_', ' ')}: {count}")
        fuzz_kept(seed, arguments.seconds / 2)
    except (FuzzError, txmq.TxmqError) as error:
        print(f"\nFOUND: {error!r}\nkept: {directory}\nrepeat: python -m tools.fuzz --seed {seed}")
        return 1
    shutil.rmtree(directory)
    print("nobody else noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
