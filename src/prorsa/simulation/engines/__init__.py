"""Simulated engine instances, from their ranks to the engine protocol."""
