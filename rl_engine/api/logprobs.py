"""Log-probs of chosen tokens, with the contract built inside.

Shapes: B sequences of this rank, T token slots, V_local columns of this rank's vocabulary shard, N = B·T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_engine.api.shapes import fail_together, flat_mask, flatten_rows, logprob_contract
from rl_engine.contracts import DEFAULT_IGNORE_INDEX, LogitsDtype
from rl_engine.errors import InputError
from rl_engine.logprob.op import VocabParallelLogprobOp
from rl_engine.mesh import Axis

__all__ = ["next_token_targets", "selected_logprobs"]


def next_token_targets(input_ids: Tensor, completion_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Targets and mask for the logits of a causal model, where position t predicts token t + 1.

    The ids and the mask, one place to the left: the mask follows the predicted token, not the token that is
    read. The last position predicts nothing: its target is −100 and it is inactive, so that the model's
    logits are passed whole. (A slice `logits[:, :-1]` works too, with `targets[:, :-1]` and so on, and costs
    a copy of the logits.)

    Args:
        input_ids: [B, T] int64 prompt and completion.
        completion_mask: [B, T] 0/1, 1 on the tokens of `input_ids` that were sampled.

    Returns:
        ([B, T] int64 targets, [B, T] bool mask).

    Raises:
        InputError: The shapes differ, there are fewer than two tokens, or the mask holds something else than
            0 and 1.

    Example:
        >>> ids = torch.tensor([[10, 11, 12, 13]])
        >>> targets, mask = next_token_targets(ids, torch.tensor([[0, 0, 1, 1]]))
        >>> targets.tolist(), mask.tolist()
        ([[11, 12, 13, -100]], [[False, True, True, False]])
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise InputError(f"input_ids is {got}, expected a torch.int64 tensor [B, T]; use .long()")
    if not isinstance(completion_mask, Tensor):
        got = type(completion_mask).__name__
        raise InputError(f"completion_mask is {got}, expected a tensor [B, T] of 0 and 1")
    if input_ids.shape != completion_mask.shape or input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise InputError(
            f"input_ids and completion_mask must both be [B, T] with T ≥ 2, got {list(input_ids.shape)} and "
            f"{list(completion_mask.shape)}"
        )
    pad = torch.nn.functional.pad
    targets = pad(input_ids[:, 1:], (0, 1), value=DEFAULT_IGNORE_INDEX)
    active = flat_mask(completion_mask, input_ids, validate=True).view(input_ids.shape)
    return targets, pad(active[:, 1:], (0, 1), value=False)


def selected_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    with_entropy: bool = False,
    validate: bool = True,
) -> Any:
    """Log-probabilities of the chosen tokens, the same bits for every sharding of the vocabulary.

    Equals `torch.log_softmax(logits / temperature, -1).gather(-1, targets)`, with 0 where inactive, without
    the [N, V] copies. Collectives over `tp_group`: a preflight under `validate`, one packed all-gather; none
    in backward.

    Args:
        logits: [B, T, V_local] or [N, V_local] bf16, fp16 or fp32; never modified.
        targets: [B, T] or [N] token ids, aligned with the logits.
        mask: like `targets`, 0/1, the active tokens; None: all.
        temperature: In [0.01, 100].
        ignore_index: Tokens with this target are inactive too.
        vocab_size: Real columns over all ranks; what lies behind is padding. None: all.
        tp_group: Ranks that split the vocabulary into equal shards; use the op with a contract for unequal
            ones.
        with_entropy: Also return the entropy of each row in nats.
        validate: Check agreement between ranks and values. The same on every rank.

    Returns:
        fp32 log-probs like `targets`, or (log-probs, entropy); differentiable.

    Raises:
        InputError: Shapes, dtypes or values that have no log-probability.
        AgreementError: Ranks of `tp_group` disagree, or one of them failed.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, -0.5]])
        >>> round(selected_logprobs(logits, torch.tensor([1])).item(), 6)
        -1.619617
    """
    tp = Axis.from_group("tp", tp_group)
    try:
        flat, ids, _ = flatten_rows(logits, targets)
        active = None
        if mask is not None:
            active = flat_mask(mask, targets, validate=validate) & (ids != ignore_index)
        contract = logprob_contract(
            LogitsDtype.parse(logits.dtype),
            flat.shape[1],
            tp.rank,
            tp.size,
            vocab_size,
            temperature,
            ignore_index,
            with_entropy,
        )
    except Exception as caught:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        fail_together(caught, tp, validate=validate)
    out = VocabParallelLogprobOp()(
        flat, ids, contract=contract, mask=active, tp_group=tp_group, validate=validate
    )
    logp = out[0].view(targets.shape)
    return (logp, out[2].view(targets.shape)) if with_entropy else logp
