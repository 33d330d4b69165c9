"""The first bytes that port scanners and lost clients of other protocols send.

Source: nmap-service-probes (names in capitals); each protocol's own specification for the others.
"""

from __future__ import annotations

from typing import Final

PROBES: Final = {
    "GenericLines": b"\r\n\r\n",
    "GetRequest": b"GET / HTTP/1.0\r\n\r\n",
    "HTTPOptions": b"OPTIONS / HTTP/1.0\r\n\r\n",
    "RTSPRequest": b"OPTIONS / RTSP/1.0\r\n\r\n",
    "RPCCheck": bytes.fromhex("80000028 72fe1d13 00000000 00000002 000186a0 00019775") + bytes(20),
    "DNSVersionBindReqTCP": b"\0\x1e\0\x06\x01\0\0\x01\0\0\0\0\0\0\x07version\x04bind\0\0\x10\0\x03",
    "SSLSessionReq": bytes.fromhex("16030000530100004f0300") + bytes(32) + b"\0\0\x28\0\x16\0\x13" + bytes(37),
    "TLSSessionReq": bytes.fromhex("16030300690100006503035505") + bytes(99),
    "SSLv23SessionReq": bytes.fromhex("80 9e 01 03 01 00 75 00 00 00 20") + bytes(149),
    "SSL 2.0": bytes.fromhex("802e0100020015000000100100800200800300800400800500800600400700c0") + bytes(16),
    "heartbeat": bytes.fromhex("1803020003014000"),
    "an alert": bytes.fromhex("15030300020128"),
    "TerminalServerCookie": bytes.fromhex("0300002a25e00000000000")
    + b"Cookie: mstshash=nmap\r\n\x01\0\x08\0\x03\0\0\0",
    "SMBProgNeg": b"\0\0\0\xa4\xffSMBr\0\0\0\0\x08\x01\x40" + bytes(148),
    "X11Probe": b"\x6c\0\x0b\0\0\0\0\0\0\0\0\0",
    "LDAPSearchReq": bytes.fromhex("30840000002d02010763840000002404000a01000a0100020100020164010100"),
    "SIPOptions": b"OPTIONS sip:nm SIP/2.0\r\nVia: SIP/2.0/TCP nm;branch=foo\r\n\r\n",
    "NULL, then telnet": b"\xff\xfb\x1f\xff\xfb\x20\xff\xfb\x18\xff\xfb\x27",
    "JavaRMI": b"JRMI\0\x02\x4b",
    "Kerberos": b"\0\0\0\x71\x6a\x81\x6e\x30\x81\x6b\xa1\x03\x02\x01\x05",
    "SSH": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "Redis": b"*1\r\n$4\r\nPING\r\n",
    "memcached": b"stats\r\n",
    "MySQL": b"\x20\0\0\x01\x85\xa6\x03\0\0\0\0\x01\x21" + bytes(23),
    "PostgreSQL's SSLRequest": b"\0\0\0\x08\x04\xd2\x16\x2f",
    "Kafka's ApiVersions": b"\0\0\0\x1c\0\x12\0\x03\0\0\0\x01\0\x09rdkafka\0\x05java\x041.0\0",
    "AMQP": b"AMQP\0\0\x09\x01",
    "MQTT": b"\x10\x0c\0\x04MQTT\x04\x02\0\x3c\0\0",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
    "PROXY 1": b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n",
    "PROXY 2": b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12),
    "zeros": bytes(4096),
    "a record of the largest size": b"\x16\x03\x01\xff\xff" + bytes(0xFFFF),
}
