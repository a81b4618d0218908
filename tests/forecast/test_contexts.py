"""What the queue has to compute, told event by event."""

from story import Story, trajectory

from prorsa.forecast.survival.contexts import Contexts
from prorsa.forecast.survival.groups import Groups
from prorsa.lifecycle import events as e
from prorsa.lifecycle.states import State


def to_compute(contexts):
    return contexts.queue()[1].sum()


def test_the_queue_computes_what_no_cache_has():
    contexts = Contexts(Groups())
    story = Story(contexts)
    story.tell(*trajectory("a", 0.0, State.PREFILL, first=100), *trajectory("b", 0.0, State.READY, first=100))
    assert to_compute(contexts) == 200.0
    # One member has the prompt of the group computed; of another one the last token remains.
    story.tell(e.DecodeStarted(3.0, "a", "d0"))
    assert to_compute(contexts) == 1.0
    # One that is cancelled has what it made; one that comes back from a tool has to compute the result.
    story.tell(e.Requeued(4.0, "a", 130))
    assert to_compute(contexts) == 2.0
    story.tell(
        e.PrefillStarted(4.0, "a", "p0"), e.DecodeStarted(5.0, "a", "d0"), e.ToolStarted(6.0, "a", "search", 150)
    )
    assert to_compute(contexts) == 1.0
    story.tell(e.Ready(7.0, "a", 190))
    assert to_compute(contexts) == 41.0
    contexts.caches_lost()
    assert to_compute(contexts) == 290.0
    story.tell(e.Dropped(8.0, "a", "no sandbox"))
    assert to_compute(contexts) == 100.0
    # The place of one that has left is taken by the next.
    story.tell(*trajectory("c", 9.0, State.READY, first=70, group="h"))
    assert to_compute(contexts) == 170.0


def test_the_queue_is_in_the_order_of_entry():
    contexts = Contexts(Groups())
    story = Story(contexts)
    for name, group, first in (("a", "g", 100), ("b", "h", 200), ("c", "i", 300)):
        story.tell(*trajectory(name, 0.0, State.PREFILL, first=first, group=group))
    # a is prefilled, makes 10 tokens and is cancelled: it is the last one now, with one token to compute.
    story.tell(e.DecodeStarted(3.0, "a", "d0"), e.Requeued(4.0, "a", 110))
    assert [column.tolist() for column in contexts.queue()] == [[200, 300, 110], [200, 300, 1]]
    # So is one that is cancelled in its prefill.
    story.tell(e.Requeued(5.0, "b", 200))
    assert [column.tolist() for column in contexts.queue()] == [[300, 110, 200], [300, 1, 200]]


def test_nothing_is_left_of_a_group_that_is_forgotten():
    groups = Groups()
    numbers = groups.column()
    groups.cover(2)
    numbers[0], numbers[1] = 5.0, 7.0
    groups.forget(0)
    groups.cover(3)
    assert numbers.tolist() == [0.0, 7.0, 0.0]
