"""Files of a table in the form in which RocksDB writes them, as small as can be, for tests without RocksDB."""

from __future__ import annotations

import struct

import xxhash

MANIFEST = bytes.fromhex("23e3919827000181402464363162623833362d363665332d343664612d383134382d313565333335643865363061")
"""A log with one record, as RocksDB wrote it."""
CURRENT = b"MANIFEST-000005\n"


def sst_file(content: bytes, size: bytes = b"", name_size: bytes = b"\x0d") -> bytes:
    """Return an SST file with one data block, of this content; of others than its own sizes if they are given."""
    data = _block(content)
    index = _block(_entry(b"\x00\x01k" + _number(0) + (size or _number(len(content)))))
    name = b"rocksdb.index"
    metaindex = _entry(b"\0" + name_size + b"\x0a" + name + _number(len(data)) + _number(len(index) - 5))
    footer = struct.pack("<B4sIII24xIQ", 4, b"\x3e\x00\x7a\x00", 0, 0, len(metaindex), 6, 0x88E241B785F4CFF7)
    checksum = _checksum(footer[:-1], footer[-1])
    return data + index + _block(metaindex) + footer[:5] + checksum + footer[9:]


def sst_content(file: bytes) -> bytes:
    """Return what `sst_file` was given."""
    return file[: -len(sst_file(b""))] if len(file) > len(sst_file(b"")) else b""


def _entry(entry: bytes) -> bytes:
    return entry + struct.pack("<II", 0, 1)


def _block(content: bytes) -> bytes:
    return content + b"\x00" + _checksum(content, 0)


def _checksum(content: bytes, last_byte: int) -> bytes:
    lower = xxhash.xxh3_64_intdigest(content) & 0xFFFFFFFF
    return struct.pack("<I", lower ^ (last_byte * 0x6B9083D9 & 0xFFFFFFFF))


def _number(value: int) -> bytes:
    """Return a varint that is always five bytes long."""
    return bytes([*(value >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21)), value >> 28])
