"""Rollouts: sampled completions with the log-probs under which they were sampled.

Letters: G groups, K samples a group, B = G·K sequences, P padded prompt, C padded completion, T = P + C.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from rl_engine.cli.demo.task import grade
from rl_engine.errors import InputError
from rl_engine.verify.batch import LossBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_engine.cli.demo.policy import Policy
    from rl_engine.cli.demo.task import Question

__all__ = ["Rollouts", "sample_rollouts"]


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """A batch of graded completions; prompts are padded on the left, completions on the right.

    Attributes:
        input_ids: [B, T] int64, prompt then completion.
        attention_mask: [B, T] int64, 0 on padding.
        completion_mask: [B, C] bool, True on sampled tokens, the one that ended the completion included.
        old_logps: [B, C] fp32, log-prob of each sampled token when it was sampled, 0 where the mask is False.
        rewards: [B] fp32.
        group_boundaries: [G + 1] int64, CSR offsets of the groups over the sequences.
        prompts: One text a group.
        completions: One text a sequence.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    old_logps: Tensor
    rewards: Tensor
    group_boundaries: Tensor
    prompts: tuple[str, ...]
    completions: tuple[str, ...]

    @property
    def completion_ids(self) -> Tensor:
        """Return the sampled tokens, [B, C] int64."""
        return self.input_ids[:, -self.completion_mask.shape[1] :]

    @property
    def offsets(self) -> list[int]:
        """Return the group boundaries as integers."""
        return cast("list[int]", self.group_boundaries.tolist())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, as they are saved."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "completion_mask": self.completion_mask,
            "old_logps": self.old_logps,
            "rewards": self.rewards,
            "group_boundaries": self.group_boundaries,
        }

    def records(self) -> list[dict[str, object]]:
        """Return one record a sequence: group, prompt, completion, reward, number of tokens."""
        bounds = self.offsets
        lengths = cast("list[int]", self.completion_mask.sum(-1).tolist())
        rewards = cast("list[float]", self.rewards.tolist())
        return [
            {
                "group": group,
                "prompt": self.prompts[group],
                "completion": self.completions[index],
                "reward": round(rewards[index], 6),
                "tokens": lengths[index],
            }
            for group in range(len(bounds) - 1)
            for index in range(bounds[group], bounds[group + 1])
        ]

    def logits(self, policy: Policy) -> Tensor:
        """Return a policy's fp32 logits [B, C, V] that predict the completions.

        Groups must have one size; every prompt is read once.
        """
        length = self.completion_mask.shape[1]
        prompts = self.group_boundaries[:-1]
        return policy.completion_logits(
            self.input_ids[prompts, :-length],
            self.attention_mask[prompts, :-length],
            self.completion_ids,
            self.completion_mask,
        )

    def save(self, path: Path) -> None:
        """Write the tensors, and the texts as metadata, to a safetensors file."""
        metadata = {"prompts": json.dumps(self.prompts), "completions": json.dumps(self.completions)}
        safetensors.torch.save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors().items()}, path, metadata
        )

    def loss_batch(self, logits: Tensor) -> LossBatch:
        """Return the batch that `rl-engine verify` reads.

        Args:
            logits: Logits [B, C, V] that predict the completions.
        """
        return LossBatch(
            logits=logits,
            targets=self.completion_ids.contiguous(),
            old_logps=self.old_logps,
            rewards=self.rewards,
            mask=self.completion_mask,
            group_boundaries=tuple(self.offsets),
            vocab_size=logits.shape[-1],
        )

    @classmethod
    def load(cls, path: Path) -> Rollouts:
        """Read what `save` wrote.

        Raises:
            InputError: The file lacks a tensor or a text.
        """
        with cast("Any", safetensors).safe_open(path, framework="pt") as file:
            metadata = cast("dict[str, str]", file.metadata() or {})
            names = set(cast("list[str]", file.keys()))
            wanted = {field.name for field in fields(cls)}
            missing = wanted - names - metadata.keys()
            if missing:
                raise InputError(
                    f"{path} lacks {', '.join(sorted(missing))}; expected a file of `rl-engine demo`"
                )
            values: dict[str, Any] = {name: file.get_tensor(name) for name in wanted & names}
            values |= {name: tuple(json.loads(metadata[name])) for name in wanted & metadata.keys()}
            return cls(**values)

    def save_jsonl(self, path: Path) -> None:
        """Write `records()`, one JSON object a line."""
        lines = (json.dumps(record, ensure_ascii=False) for record in self.records())
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@torch.no_grad()
def sample_rollouts(
    policy: Policy,
    questions: Sequence[Question],
    *,
    samples_per_question: int,
    max_tokens: int,
    seed: int,
) -> Rollouts:
    """Sample completions at temperature 1 and grade them.

    Args:
        policy: The model to sample from.
        questions: G questions.
        samples_per_question: K completions for each.
        max_tokens: C, the most tokens of a completion.
        seed: Seed of the sampling; the same seed and weights on the same machine give the same tokens.

    Returns:
        The rollouts, groups in the order of the questions. Log-probs are log_softmax of the fp32 logits when
        the token was sampled.
    """
    prompts = [policy.chat_ids(question.text) for question in questions for _ in range(samples_per_question)]
    prompt_ids, prompt_mask = _left_padded(prompts, policy.end_id)
    tokens, logps = _generate(policy, prompt_ids, prompt_mask, max_tokens=max_tokens, seed=seed)
    ends = tokens == policy.end_id
    mask = ends.cumsum(-1) - ends.long() == 0  # up to and with the first end
    completions = tuple(policy.text(row[keep]) for row, keep in zip(tokens, mask, strict=True))
    ended = cast("list[bool]", ends.any(-1).tolist())
    rewards = [
        grade(text, questions[index // samples_per_question].answer, finished=ended[index])
        for index, text in enumerate(completions)
    ]
    return Rollouts(
        input_ids=torch.cat([prompt_ids, tokens], dim=1),
        attention_mask=torch.cat([prompt_mask, mask.long()], dim=1),
        completion_mask=mask,
        old_logps=torch.where(mask, logps, 0.0),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_boundaries=torch.arange(len(questions) + 1) * samples_per_question,
        prompts=tuple(question.text for question in questions),
        completions=completions,
    )


def _left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _generate(
    policy: Policy, prompt_ids: Tensor, prompt_mask: Tensor, *, max_tokens: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return tokens [B, C] int64 and their log-probs [B, C] fp32; C is the longest completion."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = policy.model.generate(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,
            max_new_tokens=max_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=policy.end_id,
            pad_token_id=policy.end_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = output.sequences[:, prompt_ids.shape[1] :]
    steps = [logits.float().log_softmax(-1) for logits in output.logits]
    logps = [step.gather(1, tokens[:, index, None])[:, 0] for index, step in enumerate(steps)]
    return tokens, torch.stack(logps, 1)
