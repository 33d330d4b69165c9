"""What the commands about users have in common: whom they speak with, and whom they mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli.connecting import connected

if TYPE_CHECKING:
    from txmq.client.admin.users import Users

UserName = Annotated[str, typer.Argument(metavar="USER", help="Name of the user.", show_default=False)]


@contextmanager
def administering(bootstrap: str, user: str | None = None) -> Iterator[Users]:
    """The users of a broker, for a block. If it names an unknown one, the error suggests the nearest name."""
    from txmq.client.admin.users import Users

    with connected(bootstrap, user=user) as client:
        yield Users(client.control, client.timeout)
