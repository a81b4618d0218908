"""Who works on while roles change, by values worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.allocation.transition import staying


@pytest.mark.parametrize(
    ("before", "after", "working", "decoding"),
    [
        ((2, 6, 0), (2, 6, 0), (2, 6, 0), 6),
        # A prefill instance that becomes a decode instance does nothing meanwhile, and the other way round.
        ((2, 6, 0), (1, 7, 0), (1, 6, 0), 6),
        ((1, 7, 0), (3, 5, 0), (1, 5, 0), 5),
        # All that become mixed go on at once.
        ((2, 6, 0), (0, 0, 8), (0, 0, 8), 6),
        ((1, 7, 0), (1, 4, 3), (1, 4, 3), 7),
        # A mixed instance becomes a decode instance at once, and a prefill instance after a drain.
        ((0, 0, 8), (2, 6, 0), (0, 6, 0), 6),
        ((0, 2, 6), (0, 5, 3), (0, 5, 3), 8),
    ],
)
def test_who_works_on(before: tuple[int, ...], after: tuple[int, ...], working: tuple[int, ...], decoding: int) -> None:
    kept, decodes = staying(np.array(before, dtype=float), np.array([after], dtype=float))
    assert kept.tolist() == [list(working)]
    assert decodes.tolist() == [decoding]


roles = st.tuples(*[st.integers(0, 6)] * 3)


@given(before=roles, after=roles)
def test_no_more_work_on_than_there_were_or_will_be(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    was, will = (np.array(counts, dtype=float) for counts in (before, after))
    kept, decoding = staying(was, will)
    assert (kept <= will).all()
    assert kept.sum() <= was.sum()
    assert min(before[1] + before[2], after[1] + after[2]) >= decoding >= np.minimum(was, will)[1:].sum()
