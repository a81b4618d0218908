"""Experiments in virtual time: the deciding, routing and rollout code of the product runs unchanged."""
