"""``txmq user``: add, passwd, remove, list."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli import output
from txmq.cli.connecting import PasswordFile, UserName, administering, new_password

app = output.command_group(
    "Who may connect. The first user is an administrator, and from then on everybody has to log in."
)
Certificate = Annotated[
    str | None, typer.Option(metavar="CN=NAME", help="Subject or alternative name of the user's client certificate.")
]
_COLUMNS = ("user", "password", "certificate", "administrator", "grants")


@app.command()
def add(
    name: UserName,
    password_file: PasswordFile = None,
    certificate: Certificate = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Make a user. The password is not sent: the broker gets keys that recognise it.

    [bold]Examples[/bold]

      txmq user add ops
      txmq user add shop --password-file shop.password
      txmq user add card --certificate CN=card
    """
    password = None if certificate and password_file is None else new_password(password_file)
    with administering(bootstrap) as users:
        _show(users.add(name, password, certificate), as_json=as_json)


@app.command()
def passwd(
    name: UserName,
    password_file: PasswordFile = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Give a user another password; connections that are there go on.

    [bold]Examples[/bold]

      txmq user passwd shop
    """
    password = new_password(password_file)
    with administering(bootstrap, name) as users:
        _show(users.passwd(name, password), as_json=as_json)


@app.command()
def remove(
    name: UserName,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Remove a user with all that was granted: refused at once, on connections that are there, too.

    [bold]Examples[/bold]

      txmq user remove shop
    """
    with administering(bootstrap, name) as users:
        users.remove(name)
    output.report({"user": name, "removed": True}, f"user {name} is removed", as_json=as_json)


@app.command("list")
def list_(bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False) -> None:
    """List the users.

    [bold]Examples[/bold]

      txmq user list
    """
    with administering(bootstrap) as users:
        _show(users.list(), as_json=as_json)


def _show(rows: list[dict[str, object]], *, as_json: bool) -> None:
    output.show_rows("users", _COLUMNS, rows, as_json=as_json)
