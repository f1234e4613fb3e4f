"""Detectors: one file per failure. Adding one means adding it here."""

from __future__ import annotations

from monitor.detectors.actor_dead import ActorDead
from monitor.detectors.advantage_explosion import AdvantageExplosion
from monitor.detectors.base import Detector, Settings
from monitor.detectors.checkpoint_incomplete import CheckpointIncomplete
from monitor.detectors.critic_divergence import CriticDivergence
from monitor.detectors.critic_loss_oscillation import CriticLossOscillation
from monitor.detectors.entropy_collapse import EntropyCollapse
from monitor.detectors.entropy_explosion import EntropyExplosion
from monitor.detectors.gpu_headroom import GpuHeadroom
from monitor.detectors.gpu_lost import GpuLost
from monitor.detectors.gradient_explosion import GradientExplosion
from monitor.detectors.kl_runaway import KlRunaway
from monitor.detectors.memory_growth import MemoryGrowth
from monitor.detectors.no_learning_signal import NoLearningSignal
from monitor.detectors.non_finite import NonFiniteDetector
from monitor.detectors.optimizer_idle import OptimizerIdle
from monitor.detectors.placement_group_infeasible import PlacementGroupInfeasible
from monitor.detectors.placement_group_leak import PlacementGroupLeak
from monitor.detectors.response_length import ResponseLength
from monitor.detectors.restart_from_scratch import RestartFromScratch
from monitor.detectors.reward_collapse import RewardCollapse
from monitor.detectors.reward_hacking import RewardHacking
from monitor.detectors.rollout_mismatch import RolloutMismatch
from monitor.detectors.rollout_stall import RolloutStall
from monitor.detectors.throughput_regression import ThroughputRegression
from monitor.detectors.vanishing_policy_gradient import VanishingPolicyGradient

DETECTORS: tuple[type[Detector], ...] = (
    NonFiniteDetector,
    RolloutStall,
    NoLearningSignal,
    OptimizerIdle,
    KlRunaway,
    VanishingPolicyGradient,
    AdvantageExplosion,
    CriticLossOscillation,
    CriticDivergence,
    GradientExplosion,
    EntropyExplosion,
    EntropyCollapse,
    ResponseLength,
    RewardCollapse,
    RewardHacking,
    RolloutMismatch,
    ThroughputRegression,
    MemoryGrowth,
    GpuHeadroom,
    CheckpointIncomplete,
    RestartFromScratch,
)
"""Every detector, causes before the consequences they suppress."""

MACHINE_DETECTORS: tuple[type[Detector], ...] = (
    PlacementGroupInfeasible,
    PlacementGroupLeak,
    ActorDead,
    GpuLost,
)
"""Every detector that judges a machine or cluster instead of a run."""

ALL_DETECTORS = (*DETECTORS, *MACHINE_DETECTORS)

__all__ = ["ALL_DETECTORS", "DETECTORS", "MACHINE_DETECTORS", "Detector", "Settings"]
