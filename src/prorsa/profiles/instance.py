"""The times of an instance that a policy plans with, from its profile: `prorsa.allocation.EngineCosts`."""

from __future__ import annotations

from math import ceil

from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import Profile


class ProfileCosts:
    """Raises `ConfigError` where the profile's grid cannot be used."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._steps = StepCosts(profile)

    @property
    def ranks(self) -> int:
        return self._profile.ranks

    @property
    def chunk(self) -> int:
        return self._profile.chunk

    @property
    def flip_s(self) -> float:
        return self._profile.flip_s

    def prefill_s(self, new: float, prefix: float) -> float:
        new, prefix = max(round(new), 1), round(prefix)
        return new / self._steps.prefill_speed(prefix + new, prefix)

    def prefill_step_s(self, tokens: float, prefix: float, share: float) -> float:
        return self._steps.prefill_local(tokens, prefix) + self._steps.shared(True, share * tokens, tokens)

    def decode_step_s(self, decodes: float, context: float) -> float:
        mean = decodes / self.ranks
        most = max(ceil(mean), 1)
        return self._steps.decode_local(most, context) + self._steps.shared(False, mean, most)
