"""The ``txmq`` command.

``main`` turns every error of txmq into one line that says what to do next; a traceback is a defect of txmq.
"""

from __future__ import annotations

import _thread
import copy
import inspect
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NoReturn

import typer

from txmq.cli import (
    acl,
    audit,
    bench,
    binlog,
    broker,
    cluster,
    consume,
    data_directory,
    dead_letter,
    group,
    outbox,
    output,
    produce,
    query,
    quota,
    resolver,
    retry,
    spool,
    stats,
    topic,
    tx,
    user,
)
from txmq.cli.demo import demo
from txmq.errors import (
    ConfigError,
    ConnectionLostError,
    OverloadedError,
    PartialResultError,
    RequestTimeoutError,
    TxmqError,
)
from txmq.runtime.build import VERSION, is_compiled, pages

INTERRUPT_AGAIN_S = 0.05

app = typer.Typer(
    name="txmq",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Transactional messaging: write the row and publish the event in one provable act.

    [bold]First steps[/bold]

      txmq demo                                      see it survive kill -9
      txmq broker --data var/txmq                    start a broker
      txmq topic create orders --partitions 4        make a topic
      echo hello | txmq produce --topic orders       send a line
      txmq consume --topic orders --from earliest    read it back

    Clients find the broker by --bootstrap, else TXMQ_BOOTSTRAP, else txmq://127.0.0.1:8123.""",
    epilog=f"docs/ and examples/, wherever a text names them, are below {pages()}",
)
app.add_typer(broker.app, name="broker")
app.add_typer(cluster.app, name="cluster")
app.add_typer(user.app, name="user")
app.add_typer(acl.app, name="acl")
app.add_typer(quota.app, name="quota")
app.add_typer(topic.app, name="topic")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.add_typer(group.app, name="group")
app.add_typer(retry.app, name="retry")
app.add_typer(dead_letter.app, name="dead-letter")
app.command("stats")(stats.stats)
app.add_typer(tx.app, name="tx")
app.add_typer(query.app, name="query")
app.add_typer(resolver.app, name="resolver")
app.add_typer(outbox.app, name="outbox")
app.add_typer(spool.app, name="spool")
app.add_typer(binlog.app, name="binlog")
app.add_typer(data_directory.journal_app, name="journal")
app.add_typer(data_directory.log_app, name="log")
app.command("bench", help=bench.HELP)(bench.bench)
app.command("audit")(audit.audit)
app.command("demo")(demo.demo)
app.command("demo-audit")(demo.demo_audit)

_PASSWORD = re.compile(r"\bzks?://.*@", re.DOTALL)


def _say_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    """Options that stand before any command."""


@app.command("version")
def version(as_json: output.Json = False) -> None:
    """Print the version, and whether hot modules run compiled.

    [bold]Examples[/bold]

      txmq version
    """
    if as_json:
        output.print_json({"version": VERSION, "compiled": is_compiled()})
    else:
        typer.echo(f"txmq {VERSION}{' (compiled)' if is_compiled() else ''}")


def command(words: Sequence[str] = ()) -> Any:
    """The tree of commands; where the words begin with the name of a branch, that branch alone.

    Typer takes longer to build the whole tree (50 ms) than a broker to start.

    Switches show without a type: ``--json``, where typer would say ``--json <bool>``. An option that is given twice is
    refused, unless it may be repeated; typer would keep the last one. So is an address with a password: every user of
    the machine can list command lines.
    """
    root = typer.main.get_command(_branch(words[0]) if words else app)
    _complete(root, typer.Context(root, **root.context_settings))
    return root


def _branch(name: str) -> typer.Typer:
    """The app with nothing but the branch of this name; all of it where there is none."""
    one = copy.copy(app)
    one.registered_groups = [group for group in app.registered_groups if group.name == name]
    one.registered_commands = [command for command in app.registered_commands if command.name == name]
    return one if one.registered_groups or one.registered_commands else app


def _complete(one: Any, context: Any) -> None:
    one.help = _reflowed(one.help or "")
    one.parse_args = partial(_parse, one, one.parse_args)
    for parameter in one.get_params(context):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for name, below in getattr(one, "commands", {}).items():
        _complete(below, type(context)(below, info_name=name, parent=context, **below.context_settings))


def _parse(one: Any, parse: Callable[[Any, list[str]], Any], context: Any, words: list[str]) -> Any:
    if context.parent is None and any(_PASSWORD.search(word) for word in words):
        raise ConfigError(
            "an address with a password is for no command line, which others can list (ps): give it in the "
            "configuration file (chmod 600), or in TXMQ_REGISTRY or TXMQ_BOOTSTRAP"
        )
    *_, given = one.make_parser(context).parse_args(args=[*words])
    for option in given:
        if given.count(option) > 1 and not (option.multiple or option.is_flag):
            raise ConfigError(f"{option.opts[0]} is given twice; give it once")
    return parse(context, words)


def _reflowed(text: str) -> str:
    """Prose folds at the end of the terminal's line, not of the source's; what is indented stays as it is.

    Typer takes the indentation off if all of the text after its first line is indented: a heading's closing tag,
    put on the empty line after the heading, is a line that is not.
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    folded = [one if one.startswith(" ") or "\n " in one else one.replace("\n", " ") for one in paragraphs]
    return "\n\n".join(folded).replace("[/bold]\n\n", "\n[/bold]\n")


def _hint(away: str) -> str:
    """The next step, if a broker is away."""
    if "cannot connect to home" in away:
        return ": start the broker that has this home (txmq cluster describe names it)"
    if "a replica of home" in away:
        return ": name the leader, or the registry, with --bootstrap"
    if "ZooKeeper" in away:
        return ""  # the text says what to do
    if "broker of the cluster" in away:
        return ": start the brokers of the cluster"
    hint = "" if "txmq broker" in away else ": is a broker running? start one with: txmq broker"
    return f"{hint} (or name another with --bootstrap)"


def _fail(error: Exception, text: str) -> NoReturn:
    """The error's notes follow its text: what was done nevertheless."""
    output.fail("; ".join([text, *getattr(error, "__notes__", ())]))


def interrupt_again(dropped: sys.UnraisableHookArgs) -> None:
    """A Ctrl-C that struck where Python drops it (a weak reference's callback, ``__del__``) strikes once more.

    In a moment, and by a thread that takes no lock: what was struck may hold any.
    """
    if dropped.exc_type is KeyboardInterrupt:
        _thread.start_new_thread(_interrupt, ())
    else:
        sys.__unraisablehook__(dropped)


def _interrupt() -> None:
    time.sleep(INTERRUPT_AGAIN_S)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Entry point of the console script."""
    output.open_streams()
    sys.unraisablehook = interrupt_again
    try:
        command(sys.argv[1:])()
    except ConfigError as error:
        output.fail(str(error), output.STATUS_USAGE)
    except PartialResultError as error:
        output.fail(str(error))
    except (ConnectionLostError, RequestTimeoutError) as error:
        _fail(error, f"{error}{_hint(str(error))}")
    except OverloadedError as error:
        _fail(error, f"{error}; the broker is busy, try again")
    except TxmqError as error:
        _fail(error, str(error) or type(error).__name__)
    except BrokenPipeError:
        # The reader of our output has gone (| head): point stdout at nothing, so that the exit flush cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(output.STATUS_FAILED) from None
    except OSError as error:
        output.fail(str(error))


if __name__ == "__main__":
    main()
