"""Tokens that arrive together are one piece: the sequence, its line in the file, and the figures that are made of it."""

from __future__ import annotations

import itertools
import json
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.cluster.observers import TurnRecord
from prorsa.engines.protocol import FinishReason
from prorsa.report.measures import cumulative_tokens, inter_token_latencies, percentiles
from prorsa.report.rundir import dump_turn, load_turn
from prorsa.report.runs import Runs, compact, runs


def turn(ready: float, arrivals: tuple[float, ...], versions: tuple[int, ...] | None = None) -> TurnRecord:
    versions = (0,) * len(arrivals) if versions is None else versions
    return TurnRecord("t", 0, 9, 3, (("p", "d"),), ready, arrivals, versions, FinishReason.STOP)


@given(st.lists(st.integers(0, 2)))
def test_runs_are_the_sequence_that_they_stand_for(values: list[int]) -> None:
    pairs = list(runs(values))
    kept = Runs(array("q", [value for value, _ in pairs]), [count for _, count in pairs])
    assert kept == values
    assert list(kept) == values
    assert len(kept) == len(values)
    assert [kept[index] for index in range(-len(values), len(values))] == values + values
    assert list(kept[1:-1]) == values[1:-1]
    assert list(runs(kept)) == pairs
    assert all(left != right for left, right in itertools.pairwise(kept.values))
    assert kept != [*values, 0]
    with pytest.raises(IndexError):
        kept[len(values)]


def test_the_line_of_a_turn_by_hand() -> None:
    record = turn(10.0, (10.5, 10.75, 10.75, 10.75, 11.0), (4, 4, 5, 5, 5))
    line = dump_turn(record)
    assert line["arrivals"] == [0.5, [0.75, 3], 1.0]
    assert [list(run) for run in line["versions"]] == [[4, 2], [5, 3]]
    back = load_turn(json.loads(json.dumps(line)))
    assert back == record
    assert (back.output_tokens, back.first_token, back.arrivals[-1]) == (5, 10.5, 11.0)
    assert list(compact(back.arrivals).counts) == [1, 3, 1]


def test_a_line_with_a_number_for_every_token_is_read_too() -> None:
    line = json.loads(json.dumps(dump_turn(turn(10.0, (10.5, 10.75)))))
    assert load_turn(line | {"arrivals": [0.5, 0.75, 0.75]}).arrivals == (10.5, 10.75, 10.75)
    assert load_turn(line | {"arrivals": []}).first_token is None


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), min_size=1, max_size=12).map(
            lambda steps: tuple(np.repeat(np.cumsum([gap for gap, _ in steps]) / 1000, [n for _, n in steps]).tolist())
        ),
        min_size=1,
        max_size=6,
    )
)
def test_figures_do_not_depend_on_how_arrivals_are_kept(turns: list[tuple[float, ...]]) -> None:
    """Against latencies taken token by token, as their definition says."""
    found = inter_token_latencies([turn(0.0, arrivals) for arrivals in turns])
    gaps: list[float] = []
    for arrivals in turns:
        pieces = [[arrivals[0]]]
        for before, now in itertools.pairwise(arrivals):
            if now - before < 0.001:
                pieces[-1].append(now)
            else:
                pieces.append([now])
        for before, piece in itertools.pairwise(pieces):
            gaps += [(piece[0] - before[0]) / len(piece)] * len(piece)
    if gaps:
        assert [found.overall_p50, found.overall_p99] == pytest.approx(np.percentile(gaps, [50, 99]))
    else:
        assert not len(found.times)
    times, totals = cumulative_tokens([turn(0.0, arrivals) for arrivals in turns]).decoded
    everything = np.sort(np.concatenate(turns))
    assert totals[-1] == len(everything)
    latest = np.searchsorted(times, everything, side="right") - 1
    assert totals[latest].tolist() == np.searchsorted(everything, everything, side="right").tolist()


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 5)), min_size=1))
def test_percentiles_of_counted_values_are_those_of_the_values(pairs: list[tuple[float, int]]) -> None:
    values, counts = (np.array(column) for column in zip(*pairs, strict=True))
    wanted = np.percentile(np.repeat(values, counts), [0, 50, 99, 100])
    assert percentiles(values, counts, (0, 50, 99, 100)) == pytest.approx(wanted)
