from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudo_control import Scripts

from prorsa.engines.protocol import GenerateRequest, SamplingParams
from prorsa.simulation.workloads.pseudo_model import BASE, STOP, PseudoModel, Stream, TurnName, context_hash
from prorsa.simulation.workloads.scripts import Script, TurnScript
from prorsa.simulation.workloads.tokens import Span

# Turn 0 begins with a context of 5 tokens and has 4, turn 1 begins with 5 + 4 + 3 = 12 and has 6.
WORKLOAD = Scripts(Script(5, (TurnScript(4, "shell", 1.0, 3), TurnScript(6))))
PROMPT = (1, 50, 60, 70, 80)
RESULT = (11, 12, 13)

names = st.builds(TurnName, st.integers(0, 2**24 - 2), st.integers(0, 2**31 - 1), st.integers(0, 2**16 - 1))


def stream(model: PseudoModel, context: tuple[int, ...] | Span, turn: int, seed: int = 9) -> Stream:
    sampling = SamplingParams(max_new_tokens=100, seed=seed)
    return model.stream(GenerateRequest(f"g0.1.{turn}.0", context, sampling))


def generate(context: tuple[int, ...], turn: int, seed: int = 9) -> tuple[int, ...]:
    rest = stream(PseudoModel(WORKLOAD, hashed=True), context, turn, seed)
    return rest.take(rest.length)[0]


@given(names)
def test_a_token_names_its_turn(name: TurnName) -> None:
    assert TurnName.of_token(name.token) == name
    assert name.token != STOP


@given(names, names)
def test_turns_have_different_tokens(one: TurnName, other: TurnName) -> None:
    assert (one.token == other.token) == (one == other)


def test_counted_tokens_of_a_turn_are_one_integer_and_the_stop_token() -> None:
    model = PseudoModel(WORKLOAD)
    rest = stream(model, Span(1, 12), 1)
    token = TurnName(0, 9, 1).token
    assert rest.length == 6
    assert rest.take(2)[0] == (token, token)
    tokens, logprobs = rest.take(100)
    assert tokens == (token, token, token, STOP)
    assert len(logprobs) == 4
    assert len(set(logprobs)) == 2
    assert all(-1 <= value < 0 for value in logprobs)
    assert rest.length == 0
    assert rest.take(1) == ((), ())
    assert model.name(token) == TurnName(0, 9, 1)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_resent_turn_goes_on_where_it_was_cut_off(hashed: bool) -> None:
    model = PseudoModel(WORKLOAD, hashed)
    context = tuple(range(1, 13))
    whole = stream(model, context, 1).take(6)
    for kept in range(6):
        rest = stream(PseudoModel(WORKLOAD, hashed), context + whole[0][:kept], 1)
        assert rest.length == 6 - kept
        assert rest.take(6) == (whole[0][kept:], whole[1][kept:])


@pytest.mark.parametrize(("length", "turn"), [(4, 0), (9, 0), (11, 1), (18, 1)])
def test_a_context_that_the_script_does_not_lead_to_is_refused(length: int, turn: int) -> None:
    with pytest.raises(ValueError, match=rf"request g0.1.{turn}.0 has a context of {length} tokens, but turn {turn}"):
        stream(PseudoModel(WORKLOAD), Span(1, length), turn)


def test_a_request_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no sampling\.seed"):
        PseudoModel(WORKLOAD).stream(GenerateRequest("g0.1.0.0", Span(1, 5), SamplingParams(max_new_tokens=9)))


def test_hashed_tokens_name_their_turn_and_differ() -> None:
    model = PseudoModel(WORKLOAD, hashed=True)
    tokens = generate(PROMPT, 0)
    assert tokens[-1] == STOP
    assert len(set(tokens)) == 4
    assert {model.name(token) for token in tokens[:-1]} == {TurnName(0, 9, 0)}
    assert set(tokens).isdisjoint(generate(PROMPT, 0, seed=10)[:-1])


def test_a_lost_repeated_or_changed_token_changes_all_that_follow() -> None:
    first = generate(PROMPT, 0)
    context = PROMPT + first + RESULT
    right = generate(context, 1)
    for index in range(1, len(context)):
        changed = (*context[:index], context[index] + 1, *context[index + 1 :])
        # The length must be right, so a token that was lost or repeated is made up for by another.
        lost = (*context[:index], *context[index + 1 :], 99)
        repeated = (*context[:index], context[index - 1], *context[index:-1])
        for wrong in (changed, lost, repeated):
            assert wrong == context or all(a != b for a, b in zip(generate(wrong, 1)[:-1], right[:-1], strict=True))


@given(st.lists(st.integers(0, 2**100), max_size=40))
def test_the_hash_of_a_context_is_horners_polynomial(tokens: list[int]) -> None:
    state = 1
    for token in tokens:
        state = (state * BASE + token) % 2**64
    assert context_hash(tuple(tokens)) == state
