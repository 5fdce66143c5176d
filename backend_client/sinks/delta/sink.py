"""
Publishes to a table of Delta Lake: one commit of the table per slot and checkpoint.

The marker lies in the commit as *application transactions*, numbers under names that Delta keeps for this purpose: a
checkpoint of the table's log has them all, so they outlive the commits of which the log is cleaned, and rewriting or
deleting data leaves them. A commit's own information and the files' metadata would not.

A commit is built on the version of the table that was read when the slot was opened. Delta refuses it if a later
version has a transaction of the same name: that fences a publisher that was paused. Other writers' commits are no
obstacle.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, cast, get_args
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from deltalake import (
    CommitProperties,
    DeltaTable,
    PostCommitHookProperties,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import DeltaError, TableNotFoundError

from backend_client.sinks.delta.columns import check_readable, check_table, column_types, conformed, stored_columns
from backend_client.sinks.delta.constraints import check_lengths
from backend_client.sinks.delta.flushing import flush_checked, flush_newest, flush_parents
from backend_client.sinks.delta.markers import check_retention, stored_marker, transactions
from backend_client.sinks.delta.spool import rows_per_group, spool
from backend_client.sinks.delta.statistics import check_values, statistics_of, without_floats
from backend_client.sinks.delta.storage_options import encryption_of, endpoint_of, told
from backend_client.sinks.delta.trial import check_rows
from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from storage.errors import DstlError, FencedError, InvalidInputError, UnavailableError
from storage.open import open_store

_CREATED_WITH = {"delta.checkpointInterval": "10"}
"""A reader that opens the table reads all commits since the last checkpoint of its log."""
_COMMIT_RETRIES = 100
"""How many commits of others may come between; each try is one small PUT."""
_CLEANED_EVERY = 1_000
"""To remove old commits, the library lists the whole log: in each publish, that would take longer with every one."""
_Compression = Literal["ZSTD", "SNAPPY", "GZIP", "UNCOMPRESSED"]
_UNUSABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\[\]^|\\\x00-\x1f\x7f]")
"""With these in a folder's name the library makes empty commits, but panics, or uses another folder, to write files."""
_LOOKED_AGAIN_AFTER_S = 10.0
"""A look costs some requests, which a publish that is quick does without."""
_SECRETS = ("aws_access_key_id", "access_key_id", "aws_session_token", "token")


