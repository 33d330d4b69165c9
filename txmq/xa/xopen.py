"""Flags and codes of X/Open XA, as its ``xa.h`` numbers them.

Source: X/Open CAE Specification, Distributed Transaction Processing: The XA Specification, chapter 4.
"""

from __future__ import annotations

import enum


class XAFlag(enum.IntFlag):
    """Flags of a transaction manager's call."""

    TMNOFLAGS = 0
    TMMIGRATE = 0x00100000
    TMJOIN = 0x00200000
    TMENDRSCAN = 0x00800000
    TMSTARTRSCAN = 0x01000000
    TMSUSPEND = 0x02000000
    TMSUCCESS = 0x04000000
    TMRESUME = 0x08000000
    TMNOWAIT = 0x10000000
    TMFAIL = 0x20000000
    TMONEPHASE = 0x40000000
    TMASYNC = 0x80000000


class XACode(enum.IntEnum):
    """A resource's answer. Negative: the call failed. 100 to 107: the branch is rolled back, or can only be."""

    XA_RBROLLBACK = 100
    XA_RBCOMMFAIL = 101
    XA_RBDEADLOCK = 102
    XA_RBINTEGRITY = 103
    XA_RBOTHER = 104
    XA_RBPROTO = 105
    XA_RBTIMEOUT = 106
    XA_RBTRANSIENT = 107
    XA_NOMIGRATE = 9
    XA_HEURHAZ = 8
    XA_HEURCOM = 7
    XA_HEURRB = 6
    XA_HEURMIX = 5
    XA_RETRY = 4
    XA_RDONLY = 3
    XA_OK = 0
    XAER_ASYNC = -2
    XAER_RMERR = -3
    XAER_NOTA = -4
    XAER_INVAL = -5
    XAER_PROTO = -6
    XAER_RMFAIL = -7
    XAER_DUPID = -8
    XAER_OUTSIDE = -9
