"""Compressing and inflating the record section of a batch, through cramjam, with bounds.

Inflating goes into a buffer of a fixed size, which the library refuses to leave: a 32 KiB zstd bomb that would become
1 GiB is given up once 2 MiB are full. The buffer starts at a guess and is made larger up to the smaller of

* the absolute limit the caller names, and
* ``INFLATED_RATIO_MAX`` times the compressed size, but at least ``INFLATED_FREE_SIZE_BYTES``: short and very regular
  content (a thousand equal messages) may compress any number of times (``batch.inflated_size_max``). ``compress``
  leaves content that is beyond it as it is, so that what txmq writes, txmq reads.

One stream per batch: a truncated one, bytes after it, and a stated size that is not the real one are refused. What
comes out is never inflated again, so a nested stream is just records that do not parse.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import cramjam

from txmq.errors import InvalidBatchError
from txmq.log.batch import CODEC_GZIP, CODEC_LZ4, CODEC_ZSTD, INFLATED_SIZE_BYTES_MAX, inflated_size_max
from txmq.runtime.ports import Buffer

CODECS: Final = {"gzip": CODEC_GZIP, "lz4": CODEC_LZ4, "zstd": CODEC_ZSTD}
_LEVEL: Final = 1
_LIBRARY: Final[dict[int, Any]] = {CODEC_GZIP: cramjam.gzip, CODEC_LZ4: cramjam.lz4, CODEC_ZSTD: cramjam.zstd}
_GUESS_FACTOR: Final = 4


def compress(codec: int, content: Buffer) -> bytes | None:
    """Compress; None if that gains nothing, or gains so much that ``inflate`` would refuse it."""
    packed = bytes(_LIBRARY[codec].compress(content, _LEVEL))
    if len(packed) >= len(content) or len(content) > inflated_size_max(len(packed)):
        return None
    return packed


def inflate(codec: int, packed: Buffer, head: bytes, size_bytes_max: int = INFLATED_SIZE_BYTES_MAX) -> bytearray:
    """Inflate one stream after ``head``.

    Args:
        head: bytes to begin the result with; they do not count.
        size_bytes_max: most bytes it may inflate to.

    Raises:
        InvalidBatchError: not exactly one whole stream, or it inflates to more than is allowed.
    """
    allowed = min(size_bytes_max, inflated_size_max(len(packed)))
    if codec == CODEC_GZIP:
        return _inflate_gzip(packed, head, allowed)
    library, start, guess = _LIBRARY[codec], len(head), min(allowed, _GUESS_FACTOR * len(packed) + 1024)
    while True:
        target = bytearray(start + guess)
        target[:start] = head
        with memoryview(target) as view:
            try:
                size = library.decompress_into(packed, view[start:])
            except cramjam.DecompressionError as error:
                # Damage and lack of room are the same exception; a damaged stream costs a few tries more.
                size, failure = -1, error
        if size >= 0:
            del target[start + size :]
            return target
        if guess == allowed:
            raise InvalidBatchError(f"does not inflate to at most {allowed} bytes: {failure}")
        guess = min(allowed, guess * _GUESS_FACTOR)


def _inflate_gzip(packed: Buffer, head: bytes, allowed: int) -> bytearray:
    """gzip through zlib, which can stop at a size and say what is left over."""
    stream = zlib.decompressobj(wbits=31)
    try:
        content = stream.decompress(packed, allowed + 1)
    except zlib.error as error:
        raise InvalidBatchError(f"does not inflate: {error}") from error
    if len(content) > allowed:
        raise InvalidBatchError(f"inflates to more than the {allowed} bytes allowed")
    if not stream.eof:
        raise InvalidBatchError("the gzip stream is cut off")
    if stream.unused_data:
        raise InvalidBatchError(f"{len(stream.unused_data)} bytes behind the gzip stream")
    return bytearray(head + content)
