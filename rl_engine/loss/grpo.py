"""The distributed GRPO loss: contract and tensors in, the global loss out, the same bits in every layout.

Steps of a call, on every rank of the TP × DP × CP mesh:

1. local checks; a failure is kept, not raised yet.
2. with `validate`: preflight over TP, DP, CP (contract, backends, numerics, failures of step 1). The first
   collective of the call on each axis: afterwards every rank has raised, or none.
3. all-reduce(SUM) over DP, then CP: rewards by bit pattern, active-token counts, who holds what
   (:mod:`rl_engine.loss.sequences`).
4. logprobs of the policy, then of the reference without gradient: one packed exchange over TP each.
5. advantages, token terms, and all-reduce(SUM) over DP, then CP, of the exact sums.
6. with `validate`: one read; a problem anywhere raises on every rank.

Backward: elementwise on each rank's own logits, no collective. A rank's logits receive the gradient of the
*global* loss; a trainer that averages gradients over DP (and CP) says so by `data_parallel_reduction="mean"`.

DP and CP ranks alike hold other tokens: the sums do not see which axis a token lies on, so one group over
both may be passed as `dp_group` with a sharding of segments, for half the collectives.

Deliberately not done: nothing is divided before the sum is complete, no collective adds floats, no rank
drops a sequence, and no token is moved: attention over CP is the model's.
"""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_engine.contracts import GRPOLossContract, KLEstimator, MeshAxis
from rl_engine.errors import InputError, RLEngineError
from rl_engine.logprob.inputs import MaskCache, active_rows, bit_checksum, check_inputs
from rl_engine.logprob.op import (
    ClosedCall,
    VocabParallelLogprobOp,
    find_problem,
    flatten_fields,
    problem_flag,
)
from rl_engine.loss.arithmetic import ExactArithmetic, LossArithmetic
from rl_engine.loss.evaluate import explain_values, policy_loss_from_logps, report_problems
from rl_engine.loss.result import GRPOLossResult, LossProvenance
from rl_engine.loss.sequences import GatheredSequences, TokenBatch, gather_sequences, token_batch
from rl_engine.mesh import Axis, Claim, guard, preflight_mesh
from rl_engine.numerics.float_mode import require_gradual_underflow
from rl_engine.numerics.words import LossTokens
from rl_engine.registry import kernel_registry

__all__ = ["DistributedGRPOLossOp", "load_exact"]


