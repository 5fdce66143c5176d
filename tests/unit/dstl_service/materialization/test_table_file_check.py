"""Files of real tables are verified by the checksums that RocksDB wrote, and damage of any part is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from backend_client.table.state_table import StateTable
from dstl_service.materialization.table_file_check import DamagedFileError, check_table_file
from tests.rocksdb_files import CURRENT, MANIFEST, sst_content, sst_file

VERSION = "3.0.u"


def snapshot(folder: Path, *changes: Iterable[tuple[bytes, bytes]]) -> dict[str, bytes]:
    """Return the files of a table whose changes came in this many batches, with a snapshot after each."""
    table = StateTable.open(folder)
    files: dict[str, bytes] = {}
    for part in changes:
        table.advance(part, VERSION)
        with table.making_snapshot() as made:
            files = {path.name: path.read_bytes() for path in made.iterdir()}
    table.close()
    return files


def is_valid(name: str, data: bytes, files: Iterable[str]) -> bool:
    """Tell whether a file passes."""
    try:
        check_table_file(name, data, list(files))
    except DamagedFileError:
        return False
    return True


def flipped(data: bytes, position: int, bit: int) -> bytes:
    """Return the same bytes with one bit flipped."""
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a table with one data block, whose index is not compressed."""
    return snapshot(tmp_path_factory.mktemp("small"), [(b"\x00\x01key%d" % number, b"v") for number in range(9)])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a table with some hundred blocks, whose index is compressed."""
    chance = random.Random(3)
    changes = [(b"\x00\x01some key %08d" % number, chance.randbytes(60)) for number in range(20_000)]
    return snapshot(tmp_path_factory.mktemp("large"), changes)


def test_files_of_real_tables_pass(small: dict[str, bytes], large: dict[str, bytes], tmp_path: Path) -> None:
    """Files written by RocksDB pass: small tables and large ones, with deleted keys, with a MANIFEST in blocks."""
    long = snapshot(tmp_path, *([(b"\x00\x01%05d" % number + b"k" * 9000, b"v")] for number in range(8)))

    assert max(len(data) for name, data in long.items() if name.startswith("MANIFEST")) > 2 * (32 << 10)
    for files in (small, large, long):
        assert {name for name, data in files.items() if not is_valid(name, data, files)} == set()


def test_every_flipped_bit_of_a_small_table_is_found(small: dict[str, bytes]) -> None:
    """I10: a flipped bit in any file is found: data, filter, index, properties, trailers, footer, MANIFEST, CURRENT."""
    for name, data in small.items():
        places = [place for place in range(len(data)) if is_valid(name, flipped(data, place, place % 8), small)]
        assert not places, name


def test_flipped_bits_of_a_large_table_are_found(large: dict[str, bytes]) -> None:
    """I10: the same holds in a table with many blocks and a compressed index, at random places."""
    chance = random.Random(4)
    for name, data in large.items():
        drawn = [chance.randrange(len(data)) for _ in range(50)]
        behind_data = [len(data) - 1 - chance.randrange(min(len(data), 40_000)) for _ in range(50)]
        places = {place for place in (*drawn, *behind_data) if is_valid(name, flipped(data, place, 0), large)}
        assert not places, name


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data + b"\x00",
        lambda data: bytes(len(data)),
        lambda data: data[::-1],
    ],
    ids=["short", "half", "empty", "long", "zeros", "turned"],
)
def test_files_of_another_form_are_refused(damage: Callable[[bytes], bytes], large: dict[str, bytes]) -> None:
    """Files that are cut off, grown or something else altogether are reported as damage, never as another error."""
    assert not [name for name, data in large.items() if is_valid(name, damage(data), large)]


def test_block_at_the_place_of_another_is_found(large: dict[str, bytes]) -> None:
    """I10: the file of another table under this name passes, but a file made of parts of two does not."""
    (name,) = (name for name in large if name.endswith(".sst"))
    data = large[name]

    assert not is_valid(name, data[:5000] + data[:1000] + data[6000:], large)


@pytest.mark.parametrize("place", ["size", "name_size"])
def test_forged_number_takes_no_time(place: str) -> None:
    """C37: a number of a million bytes, whose computation takes minutes, is damage at its eleventh byte."""
    forged = sst_file(b"data", **{place: b"\xff" * 1_000_000 + b"\x01"})

    with pytest.raises(DamagedFileError, match="more than 64 bits"):
        check_table_file("000001.sst", forged, [])


def test_current_names_a_file_of_the_snapshot() -> None:
    """A snapshot is opened by the file that CURRENT names, so that file must be there."""
    assert is_valid("CURRENT", CURRENT, ["MANIFEST-000005"])
    assert not is_valid("CURRENT", CURRENT, ["MANIFEST-000006"])
    assert is_valid("MANIFEST-000005", MANIFEST * 3, [])


def test_files_made_for_tests_have_the_same_form() -> None:
    """The test doubles of table files have the form of RocksDB's files."""
    for content in (b"", b"content", bytes(1000)):
        assert is_valid("000001.sst", sst_file(content), [])
        assert sst_content(sst_file(content)) == content
