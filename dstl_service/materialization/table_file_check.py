"""
Verifies the files of a table's snapshot by the checksums that RocksDB wrote into them with the data.

A hash taken when a file is stored only proves that it does not change afterwards. Only these checksums show whether the
local disk had damaged it before: RocksDB computes them in memory, before anything is on a disk. Every byte of a file
must be covered by one of them: bytes between two blocks are damage, too.

    SST         `[data block]... [filter] [index] [properties] [metaindex] footer`, of format 6; each block with a
                trailer of its kind of compression and the XXH3 of both
    MANIFEST    a log of records with a CRC-32C each
    CURRENT     the name of the MANIFEST

Tables are written in exactly these forms (`backend_client.table.files`). Any other form cannot be verified, so it is
refused like damage. Pure.

A disk that has lost a file's bytes may report an error when they are read: that is damage, too (`storage.lost_bytes`).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from storage.checksum import BytesLike, checksum64
from storage.errors import CorruptDataError

_FOOTER = struct.Struct("<B4s3I24xIQ")
_FOOTER_CHECKSUM = slice(5, 9)
_EXTENDED_MAGIC = b"\x3e\x00\x7a\x00"
_MAGIC = 0x88E241B785F4CFF7
_FORMAT_VERSION = 6
_XXH3 = 4
_TRAILER = struct.Struct("<BI")
_LAST_BYTE_FACTOR = 0x6B9083D9
_U32 = struct.Struct("<I")
_U32_MASK = 0xFFFF_FFFF
_PLAIN, _LZ4 = 0, 4
_LZ4_RATIO_MAX = 255
_INDEX = b"rocksdb.index"

_LOG_BLOCK_BYTES = 32 << 10
_RECORD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_CRC32C_POLYNOMIAL = 0x82F63B78
_CRC_MASK_DELTA = 0xA282EAD8


class DamagedFileError(CorruptDataError):
    """A file of a table is not as RocksDB wrote it. The local table is useless; its state is in the store."""


class _NotAsWrittenError(Exception):
    """The message says where."""


class _Block(NamedTuple):
    """Position of a block, without its trailer."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset of the next block."""
        return self.offset + self.size + _TRAILER.size


def check_table_file(name: str, data: BytesLike, names: Collection[str]) -> None:
    """
    Verify a file of a snapshot.

    Args:
        name: The file's name, one that snapshots have.
        data: Its whole content.
        names: All files of the snapshot.

    Raises:
        DamagedFileError: The file is not as RocksDB wrote it, or in a form that cannot be verified.
    """
    try:
        if name.endswith(".sst"):
            _check_sst(memoryview(data))
        elif name == "CURRENT":
            _check_current(bytes(data), names)
        else:
            _check_log(bytes(data))
    # Parsing an invalid form may fail anywhere.
    except (_NotAsWrittenError, struct.error, IndexError, OverflowError, ValueError, OSError) as error:
        raise DamagedFileError(f"file {name} of a table is damaged: {error}") from error


def _check_sst(data: memoryview) -> None:
    end = len(data) - _FOOTER.size
    if end < 0:
        raise _NotAsWrittenError("it is shorter than a footer")
    kind, extended_magic, _, base, meta_size, version, magic = _FOOTER.unpack_from(data, end)
    if (kind, extended_magic, version, magic) != (_XXH3, _EXTENDED_MAGIC, _FORMAT_VERSION, _MAGIC):
        raise _NotAsWrittenError(f"its footer is not that of an SST file of format {_FORMAT_VERSION} with XXH3")
    _check_footer(data[end:], base, end)
    metaindex = _Block(end - meta_size - _TRAILER.size, meta_size)
    blocks = dict(_metaindex(_content(data, metaindex, base)))
    if _INDEX not in blocks:
        raise _NotAsWrittenError("it has no index")
    expected = _check_data(data, _data_sizes(_content(data, blocks[_INDEX], base)), base)
    for block in sorted((*blocks.values(), metaindex)):
        if block.offset != expected:
            raise _NotAsWrittenError(f"the bytes at {expected} belong to no block")
        _check_block(data, block, base)
        expected = block.end
    if expected != end:
        raise _NotAsWrittenError(f"the bytes at {expected} belong to no block")


def _check_data(data: memoryview, sizes: Iterable[int], base: int) -> int:
    """Verify the data blocks, which are contiguous from the start of the file; return where they end."""
    offset, trailer_size = 0, _TRAILER.size
    for size in sizes:
        _check_block(data, _Block(offset, size), base)
        offset += size + trailer_size
    return offset


def _check_footer(footer: memoryview, base: int, offset: int) -> None:
    blank = bytearray(footer)
    blank[_FOOTER_CHECKSUM] = bytes(_U32.size)
    (stored,) = _U32.unpack(footer[_FOOTER_CHECKSUM])
    if _checksum(memoryview(blank)[:-1], blank[-1], base, offset) != stored:
        raise _NotAsWrittenError("the checksum of its footer does not match")


def _check_block(data: memoryview, block: _Block, base: int) -> None:
    compression, stored = _TRAILER.unpack_from(data, block.offset + block.size)
    content = data[block.offset : block.offset + block.size]
    if _checksum(content, compression, base, block.offset) != stored:
        raise _NotAsWrittenError(f"the checksum of the block at {block.offset} does not match")