class DistributedGRPOLossOp:
    """GRPO over TP × DP × CP: ratio, clip, KL, group advantages and global normalisation.

    loss = normalise(Σ −min(r·A, clip(r)·A)) + β·normalise(Σ KL), with r = exp(logp − old) (Shao et al.,
    "DeepSeekMath", 2024, eq. 3); normalisers and asymmetric clip as in Yu et al., "DAPO", 2025, and Liu et
    al., "Understanding R1-Zero-Like Training", 2025.

    Args:
        arithmetic: The loss backend; None is the exact one.

    Example:
        >>> from rl_engine.contracts import LogprobContract, LossShardingSpec, ShardingSpec
        >>> contract = GRPOLossContract(
        ...     LogprobContract(role="train", dtype="fp32", sharding=ShardingSpec.even(8, 0, 1)),
        ...     LossShardingSpec.even(2, padded_seq_len=3, group_size=2),
        ... )
        >>> logits = torch.zeros(6, 8, requires_grad=True)
        >>> old = torch.full((6,), -2.0794415)
        >>> ids = torch.tensor([1, 2, 3, 4, 5, 6])
        >>> rewards = torch.tensor([1.0, 0.0])
        >>> result = DistributedGRPOLossOp().apply(logits, ids, old, rewards, contract=contract)
        >>> result.advantages.tolist(), int(result.num_active_tokens)
        ([1.0, -1.0], 6)
    """

    def __init__(self, arithmetic: LossArithmetic | None = None) -> None:
        self.arithmetic: LossArithmetic = ExactArithmetic() if arithmetic is None else arithmetic
        self._masks = MaskCache()

    def apply(
        self,
        policy_local_logits: Tensor,
        action_ids: Tensor,
        old_logps: Tensor,
        rewards: Tensor | None = None,
        *,
        contract: GRPOLossContract,
        mask: Tensor | None = None,
        ref_local_logits: Tensor | None = None,
        ref_logps: Tensor | None = None,
        advantages: Tensor | None = None,
        tp_group: ProcessGroup | None = None,
        dp_group: ProcessGroup | None = None,
        cp_group: ProcessGroup | None = None,
        validate: bool = True,
        logprob_backend: str = "auto",
    ) -> GRPOLossResult:
        """Evaluate the loss over the whole mesh.

        Collectives with `validate`: a preflight over each axis, all-reduces over DP and CP, TP exchange
        (two with reference logits), all-reduces over DP and CP. Without: the same less the preflights. On
        an axis of one rank: none.

        Args:
            policy_local_logits: [N, V_local] this rank's token slots in the order of its sharding, this
                rank's columns.
            action_ids: [N] int64 or int32 sampled tokens, aligned with the logits that predict them.
            old_logps: [N] fp32 log-probs at sampling; constants.
            rewards: [S_local] rewards of this rank's sequences, in the order of
                `LossShardingSpec.local_sequences`, cast to fp32; constants. CP ranks that share a sequence
                all pass its reward.
            contract: What is asked.
            mask: [N] bool active tokens; None takes the contract's, else all whose id is not the ignore
                index.
            ref_local_logits: [N, V_local] reference logits; needed for β > 0 unless `ref_logps` is given.
            ref_logps: [N] fp32 reference log-probs, instead of logits.
            advantages: [S_local] or [N] fp32, instead of rewards.
            tp_group: Ranks that share the sequences and split the vocabulary.
            dp_group: Ranks that hold other sequences.
            cp_group: Ranks that hold other tokens of the same sequences.
            validate: Check agreement and values; False trusts the caller and never synchronises. The same
                on every rank.
            logprob_backend: Registry policy or id for the logprobs.

        Returns:
            The result, the same on every rank.

        Raises:
            InputError: A tensor does not fit the contract or, under `validate`, holds a value without
            meaning.
            AgreementError: Under `validate`, ranks disagree or another rank failed.
            UnsupportedError: No backend can serve the contract.
        """
        tp, dp = Axis.from_group("tp", tp_group), Axis.from_group("dp", dp_group)
        cp = Axis.from_group("cp", cp_group)
        error: Exception | None = None
        logprob_op = VocabParallelLogprobOp()
        active = torch.empty(0)
        try:
            if not isinstance(contract, GRPOLossContract):
                raise InputError(f"contract is {type(contract).__name__}, expected GRPOLossContract")
            logits_device = policy_local_logits.device if isinstance(policy_local_logits, Tensor) else None
            logprob_op = kernel_registry.get_logprob_op(
                contract.logprob, logprob_backend, device=logits_device
            ).op
            check_inputs(policy_local_logits, action_ids, contract.logprob, mask, tp)
            self._check(
                contract,
                policy_local_logits,
                old_logps,
                rewards,
                advantages,
                ref_local_logits,
                ref_logps,
                dp,
                cp,
            )
            active = active_rows(action_ids, contract.logprob, mask, self._masks, validate=validate)
        except Exception as caught:  # noqa: BLE001  whatever it is, the other ranks must hear of it
            error = caught
        if validate:
            given = {
                "reference logits": str(ref_local_logits is not None),
                "reference logps": str(ref_logps is not None),
                "rewards": str(rewards is not None),
            }
            self._announce((tp, dp, cp), contract, logprob_op, given, error)

        with guard(tp, dp, cp):
            if error is not None:
                raise error
            sharding = contract.sharding
            device = policy_local_logits.device
            batch = token_batch(sharding, old_logps.detach(), active)
            own_rewards = None if rewards is None else rewards.detach().to(device).float()
            own_advantages = None if advantages is None else per_token(advantages, batch)
            ref = None if ref_logps is None else ref_logps.detach()
            gathered = gather_sequences(own_rewards, batch, (dp, cp))
            calls = self._logprobs(
                policy_local_logits,
                ref_local_logits,
                action_ids,
                batch,
                own_rewards,
                own_advantages,
                ref,
                contract,
                logprob_op,
                tp,
                validate,
                gathered,
                math.prod(axis.size for axis in (dp, cp)),
            )
            if len(calls) == 2:
                ref = calls[1].logp
            flags = [problem_flag(call, active) for call in calls]
            evaluated = policy_loss_from_logps(
                calls[0].logp,
                batch,
                gathered,
                own_advantages,
                ref,
                torch.stack(flags).any(),
                boundaries=sharding.group_boundaries,
                objective=contract.objective,
                reduction=contract.reduction,
                arithmetic=self.arithmetic,
                provenance=self._provenance(contract, logprob_op, (tp, dp, cp), active, rewards is not None),
                axes=(dp, cp),
            )

        def explain_local() -> RLEngineError | None:
            # What this rank brought comes first: its siblings can only be told that it differs.
            brought = [
                ("old_logps", batch.old),
                ("ref_logps", None if ref_logps is None else ref),
                ("advantages", evaluated.token_advantages),
            ]
            found: RLEngineError | None = explain_values(batch, brought)
            if found is not None:
                return found
            for name, call in zip(("policy", "reference"), calls, strict=False):
                found = find_problem(call, active, action_ids, contract.logprob, name)
                if found is not None:
                    return found
            computed = [
                ("reference logps", ref),
                ("policy logps", calls[0].logp.detach()),
                ("the surrogate, ratio × advantage,", evaluated.surrogate),
            ]
            return explain_values(batch, computed)

        report_problems(
            evaluated,
            gathered,
            explain_local,
            reduction=contract.reduction,
            validate=validate,
            axes=(tp, dp, cp),
        )
        return evaluated.result

    def _logprobs(
        self,
        policy_logits: Tensor,
        ref_logits: Tensor | None,
        action_ids: Tensor,
        batch: TokenBatch,
        rewards: Tensor | None,
        advantages: Tensor | None,
        ref: Tensor | None,
        contract: GRPOLossContract,
        op: VocabParallelLogprobOp,
        tp: Axis,
        validate: bool,
        gathered: GatheredSequences,
        num_parts: int,
    ) -> list[ClosedCall]:
        """The policy's call, and the reference's where logits are given.

        The reference comes first: its log-probs are part of what the policy's call may use to make the
        gradient of the loss in the same visit to the logits.
        """
        data = None
        if validate and tp.size > 1:
            per_row = [v for v in (batch.old, ref, advantages) if v is not None]
            masked = [torch.where(batch.active, v, 0.0) for v in per_row]
            data = bit_checksum(torch.cat(masked if rewards is None else [*masked, rewards]))
        reference: list[ClosedCall] = []
        if ref_logits is not None:
            with torch.no_grad():
                reference = [
                    op.compute(ref_logits, action_ids, contract.logprob, batch.active, tp, validate=validate)
                ]

        def loss_tokens() -> LossTokens:
            known = advantages
            if known is None:
                spec = contract.objective.advantage
                boundaries = contract.sharding.group_boundaries
                known = self.arithmetic.group_advantages(gathered.rewards, boundaries, spec)[batch.sequence]
            counts = gathered.active_tokens
            weights = self.arithmetic.token_weights(counts, contract.reduction, num_parts)
            return LossTokens(
                old=batch.old.contiguous(),
                advantage=known.contiguous(),
                ref=reference[0].logp if reference else None if ref is None else ref.contiguous(),
                active=batch.active.contiguous(),
                weight=weights[batch.sequence],
                low=1.0 - contract.objective.clip.clip_eps_low,
                high=1.0 + contract.objective.clip.clip_eps_high,
                guard=contract.objective.log_ratio_guard,
                beta=contract.objective.beta,
                k3=contract.objective.kl_estimator is KLEstimator.K3_UNBIASED,
            )

        exact = isinstance(self.arithmetic, ExactArithmetic)
        policy = op.compute(
            policy_logits,
            action_ids,
            contract.logprob,
            batch.active,
            tp,
            validate=validate,
            data=data,
            loss=loss_tokens if exact else None,
        )
        return [policy, *reference]

    def _check(
        self,
        contract: GRPOLossContract,
        logits: Tensor,
        old_logps: Tensor,
        rewards: Tensor | None,
        advantages: Tensor | None,
        ref_logits: Tensor | None,
        ref_logps: Tensor | None,
        dp: Axis,
        cp: Axis,
    ) -> None:
        sharding = contract.sharding
        n = logits.shape[0]
        if n != sharding.num_local_tokens:
            slots = f"{sharding.num_local_sequences} sequences × {sharding.padded_seq_len} tokens"
            if not sharding.is_contiguous:
                slots = f"segments of {sharding.num_local_sequences} sequences, together"
            equals = "=" if sharding.is_contiguous else "of"
            raise InputError(
                f"logits have {n} rows, the contract gives DP rank {sharding.dp_rank} {slots} {equals} "
                f"{sharding.num_local_tokens}"
            )
        for axis, rank, size in (
            (dp, sharding.dp_rank, sharding.dp_world_size),
            (cp, sharding.cp_rank, sharding.cp_world_size),
        ):
            if axis.size != size or axis.rank != rank:
                raise InputError(
                    f"the contract is for {axis.name.upper()} rank {rank} of {size}, the call has rank "
                    f"{axis.rank} of {axis.size}; pass {axis.name}_group=, or build the sharding from that "
                    f"group"
                )
        check_tokens(n, logits.device, old_logps=old_logps, ref_logps=ref_logps)
        check_sequences(n, sharding.num_local_sequences, rewards, advantages)
        if ref_logits is not None and ref_logps is not None:
            raise InputError("both ref_local_logits and ref_logps were given; pass one of them")
        if ref_logits is not None and (ref_logits.shape != logits.shape or ref_logits.dtype != logits.dtype):
            raise InputError(
                f"ref_local_logits are {list(ref_logits.shape)} {ref_logits.dtype}, expected "
                f"{list(logits.shape)} {logits.dtype} like "
                "the policy's"
            )
        if contract.objective.beta > 0 and ref_logits is None and ref_logps is None:
            raise InputError(
                f"beta is {contract.objective.beta} and no reference was given; pass ref_local_logits= or "
                f"ref_logps=, or beta=0"
            )

    def _announce(
        self,
        axes: tuple[Axis, Axis, Axis],
        contract: GRPOLossContract,
        logprob_op: VocabParallelLogprobOp,
        given: dict[str, str],
        error: Exception | None,
    ) -> None:
        if all(axis.size == 1 for axis in axes):
            return
        loss = {
            "loss_backend": self.arithmetic.backend_id,
            "loss_numerics_id": self.arithmetic.numerics_id,
        }
        shared = logprob_op.identity() | loss | given
        on_tp, on_mesh = dict(shared), dict(shared)
        if isinstance(contract, GRPOLossContract):
            on_tp |= flatten_fields(contract.agreement_fields(MeshAxis.TP))
            on_mesh |= flatten_fields(contract.agreement_fields(None))
        claims = [
            Claim(axis=axis, fingerprint=json.dumps(facts), facts=facts)
            for axis, facts in zip(axes, (on_tp, on_mesh, on_mesh), strict=True)
        ]
        preflight_mesh(claims, error=error)

    def _provenance(
        self,
        contract: GRPOLossContract,
        op: VocabParallelLogprobOp,
        axes: tuple[Axis, Axis, Axis],
        active: Tensor,
        from_rewards: bool,
    ) -> LossProvenance:
        tp, dp, cp = axes
        identity = op.identity()
        exact = self.arithmetic.numerics_id == identity["numerics_id"]
        return LossProvenance(
            loss_backend=self.arithmetic.backend_id,
            logprob_backend=identity["backend_id"],
            numerics_id=self.arithmetic.numerics_id if exact else identity["numerics_id"],
            tp_world_size=tp.size,
            dp_world_size=dp.size,
            contract=contract,
            advantage=contract.objective.advantage if from_rewards else None,
            active_mask=active.clone(),
            cp_world_size=cp.size,
        )


