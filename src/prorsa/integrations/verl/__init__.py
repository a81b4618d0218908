"""verl 0.9.1 as the trainer: Prorsa's rollout inside verl's V1 trainers, by verl's own extension points.

    prorsa train          launch: data, `overrides`, and a `supervisor` that runs the driver and leaves nothing of it behind
      driver              main: verl's task runner; every process that imports verl loads `plugin`
      router actor        router: the control plane, and owner of the engine processes; `replica` makes it
      agent-loop worker   agent: runs our episode and its sandboxes; turns and lifecycle events go to the router actor
      trainer worker      verl's own, on `platform_cpu`; batches come to it through `sampler`

Weights go from the trainer to the engines as a checkpoint on disk (`weights`): `adapter` publishes it when trainer and
rollout share a worker (`sync`), `checkpoint` when they do not (`separate_async`). `loaded` proves that verl uses them.
"""
