import csv
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.config import ConfigError
from prorsa.profiles.costs import COLUMNS, StepCosts
from prorsa.profiles.profile import Profile, load_profile, shipped_profiles

FIELDS: dict[str, Any] = {
    "name": "hand",
    "model": "m",
    "gpu": "g",
    "source": "made up",
    "gpus": 4,
    "ranks": 2,
    "grid": "grid.csv",
    "chunk": 100,
    "kv_tokens": 1000,
    "kv_bytes": 10,
    "max_running": 8,
    "network_bytes_per_s": 1e9,
    "store_bytes_per_s": 1e9,
    "flip_s": 1.0,
    "update_s": 1.0,
}
HAND = """\
phase,tokens,context,attn_ms,dense_ms,moe_ms,moe_skewed_ms,comm_ms
prefill,100,0,10,2,20,30,4
prefill,100,1000,20,2,20,30,4
prefill,200,0,18,4,40,60,8
prefill,200,1000,38,4,40,60,8
decode,1,1000,1,1,3,5,0.5
decode,1,3000,3,1,3,5,0.5
decode,3,1000,3,2,5,9,1.5
decode,3,3000,9,2,5,9,1.5
"""
COSTS = {name: StepCosts(load_profile(name)) for name in shipped_profiles()}


def profile(directory: Path, text: str = HAND, **changes: Any) -> Profile:
    (directory / "grid.csv").write_text(text)
    return Profile.model_validate(FIELDS | changes | {"directory": str(directory)})


def costs(directory: Path, text: str = HAND, **changes: Any) -> StepCosts:
    return StepCosts(profile(directory, text, **changes))


def test_what_a_prefix_adds_by_itself_is_seen_where_one_token_was_measured(tmp_path: Path) -> None:
    assert costs(tmp_path).prefix_s(1000) == 0
    single = "prefill,1,0,2,1,0,0,0\nprefill,1,1000,8,1,0,0,0\n"
    assert costs(tmp_path, HAND + single).prefix_s(500) == pytest.approx(0.003)


def test_times_between_the_points_are_interpolated_in_both_directions(tmp_path: Path) -> None:
    hand = costs(tmp_path)
    # 150 tokens: 17 ms without prefix, 32 ms after 1,000; after 500, the middle of those.
    assert hand.prefill_local(150, 0) == pytest.approx(0.017)
    assert hand.prefill_local(150, 1000) == pytest.approx(0.032)
    assert hand.prefill_local(150, 500) == pytest.approx(0.0245)
    # A quarter of the way from 4 ms to 11 ms.
    assert hand.decode_local(1.5, 3000) == pytest.approx(0.00575)
    assert hand.decode_local(2, 1500) == pytest.approx(0.0035 + (0.0075 - 0.0035) / 4)


def test_how_close_the_contexts_of_the_decode_grid_are(tmp_path: Path) -> None:
    assert costs(tmp_path).least_window == 2000
    closer = "".join(f"decode,{batch},1300,{batch},1,4,7,1\n" for batch in (1, 3))
    assert costs(tmp_path, HAND + closer).least_window == 300
    single = "".join(line for line in HAND.splitlines(keepends=True) if ",3000," not in line)
    assert costs(tmp_path, single).least_window is None


def test_experts_see_the_mean_of_the_ranks_and_the_exchange_the_largest(tmp_path: Path) -> None:
    hand = costs(tmp_path, step_overhead_s=0.001)
    assert hand.shared(True, 125, 200) == pytest.approx(0.025 + 0.008 + 0.001)
    assert hand.shared(False, 2, 3) == pytest.approx(0.004 + 0.0015 + 0.001)


def test_a_step_with_any_prefill_is_priced_by_the_prefill_grid(tmp_path: Path) -> None:
    hand = costs(tmp_path)
    assert hand.shared(True, 2, 2) == pytest.approx(0.024)
    assert hand.shared(False, 2, 2) == pytest.approx(0.005)


@pytest.mark.parametrize(("imbalance", "moe_ms"), [(0.0, 20), (0.5, 25), (1.0, 30), (2.0, 40)])
def test_expert_imbalance_goes_from_the_balanced_to_the_skewed_time_and_beyond(
    tmp_path: Path, imbalance: float, moe_ms: float
) -> None:
    assert costs(tmp_path, expert_imbalance=imbalance).shared(True, 100, 100) == pytest.approx(moe_ms / 1e3 + 0.004)


