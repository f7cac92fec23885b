"""The error tree: who is whose kind, and what survives a trip between processes."""

from __future__ import annotations

import pickle

import pytest

from rl_engine import errors

KINDS = {
    "ContractError": ValueError,
    "LogprobContractError": errors.ContractError,
    "LossContractError": errors.ContractError,
    "InputError": ValueError,
    "UnsupportedError": RuntimeError,
    "AgreementError": RuntimeError,
    "DeterminismError": RuntimeError,
}


@pytest.mark.parametrize("name", KINDS)
def test_tree(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.RLEngineError)
    assert issubclass(error, KINDS[name])


def test_the_table_is_complete() -> None:
    assert {*KINDS, "RLEngineError"} == set(errors.__all__)


@pytest.mark.parametrize("name", KINDS)
def test_pickling(name: str) -> None:
    copy = pickle.loads(pickle.dumps(getattr(errors, name)("what, what else, what to type")))
    assert type(copy).__name__ == name
    assert str(copy) == "what, what else, what to type"


def test_reasons_survive_pickling() -> None:
    error = errors.UnsupportedError("nobody", reasons={"a": ["one", "two"], "b": ()})
    copy = pickle.loads(pickle.dumps(error))
    assert copy.reasons == {"a": ("one", "two"), "b": ()}
    assert errors.UnsupportedError("nobody").reasons == {}
