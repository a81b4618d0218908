"""The typed configuration: one YAML file, `key=value` overrides, everything checked before anything starts.

Every section is strict: an unknown key, a wrong type or an impossible value is a `ConfigError` that names the key, the
value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

COMMENT_WIDTH = 100
END = "\n..."
"""What ends a YAML document that is a bare scalar."""
_SEXAGESIMAL_FREE = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9_]+(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
EXAMPLES = files("prorsa") / "examples"
MODELS = files("prorsa") / "models"
ARITHMETIC = "arithmetic"
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
ForecastKind = Literal["paper", "decode-returns", "survival"]
PolicyName = Literal["adaptive", "planned", "static", "colocated"]
S = TypeVar("S", bound="Section")


class _Loader(yaml.SafeLoader):
    """Without YAML 1.1's numbers to the base of 60, which `2:2` would be."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, _SEXAGESIMAL_FREE.get(tag, pattern)) for tag, pattern in resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class ConfigError(Exception):
    """The configuration cannot be used. Each line of the message names one key, its value and the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Model(Section):
    path: str
    """Directory of a Hugging Face checkpoint: safetensors, config, tokenizer with a chat template. Or `arithmetic`, the small
    model that comes with Prorsa."""
    max_context: Positive = 1024
    """Longest prompt plus output of a trajectory, tokens."""

    @field_validator("path")
    @classmethod
    def _of_a_shipped_model(cls, path: str) -> str:
        """Its directory, unless the name is also that of a directory here."""
        return str(MODELS / path) if path == ARITHMETIC and not Path(path).is_dir() else path


class Cluster(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: the small engine that comes with Prorsa; `sglang`: SGLang, see the section of that name."""
    instances: Positive = 4
    """Engine processes, each a prefill or a decode instance (or mixed under `policy.name: colocated`)."""
    gpus_per_prefill: Positive = 1
    """m_P: GPUs of a prefill instance."""
    gpus_per_decode: Positive = 1
    """m_D: GPUs of a decode instance."""
    gpus: Positive | None = None
    """GPU budget G (paper, 4.2). The default is what `instances` take in their larger role."""
    kv_tokens: Positive = 8192
    """KV-cache capacity of an instance, tokens."""
    block_tokens: Positive = 16
    """KV block (page) length, tokens."""
    prefill_chunk: Positive = 512
    """Prompt tokens that an engine prefills in one step."""
    max_running: Positive = 32
    """Requests that an engine decodes at once."""
    max_waiting: Positive = 256
    """Bound of an engine's queue; beyond it the engine refuses."""
    kv_store_tokens: int = Field(default=65536, ge=0)
    """Capacity of the KV store outside the instances, tokens; 0 runs without one."""
    hang_timeout: Seconds = 30.0
    """An engine that shows no progress for so long is taken for hung and started again, seconds. Requests that wait in its
    queue are progress enough while its scheduler runs. Set it above what one step takes, and the first one where kernels are
    compiled then."""
    restart_within: Seconds = 86400.0
    """How long the restart of a dead engine is tried again and again, seconds. Then the engine is given up for this run."""

    @property
    def budget(self) -> int:
        """G."""
        return self.gpus or self.instances * max(self.gpus_per_prefill, self.gpus_per_decode)


class SGLang(Section):
    """Read where `cluster.engine` is `sglang`."""

    python: str = ".venv-sglang/bin/python"
    """Interpreter of the environment that has SGLang and this package (`make sglang` makes one)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the engines run on; `auto` takes the GPUs where there are any."""
    flags: list[str] = []
    """Further command-line flags of every engine, after ours."""
    start_timeout: Seconds = 1200.0
    """Longest time from an engine's start until it serves."""
    kv_store: Literal["none", "file", "mooncake"] = "none"
    """Where the engines share their KV (SGLang's hierarchical cache): in files, or in a Mooncake store. With `none` a resent
    request is computed anew, as far as its new engine has no prefix of it. `cluster.kv_store_tokens` is for embedded
    engines."""
    kv_store_dir: str | None = None
    """`file`: the directory below which each run has one, which goes when the run ends. The default is `run_dir`."""
    kv_store_gb: Annotated[float, Field(gt=0)] = 4.0
    """`mooncake`: memory of the store that is started on this machine, GiB."""
    kv_store_master: str | None = None
    """`mooncake`: HOST:PORT of the master of a store that runs already, in place of one that is started."""


