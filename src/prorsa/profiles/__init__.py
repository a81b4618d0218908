"""What an engine instance of a model on a kind of GPU can do, measured: the profiles and the times of their steps."""

from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import Profile, load_profile, shipped_profiles

__all__ = ["Profile", "StepCosts", "load_profile", "shipped_profiles"]
