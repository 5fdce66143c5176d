"""The error hierarchy: codes, transfer between processes and over HTTP."""

from __future__ import annotations

import json
import pickle

import pytest

from storage import errors
from storage.errors import DstlError, ErrorKind, InternalError, UnavailableError, error_from_dict

# Codes are an interface: this table may only grow.
TREE = {
    "InvalidInputError": "invalid_input",
    "UnauthorizedError": "unauthorized",
    "NotFoundError": "not_found",
    "ConflictError": "conflict",
    "FencedError": "fenced",
    "UnavailableError": "unavailable",
    "OverloadedError": "overloaded",
    "CorruptDataError": "corrupt_data",
    "ClosedError": "closed",
    "LostChangesError": "lost_changes",
    "InternalError": "internal",
}


def make(name: str) -> DstlError:
    """Return an error of the class of this name, with context."""
    error_class: type[DstlError] = getattr(errors, name)
    return error_class("what failed", key="a/b", attempt=2, parts=[1, 2])


def test_tree_has_exactly_these_codes() -> None:
    """Every kind has one class, and every class has the kind that its users rely on."""
    assert {name: make(name).kind.value for name in TREE} == TREE
    assert {kind.value for kind in ErrorKind} == set(TREE.values())
    assert {subclass.__name__ for subclass in DstlError.__subclasses__()} == set(TREE)


@pytest.mark.parametrize(("name", "builtin"), [("InvalidInputError", ValueError), ("NotFoundError", LookupError)])
def test_some_errors_are_builtin_ones(name: str, builtin: type[Exception]) -> None:
    """Code that does not know this project can catch these errors."""
    assert isinstance(make(name), builtin)


@pytest.mark.parametrize("name", TREE)
def test_error_survives_pickling(name: str) -> None:
    """Spark pickles errors between processes: class, message and context survive."""
    error = make(name)
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (found.message, found.context, str(found)) == (error.message, error.context, str(error))


@pytest.mark.parametrize("name", TREE)
def test_error_survives_json(name: str) -> None:
    """A service's error is raised as the same error by the client."""
    error = make(name)
    found = error_from_dict(json.loads(json.dumps(error.to_dict())))
    assert type(found) is type(error)
    assert found.to_dict() == error.to_dict()


@pytest.mark.parametrize("data", [{}, {"kind": "of the future", "message": "m"}, {"kind": [], "context": 3}])
def test_unknown_kind_becomes_internal(data: dict[str, object]) -> None:
    """A newer or broken peer causes a project error, never another exception."""
    assert type(error_from_dict(data)) is InternalError


def test_text_names_the_context() -> None:
    """str() is enough for a log line."""
    assert str(UnavailableError("store is away", key="a/b")) == "store is away (key='a/b')"
    assert str(UnavailableError("store is away")) == "store is away"
