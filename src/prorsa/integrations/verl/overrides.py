"""From our configuration to verl's: the Hydra overrides and the environment of one training run, on CPU by one trainer rank.

Pure functions. What verl would do slowly on a small machine is switched off here, each with its reason.
"""

from __future__ import annotations

from pathlib import Path

from prorsa.config import Config
from prorsa.integrations.verl.settings import NAME, Settings

MICRO_BATCH = 8
"""Most trajectories in one forward pass. `sampler` sorts them by length, so that a few neighbours are padded little."""
DATA_SOURCE = "prorsa"
"""`data_source` of every row; verl names its validation metrics by it."""


def train_file(settings: Settings) -> Path:
    return Path(settings.work_dir) / "train.jsonl"


def held_out_file(settings: Settings) -> Path:
    return Path(settings.work_dir) / "test.jsonl"


def router_file(settings: Settings) -> Path:
    return Path(settings.work_dir) / "router.yaml"


def agents_file(settings: Settings) -> Path:
    return Path(settings.work_dir) / "agents.yaml"


def tmp_dir(settings: Settings) -> Path:
    return Path(settings.work_dir) / "tmp"


def verl_overrides(config: Config, settings: Settings) -> list[str]:
    """The Hydra overrides of `verl.trainer.main_ppo`; `train.overrides` comes last and wins."""
    return [
        *_data(config, settings),
        *_model(config),
        *_actor(config),
        *_rollout(config, settings),
        *_algorithm(config),
        *_trainer(config, settings),
        *_infrastructure(settings),
        *config.train.overrides,
    ]


def micro_batch(config: Config) -> int:
    """The largest size up to `MICRO_BATCH` that divides a mini-batch, as verl requires."""
    trajectories = config.train.mini_batch_groups * config.rollout.group_size
    return max(size for size in range(1, MICRO_BATCH + 1) if trajectories % size == 0)


def environment(settings: Settings, cores: int) -> dict[str, str]:
    """What the trainer's process tree needs beside the caller's environment."""
    return {
        "VERL_PLATFORM": "cpu",
        # FSDP is registered for cuda and npu only, and runs on CPU all the same.
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(metrics_file(settings)),
        # verl 0.9.1 crashes at INFO where separate_async has no hybrid replicas (trainer_separate_async.py:184).
        "VERL_LOGGING_LEVEL": "WARN",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": f"{settings.work_dir}/datasets",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(cores),
        # A thread that spins while it waits takes the core that the other one needs.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TQ_NUM_THREADS": str(cores),
        # verl's main_ppo would hand this to Ray's workers in a runtime environment.
        "TRANSFER_QUEUE_ENABLE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        # Sandboxes and whatever else makes temporary files: they go with the run.
        "TMPDIR": str(tmp_dir(settings)),
    }


def metrics_file(settings: Settings) -> Path:
    """Where verl's file logger writes one line a step."""
    return Path(settings.run_dir) / "verl.jsonl"


def _data(config: Config, settings: Settings) -> list[str]:
    return [
        f"data.train_files={train_file(settings)}",
        f"data.val_files={held_out_file(settings)}",
        f"data.train_batch_size={config.rollout.groups}",
        # The agent loop renders prompts itself and keeps to model.max_context; verl pads nothing to these.
        f"data.max_prompt_length={config.model.max_context}",
        f"data.max_response_length={config.model.max_context}",
        f"data.seed={config.seed}",
        "data.dataloader_num_workers=0",
    ]


def _model(config: Config) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={_quoted(config.model.path)}",
        # Packing needs flash attention, and recomputing activations trades time for memory that a small model has.
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    ]


def _actor(config: Config) -> list[str]:
    return [
        "actor_rollout_ref.actor.strategy=fsdp2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={config.train.mini_batch_groups}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro_batch(config)}",
        f"actor_rollout_ref.actor.optim.lr={config.train.learning_rate}",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        # Reduce gradients once a mini-batch, not once a micro-batch.
        "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=True",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        # The default is bfloat16, in which log-probabilities are too coarse to compare with the engines', and slow on CPU.
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        f"actor_rollout_ref.actor.fsdp_config.seed={config.seed}",
        f"actor_rollout_ref.actor.data_loader_seed={config.seed}",
    ]


