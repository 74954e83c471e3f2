"""The maths of GRPO as pure functions: advantages, logprobs, losses.

Owns what is computed from tensors and plain numbers. Must not know configuration, models, rollouts or the training
loop, and never writes to an argument.
"""
