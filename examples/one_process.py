"""A GRPO step in one process, on a model of a few lines.

python examples/one_process.py
"""

from __future__ import annotations

import torch
from torch import nn

import rl_engine

VOCAB, HIDDEN, PROMPT, COMPLETION, SAMPLES = 97, 32, 5, 12, 8


def sample(model: nn.Module, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [B, PROMPT + COMPLETION] and the log-probs [B, COMPLETION] under which they were sampled."""
    ids, logps = prompts, []
    for _ in range(COMPLETION):
        last = model(ids[:, -1])
        token = torch.distributions.Categorical(logits=last).sample()
        logps.append(rl_engine.selected_logprobs(last, token))
        ids = torch.cat([ids, token[:, None]], dim=1)
    return ids, torch.stack(logps, dim=1)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)
    prompts = torch.randint(VOCAB, (2, PROMPT)).repeat_interleave(SAMPLES, 0)
    group_ids = torch.arange(2).repeat_interleave(SAMPLES)
    completion_mask = torch.zeros(len(prompts), PROMPT + COMPLETION, dtype=torch.bool)
    completion_mask[:, PROMPT:] = True

    for step in range(14):
        with torch.no_grad():
            ids, sampled = sample(model, prompts)
        rewards = (ids[:, PROMPT:] % 2 == 0).float().mean(1)  # even tokens are good

        targets, mask = rl_engine.next_token_targets(ids, completion_mask)
        old_logps = torch.zeros(targets.shape)
        old_logps[mask] = sampled.reshape(-1)
        result = rl_engine.grpo_loss(model(ids), targets, old_logps, rewards, mask=mask, group_ids=group_ids)
        optimizer.zero_grad()
        result.loss.backward()
        norm = nn.utils.get_total_norm(weight.grad for weight in model.parameters())
        optimizer.step()
        print(f"step {step:2d}  mean reward {rewards.mean():.3f}  |gradient| {norm:.4f}")


if __name__ == "__main__":
    main()
