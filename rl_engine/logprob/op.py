"""The vocab-parallel selected-token logprob op: checks a call, hands it to a backend, reports problems.

Steps of a call, on every rank of the TP group:

1. local checks of shapes, dtypes and devices; a failure is kept, not raised yet.
2. with `validate`: preflight over TP (one small all-gather): contract fingerprint, number of rows, backend
   id, numerics id, and whether a rank failed step 1, by whatever exception. All ranks raise, or none does.
   The first collective of the call.
3. the backend's forward: its own collectives, one packed exchange for the exact tiers. A rank that fails
   here (out of memory) rings the alarm, so that the others do not wait for it.
4. with `validate`: one deferred read of one flag; rows that are not good, targets that nobody owns and TP
   siblings that hold other targets or masks become errors, the same on every rank of the group.

With `validate=False` steps 2 and 4 are gone, and rows with a problem hold NaN.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from torch import Tensor
from torch.distributed import ProcessGroup

from rl_engine.contracts import LogprobContract, MeshAxis
from rl_engine.errors import AgreementError, InputError, RLEngineError
from rl_engine.logprob.inputs import MaskCache, Rows, active_rows, check_inputs, prepare_rows, replace_tiles
from rl_engine.mesh import Axis, guard, preflight
from rl_engine.numerics.words import LossTokens
from rl_engine.registry import kernel_registry

__all__ = [
    "ClosedCall",
    "LogprobBackend",
    "VocabParallelLogprobOp",
    "find_problem",
    "flatten_fields",
    "problem_flag",
]


class ClosedCall(NamedTuple):
    """What a backend returns for its rows.

    Attributes:
        logp: [n] fp32, 0 on inactive rows, differentiable.
        lse: [n] fp32, differentiable.
        entropy: [n] fp32 in nats where the contract asks for it, differentiable.
        good: [n] bool, the row's sum is in the domain (no NaN, no +inf, not all −inf).
        owned: [n] bool, the target lies in the real vocabulary.
        agree: 0-dim bool, the TP siblings hold the same targets and mask; None where that was not compared.
    """

    logp: Tensor
    lse: Tensor
    entropy: Tensor | None
    good: Tensor
    owned: Tensor
    agree: Tensor | None


class LogprobBackend(Protocol):
    """The arithmetic behind the op."""

    backend_id: str
    numerics_id: str

    def check(self, contract: LogprobContract) -> None:
        """Raise InputError where the backend computes something else than the contract asks."""
        ...

    def rows(self, rows: Rows) -> ClosedCall:
        """Forward over checked rows, differentiable in `rows.logits`."""
        ...


def problem_flag(call: ClosedCall, active: Tensor) -> Tensor:
    """0-dim bool: whether any active row has a problem or the TP siblings disagree."""
    flag = (active & ~(call.good & call.owned)).any()
    return flag if call.agree is None else flag | ~call.agree


def find_problem(
    call: ClosedCall, active: Tensor, target_ids: Tensor, contract: LogprobContract, name: str = ""
) -> RLEngineError | None:
    """What a raised :func:`problem_flag` stands for, as an error that names the row. Reads from the device.

    Returns:
        AgreementError where the ranks of the TP group hold other targets or masks, InputError where an
        active row holds a NaN,
        a +inf, nothing finite, or a target outside the real vocabulary; None where all is well.
    """
    if call.agree is not None and not bool(call.agree):
        outside = (target_ids < 0) | (target_ids >= contract.sharding.real_vocab_size)
        stray = (active & outside).nonzero()[:, 0]
        if len(stray):  # the siblings can only be told that this rank differs
            return _stray_target(int(stray[0]), len(stray), target_ids, contract)
        return AgreementError(
            "the ranks of the tp group were given different tokens, masks or per-token data for the same "
            "rows; every rank of a "
            "TP group must pass the same batch: check how the data loader shards it"
        )
    bad = cast("list[int]", (active & ~(call.good & call.owned)).nonzero()[:, 0].tolist())
    if not bad:
        return None
    row = bad[0]
    if not bool(call.owned[row]):
        return _stray_target(row, len(bad), target_ids, contract)
    others = f" ({len(bad)} such rows)" if len(bad) > 1 else ""
    whose = f"{name} logits" if name else "logits"
    return InputError(
        f"row {row}{others}: the {whose} hold a NaN or +inf, nothing but −inf, or values beyond ±1.4e6·T, "
        f"so that no "
        "log-probability exists; mask the row out, or look for the overflow in the model"
    )


def _stray_target(row: int, count: int, target_ids: Tensor, contract: LogprobContract) -> InputError:
    others = f" ({count} such rows)" if count > 1 else ""
    return InputError(
        f"row {row}{others}: target {int(target_ids[row])} lies outside the real vocabulary [0, "
        f"{contract.sharding.real_vocab_size}); mask the row "
        f"out, or give it the ignore index {contract.resolved_ignore_index} where no mask is passed"
    )


def flatten_fields(fields: dict[str, object], prefix: str = "") -> dict[str, str]:
    """Nested JSON fields as dotted names, so that a disagreement names just `objective.beta`."""
    flat: dict[str, str] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= flatten_fields(value, f"{prefix}{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat[f"{prefix}{name}"] = str(value)
    return flat


class VocabParallelLogprobOp:
    """log softmax(logits / T)[target] over a vocabulary that is sharded across a TP group.

    Equals `torch.log_softmax(full_logits[:, :real_vocab].double() / T, -1)[row, target]`, rounded once more
    than exactly necessary (docs/numerics.md, section 9), and the same bits for every way of sharding.

    Args:
        backend: The arithmetic; None picks one per call through the registry (policy "auto").

    Example:
        >>> import torch
        >>> from rl_engine.contracts import LogprobContract, ShardingSpec
        >>> contract = LogprobContract(role="train", dtype="fp32", sharding=ShardingSpec.even(6, 0, 1))
        >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, -0.5]])
        >>> logp, lse = VocabParallelLogprobOp()(logits, torch.tensor([1]), contract=contract)
        >>> round(logp.item(), 7), round(lse.item(), 7)
        (-1.6196173, 2.6196175)
    """

    def __init__(self, backend: LogprobBackend | None = None) -> None:
        self.backend = backend
        self._masks = MaskCache()

    def __call__(
        self,
        local_logits: Tensor,
        target_ids: Tensor,
        *,
        contract: LogprobContract,
        mask: Tensor | None = None,
        tp_group: ProcessGroup | None = None,
        validate: bool = True,
        num_vocab_tiles: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Selected log-probabilities and log-sum-exp of this TP group's rows.

        Collectives over `tp_group`: the preflight under `validate`, then the backend's (one packed
        all-gather for the exact tiers). None in backward.

        Args:
            local_logits: [n, V_local] bf16, fp16 or fp32, this rank's columns; never modified.
            target_ids: [n] int64 or int32, global token ids, the same on every rank of the group.
            contract: What is asked.
            mask: [n] bool, the active rows; None takes the contract's, else all rows whose target is not
                the ignore index.
            tp_group: The group that shards the vocabulary; None for a single shard.
            validate: Check agreement and values; False trusts the caller and never synchronises. The same
                on every rank.
            num_vocab_tiles: Tile count of the tiled backend, overriding the contract's.

        Returns:
            (logp, lse), or (logp, lse, entropy) where the contract asks for it: each [n] fp32, replicated
            over TP, differentiable.
            Inactive rows: logp and entropy 0, lse as computed.

        Raises:
            InputError: A tensor does not fit the contract, or under `validate` holds values without a
            log-probability.
            AgreementError: Under `validate`, ranks disagree, or another rank failed.
            UnsupportedError: No backend can serve the contract.
        """
        axis = Axis.from_group("tp", tp_group)
        error: Exception | None = None
        op, active = self, None
        try:
            contract = replace_tiles(contract, num_vocab_tiles)
            op = self.resolve(contract, local_logits)
            check_inputs(local_logits, target_ids, contract, mask, axis)
            assert op.backend is not None
            op.backend.check(contract)
            active = active_rows(target_ids, contract, mask, self._masks, validate=validate)
        except Exception as caught:  # noqa: BLE001  whatever it is, the other ranks must hear of it
            error = caught
        if validate:
            op.announce(axis, contract, local_logits, error)
        with guard(axis):
            if error is not None:
                raise error
            assert active is not None
            call = op.compute(local_logits, target_ids, contract, active, axis, validate=validate)
        if validate and bool(problem_flag(call, active)):
            found = find_problem(call, active, target_ids, contract)
            assert found is not None
            raise found
        return (call.logp, call.lse) if call.entropy is None else (call.logp, call.lse, call.entropy)

    def resolve(self, contract: LogprobContract, local_logits: Tensor) -> VocabParallelLogprobOp:
        """The op that will serve the call: itself, or the registry's choice where it has no backend.

        Raises:
            UnsupportedError: No backend can serve the contract.
        """
        if self.backend is not None:
            return self
        device = local_logits.device if isinstance(local_logits, Tensor) else None
        op: VocabParallelLogprobOp = kernel_registry.get_logprob_op(contract, "auto", device=device).op
        return op

    def announce(
        self, axis: Axis, contract: LogprobContract, local_logits: Tensor, error: Exception | None
    ) -> None:
        """Preflight over one axis: every rank returns, or every rank raises.

        Raises:
            AgreementError: Contracts, numbers of rows, backends or numerics differ, or another rank failed.
        """
        if axis.size == 1:
            return
        facts = self.identity()
        if error is None:  # a contract that failed its checks may not have these
            facts |= flatten_fields(contract.agreement_fields(MeshAxis.TP))
            # The exchange carries rows, and a transport that gets more than it expects ends the process.
            facts["num_rows"] = str(local_logits.shape[0])
        preflight(axis, fingerprint=json.dumps(facts), facts=facts, error=error)

    def identity(self) -> dict[str, str]:
        """Backend id and numerics id, which must agree between ranks."""
        if self.backend is None:
            return {"backend_id": "none", "numerics_id": "none"}
        return {"backend_id": self.backend.backend_id, "numerics_id": self.backend.numerics_id}

    def compute(
        self,
        local_logits: Tensor,
        target_ids: Tensor,
        contract: LogprobContract,
        active: Tensor,
        axis: Axis,
        *,
        validate: bool,
        data: Tensor | None = None,
        loss: Callable[[], LossTokens] | None = None,
    ) -> ClosedCall:
        """The forward over inputs that were checked; for callers that preflight and report themselves.

        `data` is a checksum of whatever else the TP siblings must hold alike (:func:`bit_checksum`); `loss`
        is asked where the backend can make the loss's gradient in the same visit to the logits.
        """
        assert self.backend is not None
        rows = prepare_rows(local_logits, target_ids, contract, active, axis, validate=validate, data=data)
        takes = getattr(self.backend, "takes_loss", None)
        if loss is not None and takes is not None and takes(rows.logits, rows.real_cols, axis):
            rows = dataclasses.replace(rows, loss=loss())
        return self.backend.rows(rows)
