"""Names of a writer's options: slips are told, and those of sinks are left to them."""

from __future__ import annotations

import pytest

from backend_client.spark.output.writer_options import check_beside_function, check_beside_sink, check_names, is_own
from storage.errors import InvalidInputError


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gaurantee", "guarantee"),
        ("Guarantees", "guarantee"),
        ("abandonOutputs", "abandonOutput"),
        ("abandon_output", "abandonOutput"),
        ("checkpointLocaton", "checkpointLocation"),
        ("consumer.group", "consumerGroup"),
    ],
)
def test_slips_are_told(name: str, meant: str) -> None:
    """Spark's sinks leave unknown options out: output would be at least once without a word."""
    with pytest.raises(InvalidInputError, match=f"no option '{name}'; it looks like '{meant}'"):
        check_names({name: "x"})


def test_options_of_sinks_are_left_to_them() -> None:
    """Whatever their names are, unless they are slips."""
    check_names(["GUARANTEE", "consumerGroup.bootstrap.servers", "checkpointlocation"])
    check_names(["path", "topic", "kafka.group.id", "compression", "truncate", "mergeSchema", "checkpointInterval"])
    assert is_own("AbandonOutput")
    assert not is_own("path")


def test_beside_a_sink_nothing_is_left_out() -> None:
    """A sink has arguments of its own."""
    check_beside_sink(["checkpointLocation", "consumerGroup", "Guarantee"], ())
    with pytest.raises(InvalidInputError, match="has no option path, slots: options of the system are arguments"):
        check_beside_sink(["slots", "path", "guarantee"], ())
    with pytest.raises(InvalidInputError, match="has no partitionBy"):
        check_beside_sink([], ("day",))


def test_beside_a_function_nothing_is_left_out() -> None:
    """The function alone writes the batches."""
    check_beside_function(None, None, ())
    for given, told in (
        (("json", None, ()), "format"),
        ((None, "/x", ()), "a path"),
        ((None, None, ("k",)), "partitionBy"),
    ):
        with pytest.raises(InvalidInputError, match=f"has a function, and {told} besides"):
            check_beside_function(*given)
