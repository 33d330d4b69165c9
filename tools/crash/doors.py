"""Who connects to a campaign's brokers: anybody, in plaintext; or over TLS a user for each process, with what it needs.

Theory of operation. ``Doors`` is what a campaign has without ``--tls``. ``GuardedDoors`` is a CA below the campaign's
directory. Brokers, and ZooKeeper, have a certificate for this machine, whose host names clients check; they ask for a
certificate of the same CA, and each user has one that is good for no host, and a password in a file. The campaign
itself is the operator, an administrator. Each process that it starts is a user of its own, by the name of its role.

Invariants:
* no process but the campaign's own logs in as the operator;
* at the end no process was refused anything: it had the grants that it needs, and tried nothing else (``refused``).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import txmq
from tools.crash.processes import CampaignError
from txmq.addresses import TlsFiles, join_address
from txmq.client.admin.cluster import Users
from txmq.protocol.json_text import FieldsList
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess, address_of
from txmq.testing.processes.proxy import Proxy

OPERATOR: Final = "operator"
KNOWN_S: Final = 10.0  # until every home knows a change
_REFUSALS: Final = ("refused", "login failed")
_SHOWN_MAX: Final = 10


class Grant(NamedTuple):
    """What a user may do, as ``txmq acl add`` says it; ``kind`` is topic, group or resource."""

    may: str
    kind: str
    name: str


def may(operations: str, kind: str, names: Iterable[str]) -> list[Grant]:
    """The same grant on several things."""
    return [Grant(operations, kind, name) for name in names]


def user_of(run_name: str) -> str:
    """The user of a process: that of all processes which play its role one after another."""
    return run_name.partition(".")[0]


class Doors:
    """Open ones: there are no users.

    Attributes:
        tls: what brokers and ZooKeeper show and trust, if they speak TLS.
        credentials: of the cluster's nodes in ZooKeeper.
    """

    tls: TlsFiles | None = None
    credentials = ""

    def address(self, brokers: Sequence[BrokerProcess], user: str = OPERATOR) -> str:
        """Of some brokers, the first one first, for a user."""
        del user
        return address_of(brokers)

    def relayed(self, proxy: Proxy, user: str) -> str:
        """Of a proxy in front of a broker."""
        del user
        return proxy.address

    def close(self, brokers: Sequence[BrokerProcess]) -> None:
        """From here on nobody is served but the operator, and those who are admitted."""

    def admit(self, brokers: Sequence[BrokerProcess], users: Mapping[str, Iterable[Grant]]) -> None:
        """Make users who may do this and nothing else; all brokers know them when this returns."""

    def refused(self, brokers: Sequence[BrokerProcess]) -> list[str]:
        """What processes were refused, a line each."""
        del brokers
        return []


OPEN: Final = Doors()


class GuardedDoors(Doors):
    """See the module's docstring.

    Args:
        directory: for the CA, the users' certificates and passwords; made if it is missing.
    """

    credentials = "brokers:campaign"

    def __init__(self, directory: Path) -> None:
        self._directory, self._authority = directory, CertificateAuthority(directory)
        self.tls: TlsFiles = self._authority.issue("brokers")

    def address(self, brokers: Sequence[BrokerProcess], user: str = OPERATOR) -> str:
        return self._address(",".join(join_address(broker.host, broker.port) for broker in brokers), user)

    def relayed(self, proxy: Proxy, user: str) -> str:
        return self._address(proxy.address.partition("://")[2], user)

    def _address(self, hosts: str, user: str) -> str:
        own = {"cert": str(self._directory / f"{user}.pem"), "key": str(self._directory / f"{user}.key")}
        words = {"ca": self.tls.ca, **own, "password_file": str(self._password_file(user))}
        return f"txmqs://{user}@{hosts}?{urlencode(words)}"

    def _password_file(self, user: str) -> Path:
        return self._directory / f"{user}.password"

    def _make_secrets(self, user: str) -> str:
        """The user's certificate, and a password, which is returned."""
        password = secrets.token_urlsafe()
        self._authority.issue(user, hosts=())
        self._password_file(user).touch(mode=0o600)
        self._password_file(user).write_text(password, "utf-8")
        return password

    def close(self, brokers: Sequence[BrokerProcess]) -> None:
        password = self._make_secrets(OPERATOR)
        with txmq.connect(address_of(brokers[:1])) as client:  # with the brokers' certificate, and without a login
            Users(client.control, client.timeout).add(OPERATOR, password)
        for broker in brokers:
            eventually(partial(self._lets_in, broker), "every home knows the operator", KNOWN_S, CampaignError)

    def _lets_in(self, broker: BrokerProcess) -> bool:
        try:
            txmq.connect(self.address([broker])).close()
        except txmq.errors.BrokerError:
            return False
        return True

    def admit(self, brokers: Sequence[BrokerProcess], users: Mapping[str, Iterable[Grant]]) -> None:
        with txmq.connect(self.address(brokers[:1])) as client:
            operator = Users(client.control, client.timeout)
            for user, grants in users.items():
                operator.add(user, self._make_secrets(user))
                for grant in grants:
                    operator.acl("grant", user, {"may": grant.may, grant.kind: grant.name})
            granted = operator.acl("list")
        for broker in brokers[1:]:
            eventually(partial(self._has, broker, granted), "every home knows the users", KNOWN_S, CampaignError)

    def _has(self, broker: BrokerProcess, granted: FieldsList) -> bool:
        with txmq.connect(self.address([broker])) as client:
            return Users(client.control, client.timeout).acl("list") == granted

    def refused(self, brokers: Sequence[BrokerProcess]) -> list[str]:
        found = [
            f"{broker.data_dir.name} refused {line.get('tried', line['user'])}: {line.get('reason', line['event'])}"
            for broker in brokers
            for line in _audited(broker.logs())
            if line["event"] in _REFUSALS and OPERATOR not in (line["user"], line.get("tried"))
        ]
        left_out = [f"and {len(found) - _SHOWN_MAX} more refusals"] if len(found) > _SHOWN_MAX else []
        return [*found[:_SHOWN_MAX], *left_out]


def _audited(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if '"audit"' in line:
            with suppress(ValueError):  # a kill has torn it
                yield json.loads(line)