def test_experts_that_are_faster_when_skewed_never_take_negative_time(tmp_path: Path) -> None:
    fast = costs(tmp_path, HAND.replace("20,30,4", "20,10,4"), expert_imbalance=5.0)
    assert fast.shared(True, 100, 100) == pytest.approx(0.004)


def test_below_the_smallest_point_times_stay_and_above_the_largest_they_go_on(tmp_path: Path) -> None:
    hand = costs(tmp_path)
    assert hand.prefill_local(1, 0) == hand.prefill_local(100, 0)
    assert hand.decode_local(1, 10) == hand.decode_local(1, 1000)
    assert hand.shared(False, 0.1, 1) == hand.shared(False, 1, 1)
    # After 1,000: 42 ms for 200 tokens, 20 more a hundred. After 2,000: 20 and, for 300 tokens, 30 ms more.
    assert hand.prefill_local(300, 1000) == pytest.approx(0.062)
    assert hand.prefill_local(200, 2000) == pytest.approx(0.062)
    assert hand.prefill_local(300, 2000) == pytest.approx(0.092)
    assert hand.shared(True, 400, 300) == pytest.approx(0.080 + 0.012)


def test_times_beyond_the_grid_stay_level_where_the_last_segment_falls(tmp_path: Path) -> None:
    falling = HAND.replace("decode,3,1000,3,2", "decode,3,1000,0.5,0.5")
    odd = costs(tmp_path, falling)
    assert odd.decode_local(2, 1000) == pytest.approx(0.0015)
    assert odd.decode_local(300, 1000) == pytest.approx(0.001)


def test_one_point_is_a_grid_of_constant_times(tmp_path: Path) -> None:
    lines = [line for line in HAND.splitlines() if line.startswith(("phase", "prefill,100,0", "decode,1,1000"))]
    constant = costs(tmp_path, "\n".join(lines))
    assert constant.prefill_local(5000, 70000) == pytest.approx(0.012)
    assert constant.shared(False, 64, 64) == pytest.approx(0.0035)


def test_prefill_speed_counts_new_tokens_of_all_ranks_in_full_chunks(tmp_path: Path) -> None:
    hand = costs(tmp_path)
    # One chunk after 0: 12 + 24 ms for 100 tokens on each of 2 ranks.
    assert hand.prefill_speed(100) == pytest.approx(2 * 100 / 0.036)
    # Chunks after 0, 100 and, half filled with this prompt, 200: 12, 13 and 14 ms beside 24 ms each.
    assert hand.prefill_speed(250) == pytest.approx(2 * 250 / (0.036 + 0.037 + 0.5 * 0.038))
    assert hand.prefill_speed(1050, 1000) == pytest.approx(2 * 50 / (0.5 * 0.046))
    for prompt, prefix in ((100, 100), (100, -1)):
        with pytest.raises(ValueError, match="at least one must be new"):
            hand.prefill_speed(prompt, prefix)


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_point_of_a_shipped_grid_is_returned_as_it_stands(name: str) -> None:
    shipped = load_profile(name)
    balanced, skewed = COSTS[name], StepCosts(shipped.model_copy(update={"expert_imbalance": 1.0}))
    with (Path(shipped.directory) / shipped.grid).open() as lines:
        for row in csv.DictReader(lines):
            phase, tokens, context = row["phase"], float(row["tokens"]), float(row["context"])
            attention, dense, moe, moe_skewed, comm = (float(row[name]) / 1e3 for name in COLUMNS[3:])
            local = balanced.prefill_local if phase == "prefill" else balanced.decode_local
            assert local(tokens, context) == pytest.approx(attention + dense, rel=1e-12)
            extending = phase == "prefill"
            assert balanced.shared(extending, tokens, tokens) == pytest.approx(moe + comm, rel=1e-12)
            assert skewed.shared(extending, tokens, tokens) == pytest.approx(moe_skewed + comm, rel=1e-12)


AXIS = st.floats(0.5, 1e6)


@given(name=st.sampled_from(shipped_profiles()), tokens=AXIS, context=AXIS)
def test_times_lie_between_those_of_the_corners_around(name: str, tokens: float, context: float) -> None:
    shipped = COSTS[name]
    sizes, contexts = [2.0**n for n in range(9)], [2.0**n for n in range(10, 20)]
    tokens, context = min(tokens, sizes[-1]), min(context, contexts[-1])
    corners = [shipped.decode_local(t, c) for t, c in product(around(sizes, tokens), around(contexts, context))]
    assert min(corners) * (1 - 1e-12) <= shipped.decode_local(tokens, context) <= max(corners) * (1 + 1e-12)


