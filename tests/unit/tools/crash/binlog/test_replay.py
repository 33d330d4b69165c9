"""The SQL of a binlog is run with the changes of XA transactions at their XA COMMIT, or not at all."""

from __future__ import annotations

import pytest

from tools.crash.binlog.replay import replayable

HEAD = "#261123 15:14:31 server id 1  end_log_pos 100 CRC32 0x0d554369 \t"
PLAIN = f"{HEAD}GTID 0-1-9 trans\nSTART TRANSACTION\n/*!*/;\nBINLOG '\nplain\n'/*!*/;\nCOMMIT/*!*/;\n"


def prepared(name: str) -> str:
    """The group of an XA PREPARE."""
    return (
        f"{HEAD}GTID 0-1-5 trans XID\nXA START X'{name}',X'',1/*!*/;\nSET TIMESTAMP=1/*!*/;\nBINLOG '\nrow{name}\n"
        f"'/*!*/;\nXA END X'{name}',X'',1\n/*!*/;\n{HEAD}XID = X'{name}',X'',1\nXA PREPARE X'{name}',X'',1\n/*!*/;\n"
    )


def ended(name: str, word: str) -> str:
    """The group of an XA COMMIT or XA ROLLBACK."""
    return f"{HEAD}GTID 0-1-6 trans\nSET TIMESTAMP=2/*!*/;\nXA {word} X'{name}',X'',1\n/*!*/;\n"


TORN = prepared("0a").partition("XA END")[0]


@pytest.mark.parametrize(
    ("shown", "run"),
    [
        (PLAIN, "START plain COMMIT"),
        (prepared("0a") + PLAIN + ended("0a", "COMMIT"), "START plain COMMIT START row0a COMMIT"),
        (prepared("0a") + prepared("0b") + ended("0b", "COMMIT"), "START row0b COMMIT"),
        (prepared("0a") + ended("0a", "ROLLBACK") + PLAIN, "START plain COMMIT"),
        (ended("0a", "ROLLBACK") + ended("0b", "COMMIT") + PLAIN, "START COMMIT START plain COMMIT"),
        (TORN + PLAIN, "START plain COMMIT"),
        (f"{TORN}{HEAD}Start: binlog v 4\nBINLOG '\nformat\n'/*!*/;\n", "format"),
    ],
)  # fmt: skip
def test_changes_are_run_when_they_are_committed(shown: str, run: str) -> None:
    lines = [line.decode() for line in replayable(shown.encode().split(b"\n"))]
    shown_words = ("START", "row", "plain", "COMMIT", "format")
    said = [line.split()[0].partition("/")[0] for line in lines if line.startswith(shown_words)]
    assert " ".join(said) == run
    assert not [line for line in lines if line.startswith("XA ")]
    assert lines.count("BINLOG '") == lines.count("'/*!*/;")


GTID = f"{HEAD}GTID\tlast_committed=0\nSET @@SESSION.GTID_NEXT= 'fb61775d-ec05-11f1-8d92-02fc00000001:1'/*!*/;\n"
XA_ROWS = (
    f"{GTID}XA START X'0a',X'',1\n/*!*/;\nBINLOG '\nrow0a\n'/*!*/;\nXA END X'0a',X'',1\n/*!*/;\n"
    f"{HEAD}XA PREPARE X'0a',X'',1\n"
)


@pytest.mark.parametrize(
    "end",
    ["XA PREPARE X'0a',X'',1\n/*!*/;\n%sXA COMMIT X'0a',X'',1\n/*!*/;", "XA COMMIT X'0a',X'',1 ONE PHASE\n/*!*/;"],
)
def test_mysqls_changes_are_run_under_new_gtids(end: str) -> None:
    shown = XA_ROWS + end.replace("%s", GTID)
    lines = [line.decode() for line in replayable(shown.encode().split(b"\n"))]
    assert {line for line in lines if "GTID_NEXT" in line} == {"SET @@SESSION.GTID_NEXT= 'AUTOMATIC'/*!*/;"}
    said = [line for line in lines if not line.startswith(("#", "/*!*/;", "SET "))]
    assert said == ["START TRANSACTION/*!*/;", "BINLOG '", "row0a", "'/*!*/;", "COMMIT"]
