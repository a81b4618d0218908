"""What will arrive: the demand of the next seconds, from where every trajectory is (paper, Appendix B)."""

from prorsa.forecast.baselines import Kalman, Persistence
from prorsa.forecast.forecast import Forecast, Forecaster
from prorsa.forecast.forecaster import LifecycleForecaster
from prorsa.forecast.injection import FixedRate, GroupReplenishment, Injection, ReplaceOnReward
from prorsa.forecast.measure import Measured, WindowMeter, wape
from prorsa.forecast.survival import SurvivalForecaster
from prorsa.forecast.work import Work

__all__ = [
    "FixedRate",
    "Forecast",
    "Forecaster",
    "GroupReplenishment",
    "Injection",
    "Kalman",
    "LifecycleForecaster",
    "Measured",
    "Persistence",
    "ReplaceOnReward",
    "SurvivalForecaster",
    "WindowMeter",
    "Work",
    "wape",
]
