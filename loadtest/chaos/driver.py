"""
A driver with its tasks, as far as the service sees them, and a model of what its job's state must be.

It executes batches by a seeded script: several operators and partitions, losing attempts, pre-emptive sets, sets sent
twice, early persists, aborts, take-overs with a new epoch, restores and garbage collections. The service may be killed
at any moment; the driver does what a real one does then. What it was told, it keeps, and `Violation` is raised at once
when the service contradicts it.
"""

from __future__ import annotations

import random
import threading
from dataclasses import asdict, replace
from typing import Any

from backend_client.log_writer import LogTarget
from backend_client.service_client import ServiceClient
from dstl_service.wire import ChangeSetRef, CheckpointRef, CompleteRequest, OperatorInfo
from loadtest.chaos.phases import Phases
from storage.change_set import decode_change_set, encode_change_set
from storage.checksum import checksum64
from storage.errors import ConflictError, CorruptDataError, LostChangesError, UnavailableError
from storage.key_groups import key_group_range
from storage.model import KeyGroupRange

OPERATORS = ("counts", "joins")
MAX_PARALLELISM = 128
PATIENCE_S = 60.0
STATES_KEPT = 20

Table = dict[bytes, bytes]
State = dict[str, Table]
Change = dict[bytes, bytes | None]


class Violation(AssertionError):  # noqa: N818 - it is no error of this program but the service's
    """The service said or did what it must not."""


