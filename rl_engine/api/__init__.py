"""The front door: three calls that build their contracts themselves.

`selected_logprobs` for log-probs, `grpo_loss` for the whole loss from logits, `policy_loss` for those who
hold log-probs already. Logits and targets are aligned: row t of the logits predicts target t
(`next_token_targets` does the shift).
"""

from rl_engine.api.grpo import grpo_loss as grpo_loss
from rl_engine.api.logprobs import next_token_targets as next_token_targets
from rl_engine.api.logprobs import selected_logprobs as selected_logprobs
from rl_engine.api.policy import policy_loss as policy_loss

__all__ = ["grpo_loss", "next_token_targets", "policy_loss", "selected_logprobs"]