def check_tokens(n: int, device: torch.device, **tensors: Tensor | None) -> None:
    """Hold per-token fp32 tensors against the number of tokens; `ref_logps` alone may be None.

    Raises:
        InputError: wrong shape, dtype or device, or a CPU that flushes subnormals.
    """
    require_gradual_underflow(device)
    for name, tensor in tensors.items():
        if tensor is None and name == "ref_logps":
            continue
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} is {type(tensor).__name__}, expected a torch tensor")
        if tensor.shape != (n,):
            raise InputError(f"{name} must be [{n}], one per token, got {list(tensor.shape)}")
        if tensor.dtype is not torch.float32:
            raise InputError(f"{name} is {tensor.dtype}, expected torch.float32; use .float()")
        if tensor.device != device:
            raise InputError(f"{name} is on {tensor.device}, the rest on {device}; move it there")


def check_sequences(n: int, num_local: int, rewards: Tensor | None, advantages: Tensor | None) -> None:
    """Exactly one of rewards [S_local] and advantages ([S_local] or [N]).

    Raises:
        InputError: none, both, or a wrong shape or dtype.
    """
    if (rewards is None) == (advantages is None):
        got = "neither" if rewards is None else "both"
        raise InputError(f"{got} of rewards and advantages given; pass exactly one of them")
    name, values = ("rewards", rewards) if rewards is not None else ("advantages", advantages)
    if not isinstance(values, Tensor):
        raise InputError(f"{name} is {type(values).__name__}, expected a torch tensor")
    shapes = [(num_local,)] if rewards is not None else [(num_local,), (n,)]
    if tuple(values.shape) not in shapes:
        expected = " or ".join(f"[{s[0]}]" for s in shapes)
        raise InputError(f"{name} must be {expected} (one per local sequence), got {list(values.shape)}")
    if values.is_complex() or values.dtype is torch.bool:
        raise InputError(f"{name} is {values.dtype}, expected a real number per sequence; use .float()")


def per_token(advantages: Tensor, batch: TokenBatch) -> Tensor:
    """[N] fp32 constants from checked advantages, [S_local] or [N]."""
    values = advantages.detach().to(batch.active.device).float()
    if values.shape == batch.sequence.shape:
        return values
    return batch.spread(values)


def load_exact() -> DistributedGRPOLossOp:
    """The loss on exact sums."""
    return DistributedGRPOLossOp(ExactArithmetic())
