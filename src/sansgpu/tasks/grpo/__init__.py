"""Reinforcement learning with verifiers: Group Relative Policy Optimization (GRPO)."""
