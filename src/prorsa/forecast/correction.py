"""The online multiplicative bias correction from forecast residuals (B.8)."""

from __future__ import annotations

DECAY = 0.95
"""What a window's weight shrinks to with every later window."""

BOUND = 4.0
"""The bias stays within [1 / BOUND, BOUND]: one odd window must not move the whole cluster."""


class BiasCorrection:
    """The ratio of what arrived to what was predicted, over recent windows.

    It starts from one imagined window that was predicted right, of the size of the first real one. It scales the
    PREDICTED parts only: the observed backlog is exact.
    """

    def __init__(self) -> None:
        self._predicted = 0.0
        self._arrived = 0.0

    @property
    def bias(self) -> float:
        if self._predicted <= 0.0:
            return 1.0
        return min(max(self._arrived / self._predicted, 1.0 / BOUND), BOUND)

    def update(self, predicted: float, arrived: float) -> None:
        """One finished window: tokens that the predicted parts announced, uncorrected, and tokens that arrived."""
        if not predicted and not arrived:
            # An idle window teaches nothing, and many of them must not wear away what the busy ones taught.
            return
        if not self._predicted:
            self._predicted = self._arrived = predicted
        self._predicted = DECAY * self._predicted + predicted
        self._arrived = DECAY * self._arrived + arrived
