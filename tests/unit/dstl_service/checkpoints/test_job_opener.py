"""Taking a job over: only the service of the driver's own storage does it."""

from __future__ import annotations

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
