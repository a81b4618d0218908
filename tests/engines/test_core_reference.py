"""The engine core against transformers on the same checkpoint: tokens and log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint
from core_driving import generate, generate_apart, prompts_of

from prorsa.engines.embedded.core import EngineCore
from prorsa.engines.protocol import Role, SamplingParams

torch = pytest.importorskip("torch", reason="the reference needs torch (extra `verl`)")
transformers = pytest.importorskip("transformers", reason="the reference needs transformers (extra `verl`)")

LENGTHS = (1, 5, 16, 17, 40, 64, 150)
NEW = 24
GREEDY = SamplingParams(NEW, temperature=0.0)


class Reference:
    """The checkpoint in transformers, float32."""

    def __init__(self, path: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
        return list(output[0, len(prompt) :].tolist())

    def logprobs(self, prompt: list[int], answer: list[int], temperature: float) -> list[float]:
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / temperature
        every = torch.log_softmax(logits.double(), -1)
        return list(every[range(len(answer)), answer].tolist())


VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4, "vocab_size": 333, "rope_parameters": {"rope_theta": 5e5}},
    "multi-query, wide heads": {"num_key_value_heads": 1, "head_dim": 48, "hidden_size": 72, "num_hidden_layers": 3},
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    path = write_checkpoint(tmp_path_factory.mktemp("variant"), seed=5, **VARIANTS[request.param])
    return path, Reference(path)


def test_greedy_tokens_equal_in_a_batch_alone_and_through_a_handover(variant: tuple[Path, Reference]) -> None:
    path, reference = variant
    prompts = prompts_of(LENGTHS)
    expected = [reference.greedy(prompt, NEW) for prompt in prompts]
    for chunk in (7, 64, 512):
        core = EngineCore(str(path), Role.MIXED, kv_tokens=2048, prefill_chunk=chunk)
        assert [result.tokens for result in generate(core, prompts, GREEDY)] == expected
        again = generate(core, prompts, GREEDY)
        assert [result.tokens for result in again] == expected
        assert [result.cached for result in again] == [(length - 1) // 16 * 16 for length in LENGTHS]
    alone = EngineCore(str(path), Role.MIXED, kv_tokens=2048, block_tokens=8)
    assert [generate(alone, [prompt], GREEDY)[0].tokens for prompt in prompts] == expected
    prefill = EngineCore(str(path), Role.PREFILL, kv_tokens=2048, prefill_chunk=32)
    decode = EngineCore(str(path), Role.DECODE, kv_tokens=2048)
    assert [result.tokens for result in generate_apart(prefill, decode, prompts, GREEDY)] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_equal(variant: tuple[Path, Reference], temperature: float) -> None:
    path, reference = variant
    prompts = prompts_of(LENGTHS)
    core = EngineCore(str(path), Role.MIXED, kv_tokens=2048)
    for prompt, result in zip(prompts, generate(core, prompts, SamplingParams(NEW, temperature)), strict=True):
        expected = reference.logprobs(prompt, result.tokens, temperature or 1.0)
        np.testing.assert_allclose(result.logprobs, expected, atol=5e-4)


def test_the_last_position_of_the_context_is_right(checkpoint: Path) -> None:
    reference = Reference(checkpoint)
    core = EngineCore(str(checkpoint), Role.MIXED, kv_tokens=4096)
    (prompt,) = prompts_of((core.max_context - 4,))
    (result,) = generate(core, [prompt], SamplingParams(4, temperature=0.0))
    np.testing.assert_allclose(result.logprobs, reference.logprobs(prompt, result.tokens, 1.0), atol=5e-3)
    assert result.tokens == reference.greedy(prompt, 4)