class Planning(Section):
    """How `policy.name=planned` plans; it alone reads this. docs/policy.md explains it."""

    gain: float = Field(default=0.02, ge=0)
    """What other roles must promise more than the present ones, as a fraction."""
    mixed_gain: float = Field(default=0.05, ge=0)
    """The same of roles with more mixed instances than now, which are a little worse than planned."""
    mixed: bool = True
    """Whether instances may become mixed, and so the whole cluster colocated. SGLang's keep the stage that they have."""
    even_out: bool = True
    """Whether decodes move to decode instances that have just become some."""
    patience: float = Field(default=2.0, ge=0)
    """Seconds that an instance which leaves its role goes on with what it serves; then that is resent."""
    at_syncs: bool = True
    """Whether it also decides when weights were updated and when a step begins, beside every `horizon` seconds."""


MIXED = "mixed"
"""`policy.split` where all instances start mixed."""


class RolePolicy(Section):
    """Who decides the roles; real and simulated clusters have it in common."""

    split: str | None = None
    """`n_P:n_D` for `static`; for `adaptive` and `planned` the roles to start with, and for `planned` also `mixed`,
    all colocated. The default halves the instances."""
    horizon: Seconds = 10.0
    """S: how far the forecast looks, and how often the manager decides (paper, 4.1.2)."""
    planning: Planning = Planning()

    @property
    def starts_mixed(self) -> bool:
        return self.split == MIXED


class Policy(RolePolicy):
    name: PolicyName = "adaptive"
    """`adaptive`: roles follow the forecast by the paper's rule; `planned`: they are those under which the work ahead gets on
    best; `static`: the split stays; `colocated`: every instance does both stages."""
    profile: str | None = None
    """What an instance can do, for `planned`: the name of a shipped profile, or a file that `prorsa profile` wrote."""
    forecast: ForecastKind | None = None
    """`paper`: one step of each trajectory's lifecycle; `decode-returns`: the next requests of trajectories in DECODE too,
    which the paper leaves out and which are most of the arrivals where turns are shorter than the horizon; `survival`: all
    steps that fit into the horizon, each given how far it has got (docs/forecast.md). The default is `decode-returns`, which
    costs less, and `survival` for `planned`, which needs it."""
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = 8000.0
    """Profiled effective prefill speed of one instance, full-prompt tokens/s: theta until busy intervals are seen."""

    @property
    def forecaster(self) -> ForecastKind:
        return self.forecast or ("survival" if self.name == "planned" else "decode-returns")

    def initial_split(self, instances: int) -> tuple[int, int]:
        """(n_P, n_D) to start with; (0, 0) where every instance is mixed."""
        if self.name == "colocated" or self.starts_mixed:
            return 0, 0
        if self.split is None:
            return instances // 2, instances - instances // 2
        return split_counts(self.split)


class Sampling(Section):
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """1 keeps the whole distribution."""
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    max_new_tokens: Positive = 128
    """Token budget of one turn."""


class Task(Section):
    name: Literal["arithmetic"] = "arithmetic"
    """Arithmetic questions in words, answered with a Python tool over several turns."""
    train_questions: Positive = 512
    """Size of the training set; rollouts go through it in order, again and again."""
    test_questions: Positive = 64
    """Size of the held-out set."""
    max_turns: Positive = 6
    """Model turns of a trajectory."""


class Sandbox(Section):
    prewarmed: int = Field(default=8, ge=0)
    """Sandboxes kept ready; 0 starts every one cold."""
    timeout: Seconds = 5.0
    """Wall time of one tool call."""
    memory_mb: Positive = 256
    """Address space of a sandbox, MiB."""
    file_mb: Positive = 4
    """Largest file that a sandbox may write, MiB."""
    home_mb: Positive = 64
    """All files of a sandbox together, MiB; they are kept in memory where the kernel gives a sandbox mounts of its own."""
    home_files: Positive = 4096
    """Files and directories of a sandbox together."""


