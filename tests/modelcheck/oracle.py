"""
The invariants, whichever process was paused or killed; kept beside the store, and informed of every put and delete.

1. The retained checkpoints and all savepoints are whole: their chain leads back to a complete manifest, and every
   object that they name exists; in the end they are also restored and compared.
2. A checkpoint that was reported as completed is an ancestor of the newest checkpoint, or of one from which the job was
   rewound.
   Both hold for a job until its deletion has begun, and for the next job of its name from then on. Until the end of the
   deleted job is on record, it completes no checkpoint that is not whole.
3. A driver can take the job over and complete the next checkpoint.
4. Garbage is collected in the end.
5. A savepoint that was reported is taken off the register only after a request to delete it, and no object of a
   savepoint is deleted while it is on the register, or is put on the register without being stored.
   A fork keeps to all of that, too, whatever becomes of its parent: the objects that it names may be the parent's.
6. Output that is not published is in the newest checkpoint; no record is published twice, and what the marker of the
   sink covers was published.

The oracle reads manifests and indexes as they are put, and takes no turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from backend_client.sinks.protocol import Marker
from dstl_service.formats.keys import place_of
from dstl_service.formats.manifest import Manifest, ManifestKind, decode_manifest, object_keys
from dstl_service.formats.materialization_index import MaterializationIndex, decode_index
from dstl_service.formats.tombstone import TOMBSTONES, Tombstone
from dstl_service.registry.lives import life_of
from dstl_service.registry.savepoint_register import Registered, name_of
from dstl_service.wire import CheckpointRef
from storage.errors import CorruptDataError
from storage.memory_store import MemoryStore
from storage.model import ChangeSetId
from tests.modelcheck.output import SINK_NAME
from tests.modelcheck.scheduler import ViolationError

Table = dict[bytes, bytes]


@dataclass
class Knowledge:
    """The shared knowledge of the oracles of a job and of its forks: indexes, contents and manifests of all of them."""

    indexes: dict[str, MaterializationIndex] = field(default_factory=dict)
    contents: dict[ChangeSetId, Table] = field(default_factory=dict)
    made: dict[str, Manifest] = field(default_factory=dict)

    def copy(self) -> Knowledge:
        """Return a copy."""
        return Knowledge(self.indexes.copy(), self.contents.copy(), self.made.copy())


class Oracle:
    """
    Knows what was stored and what was reported.

    Args:
        store: The observed store.
        retained: Number of retained checkpoints.
        job: The job that is observed.
    """

    def __init__(self, store: MemoryStore, retained: int, job: str = "job") -> None:
        self._store = store
        self._retained = retained
        self._job = job
        self._there: dict[str, Manifest] = {}
        self._known: dict[str, Manifest] = {}
        self.share(Knowledge())
        self._doomed: list[str] = []
        self._buried: dict[str, int] = {}
        self.reported: list[str] = []
        self.savepoints: dict[str, Manifest] = {}
        self.saved: dict[str, Manifest] = {}
        self.deleted: list[str] = []
        self._registered: dict[str, Registered] = {}

    def share(self, knowledge: Knowledge) -> None:
        """Know the same of objects and contents as another job's oracle: a fork's manifests name its parent's."""
        self.knowledge = knowledge
        self._indexes, self._contents, self._made = knowledge.indexes, knowledge.contents, knowledge.made

    def copy(self, store: MemoryStore) -> Oracle:
        """Return a copy for another store."""
        other = Oracle(store, self._retained, self._job)
        for name, value in vars(self).items():
            if isinstance(value, dict | list):
                setattr(other, name, value.copy())
        other.share(self.knowledge.copy())
        return other

    def state(self) -> int:
        """Return a number that is equal for equal knowledge of deleted and reported objects; the store has the rest."""
        return hash(
            (
                frozenset((uid, m.ref, m.base, m.rewound_from, m.epoch, m.segments) for uid, m in self._known.items()),
                frozenset((key, index.files) for key, index in self._indexes.items()),
                frozenset((set_id, frozenset(table.items())) for set_id, table in self._contents.items()),
                frozenset((name, manifest.uid) for name, manifest in self.savepoints.items()),
                frozenset(self.saved),
                frozenset(self.reported),
                frozenset(self.deleted),
                tuple(self._doomed),
                repr(self._registered),
            )
        )

    def expect(self, set_id: ChangeSetId, table: Table) -> None:
        """Learn the content of a checkpoint with this change set."""
        self._contents[set_id] = table

    def contents(self, manifest: Manifest | None) -> Table:
        """Return the content of a checkpoint; one made by a rewind or a fork has that of its original."""
        if manifest is not None and manifest.base is None and manifest.forked_from is not None:
            return self.contents(self._made[manifest.forked_from.checkpoint.uid])
        sets = [segment.entry.id for segment in manifest.segments] if manifest else []
        return next((self._contents[set_id] for set_id in sets if set_id in self._contents), {})

    def manifest(self, ref: CheckpointRef | None) -> Manifest | None:
        """Return a checkpoint's manifest, even if it was deleted."""
        return self._known[ref.uid] if ref else None

    def put(self, key: str, data: bytes) -> None:
        """Learn of a put that took effect."""
        self._learn_of_deletions(key, data)
        folder = _folder_of(key)
        if folder == "materialized" and key.endswith(".json"):
            with suppress(CorruptDataError):
                self._indexes[key] = decode_index(data, key)
        if folder == "savepoints-made" and key.endswith(".json"):
            self._register(key, data)
        if folder not in ("checkpoints", "savepoints"):
            return
        manifest = decode_manifest(data, key)
        if folder == "savepoints":
            if self._is_alive(manifest):
                self.saved[_name_of(key)] = manifest
            return
        self._there[key] = manifest
        if manifest.kind is not ManifestKind.FENCE:
            self._known[manifest.uid] = self._made[manifest.uid] = manifest
            if not self._is_alive(manifest) and not self._has_ended(manifest):
                self._check_whole(manifest, f"checkpoint {manifest.ref.to_text()} of a job that is being deleted")
        self.check("after the put of " + key)

    def delete(self, key: str) -> None:
        """Learn of a delete that took effect."""
        folder = _folder_of(key)
        if folder == "checkpoints":
            self._there.pop(key)
        elif folder == "savepoints" and life_in(key) >= len(self._doomed):
            self.saved.pop(_name_of(key))
            if self._registered and _name_of(key) in self._registered[max(self._registered)].objects:
                raise ViolationError(f"{key} is deleted while it is on the register")
        self.check("after the deletion of " + key)

    def save(self, name: str, ref: CheckpointRef) -> None:
        """Learn that a savepoint was reported, which may have been deleted meanwhile."""
        found = [item for one, item in self.saved.items() if name_of(one) == name and item.ref == ref]
        if found and self._is_published(name):
            self.savepoints[name] = found[0]
        elif name not in self.deleted:
            raise ViolationError(f"savepoint {name} was reported, and is not there")

    def check(self, when: str) -> None:
        """Raise `ViolationError` unless everything is intact that must be restorable at any time."""
        for manifest in self.retained():
            self._check_whole(manifest, f"retained checkpoint {manifest.ref.to_text()} {when}")
        for name, manifest in self.savepoints.items():
            self._check_named(manifest, f"savepoint {name} {when}")

    @property
    def newest(self) -> Manifest | None:
        """The checkpoint from which the job continues: the newest, or the target of a rewind in progress."""
        places = {
            place_of(key): item
            for key, item in self._there.items()
            if item.kind is not ManifestKind.FENCE and self._is_alive(item)
        }
        there = list(places.values())
        newest = places[max(places)] if places else None
        rewound = max((item for item in there if item.rewound_from), key=lambda item: item.epoch, default=newest)
        return newest if rewound is None or newest is None or rewound.epoch <= newest.epoch else rewound

    def retained(self) -> Iterator[Manifest]:
        """Yield the checkpoints that must be restorable: the newest of those since the last rewind."""
        manifest, missing = self.newest, None
        for _ in range(self._retained):
            if missing is not None:
                raise ViolationError(f"retained checkpoint {missing.to_text()} is gone")
            if manifest is None:
                return
            yield manifest
            base = None if manifest.rewound_from else manifest.base
            manifest = self._at(base) if base else None
            missing = base if manifest is None else None

    def check_output(self, records: Sequence[str], marker: Marker | None) -> None:
        """
        Raise `ViolationError` unless the newest checkpoint has all output that is not published.

        Args:
            records: What is published; each record is ``<checkpoint id>/<epoch>``, as the job's table has them.
            marker: The slot's marker.
        """
        if twice := [record for record, count in Counter(records).items() if count > 1]:
            raise ViolationError(f"output is published twice: {twice}")
        newest = self.newest
        if newest is None or not any(operator.is_sink for operator in newest.operators):
            return
        wanted = [(int(key[2:]), int(epoch)) for key, epoch in sorted(self.contents(newest).items())]
        published = {pair for pair in wanted if marker is not None and marker.covers(pair[1], pair[0])}
        if lost := [f"{number}/{epoch}" for number, epoch in published if f"{number}/{epoch}" not in records]:
            raise ViolationError(f"output that the marker covers was never published: {lost}")
        chain = [*self._chain(newest)]
        there = {segment.entry.id for step in chain for segment in (*step.segments, *step.earlier)}
        readable = {(one.checkpoint_id, one.writer.epoch) for one in there if one.operator == SINK_NAME}
        if missing := [pair for pair in wanted if pair not in published and pair not in readable]:
            raise ViolationError(f"output is neither published nor in checkpoint {newest.ref.to_text()}: {missing}")

    def check_reported(self) -> None:
        """Raise `ViolationError` if a reported checkpoint is in no checkpoint's past."""
        past: set[str] = set()
        newest = self.newest
        waiting = [newest.ref] if newest else []
        while waiting:
            manifest = self._known.get(waiting.pop().uid)
            if manifest is not None and manifest.uid not in past:
                past.add(manifest.uid)
                waiting += [ref for ref in (manifest.base, manifest.rewound_from) if ref]
        for uid in self.reported:
            if uid not in past and self._is_alive(self._known[uid]):
                raise ViolationError(
                    f"checkpoint {self._known[uid].ref.to_text()} was reported, and is in nobody's past"
                )

    def needed(self) -> set[str]:
        """Return the objects that retained checkpoints and reported savepoints name."""
        chain = [step for manifest in self.retained() for step in self._chain(manifest)]
        return {key for manifest in [*chain, *self.savepoints.values()] for key in self._keys(manifest)}

    def named(self) -> set[str]:
        """Return the objects that all kept checkpoints name, and whatever lies among the savepoints."""
        return self.needed() | {key for manifest in self.saved.values() for key in self._keys(manifest)}

    def _register(self, key: str, data: bytes) -> None:
        """Learn of an entry of the register; one that is put again late changes nothing."""
        entry = Registered.decode(data)
        if entry is None or life_in(key) < len(self._doomed) or key <= max(self._registered, default=""):
            return
        self._registered[key] = entry
        if lost := entry.objects - set(self.saved):
            raise ViolationError(f"{sorted(lost)} are on the register, and not there")
        for name in [name for name in self.savepoints if not self._is_published(name)]:
            if name not in self.deleted:
                raise ViolationError(f"savepoint {name} is taken off the register, and nobody deletes it")
            del self.savepoints[name]

    def _is_published(self, name: str) -> bool:
        return self._registered[max(self._registered)].object_of(name) is not None

    def _learn_of_deletions(self, key: str, data: bytes) -> None:
        if key.startswith(TOMBSTONES):
            buried = Tombstone.decode(data, key)
            self._buried[buried.fate_key] = buried.life
        if key.startswith(f"@fates/{self._job}/") and data != b"kept":
            if self._buried.get(key, len(self._doomed)) < len(self._doomed):
                return  # a late mark of a job whose deletion has begun before
            self._doomed.append(key)
            self.saved.clear()
            self.savepoints.clear()
            self._registered.clear()

    def _is_alive(self, manifest: Manifest) -> bool:
        """Return whether no deletion has begun of the job in whose life a manifest was written."""
        return life_of(manifest.epoch) >= len(self._doomed)

    def _has_ended(self, manifest: Manifest) -> bool:
        """Return whether the end of the life in which a manifest was written is on record."""
        return f"@lives/{self._job}/{life_of(manifest.epoch):08d}" in self._store._objects

    def _check_whole(self, manifest: Manifest, what: str) -> None:
        for step in self._chain(manifest):
            self._check_named(step, what)

    def _chain(self, manifest: Manifest) -> Iterator[Manifest]:
        step: Manifest | None = manifest
        while step is not None:
            yield step
            if step.kind is ManifestKind.COMPLETE or step.base is None:
                return
            base, step = step.base, self._at(step.base)
            if step is None:
                raise ViolationError(f"the chain of {manifest.ref.to_text()} breaks off: {base.to_text()} is not there")

    def _check_named(self, manifest: Manifest, what: str) -> None:
        there = self._store._objects
        for key in self._keys(manifest):
            if key not in there:
                raise ViolationError(f"{what}: object {key} is gone")

    def _keys(self, manifest: Manifest) -> Iterator[str]:
        yield from object_keys(manifest)
        for handle in manifest.materializations:
            if handle.index_key in self._indexes:
                yield from (file.object_key for file in self._indexes[handle.index_key].files)

    def _at(self, ref: CheckpointRef) -> Manifest | None:
        return next((item for item in self._there.values() if item.ref == ref), None)


def life_in(key: str) -> int:
    """Return the life whose folder contains an object."""
    _, folder, number = key.split("/")[:3]
    return int(number) if folder == "lives" else 0


def _folder_of(key: str) -> str:
    """Return the kind of an object: the folder below that of the job, or of one of its lives."""
    parts = key.split("/")
    return parts[3] if parts[1] == "lives" else parts[1]


def _name_of(key: str) -> str:
    return key.rsplit("/", 1)[1].removesuffix(".json")