def _checksum(content: memoryview, last_byte: int, base: int, offset: int) -> int:
    """Return the checksum stored for bytes; it includes `base` and the offset, so no block is valid elsewhere."""
    own = (checksum64(content) & _U32_MASK) ^ (last_byte * _LAST_BYTE_FACTOR & _U32_MASK)
    place = base ^ ((offset & _U32_MASK) + (offset >> 32) & _U32_MASK) if base else 0
    return own + place & _U32_MASK


def _content(data: memoryview, block: _Block, base: int) -> bytes:
    """Return a block, verified and decompressed."""
    if block.offset < 0:
        raise _NotAsWrittenError("a block begins before the file")
    _check_block(data, block, base)
    stored = bytes(data[block.offset : block.offset + block.size])
    compression = data[block.offset + block.size]
    if compression == _PLAIN:
        return stored
    size, start = _varint(stored, 0)
    if compression != _LZ4 or size > _LZ4_RATIO_MAX * len(stored):
        raise _NotAsWrittenError(f"the block at {block.offset} is not compressed with LZ4")
    # Arrow is large, and a service starts before its first snapshot, so it loads lazily.
    import pyarrow as pa

    return pa.Codec("lz4_raw").decompress(stored[start:], size, asbytes=True)  # type: ignore[no-any-return]


def _metaindex(content: bytes) -> Iterator[tuple[bytes, _Block]]:
    """Yield the names and places of the blocks that hold no data."""
    for start in _restarts(content)[0]:
        name_size, position = _varint(content, start + 1)  # the byte before is the shared prefix length: 0
        _, position = _varint(content, position)
        name = content[position : position + name_size]
        offset, position = _varint(content, position + name_size)
        yield name, _Block(offset, _varint(content, position)[0])


def _data_sizes(content: bytes) -> Iterator[int]:
    """
    Yield the sizes of the data blocks; each is the last number of its entry in the index.

    The number is read backwards, since the highest bit is set in all its bytes but the last: the key and the block's
    offset before it need not be parsed.
    """
    starts, end = _restarts(content)
    if not end:
        return
    for entry_end in (*starts[1:], end):
        position = entry_end - 1
        size = content[position]
        while (byte := content[position := position - 1]) >= 0x80:
            size = _as_offset(size << 7 | byte & 0x7F)
        yield size


def _restarts(content: bytes) -> tuple[tuple[int, ...], int]:
    """Return the offsets of a block's entries, each a restart point, and the end of the last one."""
    (count,) = _U32.unpack_from(content, len(content) - _U32.size)
    end = len(content) - _U32.size * (count + 1)
    return struct.unpack_from(f"<{count}I", content, end), end


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the varint at a position, and its end."""
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value = _as_offset(value | (byte & 0x7F) << shift)
        if byte < 0x80:
            return value, position
        shift += 7


def _as_offset(value: int) -> int:
    """Return a number of at most 64 bits: a forged one of megabytes would take hours to compute."""
    if value >> 64:
        raise _NotAsWrittenError("a number in it has more than 64 bits")
    return value


def _check_current(data: bytes, names: Collection[str]) -> None:
    if not data.startswith(b"MANIFEST-") or data[-1:] != b"\n" or data[:-1].decode("latin-1") not in names:
        raise _NotAsWrittenError("it names no MANIFEST of the snapshot")


def _check_log(data: bytes) -> None:
    """Verify all records; RocksDB itself would take a truncated last record for an unfinished one."""
    position, is_open = 0, False
    while position < len(data):
        left = _LOG_BLOCK_BYTES - position % _LOG_BLOCK_BYTES
        if left < _RECORD.size:
            if any(data[position : position + left]):
                raise _NotAsWrittenError(f"the bytes at {position} belong to no record")
            position += left
            continue
        stored, size, kind = _RECORD.unpack_from(data, position)
        end = position + _RECORD.size + size
        if size + _RECORD.size > left or end > len(data):
            raise _NotAsWrittenError(f"the record at {position} is truncated")
        crc = _crc32c(data[end - size - 1 : end])
        if ((crc >> 15 | crc << 17) + _CRC_MASK_DELTA) & _U32_MASK != stored:
            raise _NotAsWrittenError(f"the checksum of the record at {position} does not match")
        if is_open is not (kind in (_MIDDLE, _LAST)) or not _FULL <= kind <= _LAST:
            raise _NotAsWrittenError(f"the record at {position} is out of place")
        is_open, position = kind in (_FIRST, _MIDDLE), end
    if is_open or not data:
        raise _NotAsWrittenError("its last record is truncated")


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_CRC32C_POLYNOMIAL if value & 1 else 0)  # noqa: PLW2901
        table.append(value)
    return tuple(table)


_CRC32C_TABLE = _crc32c_table()


def _crc32c(data: bytes) -> int:
    """Return the CRC-32C; slow, but a table's MANIFEST has some kilobytes."""
    table, crc = _CRC32C_TABLE, _U32_MASK
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ _U32_MASK
