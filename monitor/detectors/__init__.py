"""Detectors: one file per failure. Adding one means adding it here."""

from __future__ import annotations

from monitor.detectors.advantage_explosion import AdvantageExplosion
from monitor.detectors.base import Detector, Settings
from monitor.detectors.critic_loss_oscillation import CriticLossOscillation
from monitor.detectors.kl_runaway import KlRunaway
from monitor.detectors.non_finite import NonFiniteDetector
from monitor.detectors.rollout_stall import RolloutStall

DETECTORS: tuple[type[Detector], ...] = (
    NonFiniteDetector,
    RolloutStall,
    KlRunaway,
    CriticLossOscillation,
    AdvantageExplosion,
)
"""Every detector, causes before the consequences they suppress."""

__all__ = ["DETECTORS", "Detector", "Settings"]
