"""Make `models/arithmetic`: a tokenizer and a 1.3M-parameter Qwen3 model, supervised on synthetic demonstrations.

The demonstrations come from a teacher that is sloppy on purpose: it stops early, skips steps, turns "subtract that from 9"
round and takes the wrong operator, at the rates below. The model copies digits and writes tool calls reliably but shares
these habits, so that it answers about half of the questions: the start that reinforcement learning can improve on within
some tens of steps, by moving probability from the wrong habits to the right ones. It says nothing about how good a model
of this size can get.

Everything follows from the seed; the same machine and library versions give the same checkpoint.

    python scripts/train_model.py                      # train and evaluate (needs the `train` extra)
    python scripts/train_model.py --evaluate-only      # accuracy of an existing checkpoint
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config, Qwen3ForCausalLM

from prorsa.rollout.tasks.arithmetic import MOST_STEPS, ArithmeticTask, Problem, Step, conversation, worded_problems
from prorsa.rollout.tasks.base import Question
from prorsa.rollout.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
TASK = ArithmeticTask()

# The teacher's mistakes, each as the probability at one step.
STOP_EARLY = 0.12
SKIP_STEP = 0.03
WRONG_OPERATOR = 0.03
TURN_ROUND = 0.45  # only where the number comes first: "subtract that from 9"

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LARGEST_VOCABULARY = 512
TYPICAL_TOKENS = 63
"""What a teacher writes in one conversation, on average."""
TURN_TOKENS = 64
MOST_CALLS = 5


@dataclass(frozen=True)
class Turn:
    text: str
    result: str | None
    """What the tool answers; None for the last turn."""


def demonstrate(problem: Problem, rng: random.Random) -> list[Turn]:
    """One conversation of the sloppy teacher."""
    value, turns = problem.start, []
    for step in problem.steps:
        if rng.random() < STOP_EARLY:
            break
        if rng.random() < SKIP_STEP:
            continue
        taken = slip(step, rng)
        turns.append(Turn(call(taken.expression(value)), f"{taken.apply(value)}\n"))
        value = taken.apply(value)
    return [*turns, Turn(f"The answer is {value}.", None)]


def slip(step: Step, rng: random.Random) -> Step:
    if rng.random() < WRONG_OPERATOR:
        return Step(rng.choice(["add", "subtract", "multiply"]), step.number)
    if step.operation == "subtract_from" and rng.random() < TURN_ROUND:
        return Step("subtract", step.number)
    return step


def call(expression: str) -> str:
    arguments = json.dumps({"name": "python", "arguments": {"code": f"print({expression})"}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def build_tokenizer(directory: Path, seed: int) -> tuple[ChatTokenizer, int]:
    """Byte-level BPE learned from demonstrations; digits and newlines never merge; Qwen3's turn tokens and tool tags."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True) for text in SPECIAL] + [AddedToken(text, special=False) for text in TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST_VOCABULARY - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    write_tokenizer(tokenizer, added, directory)
    tokenizer.train_from_iterator(sample_texts(ChatTokenizer(directory), seed), trainer)
    size = write_tokenizer(tokenizer, added, directory)
    return ChatTokenizer(directory), size


def write_tokenizer(tokenizer: Tokenizer, added: list[AddedToken], directory: Path) -> int:
    complete = Tokenizer.from_str(tokenizer.to_str())
    complete.add_tokens(added)
    complete.save(str(directory / "tokenizer.json"))
    shutil.copyfile(TEMPLATE, directory / "chat_template.jinja")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return complete.get_vocab_size()


def sample_texts(chat: ChatTokenizer, seed: int) -> Iterator[str]:
    """Plain text between the special tokens and tags of 2,000 demonstrations."""
    separator = re.compile("|".join(re.escape(text) for text in SPECIAL + TAGS))
    rng = random.Random(seed)
    for problem, text in islice(worded_problems("train", seed), 2000):
        messages: list[dict[str, Any]] = list(conversation(text))
        for turn in demonstrate(problem, rng):
            messages.append({"role": "assistant", "content": turn.text})
            if turn.result is not None:
                messages.append({"role": "tool", "content": turn.result})
        yield from separator.split(chat.render_text(messages, TASK.tools, add_generation_prompt=False))