@dataclass(frozen=True, slots=True)
class DeltaSink(Sink):
    """
    A table of Delta Lake, which is created if it is missing; other writers may use it, too.

    Args:
        path: ``s3://bucket/folder`` or ``file:///folder``; the executors' environment has the credentials.
        partition_by: Columns by which a new table is partitioned; an existing one must be partitioned by them.
        merge_schema: Whether columns that the table lacks are added to it when the query starts.
        compression: Of the files: ``zstd``, ``snappy``, ``gzip`` or ``uncompressed``.
        storage_options: Options of the store as `deltalake` takes them, for example ``aws_endpoint_url``.
    """

    path: str
    partition_by: tuple[str, ...] = ()
    merge_schema: bool = False
    compression: str = "zstd"
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        columns: object = self.partition_by
        if isinstance(columns, str):
            raise InvalidInputError(f"partition_by must be a tuple of columns, such as ({columns!r},)")
        if not (isinstance(self.path, str) and _names_a_folder(self.path)):
            given = (
                repr(re.sub("//(?:.*(?=@)|[^/]*:.*)", "//…", self.path))
                if isinstance(self.path, str)
                else "another type"
            )
            raise InvalidInputError(
                "path must be s3://bucket/folder or file:///folder, with % and two digits for #, ? and %, and without "
                f"credentials, not {given}"
            )
        if self.is_local and (found := _UNUSABLE.search(self.location)):
            raise InvalidInputError(
                f"path {self.path!r} names a folder with {found[0]!r}, to which the library cannot write"
            )
        for name, value in self.storage_options.items():
            if not isinstance(value, str):
                raise InvalidInputError(f"storage_options has {name!r} with a {type(value).__name__}: use text")
        if not self.is_local:
            endpoint_of(self.storage_options)
        if str(self.compression).upper() not in get_args(_Compression):
            known = ", ".join(get_args(_Compression)).lower()
            raise InvalidInputError(f"compression {self.compression!r} is unknown; use one of {known}")

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Create the table, or check that it takes the columns; make an empty commit, which needs all rights."""
        wanted = column_types(columns, self.partition_by)
        self._check_conditional_puts()
        with told(self.path, self.storage_options):
            table = self._opened(wanted)
            opened = table.version()
            added = check_table(table, self.path, wanted, self.partition_by, merge=self.merge_schema)
            if added:
                table.alter.add_columns(added)
            check_retention(table, self.path)
            _commit_nothing(table, CommitProperties(custom_metadata={"dstl": "check of a sink"}))
            if self.is_local:
                flush_checked(self.folder, opened, self.table().version())

    def open(self, slot: Slot) -> SlotPublisher:
        """Open a slot. Of several publishers the first one to commit wins; the others are fenced."""
        try:
            with told(self.path, self.storage_options):
                return _DeltaPublisher(self, slot)
        except InvalidInputError as error:  # the driver took the options: this host's environment has no endpoint
            raise UnavailableError(f"on this host {error}") from error

    def table(self) -> DeltaTable:
        """Load the table's newest version."""
        return DeltaTable(self.location, storage_options=self.options)

    @property
    def is_local(self) -> bool:
        """Whether the table is in a folder of a mounted disk."""
        return urlsplit(self.path).scheme == "file"

    @property
    def location(self) -> str:
        """Where `deltalake` finds the table."""
        return unquote(urlsplit(self.path).path) if self.is_local else self.path

    @property
    def folder(self) -> Path:
        """The table's folder on a disk, as the library finds it: without ``..`` and links."""
        return Path(os.path.realpath(self.location))

    @property
    def options(self) -> dict[str, str]:
        """The store's options, with what S3 needs for commits that overwrite nothing."""
        if self.is_local:
            return dict(self.storage_options)
        options = {"aws_conditional_put": "etag", **self.storage_options}
        if endpoint := endpoint_of(self.storage_options):
            options.setdefault("aws_endpoint_url", endpoint)
            options.setdefault("aws_allow_http", str(endpoint.startswith("http://")).lower())
        return options

    def _opened(self, columns: pa.Schema) -> DeltaTable:
        """Load the table, which is created if it is missing."""
        try:  # the library's `is_deltatable` stops all threads of Python until the store answers
            return self.table()
        except TableNotFoundError:
            self._create(columns)
            return self.table()

    def _create(self, columns: pa.Schema) -> None:
        if self.is_local:
            os.makedirs(self.location, exist_ok=True)
            flush_parents(self.folder)
        DeltaTable.create(
            self.location,
            columns,
            mode="ignore",
            partition_by=list(self.partition_by),
            configuration={**_CREATED_WITH, **statistics_of(columns, self.partition_by)},
            storage_options=self.options,
        )

    def _check_conditional_puts(self) -> None:
        """Check that the store of an S3 table refuses to overwrite: without that, commits would replace each other."""
        if self.is_local or any(name.lower() in _SECRETS for name in self.storage_options):
            return
        endpoint = endpoint_of(self.storage_options)
        # In a hidden folder: readers skip names that begin with an underscore.
        options = {**encryption_of(self.storage_options), **({"endpoint_url": endpoint} if endpoint else {})}
        with closing(open_store(f"{self.path.rstrip('/')}/_dstl", **options)) as store:
            try:
                store.check_writable()
            except DstlError as error:
                raise UnavailableError(f"the sink's table {self.path} cannot be written: {error}") from error


