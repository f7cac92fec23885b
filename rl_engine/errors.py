"""The error tree: every message holds the actual value, what was expected, and what to type.

    RLEngineError
    ├── ContractError(ValueError)        a request that cannot mean anything
    │   ├── LogprobContractError
    │   └── LossContractError
    ├── InputError(ValueError)           tensors that do not fit the contract they came with
    ├── UnsupportedError(RuntimeError)   a sound request that no backend can serve; carries `.reasons`
    ├── AgreementError(RuntimeError)     ranks of one mesh axis disagree, or one of them failed
    └── DeterminismError(RuntimeError)   two results that must be the same bits are not

Catch `RLEngineError` for all of them, or the built-in base named in brackets where code must not know this
package.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "AgreementError",
    "ContractError",
    "DeterminismError",
    "InputError",
    "LogprobContractError",
    "LossContractError",
    "RLEngineError",
    "UnsupportedError",
]


class RLEngineError(Exception):
    """The root of everything that this package raises on purpose."""


class ContractError(RLEngineError, ValueError):
    """A field of a contract, or a dispatch policy, breaks a rule of its own or of its neighbours."""


class LogprobContractError(ContractError):
    """A rule of the logprob contract, of its parts or of a logprob backend's capability is broken."""


class LossContractError(ContractError):
    """A rule of the loss contract, of its parts or of a loss backend's capability is broken."""


class InputError(RLEngineError, ValueError):
    """A tensor handed to an op does not fit the contract: shape, dtype, device or value."""


class UnsupportedError(RLEngineError, RuntimeError):
    """No registered backend can serve the contract under the caller's policy.

    Attributes:
        reasons: For each candidate's backend id, every reason against it, in the order of priority.

    Example:
        >>> error = UnsupportedError("nobody can", reasons={"tiled_torch": ["tp_world_size 3", "dtype fp16"]})
        >>> error.reasons["tiled_torch"]
        ('tp_world_size 3', 'dtype fp16')
    """

    reasons: dict[str, tuple[str, ...]]

    def __init__(
        self, message: str, reasons: Mapping[str, list[str] | tuple[str, ...]] | None = None
    ) -> None:
        super().__init__(message)
        self.reasons = {backend: tuple(texts) for backend, texts in (reasons or {}).items()}


class AgreementError(RLEngineError, RuntimeError):
    """The ranks of a mesh axis disagree on what they are about to do, or one of them failed its checks."""


class DeterminismError(RLEngineError, RuntimeError):
    """Two results that were declared to be the same bits are not."""
