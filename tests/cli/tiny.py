"""A policy of a few thousand random weights, for tests of the demo."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_engine.cli.demo.policy import Policy

VOCAB = 31


class CharTokenizer:
    """Characters by their code modulo the vocabulary; 0 ends a completion."""

    eos_token_id = 0

    def apply_chat_template(self, chat: list[dict[str, str]], **_: object) -> str:
        return chat[-1]["content"]

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(letter) % (VOCAB - 1) for letter in text]}

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(str(token) for token in ids if token)


def tiny_policy() -> Policy:
    """Return the same policy at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
        return Policy(model=LlamaForCausalLM(config), tokenizer=CharTokenizer())