def _rollout(config: Config, settings: Settings) -> list[str]:
    prefix = "actor_rollout_ref.rollout"
    sampling = config.sampling
    return [
        f"{prefix}.name={NAME}",
        f"{prefix}.n={config.rollout.group_size}",
        f"{prefix}.temperature={sampling.temperature}",
        f"{prefix}.top_p={sampling.top_p}",
        f"{prefix}.top_k={sampling.top_k}",
        f"{prefix}.val_kwargs.do_sample={sampling.temperature > 0}",
        f"{prefix}.val_kwargs.temperature={sampling.temperature}",
        f"{prefix}.val_kwargs.top_p={sampling.top_p}",
        f"{prefix}.val_kwargs.top_k={sampling.top_k}",
        # One replica is the whole cluster, however many instances that has.
        f"{prefix}.tensor_model_parallel_size=1",
        f"{prefix}.log_prob_micro_batch_size_per_gpu={micro_batch(config)}",
        f"{prefix}.free_cache_engine=False",
        f"{prefix}.router_config_path={router_file(settings)}",
        f"{prefix}.agent.num_workers=1",
        f"{prefix}.agent.default_agent_loop={NAME}",
        f"{prefix}.agent.agent_loop_config_path={agents_file(settings)}",
        f"+{prefix}.custom={{{NAME}:{_inline(settings)}}}",
    ]


def _algorithm(config: Config) -> list[str]:
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        # The episode brings its reward with it, so that verl's reward workers would have nothing to do.
        "reward.num_workers=0",
    ]


def _trainer(config: Config, settings: Settings) -> list[str]:
    sampler = "PromptReplayBuffer" if config.train.mode == "sync" else "PromptReplayBufferAsync"
    every = config.train.test_every or config.rollout.steps
    return [
        f"trainer.v1.trainer_mode={config.train.mode}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.project_name=prorsa",
        f"trainer.experiment_name={_quoted(config.name)}",
        "trainer.logger=[console,file]",
        f"trainer.total_training_steps={config.rollout.steps}",
        f"trainer.total_epochs={config.rollout.steps}",
        "trainer.val_before_train=True",
        f"trainer.test_freq={every}",
        *_checkpoints(config, settings),
        "trainer.v1.sampler.custom_sampler.path=pkg://prorsa.integrations.verl.sampler",
        f"trainer.v1.sampler.custom_sampler.name={sampler}",
        f"+trainer.v1.sampler.sampler_kwargs={_inline(settings)}",
        *(_separate_async(config, settings) if config.train.mode == "separate_async" else []),
    ]


def _checkpoints(config: Config, settings: Settings) -> list[str]:
    if not config.train.save_every:
        directory = f"{settings.work_dir}/checkpoints"
        return [
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            f"trainer.default_local_dir={_quoted(directory)}",
        ]
    return [
        f"trainer.save_freq={config.train.save_every}",
        # From the newest checkpoint, where there is one.
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={_quoted(f'{settings.run_dir}/checkpoints')}",
        # With one alone, verl would remove it before the next is whole.
        "trainer.max_actor_ckpt_to_keep=2",
    ]


def _separate_async(config: Config, settings: Settings) -> list[str]:
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    return [
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        f"{engine}.backend={NAME}",
        f"{engine}.custom_backend_module=prorsa.integrations.verl.checkpoint",
        f"+{engine}.engine_kwargs.{NAME}={_inline(settings)}",
        f"trainer.v1.separate_async.parameter_sync_step={config.rollout.groups // config.train.mini_batch_groups}",
        # Tokens come from older weights than those being trained. The policy ratio is then against the weights that
        # sampled each token, whose log-probabilities the engines gave; recomputed ones would hide the difference.
        "algorithm.rollout_correction.bypass_mode=True",
        # verl counts the versions that a group spans: 1 is on policy.
        f"trainer.v1.sampler.max_off_policy_threshold={config.rollout.max_staleness + 1}",
        f"trainer.v1.separate_async.num_warmup_batches={config.rollout.max_staleness}",
    ]


def _infrastructure(settings: Settings) -> list[str]:
    return [
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"hydra.run.dir={settings.work_dir}",
        "hydra.output_subdir=null",
        "hydra/job_logging=disabled",
        "hydra/hydra_logging=disabled",
    ]


def _inline(settings: Settings) -> str:
    """The settings as a dict in Hydra's override grammar."""
    return "{" + ",".join(f"{key}:{_quoted(value)}" for key, value in settings.mapping().items()) + "}"


def _quoted(text: str) -> str:
    """A string in Hydra's override grammar, whatever characters it has."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
