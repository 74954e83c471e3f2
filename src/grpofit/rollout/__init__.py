"""Rollouts: the engine protocol and its implementations."""
