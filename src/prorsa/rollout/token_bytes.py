"""How much text a token can stand for at most: a bound by which a prompt that cannot fit is known before it is encoded."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

SHRINKS = {None: 1, "NFC": 4}
"""Normalisers, and how many times shorter they may make a text in UTF-8: none composes more than three characters of three
bytes to one of three, and singletons do not lose more than a byte in three."""
KEEPS = ("ByteLevel", "Digits", "Split")
"""Pre-tokenizers that leave nothing out (`Split` unless it is told to remove)."""


def most_bytes(tokenizer: Tokenizer) -> int | None:
    """Bytes of UTF-8 text that a token stands for at most.

    None where that is not known: only vocabularies of bytes have no token for "anything unknown", and an added token that
    takes the blanks beside it, or a step that removes or rewrites text, has no bound.
    """
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    normalizer = (parts["normalizer"] or {}).get("type")
    bytewise = parts["model"]["type"] == "BPE" and _keeps_bytes(parts["pre_tokenizer"])
    greedy = any(added["lstrip"] or added["rstrip"] for added in parts["added_tokens"])
    if normalizer not in SHRINKS or not bytewise or greedy or parts["truncation"]:
        return None
    added = {token["content"] for token in parts["added_tokens"]}
    # A character of the vocabulary is a byte; an added token is written as it is.
    longest = max((len(token) for token in parts["model"]["vocab"] if token not in added), default=1)
    return max(longest, *(len(token.encode()) for token in added), 1) * SHRINKS[normalizer]


def _keeps_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    known = all(step["type"] in KEEPS and step.get("behavior") != "Removed" for step in steps)
    return known and any(step["type"] == "ByteLevel" for step in steps)
