"""Orbax: orbax_saver.py DIRECTORY STEP...; saves each STEP, of which two are kept; without one restores the newest."""

import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

directory, *steps = sys.argv[1:]


def state(step):
    random = np.random.default_rng(step)
    return {
        "params": {"weight": jnp.asarray(random.standard_normal((300, 500), np.float32)), "bias": jnp.zeros(500)},
        "step": step,
    }


options = ocp.CheckpointManagerOptions(max_to_keep=2)
with ocp.CheckpointManager(directory, options=options) as manager:
    for step in map(int, steps):
        assert manager.save(step, args=ocp.args.StandardSave(state(step)))
    manager.wait_until_finished()
    if not steps:
        step = manager.latest_step()
        found = manager.restore(step, args=ocp.args.StandardRestore(state(0)))
        assert np.array_equal(found["params"]["weight"], state(step)["params"]["weight"])
        print("loaded", step, sorted(manager.all_steps()))