def around(axis: list[float], value: float) -> tuple[float, float]:
    return max((x for x in axis if x <= value), default=axis[0]), min(x for x in axis if x >= value)


STEPS = st.lists(st.floats(0, 50), min_size=5, max_size=5)


@given(attention=st.lists(STEPS, min_size=4, max_size=4), comm=STEPS, at=st.tuples(AXIS, AXIS), more=AXIS)
def test_times_grow_with_tokens_and_context_where_the_grid_does(
    attention: list[list[float]], comm: list[float], at: tuple[float, float], more: float
) -> None:
    """The grid's times are sums of what is drawn, so they never fall along either axis."""
    lines = [line for line in HAND.splitlines() if not line.startswith("decode")]
    for t, c in product(range(4), range(5)):
        time = 1 + sum(attention[i][j] for i in range(t + 1) for j in range(c + 1))
        lines.append(f"decode,{10**t},{10 ** (c + 1)},{time},0,0,0,{sum(comm[: t + 1])}")
    with TemporaryDirectory() as directory:
        drawn = costs(Path(directory), text="\n".join(lines))
    tokens, context = at
    assert drawn.decode_local(tokens + more, context) >= drawn.decode_local(tokens, context) * (1 - 1e-9)
    assert drawn.decode_local(tokens, context + more) >= drawn.decode_local(tokens, context) * (1 - 1e-9)
    assert drawn.shared(False, 1, tokens + more) >= drawn.shared(False, 1, tokens) * (1 - 1e-9)


def without(start: str) -> str:
    return "\n".join(line for line in HAND.splitlines() if not line.startswith(start))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: the columns are none"),
        (
            HAND.replace(",comm_ms", ""),
            "line 1: the columns are phase,tokens,context,attn_ms,dense_ms,moe_ms,moe_skewed_ms;",
        ),
        (HAND.replace("comm_ms", "comms_ms"), "line 1: the columns are .*comms_ms; they must be .*comm_ms"),
        (HAND.replace("20,30,4\n", "20,30\n", 1), "line 2: 7 values; the header names 8 columns"),
        (HAND.replace("prefill,100,0,10", "prefill,100,0,-10"), "line 2: attn_ms=-10: write a number of 0 or more"),
        (HAND.replace("prefill,100,0,10", "prefill,100,0,nan"), "line 2: attn_ms=nan: write a number"),
        (HAND.replace("prefill,100,0,10", "prefill,100,0,inf"), "line 2: attn_ms=inf: write a number"),
        (HAND.replace("prefill,100,0,10", "prefill,100,0,fast"), "line 2: attn_ms=fast: write a number"),
        (HAND.replace("prefill,100,0,10", "prefill,100,,10"), "line 2: context=: write a number"),
        (HAND.replace("prefill,100,0,10,2", "prefill,100,0,0,0"), "line 2: attn_ms=0, dense_ms=0: a step takes time"),
        (HAND.replace("prefill,100,0", "prefill,0,0"), "line 2: tokens=0: a step has tokens"),
        (HAND.replace("prefill,100,1000", "prefill,100,0"), "line 3: prefill of tokens=100, context=0 stands twice"),
        (HAND.replace("decode,1,1000", "decoding,1,1000"), "line 6: phase=decoding: unknown; write prefill or decode"),
        (without("prefill,200,1000"), "prefill of tokens=200, context=1000 is missing; .* add the line"),
        (without("decode"), "no line has phase=decode; add its measurements"),
    ],
)
def test_a_grid_that_cannot_be_used_is_one_clear_error(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"grid=.*grid.csv.*{told}") as raised:
        costs(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_a_grid_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grid=.*other\.csv: cannot be read .* beside the profile"):
        costs(tmp_path, grid="other.csv")


def test_columns_may_come_in_any_order(tmp_path: Path) -> None:
    rows = list(csv.DictReader(HAND.splitlines()))
    turned = [",".join(reversed(COLUMNS)), *(",".join(row[name] for name in reversed(COLUMNS)) for row in rows)]
    assert costs(tmp_path, "\n".join(turned)).prefill_local(150, 1000) == pytest.approx(0.032)
