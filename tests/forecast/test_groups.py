"""What groups have in common, on groups that are known to have it."""

import numpy as np
import pytest

from prorsa.forecast.survival.groups import Endings, GroupLengths, Groups


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_the_groups_part_of_the_variance_is_found(share):
    random = np.random.default_rng(1)
    known = Groups()
    lengths = GroupLengths(known)
    known.cover(400)
    groups = random.standard_normal(400) * np.sqrt(share)
    for _ in range(16):
        for group, effect in enumerate(groups):
            value = np.exp(3.0 + effect + np.sqrt(1 - share) * random.standard_normal())
            lengths.add("task", group, value)
    assert lengths.share == pytest.approx(share, abs=0.1)
    factors = lengths.factors()
    if share:
        assert np.corrcoef(np.log(factors), groups)[0, 1] > 0.9
    else:
        assert factors == pytest.approx(np.ones(len(groups)), abs=0.2)


def test_the_chance_of_the_last_turn_is_calibrated_in_every_group():
    """Trajectories with lognormal numbers of turns, 70 % of whose variance is between groups, told turn by turn."""
    random = np.random.default_rng(2)
    known = Groups()
    endings, said, came = Endings(known), [], []
    known.cover(200)
    centres = random.standard_normal(200) * np.sqrt(0.7)
    turns = np.maximum(
        1, np.rint(18 * np.exp(0.45 * (centres[:, None] + np.sqrt(0.3) * random.standard_normal((200, 16)))))
    )
    for turn in range(int(turns.max())):
        for group, members in enumerate(turns):
            for total in members[members > turn]:
                if group >= 100:
                    logarithms, inclination = endings.going_on(["task"], turn + 1)
                    said.append((1.0 - np.exp(logarithms[0, turn] * inclination[group]), turn))
                    came.append(total == turn + 1)
                endings.add("task", group, turn, total == turn + 1)
    said, came = np.array(said), np.array(came)
    for low, high in ((8, 16), (16, 32), (32, 64)):
        some = (said[:, 1] >= low) & (said[:, 1] < high)
        assert said[some, 0].mean() == pytest.approx(came[some].mean(), rel=0.25)
    # Knowing the group is worth something: a likelihood above that of the mean chance of the turn.
    chance = np.clip(said[:, 0], 1e-6, 1 - 1e-6)
    likelihood = np.log(np.where(came, chance, 1 - chance)).sum()
    plain = np.array([came[said[:, 1] == turn].mean() for turn in said[:, 1]])
    plain = np.clip(plain, 1e-6, 1 - 1e-6)
    assert likelihood > np.log(np.where(came, plain, 1 - plain)).sum()


def test_where_every_first_turn_is_the_last_no_second_one_is_expected():
    groups = Groups()
    groups.cover(64)
    endings = Endings(groups)
    for group in range(64):
        for _ in range(16):
            endings.add("task", group, 0, True)
    logarithms, inclination = endings.going_on(["task"], 1)
    assert np.exp(logarithms[0, 0] * inclination).max() < 0.02
