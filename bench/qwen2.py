"""Configurations of models of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen2Config


def write_qwen2(folder: Path, **sizes: Any) -> None:
    """config.json alone: weights are drawn when the model is loaded."""
    Qwen2Config(
        bos_token_id=None, pad_token_id=0, architectures=["Qwen2ForCausalLM"], **sizes
    ).save_pretrained(folder)
