"""Checks of GPU memory: what the job will hold, against what a GPU has."""

from __future__ import annotations

from monitor.preflight.check import Check, Result, error, good, skipped, warning
from monitor.preflight.model import model_of
from monitor.preflight.setup import Setup
from monitor.units import Unit, quantity

GPU_MEMORY = "preflight.gpu_memory_bytes"
"""Key under which the command puts the GPUs' memory, in bytes."""

_GIB = 2.0**30
_ROOM = 1.3  # the guide's factor for STRICT_PACK
_REWARD_BATCH = ((10e9, 8), (20e9, 4), (float("inf"), 2))
"""The guide's table for a reward model in vLLM: parameters up to, batch size."""


def _gib(value: float) -> str:
    return quantity(value, Unit.BYTES)


def _reference(setup: Setup) -> Result:
    if not setup.reference:
        return good("no reference model is used (use_kl_loss and use_kl_in_reward are false)")
    lora = (setup.number("actor_rollout_ref.model.lora_rank") or 0) > 0 or (
        setup.number("actor_rollout_ref.model.lora.rank") or 0) > 0
    if lora:
        return good("with LoRA the reference is the actor without its adapter")
    strategy = setup.text("actor_rollout_ref.ref.strategy") or setup.text("actor_rollout_ref.actor.strategy")
    offload = setup.true("actor_rollout_ref.ref.fsdp_config.param_offload") or setup.true(
        "actor_rollout_ref.ref.megatron.param_offload")
    if strategy == "megatron" and not offload:
        return warning("a Megatron reference stays on the GPU beside the actor, a second model of its size",
                       "actor_rollout_ref.ref.megatron.param_offload=True")
    if offload:
        return good("the reference is offloaded between its uses")
    return good(f"an {strategy} reference is forward only, which verl offloads by itself between its uses")


def _reward_batch(setup: Setup) -> Result:
    if not (setup.true("reward_model.enable") or setup.true("reward.reward_model.enable")):
        return good("no reward model is used")
    if setup.true("reward.reward_model.enable"):
        return good("the reward model runs in a rollout engine, which batches by itself (max_num_seqs)")
    batch = setup.number("reward_model.micro_batch_size_per_gpu")
    model = model_of(setup, "reward_model.model.path")
    if batch is None or not model.parameters:
        return skipped("reward_model.micro_batch_size_per_gpu, or the size of reward_model.model.path")
    most = next(size for limit, size in _REWARD_BATCH if model.parameters <= limit)
    found = f"reward_model.micro_batch_size_per_gpu is {batch:.0f} for {model.parameters / 1e9:.3g} B parameters"
    if batch > 4 * most:
        return warning(f"{found}, and the guide measured the best throughput at {most}",
                       f"reward_model.micro_batch_size_per_gpu={most}")
    return good(found)


def estimate(setup: Setup) -> dict[str, float] | None:
    """Bytes on each GPU by what holds them, None where the model's size is not known.

    Mixed precision with Adam costs 16 bytes a parameter: weights and gradients in 32 bits and two moments in 32 bits
    (ZeRO, Rajbhandari and others 2020, counts the same with 16-bit copies), shared by FSDP over all GPUs, or by
    Megatron over its own parallel sizes at least; offloaded parts count as nothing. The rollout takes
    gpu_memory_utilization of the GPU with weights and cache, and gives it back while verl trains if free_cache_engine
    is set. Activations are not counted.
    """
    model = model_of(setup)
    if not model.parameters:
        return None
    total = setup.number(GPU_MEMORY) or 0.0
    gpus = max(1, setup.gpus)
    lora = (setup.number("actor_rollout_ref.model.lora_rank") or 0) > 0

    def trained(role: str, parameters: float, config: str) -> dict[str, float]:
        weights = 0.0 if setup.true(f"{config}.param_offload") else 8.0 * parameters / gpus
        moments = 0.0 if setup.true(f"{config}.optimizer_offload") else 8.0 * parameters / gpus
        return {f"{role} weights and gradients": weights / (2 if lora else 1),
                f"{role} optimizer": 0.0 if lora else moments}

    parts = trained("actor", model.parameters, "actor_rollout_ref.actor.fsdp_config")
    if setup.critic:
        critic = model_of(setup, "critic.model.path").parameters or model.parameters
        base = "critic.fsdp" if setup.has("critic.fsdp") else "critic.model.fsdp_config"
        parts |= trained("critic", critic, base)
    parallel = setup.number("actor_rollout_ref.rollout.tensor_model_parallel_size") or 1
    utilization = setup.number("actor_rollout_ref.rollout.gpu_memory_utilization") or 0.5
    parts["rollout weights"] = 2.0 * model.parameters / parallel
    parts["rollout cache"] = max(0.0, utilization * total - parts["rollout weights"]) if total else 0.0
    return parts


def _memory(setup: Setup) -> Result:
    parts, total = estimate(setup), setup.number(GPU_MEMORY)
    if parts is None:
        return skipped("the size of actor_rollout_ref.model.path (give its directory, or a name such as 7B)")
    training = sum(amount for name, amount in parts.items() if not name.startswith("rollout"))
    weights, rollout = parts["rollout weights"], parts["rollout weights"] + parts["rollout cache"]
    told = ", ".join(f"{name} {_gib(amount)}" for name, amount in parts.items() if amount)
    if not total:
        return skipped(f"the GPU's memory (--gpu-memory); by estimate a GPU holds {told}")
    freed = setup.get("actor_rollout_ref.rollout.free_cache_engine") is not False
    most = max(training, rollout) if freed else training + rollout
    found = (f"by estimate a GPU of {_gib(total)} holds {told}; without activations at most {_gib(most)} at once"
             f"{', since the rollout sleeps while verl trains' if freed else ''}")
    if weights > total or training > total:
        return error(found, "more GPUs, param_offload=True and optimizer_offload=True in "
                            "actor_rollout_ref.actor.fsdp_config, or a larger "
                            "actor_rollout_ref.rollout.tensor_model_parallel_size")
    needed = _ROOM * weights
    if needed > total or most > total / 1.1:
        return warning(found, "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True, a lower "
                              "actor_rollout_ref.rollout.gpu_memory_utilization, or more GPUs")
    if weights > (setup.number("actor_rollout_ref.rollout.gpu_memory_utilization") or 0.5) * total:
        return error(f"{found}; the rollout's share of the GPU does not hold its weights",
                     "actor_rollout_ref.rollout.gpu_memory_utilization: higher, or a larger "
                     "actor_rollout_ref.rollout.tensor_model_parallel_size")
    return good(found)


CHECKS = (
    Check(id="reference_offload", title="Reference model beside the actor", guide="2.1", run=_reference,
          why="A reference that stays on the GPU is a second model of the actor's size.",
          applies="Megatron today; FSDP before verl's forward-only reference",
          source="verl builds an FSDP reference with forward_only, which offloads it"),
    Check(id="reward_batch", title="Batch size of the reward model", guide="2.3", run=_reward_batch,
          why="A reward model whose batches are too large swaps cache blocks, and is slower and not faster.",
          applies="up to verl 0.6.1; later a rollout engine does it", source="the guide's table: 7B 8, 13B 4, 34B 2"),
    Check(id="gpu_memory", title="Memory estimate against the GPU", guide="5", run=_memory,
          why="Running out of memory after an hour of loading, or at the first long batch, costs the hour.",
          applies="FSDP; a lower bound with Megatron",
          source="16 bytes a trained parameter (ZeRO 2020), 2 for the rollout, 1.3 times the model free (the guide)"),
)
