"""A checkpoint that says the same whatever it is asked, for agents whose tool no tiny model has learnt to call."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
from checkpoints import write_checkpoint
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer


def write_scripted(path: Path, tokenizer_of: Path, *pieces: str) -> Path:
    """A Qwen3 checkpoint whose answer to any chat is `pieces`, a token each, and the end of the turn.

    Its tokenizer and chat template are those of another checkpoint, with the pieces added; prompts must end with a line feed.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_of / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    said = [tokenizer.token_to_id(piece) for piece in pieces]
    end = json.loads((tokenizer_of / "config.json").read_text())["eos_token_id"]
    write_checkpoint(path, vocab_size=tokenizer.get_vocab_size(), eos_token_id=end)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_of / name, path)
    tokenizer.save(str(path / "tokenizer.json"))
    _chain(path / "model.safetensors", [*tokenizer.encode("\n").ids, *said, end])
    return path


def _chain(path: Path, tokens: list[int]) -> None:
    """Rewrite weights so that the next token depends on the last alone: each of `tokens` is followed by the next of them."""
    weights = load_file(path)
    for name, array in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            array[:] = 0.0  # no layer adds anything to a token's embedding
    weights["model.norm.weight"][:] = 1.0
    embeddings, output = weights["model.embed_tokens.weight"], np.zeros_like(weights["lm_head.weight"])
    for last, following in pairwise(tokens):
        output[following] = embeddings[last]
    save_file(weights | {"lm_head.weight": output}, path, metadata={"format": "pt"})