def build_model(chat: ChatTokenizer, vocabulary: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=chat.eos_ids[0],
        pad_token_id=chat.encode("<|endoftext|>")[0],
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True)
class Example:
    ids: list[int]
    learnt: list[bool]
    """Which ids the teacher wrote: only these are in the loss."""


def encode(text: str, turns: list[Turn], chat: ChatTokenizer) -> Example:
    """The ids of a demonstration, put together exactly as a rollout does it."""
    ids = chat.render(conversation(text), TASK.tools)
    learnt = [False] * len(ids)
    for turn in turns:
        written = [*chat.encode(turn.text), chat.eos_ids[0]]
        returned = [] if turn.result is None else chat.tool_turn(turn.result)
        ids += written + returned
        learnt += [True] * len(written) + [False] * len(returned)
    return Example(ids, learnt)


def batches(chat: ChatTokenizer, steps: int, size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, labels) [size, longest] of new demonstrations for `steps` batches, each of conversations of similar length.

    The questions get longer on the way: one step, then up to two, then all. To copy a number is learnt first and fastest
    in short conversations.
    """
    rng = random.Random(seed + 1)
    problems = worded_problems("train", seed)
    block = 16
    for start in range(0, steps, block):
        most = 1 if start < 0.15 * steps else 2 if start < 0.35 * steps else MOST_STEPS
        short = (drawn for drawn in problems if len(drawn[0].steps) <= most)
        examples = [encode(text, demonstrate(problem, rng), chat) for problem, text in islice(short, block * size)]
        examples.sort(key=lambda example: len(example.ids))
        chunks = [examples[start : start + size] for start in range(0, len(examples), size)]
        rng.shuffle(chunks)
        for chunk in chunks:
            longest = len(chunk[-1].ids)
            ids = torch.zeros(size, longest, dtype=torch.long)
            labels = torch.full((size, longest), -100)
            for row, example in enumerate(chunk):
                written = torch.tensor(example.ids)
                ids[row, : len(written)] = written
                labels[row, : len(written)] = torch.where(torch.tensor(example.learnt), written, -100)
            yield ids, labels


def train(model: Qwen3ForCausalLM, chat: ChatTokenizer, steps: int, batch: int, peak: float, seed: int) -> None:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedule = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _warm_and_decay(step, steps)) for o in optimisers]
    # Every conversation begins with the same system turn: its keys and values are computed once a batch.
    common = len(chat.render(conversation("")[:1], TASK.tools, add_generation_prompt=False))
    model.train()
    start, recent = time.perf_counter(), []
    for step, (ids, labels) in enumerate(islice(batches(chat, steps, batch, seed), steps), 1):
        shared = model.model(input_ids=ids[:1, :common], use_cache=True).past_key_values
        shared.batch_repeat_interleave(batch)
        hidden = model.model(input_ids=ids[:, common:-1], past_key_values=shared).last_hidden_state
        targets = labels[:, common + 1 :]
        logits = model.lm_head(hidden[targets != -100])
        # Not the mean over a batch: it would give short conversations, many of them stopped early, more weight.
        total = torch.nn.functional.cross_entropy(logits, targets[targets != -100], reduction="sum")
        loss = total / (batch * TYPICAL_TOKENS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        for scheduler in schedule:
            scheduler.step()
        recent.append(loss.item())
        if step % 50 == 0 or step == steps:
            mean, recent = sum(recent) / len(recent), []
            print(f"step {step}/{steps}  loss {mean:.4f}  {time.perf_counter() - start:.0f} s", flush=True)


def _warm_and_decay(step: int, steps: int, warm: int = 50) -> float:
    return min(1.0, (step + 1) / warm) * max(0.02, 1 - step / steps)


@torch.inference_mode()
def write_turns(
    model: Qwen3ForCausalLM, contexts: list[list[int]], temperature: float, end: int, generator: torch.Generator
) -> list[list[int]]:
    """The next assistant turn of each context, its end-of-turn token included unless `TURN_TOKENS` ran out; 0 is greedy."""
    longest = max(map(len, contexts))
    ids = torch.zeros(len(contexts), longest, dtype=torch.long)
    mask = torch.zeros(len(contexts), longest + TURN_TOKENS, dtype=torch.long)
    for row, context in enumerate(contexts):
        ids[row, longest - len(context) :] = torch.tensor(context)
        mask[row, longest - len(context) :] = 1
    positions = mask.cumsum(1) - 1
    cache = DynamicCache(config=model.config)
    turns: list[list[int]] = [[] for _ in contexts]
    begin = 0
    ended = torch.zeros(len(contexts), 1, dtype=torch.bool)
    while len(turns[0]) < TURN_TOKENS and not ended.all():
        known = begin + ids.shape[1]
        logits = model(
            input_ids=ids,
            attention_mask=mask[:, :known],
            position_ids=positions[:, begin:known].clamp(min=0),
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        if temperature == 0:
            ids = logits.argmax(-1, keepdim=True)
        else:
            ids = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        ids = ids.masked_fill(ended, end)
        ended |= ids == end
        begin = known
        for turn, token in zip(turns, ids[:, 0].tolist(), strict=True):
            turn.append(token)
    return [turn[: turn.index(end) + 1] if end in turn else turn for turn in turns]


def answer_questions(
    model: Qwen3ForCausalLM, chat: ChatTokenizer, questions: list[Question], temperature: float, seed: int
) -> list[tuple[float, int]]:
    """(reward, tool calls) of one conversation for each question, all in step."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    contexts = [chat.render(question.messages, TASK.tools) for question in questions]
    outcomes = [(0.0, MOST_CALLS)] * len(questions)
    live = list(range(len(questions)))
    for calls in range(MOST_CALLS + 1):
        turns = write_turns(model, [contexts[i] for i in live], temperature, chat.eos_ids[0], generator)
        going_on = []
        for i, turn in zip(live, turns, strict=True):
            text = chat.decode(turn)
            request = TASK.parse_tool_call(text)
            if request is None:
                outcomes[i] = (TASK.reward(questions[i], text), calls)
            else:
                contexts[i] += turn + chat.tool_turn(run_tool(request.arguments.get("code")))
                going_on.append(i)
        live = going_on
        if not live:
            break
    return outcomes


