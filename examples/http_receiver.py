"""The service to which `examples.http_sink` publishes: ``python -m examples.http_receiver FILE PORT``."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.concurrency import run_in_threadpool

_TABLES = """
create table if not exists slots (slot text primary key, generation integer not null, key text);
create table if not exists records (number integer primary key, record text not null);
"""


class Records:
    """
    Records, and the generation and the last request's idempotency key of each slot.

    Args:
        path: A SQLite file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with self._transaction() as transaction:
            transaction.executescript(_TABLES)

    def open(self, slot: str) -> dict[str, Any]:
        """Begin a slot's next generation; return it, and the key of the last request that was stored."""
        with self._transaction() as transaction:
            transaction.execute("insert or ignore into slots values (?, 0, null)", [slot])
            transaction.execute("update slots set generation = generation + 1 where slot = ?", [slot])
            row = transaction.execute("select generation, key from slots where slot = ?", [slot]).fetchone()
        return {"generation": row[0], "key": row[1]}

    def add(self, slot: str, generation: int, key: str, records: list[Any]) -> bool:
        """Store records and key in one transaction, a second time not again; return false for an older generation."""
        with self._transaction() as transaction:
            row = transaction.execute("select generation, key from slots where slot = ?", [slot]).fetchone()
            if row is None or row[0] != generation:
                return False
            if row[1] != key:
                rows = [[json.dumps(record)] for record in records]
                transaction.executemany("insert into records (record) values (?)", rows)
                transaction.execute("update slots set key = ? where slot = ?", [key, slot])
        return True

    def all(self) -> list[Any]:
        """Return all records, in the order in which they were stored."""
        with self._transaction() as transaction:
            return [json.loads(text) for (text,) in transaction.execute("select record from records order by number")]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        try:
            connection.execute("begin immediate")
            yield connection
            connection.commit()
        finally:
            connection.close()


def app(records: Records) -> FastAPI:
    """Return the service."""
    service = FastAPI()

    @service.get("/health")
    def health() -> None:
        """Answer."""

    @service.get("/records")
    def read() -> list[Any]:
        """Return all records."""
        return records.all()

    @service.post("/slots/{slot:path}/open")
    def open_slot(slot: str) -> dict[str, Any]:
        """Begin a slot's next generation."""
        return records.open(slot)

    @service.post("/slots/{slot:path}/records", status_code=204)
    async def add(
        slot: str,
        request: Request,
        generation: Annotated[int, Header()],
        idempotency_key: Annotated[str, Header()],
    ) -> None:
        """Store lines of JSON; 409 if the slot was opened since."""
        lines = [json.loads(line) for line in (await request.body()).splitlines()]
        if not await run_in_threadpool(records.add, slot, generation, idempotency_key, lines):
            raise HTTPException(409, "the slot was opened by another publisher")

    return service


if __name__ == "__main__":
    uvicorn.run(app(Records(sys.argv[1])), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
