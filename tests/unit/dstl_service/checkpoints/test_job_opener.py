"""Taking a job over: only the service of the driver's own storage does it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from storage.open import open_store
from tests.unit.dstl_service.http_life import service


def test_service_of_another_storage_refuses(tmp_path: Path) -> None:
    """State must not go where nobody looks for it; nothing is written, and a running driver is not fenced."""
    own, other = (tmp_path / "own").as_uri(), (tmp_path / "other").as_uri()
    with service(open_store(own)) as life:
        answer = life.client.post(f"{life.path}/epochs", json={"owner": "test", "storage": other})

        assert answer.status_code == 400
        assert own in answer.text
        assert other in answer.text
        assert "DSTL_SERVICE" in answer.text
        assert list(open_store(own).list("job/")) == []


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/../own", ""])
def test_other_forms_of_its_storage_are_accepted(tmp_path: Path, form: str) -> None:
    """A URL may be written in several ways, and older clients send none."""
    url = (tmp_path / "own").as_uri()
    with service(open_store(url)) as life:
        answer = life.client.post(f"{life.path}/epochs", json={"owner": "test", "storage": form.format(url)})

        assert answer.status_code == 200, answer.text


def test_job_can_start_over_beside_a_living_service(tmp_path: Path) -> None:
    """Who deletes the storage of a stopped job by hand begins anew, although its sidecar still knows later epochs."""
    url = (tmp_path / "state").as_uri()
    with service(open_store(url)) as life:
        opened = [life.client.post(f"{life.path}/epochs", json={"owner": "test"}).json() for _ in range(3)]
        shutil.rmtree(tmp_path / "state")
        answer = life.client.post(f"{life.path}/epochs", json={"owner": "test"})

        assert [job["epoch"] for job in opened] == [1, 2, 3]
        assert answer.status_code == 200, answer.text
        assert answer.json()["epoch"] == 1
        assert answer.json()["job_uid"] != opened[0]["job_uid"]
        begun = life.client.post(f"{life.path}/checkpoints/0/begin", json={"epoch": 1})
        assert begun.status_code == 200, begun.text
