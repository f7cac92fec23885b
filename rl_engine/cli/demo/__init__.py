"""The demo: GRPO on a real model, small enough for two CPU cores."""
