"""verl 0.9.1 as the trainer: Prorsa's rollout inside verl's V1 trainers, by verl's own extension points.

    prorsa train          launch: data, Hydra overrides, a supervised `python -m verl.trainer.main_ppo`
      driver, task runner, trainer workers      verl's own; they load `plugin`
      replica actor       server: owns the engine processes and the KV store
      router actor        router: the control plane (tracker, forecast, allocation, routing, switching)
      agent-loop worker   agent: runs our episode; its turns and lifecycle events go to the router actor

Weights go from the trainer to the engines as a safetensors checkpoint (`weights`): `adapter` takes them there when trainer
and rollout share a worker (`sync`), `checkpoint` when they do not (`separate_async`).
"""