def run_tool(code: object) -> str:
    """What the Python tool answers, for the only programs that the model was shown."""
    program = re.fullmatch(r"print\((-?\d+)([-+*])(-?\d+)\)", code) if isinstance(code, str) else None
    if program is None:
        return "error"
    left, operator, right = int(program[1]), program[2], int(program[3])
    return f"{left + right if operator == '+' else left - right if operator == '-' else left * right}\n"


def report_accuracy(model: Qwen3ForCausalLM, chat: ChatTokenizer, count: int, seed: int) -> None:
    """Print the accuracy on held-out questions by the number of steps that they need."""
    problems = list(islice(worded_problems("test", seed), count))
    questions = TASK.questions("test", count, seed)
    for temperature in (1.0, 0.0):
        outcomes = answer_questions(model, chat, questions, temperature, seed)
        parts = [f"all {sum(reward for reward, _ in outcomes) / count:.3f}"]
        for steps in range(1, MOST_STEPS + 1):
            chosen = [
                outcome for outcome, (problem, _) in zip(outcomes, problems, strict=True) if len(problem.steps) == steps
            ]
            right, calls = (sum(column) / len(chosen) for column in zip(*chosen, strict=True))
            parts.append(f"{steps} steps {right:.3f} ({calls:.1f} calls)")
        print(f"accuracy at temperature {temperature}: " + ", ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "arithmetic")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--questions", type=int, default=512, help="held-out questions of the evaluation")
    parser.add_argument("--evaluate-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.evaluate_only:
        model = AutoModelForCausalLM.from_pretrained(options.out)
        report_accuracy(model, ChatTokenizer(options.out), options.questions, options.seed)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    chat, vocabulary = build_tokenizer(options.out, options.seed)
    model = build_model(chat, vocabulary)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {vocabulary} tokens", flush=True)
    train(model, chat, options.steps, options.batch, options.learning_rate, options.seed)
    model.save_pretrained(options.out)
    report_accuracy(model, chat, options.questions, options.seed)


if __name__ == "__main__":
    main()
