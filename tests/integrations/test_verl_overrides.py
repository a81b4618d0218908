"""Our overrides, composed with the configuration that verl ships."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from prorsa.config import parse_config
from prorsa.integrations.verl.overrides import environment, micro_batch, verl_overrides
from prorsa.integrations.verl.settings import Settings

SETTINGS = Settings("/runs/one", "/tmp/prorsa-one")


def composed(**sections: Any) -> Any:
    """verl's whole configuration with our overrides. Hydra refuses a key that verl does not have."""
    return compose_overrides(verl_overrides(parse_config({"model": {"path": "/models/tiny"}, **sections}), SETTINGS))


def compose_overrides(overrides: list[str]) -> Any:
    verl = find_spec("verl")
    assert verl is not None
    assert verl.origin is not None
    with initialize_config_dir(str(Path(verl.origin).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides)


def test_sync_follows_our_configuration() -> None:
    verl = composed(
        seed=5,
        rollout={"groups": 6, "group_size": 4, "steps": 9},
        sampling={"temperature": 0.7, "top_p": 0.9},
        train={"learning_rate": 3e-4, "mini_batch_groups": 3},
    )
    assert verl.trainer.v1.trainer_mode == "sync"
    assert verl.trainer.total_training_steps == 9
    assert verl.data.train_batch_size == 6
    assert verl.data.seed == 5
    actor, rollout = verl.actor_rollout_ref.actor, verl.actor_rollout_ref.rollout
    assert (actor.ppo_mini_batch_size, actor.optim.lr) == (3, 3e-4)
    assert rollout.n == 4
    assert (rollout.temperature, rollout.top_p) == (0.7, 0.9)
    assert verl.algorithm.adv_estimator == "grpo"


def test_every_extension_point_is_named() -> None:
    verl = composed(train={"mode": "separate_async"})
    rollout = verl.actor_rollout_ref.rollout
    assert rollout.name == rollout.agent.default_agent_loop == rollout.checkpoint_engine.backend == "prorsa"
    assert rollout.checkpoint_engine.custom_backend_module == "prorsa.integrations.verl.checkpoint"
    assert rollout.router_config_path == "/tmp/prorsa-one/router.yaml"
    assert rollout.agent.agent_loop_config_path == "/tmp/prorsa-one/agents.yaml"
    sampler = verl.trainer.v1.sampler
    assert sampler.custom_sampler.path == "pkg://prorsa.integrations.verl.sampler"
    for settings in (rollout.custom.prorsa, rollout.checkpoint_engine.engine_kwargs.prorsa, sampler.sampler_kwargs):
        assert Settings.of(settings) == SETTINGS


def test_held_out_questions_are_sampled_as_in_the_rollout_before_and_after() -> None:
    verl = composed(sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 12}, rollout={"steps": 9})
    held_out = verl.actor_rollout_ref.rollout.val_kwargs
    assert (held_out.do_sample, held_out.temperature, held_out.top_p, held_out.top_k) == (True, 0.7, 0.9, 12)
    assert verl.trainer.val_before_train
    assert verl.trainer.test_freq == 9


def test_held_out_questions_every_so_many_steps() -> None:
    assert composed(train={"test_every": 4}).trainer.test_freq == 4


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_staleness_counts_versions_behind_where_verl_counts_versions_spanned(staleness: int) -> None:
    verl = composed(
        rollout={"groups": 8, "max_staleness": staleness}, train={"mode": "separate_async", "mini_batch_groups": 4}
    )
    assert verl.trainer.v1.sampler.max_off_policy_threshold == staleness + 1
    assert verl.trainer.v1.separate_async.parameter_sync_step == 2
    assert not verl.actor_rollout_ref.hybrid_engine


def test_overrides_of_the_user_come_last() -> None:
    assert composed(train={"overrides": ["trainer.test_freq=77"]}).trainer.test_freq == 77


@pytest.mark.parametrize(
    ("groups", "size", "expected"), [(8, 8, 8), (2, 2, 4), (1, 7, 7), (3, 3, 3), (1, 11, 1), (5, 4, 5)]
)
def test_a_micro_batch_divides_the_mini_batch(groups: int, size: int, expected: int) -> None:
    config = parse_config(
        {"model": {"path": "m"}, "rollout": {"group_size": size}, "train": {"mini_batch_groups": groups}}
    )
    assert micro_batch(config) == expected


@pytest.mark.parametrize("name", ["with space", "a=b,c", "it's", "{x}:[1]"])
def test_any_path_reaches_verl_as_it_is(name: str) -> None:
    config = parse_config({"name": name, "model": {"path": f"/models/{name}"}})
    verl = compose_overrides(verl_overrides(config, Settings(f"/runs/{name}", "/tmp/prorsa-one")))
    assert verl.actor_rollout_ref.model.path == f"/models/{name}"
    assert verl.trainer.experiment_name == name
    assert verl.trainer.v1.sampler.sampler_kwargs.run_dir == f"/runs/{name}"


def test_temporary_files_of_the_trainer_go_with_the_run() -> None:
    for name in ("TMPDIR", "HF_DATASETS_CACHE"):
        assert environment(SETTINGS, 2)[name].startswith(SETTINGS.work_dir)


def test_checkpoints_are_written_where_the_run_is_and_training_goes_on_from_the_newest() -> None:
    saving, without = composed(train={"save_every": 3}).trainer, composed().trainer
    assert (saving.save_freq, saving.resume_mode, saving.default_local_dir) == (3, "auto", "/runs/one/checkpoints")
    assert (without.save_freq, without.resume_mode) == (-1, "disable")
    assert without.default_local_dir == "/tmp/prorsa-one/checkpoints"
