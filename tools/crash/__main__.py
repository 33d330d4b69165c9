"""``python -m tools.crash``: long campaigns. ``--help`` says which there are and how to read what they say."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import txmq
from tools.checkers.history import describe
from tools.crash.aio.campaign import AioCampaign
from tools.crash.arguments import parser
from tools.crash.binlog.campaign import BinlogCampaign
from tools.crash.binlog.plan import MODES, ROUND
from tools.crash.campaign import Campaign, Report
from tools.crash.cluster.campaign import ClusterCampaign
from tools.crash.doors import OPEN, Doors, GuardedDoors
from tools.crash.groups.campaign import GroupCampaign, GroupReport
from tools.crash.homes.campaign import HomesCampaign
from tools.crash.homes.cells import CELLS as HOMES_CELLS
from tools.crash.ordered.campaign import ORDERED_POINTS, OrderedCampaign, OrderedReport
from tools.crash.outbox.campaign import OutboxCampaign, OutboxReport
from tools.crash.outbox.plan import ALL_POINTS as OUTBOX_POINTS
from tools.crash.outbox.plan import ROUND as OUTBOX_ROUND
from tools.crash.processes import CampaignError
from tools.crash.spark.campaign import SparkCampaign
from tools.crash.xa.campaign import CELLS, XACampaign

_OF_ONE_SHAPE: Final[Mapping[str, type[Campaign]]] = {"xa": XACampaign, "aio": AioCampaign, "homes": HomesCampaign}


def main() -> int:
    """Run, report, and keep the directory where something was found."""
    arguments = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as by Ctrl-C, its processes end with it
    seed = time.time_ns() % 1_000_000 if arguments.seed is None else arguments.seed
    for name, play in _OF_THEIR_OWN.items():
        if getattr(arguments, name):
            return play(seed, arguments)
    kind = next((f" --{name}" for name in _OF_ONE_SHAPE if getattr(arguments, name)), "")
    again = f"python -m tools.crash{kind} --cycles {arguments.cycles} --seed {seed} --sync {arguments.sync}"
    again += " --tls" * arguments.tls
    directory = Path(tempfile.mkdtemp(prefix="txmq-crash-"))
    print(f"seed {seed}, in {directory}", flush=True)
    try:
        made = _OF_ONE_SHAPE.get(kind.removeprefix(" --"), Campaign)
        campaign = made(directory, seed, arguments.sync, _say)
        campaign.settle_s_max = arguments.settle_s
        campaign.doors = _doors(directory, arguments)
        report = campaign.run(arguments.cycles, arguments.check_every)
    except (CampaignError, txmq.TxmqError) as error:  # the latter: a final read was refused
        print(f"\nSTUCK: {error!r}\nkept: {directory}\nrepeat: {again}")
        return 1
    if isinstance(campaign, HomesCampaign):
        print(f"cells played: {len(campaign.cells)} of {len(HOMES_CELLS)}")
    complaints = complaints_of(report, campaign.points if arguments.cycles >= campaign.cycles_for_all else ())
    _summary(report)
    if isinstance(campaign, XACampaign):
        print(f"cells played: {len(campaign.cells)} of {CELLS}; {campaign.database_deaths} deaths of databases")
    if complaints:
        print(f"\nBROKEN\n{complaints}\nkept: {directory}\nrepeat: {again}")
        return 1
    shutil.rmtree(directory)
    print("every promise was kept")
    return 0


def _doors(directory: Path, arguments: argparse.Namespace) -> Doors:
    return GuardedDoors(directory / "tls") if arguments.tls else OPEN


def _groups(seed: int, arguments: argparse.Namespace) -> int:
    seconds = arguments.seconds

    def play(directory: Path) -> list[str]:
        doors = _doors(directory, arguments)
        report = GroupCampaign(directory, seed, _say, coverage=int(seconds / 10), doors=doors).run(seconds)
        _group_summary(report)
        return report.complaints

    return _in_a_directory(play, f"--groups --seconds {seconds:g}", seed, arguments)


def _ordered(seed: int, arguments: argparse.Namespace) -> int:
    cycles = arguments.cycles

    def play(directory: Path) -> list[str]:
        campaign = OrderedCampaign(directory, seed, _say, _doors(directory, arguments))
        report = campaign.run(cycles, arguments.check_every)
        _ordered_summary(report)
        missed = set(ORDERED_POINTS) - report.points_hit.keys() if cycles >= 3 * len(ORDERED_POINTS) else ()
        return [*report.complaints, *(f"crash point never hit: {point}" for point in sorted(missed))]

    return _in_a_directory(play, f"--ordered --cycles {cycles}", seed, arguments)


def _outbox(seed: int, arguments: argparse.Namespace) -> int:
    cycles, check_every = arguments.cycles, arguments.check_every

    def play(directory: Path) -> list[str]:
        campaign = OutboxCampaign(directory, seed, _say, doors=_doors(directory, arguments))
        try:
            complaints = campaign.run(cycles, check_every).complaints
        finally:
            _outbox_summary(campaign.report)
        missed = set(OUTBOX_POINTS) - campaign.report.points_hit.keys() if cycles >= OUTBOX_ROUND else ()
        return [*complaints, *(f"crash point never hit: {point}" for point in sorted(missed))]

    return _in_a_directory(play, f"--outbox --cycles {cycles} --check-every {check_every}", seed, arguments)


def _spark(seed: int, arguments: argparse.Namespace) -> int:
    def play(directory: Path) -> list[str]:
        report = SparkCampaign(directory, seed, _say, _doors(directory, arguments)).run(arguments.kills)
        print(f"kills: {', '.join(f'{kind} {count}' for kind, count in sorted(report.kills.items()))}")
        print(f"{report.messages} messages out in {report.batches} batches, checksum {report.checksum:#x}")
        print(f"a killed driver has left {report.left_max} transactions prepared at most; none in the end")
        return report.complaints

    return _in_a_directory(play, f"--spark --kills {arguments.kills}", seed, arguments)


def _cluster(seed: int, arguments: argparse.Namespace) -> int:
    faults, streamed = arguments.faults, arguments.streamed

    def play(directory: Path) -> list[str]:
        campaign = ClusterCampaign(
            directory, seed, _say, settle_s_max=arguments.settle_s, streamed=streamed,
            doors=_doors(directory, arguments),
        )  # fmt: skip
        try:
            return campaign.run(faults).complaints
        finally:  # one that got stuck has played something, too
            print(*campaign.report.lines(), sep="\n")
            _write_json(arguments.json or directory / "report.json", seed, campaign.report.as_json())

    return _in_a_directory(play, f"--cluster --faults {faults} --streamed {streamed}", seed, arguments)


def _binlog(seed: int, arguments: argparse.Namespace) -> int:
    cycles, check_every = arguments.cycles, arguments.check_every

    def play(directory: Path) -> list[str]:
        campaign = BinlogCampaign(directory, seed, _say, doors=_doors(directory, arguments))
        report = campaign.report
        try:
            campaign.run(cycles, check_every)
        finally:
            print(*report.lines(), sep="\n")
            _write_json(arguments.json or directory / "report.json", seed, report.as_json())
        is_whole = check_every >= ROUND and cycles >= len(MODES) * check_every
        missed = campaign.points - report.points_hit.keys() if is_whole else ()
        return [*report.complaints, *(f"crash point never hit: {point}" for point in sorted(missed))]

    return _in_a_directory(play, f"--binlog --cycles {cycles} --check-every {check_every}", seed, arguments)


_OF_THEIR_OWN: Final[Mapping[str, Callable[[int, argparse.Namespace], int]]] = {
    "groups": _groups, "spark": _spark, "cluster": _cluster, "binlog": _binlog, "ordered": _ordered,
    "outbox": _outbox,
}  # fmt: skip


def _write_json(file: Path, seed: int, report: dict[str, Any]) -> None:
    file.write_text(json.dumps({"seed": seed} | report, indent=1) + "\n", "utf-8")


def _in_a_directory(play: Callable[[Path], list[str]], words: str, seed: int, arguments: argparse.Namespace) -> int:
    """Play in a directory of its own; kept, and said how to repeat it, where something was found."""
    again = f"python -m tools.crash {words} --seed {seed}{' --tls' * arguments.tls}"
    directory = Path(tempfile.mkdtemp(prefix="txmq-crash-"))
    print(f"seed {seed}, in {directory}", flush=True)
    try:
        complaints = play(directory)
    except (CampaignError, txmq.TxmqError) as error:  # the latter: a final read was refused
        print(f"\nSTUCK: {error!r}\nkept: {directory}\nrepeat: {again}")
        return 1
    if complaints:
        print("\nBROKEN", *complaints, f"kept: {directory}", f"repeat: {again}", sep="\n")
        return 1
    shutil.rmtree(directory)
    print("every promise was kept")
    return 0


def _ordered_summary(report: OrderedReport) -> None:
    told, counts = report.told, report.verdict.counts
    print(f"cycles: {', '.join(f'{name} {count}' for name, count in sorted(report.kinds.items()))}")
    print(f"points hit: {', '.join(f'{name} {count}' for name, count in sorted(report.points_hit.items()))}")
    print(f"told: {told['acknowledged']} acknowledged, {told['spooled']} spooled, {told['fail']} refused (spool full)")
    print(f"stored: {counts['messages']}, of which {counts['info']} at most are of killed producers, told nothing")
    print(f"in the spool at the end of a cycle: {report.spooled_max} at most")


def _outbox_summary(report: OutboxReport) -> None:
    level, counts = sorted(report.level_s) or [0.0], report.counts
    print(f"faults: {_listed(report.kinds)}")
    print(f"points hit: {_listed(report.points_hit)}")
    print(f"lines that stopped, as they had to: {_listed(report.stops)}")
    print(f"taken by restores: {_listed(report.lost)}; dropped by the operator: {report.dropped}")
    print(f"transactions: {counts['ok']} committed, {counts['fail']} rolled back, {counts['info']} unknown")
    print(f"checked: {counts['rows']} rows, {counts['messages']} messages")
    print(f"level again after: p50 {level[len(level) // 2]:.2f} s, max {level[-1]:.2f} s ({len(level)} times)")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _group_summary(report: GroupReport) -> None:
    counts, owned = report.group.counts, sorted(report.owned_s)
    print(f"changes: {', '.join(f'{name} {count}' for name, count in sorted(report.changes.items()))}")
    print(f"messages: {report.messages.counts['messages']} stored, {counts['handled']} times dealt with")
    print(f"saves: {counts['saved']} accepted, {counts['refused']} of fenced members refused")
    print(
        f"every partition owned after: p50 {owned[len(owned) // 2]:.2f} s, max {owned[-1]:.2f} s ({len(owned)} times)"
    )
    print(f"a partition that stayed made a message wait {counts['waited_ms_max']} ms at most")
    print(f"({counts['tenures']} tenures, which lived through {counts['stays']} changes)")


def _say(text: str) -> None:
    print(text, flush=True)


def complaints_of(report: Report, points: Collection[str] = ()) -> str:
    """What is wrong, one complaint a line; empty where nothing is. All ``points`` must have been hit."""
    complaints = [describe(report.verdict.findings), *report.verdict.missing, *report.offline]
    if report.is_late:
        complaints.append(f"A9 resolution-time: {max(report.settle_s):.2f} s, at most {report.settle_s_max} s")
    missed = set(points) - report.points_hit.keys()
    if missed:
        complaints.append(f"crash points never hit: {', '.join(sorted(missed))}")
    return "\n".join(filter(None, complaints))


def _summary(report: Report) -> None:
    settle = sorted(report.settle_s) or [0.0]
    p50, p99 = settle[len(settle) // 2], settle[min(len(settle) - 1, len(settle) * 99 // 100)]
    print(f"deaths: {report.deaths['broker']} of the broker, {report.deaths['client']} of clients")
    print(f"points hit: {', '.join(f'{name} {count}' for name, count in sorted(report.points_hit.items()))}")
    print(f"settled after: p50 {p50:.2f} s, p99 {p99:.2f} s, max {settle[-1]:.2f} s ({len(report.settle_s)} times)")
    print(f"restart of the broker: max {max(report.restart_s, default=0.0):.2f} s ({len(report.restart_s)} times)")


if __name__ == "__main__":
    raise SystemExit(main())
