"""The configuration refuses what cannot work, and says which key, which value and what to do."""

from pathlib import Path

import pytest

from prorsa.assembly import instance_roles
from prorsa.config import Config, ConfigError, dump_config, load_config, parse_config
from prorsa.engines.protocol import Role

MODEL = {"model": {"path": "models/arithmetic"}}


def refuse(data: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    return str(caught.value)


def test_a_minimal_configuration_takes_the_defaults() -> None:
    config = parse_config(MODEL)
    assert config.policy.horizon == 10.0
    assert config.policy.initial_split(config.cluster.instances) == (2, 2)


def test_overrides_reach_nested_keys_and_are_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\n")
    config = load_config(path, ["cluster.instances=6", "policy.split='2:4'", "sampling.temperature=0.5"])
    assert config.cluster.instances == 6
    assert config.policy.initial_split(6) == (2, 4)
    # Which YAML 1.1 reads as 2 * 60 + 4.
    assert load_config(path, ["cluster.instances=6", "policy.split=2:4"]).policy.split == "2:4"
    assert config.sampling.temperature == 0.5


def test_a_plan_may_start_from_colocation() -> None:
    config = parse_config({**MODEL, "policy": {"name": "planned", "profile": "p.yaml", "split": "mixed"}})
    assert set(instance_roles(config).values()) == {Role.MIXED}


def test_the_dumped_configuration_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    config = parse_config({**MODEL, "policy": {"name": "static", "split": "1:3", "horizon": 2.5}})
    path.write_text(dump_config(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ({**MODEL, "cluster": {"instnces": 3}}, ["cluster.instnces", "3", "unknown key"]),
        ({**MODEL, "cluster": {"instances": "three"}}, ["cluster.instances", "three", "integer"]),
        ({**MODEL, "cluster": {"instances": 1}}, ["cluster.instances=1", "2 or more"]),
        ({**MODEL, "cluster": {"gpus": 1}}, ["cluster.gpus=1", "2 or more"]),
        ({**MODEL, "cluster": {"gpus": 5, "gpus_per_decode": 2}}, ["cluster.gpus=5", "2 prefill", "6 or more"]),
        ({**MODEL, "policy": {"name": "static"}}, ["policy.split", "n_P:n_D"]),
        ({**MODEL, "policy": {"split": "3:3"}}, ["policy.split='3:3'", "6", "cluster.instances=4"]),
        ({**MODEL, "policy": {"split": "0:4"}}, ["policy.split='0:4'", "at least one of each"]),
        ({**MODEL, "policy": {"split": "mixed"}}, ["policy.split=mixed", "policy.name=adaptive", "planned"]),
        (
            {**MODEL, "policy": {"name": "planned", "profile": "p", "split": "mixed", "planning": {"mixed": False}}},
            ["policy.split=mixed", "policy.planning.mixed=false", "true"],
        ),
        (
            {
                **MODEL,
                "cluster": {"engine": "sglang"},
                "policy": {"name": "planned", "profile": "p", "split": "mixed"},
            },
            ["policy.split=mixed", "cluster.engine=sglang", "n_P:n_D"],
        ),
        ({**MODEL, "cluster": {"kv_tokens": 100}}, ["cluster.kv_tokens=100", "1040 or more"]),
        (
            {**MODEL, "cluster": {"engine": "sglang", "gpus_per_prefill": 2}, "policy": {"name": "planned"}},
            ["policy.name=planned", "gpus_per_prefill=2", "gpus_per_decode=1", "policy.name=adaptive"],
        ),
        ({**MODEL, "policy": {"name": "planned"}}, ["policy.profile=null", "prorsa profile", "policy.name=adaptive"]),
        (
            {**MODEL, "policy": {"name": "planned", "profile": "p.yaml", "forecast": "paper"}},
            ["policy.forecast=paper", "policy.name=planned", "needs survival"],
        ),
        (
            {**MODEL, "sglang": {"kv_store_dir": "/kv"}},
            ["sglang.kv_store_dir='/kv'", "kv_store=none", "set that to file"],
        ),
        (
            {**MODEL, "sglang": {"kv_store": "file", "kv_store_master": "m:1"}},
            ["sglang.kv_store_master='m:1'", "kv_store=file", "set that to mooncake"],
        ),
        ({}, ["model", "missing"]),
    ],
)
def test_what_cannot_work_is_refused_with_key_value_and_remedy(data: dict[str, object], parts: list[str]) -> None:
    message = refuse(data)
    for part in parts:
        assert part in message


def test_two_mistakes_are_both_named() -> None:
    message = refuse({**MODEL, "seed": "x", "cluster": {"instances": 0}})
    assert "seed='x'" in message
    assert "cluster.instances=0" in message


def test_one_mixed_instance_is_a_cluster() -> None:
    assert isinstance(parse_config({**MODEL, "cluster": {"instances": 1}, "policy": {"name": "colocated"}}), Config)


@pytest.mark.parametrize(
    ("override", "part"),
    [("cluster.instances", "section.key=value"), ("name.first=x", "not a section"), ("seed=[", "not valid YAML")],
)
def test_a_broken_override_is_named(tmp_path: Path, override: str, part: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: a\nmodel: {path: m}\n")
    with pytest.raises(ConfigError, match=part):
        load_config(path, [override])


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