class Batches(Section):
    """What is rolled out and when it is launched; real and simulated rollouts have it in common."""

    mode: Literal["sync", "async"] = "sync"
    """`sync`: a batch starts when the last one has ended; `async`: trajectories are injected all the time. `prorsa train`
    follows `train.mode`."""
    groups: Positive = 8
    """Groups in a batch (a step)."""
    group_size: Positive = 8
    """Trajectories of one question that are compared with each other (GRPO)."""
    steps: Positive = 4
    """Batches of a rollout, or training steps."""
    max_staleness: int = Field(default=1, ge=0)
    """How many weights versions a trajectory may fall behind before it is dropped (async)."""
    injection: Literal["replace_on_reward", "fixed_rate", "group_replenishment"] = "group_replenishment"
    """When new trajectories are launched (async; paper, B.2)."""
    injection_rate: Annotated[float, Field(gt=0)] = 8.0
    """Trajectories a second under `fixed_rate`."""


class Rollout(Batches):
    split: Literal["train", "test"] = "train"
    """The questions that `prorsa rollout` asks."""


class Train(Section):
    mode: Literal["sync", "separate_async"] = "sync"
    """verl's trainer: `sync` alternates rollout and training, `separate_async` does both at the same time."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Of AdamW."""
    mini_batch_groups: Positive = 8
    """Groups in one optimiser step."""
    test_every: int = Field(default=0, ge=0)
    """Evaluate the held-out questions every so many steps; 0 only before and after."""
    save_every: int = Field(default=0, ge=0)
    """Write a checkpoint of the training to the run directory every so many steps and at the end, from which
    `prorsa train --resume RUN` goes on; 0 writes none."""
    overrides: list[str] = []
    """Hydra overrides passed to verl as they are, after ours."""


class Recording(Section):
    """What happens while the run directory cannot be written, as on a full disk."""

    memory_mb: Positive = 256
    """Records that cannot be written wait in so much memory, MiB, and are written when they can be."""
    give_up_after: Seconds | None = 300.0
    """A rollout or a training run stops when nothing could be written for so many seconds, or the memory is used up; it can
    be resumed. null: it goes on, and counts what is lost. `prorsa serve` always goes on."""


class Gateway(Section):
    """`prorsa serve` alone reads it."""

    host: str = "127.0.0.1"
    """Address to listen at. Any but a loopback one needs an API key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 lets the system choose; the run directory's `gateway.json` says which."""
    max_body_mb: Positive = 8
    """Largest request, MiB."""
    max_requests: Positive = 1024
    """Requests in service at once; one more is answered 429. Each takes three open files."""
    max_connections: Positive = 16384
    """Open connections of clients at once, fewer where the limit on open files (ulimit -Hn) leaves fewer; one more is
    answered 503."""
    request_timeout: Seconds = 600.0
    """Longest time from a request to the end of its answer."""
    write_timeout: Seconds = 30.0
    """How long a client may leave its stream unread before its turn is cancelled."""
    tool_timeout: Seconds = 600.0
    """A trajectory whose last answer was a tool call ends when no request has followed for so long."""
    idle_timeout: Seconds = 60.0
    """The same after an answer without a tool call."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Of the draws of requests that bring none. Unset, each draws anew. Set, the same turn of a trajectory of the same name
    draws the same after a restart, too."""
    api_key_file: str | None = None
    """File with the key that requests of agents need; made with a new key where it is missing. The environment variable
    PRORSA_API_KEY goes before it. Without either they need none."""
    allowed_hosts: list[str] = []
    """Names that requests may give this server beside its own and `localhost`, without a port, such as those of a proxy
    before it. Addresses need no entry."""
    admin_token_file: str | None = None
    """File with the token of the admin endpoints; made with a new token where it is missing. The default is `admin-token` in
    the run directory. The environment variable PRORSA_ADMIN_TOKEN goes before both."""
    log: Literal["text", "json"] = "text"
    """Form of the run directory's `prorsa.log`: lines for readers, or a JSON object a line."""
    traces: str | None = None
    """OpenTelemetry traces of the requests: the URL of a collector (OTLP over HTTP, such as http://127.0.0.1:4318), or a file
    that gets a JSON object a span. Needs the extra `otel`."""


