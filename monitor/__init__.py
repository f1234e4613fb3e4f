"""Training-health monitor for LLM reinforcement learning with verl."""

__version__ = "0.1.0"
