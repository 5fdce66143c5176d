"""
A real service that is killed at random moments; the short form of ``make chaos-service``.

A failure means that acknowledged data are lost or doubled, or that a kill leaves garbage for ever. The printed seed
repeats the script: ``python -m loadtest.chaos_service --seed …``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.chaos.verify import Findings, verify
from loadtest.chaos_service import ChaosRun, run
from storage.open import open_store
from tests.support.seeds import chosen_seed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

KILLS = 16


def test_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    """I3, I5, I8, I12: each acknowledged set is restored once, no checkpoint names a lost one, no orphan remains."""
    seed = chosen_seed()
    print(f"seed {seed}")

    figures, outcomes = run(KILLS, seed, tmp_path)

    assert [outcome.failures + outcome.findings.lost + outcome.findings.different for outcome in outcomes] == [[], []]
    assert [figure.name for figure in figures if figure.holds is False] == []


def test_planted_loss_is_found(tmp_path: Path) -> None:
    """The comparison finds a missing object, and a checkpoint other than the acknowledged one."""
    chaos = ChaosRun(tmp_path.as_uri(), {}, 0, "planted")
    chaos.run()
    assert chaos.outcome.failures + chaos.outcome.findings.lost + chaos.outcome.findings.different == []

    store = open_store(chaos.storage)
    first, second, *_ = chaos.drivers
    store.delete([next(iter(store.list(f"{first.job}/segments/"))).key])
    store.delete([list(store.list(f"{second.job}/checkpoints/"))[-1].key])
    found = Findings()
    verify(chaos.storage, store, first, found)
    assert found.lost
    verify(chaos.storage, store, second, found)
    assert found.different