class Config(Section):
    name: str = "run"
    """Begins the name of the run directory."""
    run_dir: str = "runs"
    """Each run writes a new directory below it."""
    seed: int = 0
    """Of the questions, of sampling and of training."""
    model: Model
    cluster: Cluster = Cluster()
    sglang: SGLang = SGLang()
    policy: Policy = Policy()
    sampling: Sampling = Sampling()
    task: Task = Task()
    sandbox: Sandbox = Sandbox()
    rollout: Rollout = Rollout()
    train: Train = Train()
    recording: Recording = Recording()
    gateway: Gateway = Gateway()

    @model_validator(mode="after")
    def _possible(self) -> Config:
        problems = list(_impossibilities(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def split_counts(split: str) -> tuple[int, int]:
    """(n_P, n_D) of `n_P:n_D`. Raises `ConfigError`."""
    parts = split.split(":")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"policy.split={split!r}: write it as n_P:n_D with at least one of each, such as 2:2")
    return int(parts[0]), int(parts[1])


def never_changes(name: str, policy: RolePolicy) -> str | None:
    """What is wrong with `policy` where its instances start mixed and would stay so."""
    if not policy.starts_mixed or name == "colocated":
        return None
    if name in ("static", "adaptive"):
        return (
            f"policy.split=mixed: under policy.name={name} no mixed instance becomes another; use planned, or colocated"
        )
    if not policy.planning.mixed:
        return (
            "policy.split=mixed: with policy.planning.mixed=false the instances stay so; set that to true, "
            "or use policy.name=colocated"
        )
    return None


def _impossibilities(config: Config) -> list[str]:
    cluster, policy = config.cluster, config.policy
    problems: list[str] = []
    if policy.starts_mixed:
        problem = never_changes(policy.name, policy)
        if problem is None and cluster.engine == "sglang" and policy.name != "colocated":
            problem = (
                "policy.split=mixed: engines of cluster.engine=sglang stay what they are launched as; write policy.split "
                "as n_P:n_D, or use policy.name=colocated"
            )
        problems += [problem] if problem else []
    elif policy.split is not None:
        try:
            split_counts(policy.split)
        except ConfigError as error:
            problems.append(str(error))
            return problems
    if policy.name == "static" and policy.split is None:
        problems.append("policy.split=null: policy.name=static needs it; write it as n_P:n_D, such as 2:2")
    if policy.name != "colocated" and not policy.starts_mixed:
        n_prefill, n_decode = policy.initial_split(cluster.instances)
        if cluster.instances < 2:
            problems.append(
                f"cluster.instances={cluster.instances}: prefill and decode need one instance each; "
                "set it to 2 or more, or policy.name=colocated"
            )
        elif n_prefill + n_decode != cluster.instances:
            problems.append(
                f"policy.split={policy.split!r}: its sum is {n_prefill + n_decode} but cluster.instances="
                f"{cluster.instances}; make them equal"
            )
        least = cluster.gpus_per_prefill + cluster.gpus_per_decode
        start = n_prefill * cluster.gpus_per_prefill + n_decode * cluster.gpus_per_decode
        if cluster.budget < least:
            problems.append(
                f"cluster.gpus={cluster.gpus}: one instance of each role takes {least}; set it to {least} or more"
            )
        elif cluster.budget < start:
            problems.append(
                f"cluster.gpus={cluster.gpus}: the {n_prefill} prefill and {n_decode} decode instances to start with take "
                f"{start}; set it to {start} or more, or use fewer cluster.instances"
            )
    if policy.name == "planned" and policy.profile is None:
        problems.append(
            "policy.profile=null: policy.name=planned plans with what an instance can do; measure it with `prorsa profile "
            "--config FILE --out PROFILE.yaml`, or use policy.name=adaptive"
        )
    if policy.name == "planned" and policy.forecaster != "survival":
        problems.append(
            f"policy.forecast={policy.forecast}: policy.name=planned needs survival, which alone says what the work is"
        )
    unequal = cluster.gpus_per_prefill != cluster.gpus_per_decode
    if cluster.engine == "sglang" and unequal and policy.name == "planned":
        problems.append(
            f"policy.name=planned: it plans with instances that flip, and SGLang's do not where "
            f"cluster.gpus_per_prefill={cluster.gpus_per_prefill} and cluster.gpus_per_decode={cluster.gpus_per_decode}; "
            "make them equal, or use policy.name=adaptive"
        )
    sglang = config.sglang
    for key, value, store in (
        ("kv_store_dir", sglang.kv_store_dir, "file"),
        ("kv_store_master", sglang.kv_store_master, "mooncake"),
    ):
        if value is not None and sglang.kv_store != store:
            problems.append(
                f"sglang.{key}={value!r}: of no use with sglang.kv_store={sglang.kv_store}; set that to {store}"
            )
    if cluster.kv_tokens < config.model.max_context + cluster.block_tokens:
        problems.append(
            f"cluster.kv_tokens={cluster.kv_tokens}: one trajectory of model.max_context={config.model.max_context} "
            f"does not fit; set it to {config.model.max_context + cluster.block_tokens} or more"
        )
    return problems


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, or an example by its name, apply `section.key=value` overrides (values are YAML), check everything.

    Raises `ConfigError`.
    """
    return parse_config(read_yaml(find_yaml(path, EXAMPLES, "config"), overrides, "config"))


def shipped(directory: Traversable) -> list[str]:
    """Names of the YAML files in a directory of the package, without their ending."""
    return sorted(entry.name.removesuffix(".yaml") for entry in directory.iterdir() if entry.name.endswith(".yaml"))


def find_yaml(name: str | Path, directory: Traversable, what: str) -> Path:
    """The path of a YAML file that a user gives by its path or, if it is in `directory` of the package, by its name alone.

    `what` names it in the error. Raises `ConfigError` for a name that is neither.
    """
    path = Path(name)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return path
    if str(name) in shipped(directory):
        return Path(str(directory / f"{name}.yaml"))
    known = ", ".join(shipped(directory))
    raise ConfigError(f"{what}={name}: there is no file of that name; give the path of a YAML file, or one of: {known}")


def read_yaml(path: str | Path, overrides: list[str] | None = None, what: str = "config") -> dict[str, Any]:
    """The mapping that a YAML file holds, with `key=value` overrides applied. `what` names the file in errors.

    Raises `ConfigError`.
    """
    try:
        data = yaml.load(Path(path).read_text(), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{what}={path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{what}={path}: not valid YAML ({error}); mend the file") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{what}={path}: holds {type(data).__name__}; a mapping of sections is needed")
    for override in overrides or []:
        apply_override(data, override)
    return data


def parse_config(data: dict[str, Any]) -> Config:
    return validated(Config, data)


def validated(section: type[S], data: dict[str, Any], where: str = "") -> S:
    """Raises `ConfigError`, each line of which begins with `where`."""
    try:
        return section.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(where + _explain(problem) for problem in error.errors())) from error


def apply_override(data: dict[str, Any], override: str) -> None:
    """Replace one value, given as `section.key=value` (YAML), in the mapping. Raises `ConfigError`."""
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    *sections, leaf = key.split(".")
    node = data
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"{key}={value}: {section!r} is a value, not a section; see `prorsa rollout --dry-run` for the keys"
            )
        node = child
    try:
        node[leaf] = yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}={value}: the value is not valid YAML ({error}); quote it") from error


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] == "extra_forbidden":
        return f"{key}={problem['input']!r}: unknown key; remove it or mend its spelling (`--dry-run` prints every key)"
    if problem["type"] == "missing":
        return f"{key}: missing; add it to the configuration"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{key}={problem['input']!r}: {message}; change the value"


def dump_config(config: Section) -> str:
    """The resolved configuration as YAML, each key explained; `load_config` reads it back to an equal one."""
    return "\n".join(_commented(config, "")) + "\n"


def _commented(section: Section, indent: str, explain: bool = True) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        if field.description and explain:
            yield from (f"{indent}# {line}" for line in wrap(" ".join(field.description.split()), COMMENT_WIDTH))
        value = getattr(section, name)
        if isinstance(value, Section):
            yield f"{indent}{name}:"
            yield from _commented(value, indent + "  ", explain)
        elif isinstance(value, dict) and all(isinstance(part, Section) for part in value.values()):
            yield f"{indent}{name}:"
            for number, (key, part) in enumerate(value.items()):
                yield f"{indent}  {key}:"
                yield from _commented(part, indent + "    ", explain and number == 0)
        else:
            yield f"{indent}{name}: {yaml.safe_dump(value, default_flow_style=True, width=10_000).split(END)[0].strip()}"