class _DeltaPublisher(SlotPublisher):
    def __init__(self, sink: DeltaSink, slot: Slot) -> None:
        self._sink = sink
        self._slot = slot
        self._table, self._opened_s = sink.table(), _clocks()
        self._table_id = self._table.metadata().id
        check_retention(self._table, sink.path)
        self._last = stored_marker(self._table, slot)
        if sink.is_local and self._last is not None:
            flush_newest(self._table, sink.folder, slot)

    def last_published(self) -> Marker | None:
        """Return the marker of the table's version on which a commit is built."""
        return self._last

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Commit, even without records: a marker that falls behind would look as if the table had been set back."""
        schema = stored_columns(self._table, self._sink.path)
        # Through a file: the library reads in its own threads, where the log's errors would lose their kind.
        with tempfile.TemporaryFile() as file:
            rows, size_bytes = spool(file, self._conformed(records, schema), schema)
            try:
                with told(self._sink.path, self._sink.storage_options):
                    passed_s = max(now_s - then_s for now_s, then_s in zip(_clocks(), self._opened_s, strict=True))
                    if passed_s > _LOOKED_AGAIN_AFTER_S:
                        self._check_same(self._sink.table())
                    check_rows(self._table, file, size_bytes)
                    self._commit(file if rows else None, marker, rows_per_group(rows, size_bytes))
                    newest = self._check_committed(marker)
                    if self._sink.is_local:
                        flush_newest(newest, self._sink.folder, self._slot)
                    self._table, self._opened_s = newest, _clocks()
            except UnavailableError as error:
                if isinstance(error.__cause__, DeltaError):
                    self._check_not_overtaken()
                raise
        self._last = marker
        return rows

    def close(self) -> None:
        """Do nothing: a table keeps no connection."""

    def _conformed(self, records: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for batch in filter(len, records):
            found = conformed(batch, schema, self._sink.path)
            check_readable(self._table, self._sink.path, found.schema, batch.schema.names)
            check_values(self._table, self._sink.path, found)
            check_lengths(self._table, self._sink.path, found)
            yield found

    def _commit(self, file: IO[bytes] | None, marker: Marker, rows_per_group: int) -> None:
        properties = CommitProperties(
            custom_metadata={
                "dstl": f"sink {self._slot.sink}, slot {self._slot.number}: {marker.checkpoint.to_text()}"
            },
            max_commit_retries=_COMMIT_RETRIES,
            app_transactions=[Transaction(*pair) for pair in transactions(self._slot, marker)],
        )
        is_cleaned = self._slot.number == 0 and marker.checkpoint.id % _CLEANED_EVERY == 0
        afterwards = PostCommitHookProperties(cleanup_expired_logs=None if is_cleaned else False)
        if file is None:
            _commit_nothing(self._table, properties, afterwards)
            return
        reader = pa.ipc.open_stream(file)
        write_deltalake(
            self._table,
            cast("pa.RecordBatchReader", reader),
            mode="append",
            schema_mode="merge",  # columns that others have added since are filled with null
            writer_properties=WriterProperties(
                compression=cast("_Compression", self._sink.compression.upper()),
                max_row_group_size=rows_per_group,
                **without_floats(self._table, reader.schema),
            ),
            commit_properties=properties,
            post_commithook_properties=afterwards,
        )

    def _check_committed(self, marker: Marker) -> DeltaTable:
        """
        Check that readers see the commit; return the table with it.

        A process that stands still between choosing a number and putting the commit may come so late that the log has
        been cleaned: then the number is free again, and its commit lies before the log's checkpoint, where no reader
        looks.
        """
        newest = self._sink.table()
        self._check_same(newest)
        if newest.version() != self._table.version() and stored_marker(newest, self._slot) != marker:
            raise self._fenced()
        return newest

    def _check_same(self, newest: DeltaTable) -> None:
        """
        Check that the table is the one that was opened, and was not deleted and created again.

        The library takes the new one's commits for later ones of the old one. A process that stood still would add its
        records, in the old one's partitions, and a marker that the new one must not have.
        """
        if newest.metadata().id != self._table_id:
            raise UnavailableError(
                f"table {self._sink.path} was deleted and created again while output was published to it; if the new "
                f"one has a commit of sink {self._slot.sink}, slot {self._slot.number}, restore it to before that"
            )

    def _check_not_overtaken(self) -> None:
        with told(self._sink.path, self._sink.storage_options):
            if stored_marker(self._sink.table(), self._slot) != self._last:
                raise self._fenced()

    def _fenced(self) -> FencedError:
        return FencedError(f"slot {self._slot.number} of sink {self._slot.sink!r} was published by another publisher")


def _clocks() -> tuple[float, float]:
    """Return the seconds of two clocks: one may be set back, the other one stands still while a host is suspended."""
    return time.time(), time.monotonic()


def _names_a_folder(path: str) -> bool:
    """Return whether a path is one that the library takes for no other folder: it drops all behind ``#`` and ``?``."""
    parts = urlsplit(path)
    if re.search("[#?]", path) or "@" in parts.netloc:
        return False
    if parts.scheme == "s3":  # with a : it is a user, whose password has a /
        return bool(parts.netloc) and ":" not in parts.netloc
    return parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/")


def _commit_nothing(
    table: DeltaTable, properties: CommitProperties, afterwards: PostCommitHookProperties | None = None
) -> None:
    partitions = list(table.metadata().partition_columns)
    table.create_write_transaction(
        [],
        "append",
        table.schema(),
        partitions,
        commit_properties=properties,
        post_commithook_properties=afterwards,
    )