class Driver(threading.Thread):
    """
    One job. Runs until `stop`; `failure` is what ended it before.

    Args:
        job: Its name.
        address: Where the service is, whichever process serves it.
        seed: Decides the script.
        phases: Where requests are announced.
    """

    def __init__(self, job: str, address: str, seed: str, phases: Phases) -> None:
        super().__init__(name=job, daemon=True)
        self.job = job
        self.base: CheckpointRef | None = None
        self.states: dict[int, State] = {}
        self.checkpoints = 0
        self.persisted = 0
        self.repeated = 0
        self.failure: BaseException | None = None
        self._address = address
        self._client = ServiceClient(address, patience_s=PATIENCE_S)
        self._path = f"/v1/jobs/{job}"
        self._random = random.Random(seed)
        self._phases = phases
        self._stopped = threading.Event()
        self._epoch = 0
        self._attempts = 0
        self._tries: dict[str, State] = {}

    def run(self) -> None:
        """Execute batches until told to stop."""
        try:
            self.take_over()
            while not self._stopped.is_set():
                self._execute()
            self._execute()  # the last batch meets no kill, and every job has a checkpoint
        except BaseException as error:  # noqa: BLE001 - reported by whoever started the thread
            self.failure = error
        finally:
            self._client.close()

    def stop(self) -> None:
        """End after the next batch."""
        self._stopped.set()

    def expected(self, checkpoint_id: int) -> State:
        """Return what the state is at a checkpoint."""
        return self.states[checkpoint_id]

    def take_over(self) -> None:
        """Begin a new epoch and go on from the newest checkpoint, as a driver does that was started again."""
        with self._phases.request("open"):
            body = {"owner": self.job, "max_parallelism": MAX_PARALLELISM}
            opened = self._client.post(f"{self._path}/epochs", body)
        if opened["epoch"] <= self._epoch:
            raise Violation(f"{self.job}: epoch {opened['epoch']} was given after epoch {self._epoch}")
        self._epoch = opened["epoch"]
        latest = CheckpointRef(**opened["latest"]["ref"]) if opened["latest"] else None
        if latest != self.base:
            # The answer to a `complete` may have been lost with the process.
            if latest is None or latest.id != self._next_id or latest.uid not in self._tries:
                raise Violation(f"{self.job}: the newest checkpoint is {latest}, and was {self.base}")
            self._completed(latest)

    @property
    def _next_id(self) -> int:
        return self.base.id + 1 if self.base else 0

    @property
    def _state(self) -> State:
        return self.states[self.base.id] if self.base else {operator: {} for operator in OPERATORS}

    def _execute(self) -> None:
        """Execute one batch, again if sets were lost."""
        if self._chooses("open", 0.05):
            self.take_over()
        checkpoint_id = self._next_id
        while self._next_id == checkpoint_id:
            self._post("begin", f"/checkpoints/{checkpoint_id}/begin", {"epoch": self._epoch})
            changes: dict[str, Change] = {operator: {} for operator in OPERATORS}
            parallelism = {operator: self._random.choice((1, 2, 3, 4)) for operator in OPERATORS}
            refs = [
                ref
                for operator in OPERATORS
                for partition in range(parallelism[operator])
                for ref in self._run_task(operator, partition, parallelism[operator], changes[operator])
            ]
            if self._chooses("abort", 0.05):
                self._post("abort", f"/checkpoints/{checkpoint_id}/abort", {"epoch": self._epoch})
                continue
            try:
                self._complete(checkpoint_id, self._make_durable(refs), parallelism, changes)
            except LostChangesError:
                self.repeated += 1
        if self._chooses("restore", 0.1):
            self._check_restore()
        if self._chooses("collect garbage", 0.03):
            self._post("collect garbage", "/garbage-collection?dry_run=false", {})

    def _run_task(self, operator: str, partition: int, parallelism: int, changes: Change) -> list[ChangeSetRef]:
        """Send the change sets of one partition, sometimes those of an attempt that is not accepted before."""
        key_groups = key_group_range(partition, parallelism, MAX_PARALLELISM)
        if self._random.random() < 0.2:
            self._attempts += 1
            self._append(operator, partition, key_groups, {}, 0)
        self._attempts += 1
        return [
            self._append(operator, partition, key_groups, changes, sqn)
            for sqn in range(self._random.choice((1, 1, 1, 2, 3)))
        ]

    def _append(
        self, operator: str, partition: int, key_groups: KeyGroupRange, changes: Change, sqn: int
    ) -> ChangeSetRef:
        own = self._make_changes(operator, key_groups, sqn)
        changes.update(own)
        payload = encode_change_set(own)
        target = LogTarget(self.job, operator, self._next_id, self._epoch, self._attempts, partition, key_groups)
        preemptive = self._chooses("append preemptive", 0.2)
        times = 2 if self._random.random() < 0.1 else 1
        refs = []
        for _ in range(times):
            with self._phases.request("append preemptive" if preemptive else "append"):
                refs.append(
                    self._client.append(target, sqn, payload, checksum64(payload), len(own), preemptive=preemptive)
                )
        return refs[-1]  # the one that was sent again counts: another process may have taken it in

    def _make_changes(self, operator: str, key_groups: KeyGroupRange, sqn: int) -> Change:
        """Return changes by which each set can be told from every other one: a key of its own, and shared ones."""
        chance = self._random
        stamp = f"{self._next_id}/{self._attempts}/{sqn}".encode()

        def key(name: bytes) -> bytes:
            return chance.randint(key_groups.first, key_groups.last).to_bytes(2, "big") + b"\0\0" + name

        size = chance.choice((20, 20, 20, 2_000, 200_000))
        made: Change = {key(b"own " + stamp): stamp + chance.randbytes(size)}
        for _ in range(chance.randint(0, 20)):
            group = chance.randint(key_groups.first, key_groups.last) // 8 * 8
            if key_groups.contains(group):
                made[group.to_bytes(2, "big") + b"\0\0shared"] = stamp + chance.randbytes(50)
        table = self._state[operator]
        old = [k for k in table if key_groups.contains(int.from_bytes(k[:2], "big")) and b"own" in k]
        for name in chance.sample(old, max(0, len(old) - 8)):
            made[name] = None
        return made

    def _make_durable(self, refs: list[ChangeSetRef]) -> list[ChangeSetRef]:
        """Sometimes start the upload, and sometimes wait for it: whoever got handles can do without the process."""
        if self._chooses("flush", 0.5):
            with self._phases.request("flush"):
                self._client.persist(self.job, self._epoch, refs, wait=False)
        if not self._chooses("persist", 0.3):
            return refs
        chosen = refs if self._random.random() < 0.5 else refs[::2]
        with self._phases.request("persist"):
            handles = self._client.persist(self.job, self._epoch, chosen)
        self.persisted += len(handles)
        handle_of = {id(ref): handle for ref, handle in zip(chosen, handles, strict=True)}
        return [replace(ref, handle=handle_of.get(id(ref))) for ref in refs]

    def _complete(
        self, checkpoint_id: int, refs: list[ChangeSetRef], parallelism: dict[str, int], changes: dict[str, Change]
    ) -> None:
        uid = f"{self._random.getrandbits(128):032x}"
        self._tries[uid] = {operator: _applied(self._state[operator], changes[operator]) for operator in OPERATORS}
        operators = [OperatorInfo(operator, parallelism[operator], "{}", {}) for operator in OPERATORS]
        request = CompleteRequest(self._epoch, uid, self.base, refs, operators)
        try:
            answer = self._post("complete", f"/checkpoints/{checkpoint_id}/complete", asdict(request))
        except ConflictError:
            # The write of a process that was killed came later than all answers: a new driver finds it.
            self.take_over()
            if self._next_id == checkpoint_id:
                raise
            return
        except LostChangesError as error:
            if all(ref.handle is not None for ref in refs):
                raise Violation(f"{self.job}: durable sets of checkpoint {checkpoint_id} count as lost") from error
            raise
        ref = CheckpointRef(**answer["ref"])
        if (ref.id, ref.uid) != (checkpoint_id, uid):
            raise Violation(f"{self.job}: asked for {checkpoint_id}.{uid}, told {ref}")
        self._completed(ref)

    def _completed(self, ref: CheckpointRef) -> None:
        self.states[ref.id] = self._tries[ref.uid]
        self.states.pop(ref.id - STATES_KEPT, None)
        self.base, self._tries = ref, {}
        self.checkpoints += 1

    def _check_restore(self) -> None:
        """Restore both operators while the service may be killed, and compare."""
        assert self.base is not None
        for operator in OPERATORS:
            table = None
            while table is None:
                kills = self._phases.kills
                try:
                    table = self._restore(operator)
                except (UnavailableError, CorruptDataError) as error:
                    if kills == self._phases.kills:
                        raise Violation(f"{self.job}: {operator} cannot be restored: {error}") from error
            if table != self._state[operator]:
                raise Violation(f"{self.job}: {operator} was restored with other content at {self.base}")

    def _restore(self, operator: str) -> Table:
        assert self.base is not None
        table: Table = {}
        everything = KeyGroupRange(0, MAX_PARALLELISM - 1)
        with (
            self._phases.request("restore"),
            self._client.restore(self.job, operator, everything, None, self.base.to_text()) as frames,
        ):
            for header, payload in frames:
                if header["kind"] == "error":
                    raise Violation(f"{self.job}: {operator} cannot be restored: {header['error']}")
                if header["kind"] == "segment":
                    apply(table, dict(decode_change_set(payload, str(header["object"]))))
        return table

    def _post(self, kind: str, path: str, body: object) -> Any:
        with self._phases.request(kind):
            return self._client.post(f"{self._path}{path}", body)

    def _chooses(self, kind: str, share: float) -> bool:
        return self._phases.wanted == kind or self._random.random() < share


def apply(table: Table, changes: Change) -> None:
    """Bring changes into a table."""
    for key, value in changes.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value


def _applied(table: Table, changes: Change) -> Table:
    result = dict(table)
    apply(result, changes)
    return result
