"""What the queue has to compute, told event by event."""

from story import Story, trajectory

from prorsa.forecast.survival.contexts import Contexts
from prorsa.forecast.survival.groups import Groups
from prorsa.lifecycle import events as e
from prorsa.lifecycle.states import State


def test_the_queue_computes_what_no_cache_has():
    contexts = Contexts(Groups())
    story = Story(contexts)
    story.tell(*trajectory("a", 0.0, State.PREFILL, first=100), *trajectory("b", 0.0, State.READY, first=100))
    assert contexts.queue_uncached() == 200.0
    # One member has the prompt of the group computed; of another one the last token remains.
    story.tell(e.DecodeStarted(3.0, "a", "d0"))
    assert contexts.queue_uncached() == 1.0
    # One that is cancelled has what it made; one that comes back from a tool has to compute the result.
    story.tell(e.Requeued(4.0, "a", 130))
    assert contexts.queue_uncached() == 2.0
    story.tell(
        e.PrefillStarted(4.0, "a", "p0"), e.DecodeStarted(5.0, "a", "d0"), e.ToolStarted(6.0, "a", "search", 150)
    )
    assert contexts.queue_uncached() == 1.0
    story.tell(e.Ready(7.0, "a", 190))
    assert contexts.queue_uncached() == 41.0
    contexts.caches_lost()
    assert contexts.queue_uncached() == 290.0
    story.tell(e.Dropped(8.0, "a", "no sandbox"))
    assert contexts.queue_uncached() == 100.0
    # The place of one that has left is taken by the next.
    story.tell(*trajectory("c", 9.0, State.READY, first=70, group="h"))
    assert contexts.queue_uncached() == 170.0


def test_nothing_is_left_of_a_group_that_is_forgotten():
    groups = Groups()
    numbers = groups.column()
    groups.cover(2)
    numbers[0], numbers[1] = 5.0, 7.0
    groups.forget(0)
    groups.cover(3)
    assert numbers.tolist() == [0.0, 7.0, 0.0]
