"""Jobs of queries by their names."""

from __future__ import annotations

import pytest

from backend_client.settings import BackendSettings
from backend_client.spark.api.query_jobs import ProgressReports, QueryJobs
from storage.errors import InvalidInputError


def test_name_of_a_query_that_no_job_can_have_is_named() -> None:
    """Spark's names of queries may have blanks; the error says that it is the query's name that has to change."""
    jobs = QueryJobs(BackendSettings.of("file:///state", "orders", {}), ProgressReports())
    per_query = jobs.one_per_query()

    assert per_query.settings_for("totals").job == "orders.totals"
    with pytest.raises(InvalidInputError, match=r"the query's name 'all totals' is part .* Choose another queryName"):
        per_query.settings_for("all totals")
    assert jobs.settings_for("all totals").job == "orders"
