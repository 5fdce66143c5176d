"""
A driver with its tasks, as far as the service sees them, with a model of its job's state.

It runs batches by a seeded script: several operators and partitions, losing attempts, pre-emptive sets, sets sent
twice, early persists, aborts, takeovers with a new epoch, restores, garbage collections, and rewinds that may be
interrupted. The service may be killed or hang at any moment; the driver then reacts like a real one. It remembers every
answer, and raises `Violation` at once when the service contradicts one.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from backend_client.service.client import ServiceClient
from dstl_service.wire import ChangeSetRef, CheckpointRef, CompleteRequest, LogTarget, OperatorInfo
from loadtest.chaos.model import (
    MAX_PARALLELISM,
    OPERATORS,
    Change,
    State,
    Table,
    Violation,
    applied,
    draw_changes,
    table_of,
)
from loadtest.chaos.phases import Phases
from loadtest.chaos.rewinding import Fate, Rewinding
from storage.change_set import encode_change_set
from storage.checksum import checksum64
from storage.errors import ConflictError, CorruptDataError, FencedError, LostChangesError, UnavailableError
from storage.key_groups import KeyGroupRange, key_group_range

PATIENCE_S = 8.0
"""Timeout of one request, shorter than a hang of the service."""
TRIES_MAX = 20
"""Consecutive restarts of a driver after which the service counts as gone."""
STATES_KEPT = 20
REWIND_STOPPED_WITHIN_S = 0.08


class ScriptedDriver(threading.Thread):
    """
    The driver of one job. Runs until `stop`; `failure` is the error that ended it before.

    Args:
        job: Its name.
        address: Address of the service, whichever process serves it.
        seed: Decides the script.
        phases: Is told of requests.
        rewinding: Starts a rewind of the job to a checkpoint id.
    """

    def __init__(
        self, job: str, address: str, seed: str, phases: Phases, rewinding: Callable[[str, int], Rewinding]
    ) -> None:
        super().__init__(name=job, daemon=True)
        self.job = job
        self.base: CheckpointRef | None = None
        self.states: dict[int, State] = {}
        self.checkpoints = 0
        self.persisted = 0
        self.repeated = 0
        self.restarted = 0
        self.rewinds: Counter[tuple[Fate, bool]] = Counter()
        self.failure: BaseException | None = None
        self._address = address
        self._client = ServiceClient(address, patience_s=PATIENCE_S)
        self._path = f"/v1/jobs/{job}"
        self._random = random.Random(seed)
        self._phases = phases
        self._rewinding = rewinding
        self._suspended: Rewinding | None = None
        self._targets: set[int] = set()
        self._must_open = False
        self._stopped = threading.Event()
        self._epoch = 0
        self._attempts = 0
        self._tries: dict[str, State] = {}

    def run(self) -> None:
        """Run batches until stopped."""
        try:
            self._insist(self.take_over)
            while not self._stopped.is_set():
                self._execute()
            self._end_suspended()
            self._execute()  # the last batch runs without kills, so that every job has a checkpoint
        except BaseException as error:  # noqa: BLE001 - reported by the thread's starter
            self.failure = error
        finally:
            if self._suspended is not None:
                self._suspended.kill()
            self._client.close()

    def stop(self) -> None:
        """End after the next batch."""
        self._stopped.set()

    def expected(self, checkpoint_id: int) -> State:
        """Return the expected state at a checkpoint."""
        return self.states[checkpoint_id]

    def take_over(self) -> None:
        """Begin a new epoch and continue from the newest checkpoint, like a restarted driver."""
        with self._phases.request("open"):
            body = {"owner": self.job, "max_parallelism": MAX_PARALLELISM}
            opened = self._client.post(f"{self._path}/epochs", body)
        if opened["epoch"] <= self._epoch:
            raise Violation(f"{self.job}: got epoch {opened['epoch']} after epoch {self._epoch}")
        self._epoch = opened["epoch"]
        latest = CheckpointRef(**opened["latest"]["ref"]) if opened["latest"] else None
        if latest != self.base and not self._was_set_back(latest, opened["latest"]):
            # The answer to a `complete` may have been lost with the process.
            if latest is None or latest.id != self._next_id or latest.uid not in self._tries:
                raise Violation(f"{self.job}: the newest checkpoint is {latest}, but was {self.base}")
            self._completed(latest)
        self._must_open = False

    def _was_set_back(self, latest: CheckpointRef | None, info: dict[str, Any] | None) -> bool:
        """Update the model if a rewind that this driver began, with unknown outcome, has happened."""
        if latest is None or info is None or latest.id not in self._targets or not info.get("rewound_from"):
            return False
        rewound_from = CheckpointRef(**info["rewound_from"])
        was_made_meanwhile = rewound_from.id == self._next_id and rewound_from.uid in self._tries
        if rewound_from != self.base and not was_made_meanwhile:
            return False
        self.base, self._tries = latest, {}
        self.states = {
            checkpoint_id: state for checkpoint_id, state in self.states.items() if checkpoint_id <= latest.id
        }
        return True

    @property
    def _next_id(self) -> int:
        return self.base.id + 1 if self.base else 0

    @property
    def _state(self) -> State:
        return self.states[self.base.id] if self.base else {operator: {} for operator in OPERATORS}

    def _insist(self, act: Callable[[], object]) -> None:
        """Repeat an action until the service answers, restarting each time, like a driver whose query failed."""
        tries = 0
        while True:
            try:
                act()
            except (UnavailableError, FencedError) as error:
                # This driver's own request may reach a hung service long after it was given up.
                if isinstance(error, FencedError) and not self._targets and not self._phases.hangs:
                    raise
                tries += 1
                if tries == TRIES_MAX:
                    raise Violation(f"{self.job}: the service did not recover: {error}") from error
                self._client.close()
                self.restarted += 1
                self._must_open = True
            else:
                return

    def _execute(self) -> None:
        """Run one batch, from the start if the service does not answer in time or a rewind takes the job over."""
        self._insist(self._execute_batch)

    def _execute_batch(self) -> None:
        """Run one batch, again if sets were lost."""
        if self._chooses("rewind", 0.03):
            self._rewind()
        if self._must_open or self._chooses("open", 0.05):
            self.take_over()
        self._wake_suspended()
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
        """Send the change sets of one partition, sometimes after those of an attempt that is not accepted."""
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
        stamp = f"{self._next_id}/{self._attempts}/{sqn}".encode()
        own = draw_changes(self._random, self._state[operator], key_groups, stamp)
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
        return refs[-1]  # the repeated one counts: another process may have received it

    def _make_durable(self, refs: list[ChangeSetRef]) -> list[ChangeSetRef]:
        """Sometimes start the upload, and sometimes wait for it: with handles the process is no longer needed."""
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
        self._tries[uid] = {operator: applied(self._state[operator], changes[operator]) for operator in OPERATORS}
        operators = [OperatorInfo(operator, parallelism[operator], "{}", {}) for operator in OPERATORS]
        request = CompleteRequest(self._epoch, uid, self.base, refs, operators)
        try:
            answer = self._post("complete", f"/checkpoints/{checkpoint_id}/complete", asdict(request))
        except ConflictError:
            # A killed process's write came later than all answers: a new driver finds it.
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
            raise Violation(f"{self.job}: requested {checkpoint_id}.{uid}, got {ref}")
        self._completed(ref)

    def _completed(self, ref: CheckpointRef) -> None:
        self.states[ref.id] = self._tries[ref.uid]
        self.states.pop(ref.id - STATES_KEPT, None)
        self.base, self._tries = ref, {}
        self.checkpoints += 1

    def _rewind(self) -> None:
        """Rewind the job by a checkpoint or two; the process that does it may be killed or suspended half way."""
        self._end_suspended()
        targets = [checkpoint_id for checkpoint_id in self.states if self.base and checkpoint_id < self.base.id][-2:]
        if not targets:
            return
        target, fate, before = self._random.choice(targets), self._random.choice(list(Fate)), self.base
        self._targets.add(target)
        with self._phases.request("rewind"):
            rewinding = self._rewinding(self.job, target)
            is_done = rewinding.meet(fate, self._random.uniform(0, REWIND_STOPPED_WITHIN_S))
        if fate is Fate.SUSPENDED:
            self._suspended = rewinding  # at once: it must be ended after any later failure
        self._must_open = True
        self.take_over()
        if is_done and self.base == before:
            raise Violation(f"{self.job}: it was rewound to checkpoint {target}, but is at {before}")
        self.rewinds[fate, self.base != before] += 1
        if fate is not Fate.SUSPENDED:
            self._targets.clear()
        self._check_restore()

    def _wake_suspended(self) -> None:
        """Sometimes resume a suspended rewind beside this driver; it either fences this driver or gives up."""
        if self._suspended is None or self._random.random() < 0.7:
            return
        self._suspended.wake()
        if not self._suspended.is_running():
            self._end_suspended()

    def _end_suspended(self) -> None:
        """Let a suspended rewind finish, and check its outcome."""
        if self._suspended is not None:
            self._suspended.wake()
            self._suspended.end()
            self._suspended = None
            self._insist(self.take_over)
            self._targets.clear()

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
                    if isinstance(error, UnavailableError) and self._phases.hangs:
                        raise
                    if kills == self._phases.kills:
                        raise Violation(f"{self.job}: {operator} cannot be restored: {error}") from error
            if table != self._state[operator]:
                raise Violation(f"{self.job}: {operator} was restored with wrong content at {self.base}")

    def _restore(self, operator: str) -> Table:
        assert self.base is not None
        everything = KeyGroupRange(0, MAX_PARALLELISM - 1)
        with (
            self._phases.request("restore"),
            self._client.restore(self.job, operator, everything, None, self.base.to_text()) as frames,
        ):
            return table_of(frames, f"{self.job}: {operator}")

    def _post(self, kind: str, path: str, body: object) -> Any:
        with self._phases.request(kind):
            return self._client.post(f"{self._path}{path}", body)

    def _chooses(self, kind: str, share: float) -> bool:
        return self._phases.wanted == kind or self._random.random() < share
