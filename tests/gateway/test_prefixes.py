"""The index finds what comparing with every context finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorsa.gateway.prefixes import PrefixIndex

CONTEXTS = st.lists(st.binary(max_size=6).map(lambda b: bytes(x % 3 for x in b)), max_size=20)


@given(CONTEXTS, st.sets(st.integers(0, 19)), st.binary(max_size=9).map(lambda b: bytes(x % 3 for x in b)))
def test_the_longest_context_that_the_prompt_goes_beyond(
    contexts: list[bytes], removed: set[int], prompt: bytes
) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for owner, context in enumerate(contexts):
        index.add(context, owner)
    for owner in removed & set(range(len(contexts))):
        index.remove(contexts[owner], owner)
    left = {owner: context for owner, context in enumerate(contexts) if owner not in removed}
    assert len(index) == len(left)
    matching = [(-len(c), owner) for owner, c in left.items() if prompt.startswith(c) and len(c) < len(prompt)]
    assert index.find(prompt) == (min(matching)[1] if matching else None)


def test_a_prompt_is_no_continuation_of_itself() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add(b"abc", "t")
    assert index.find(b"abc") is None
    assert index.find(b"abcd") == "t"
    assert index.find(b"abd") is None
