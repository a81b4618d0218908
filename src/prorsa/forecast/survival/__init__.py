"""The forecast beyond the paper's: every chain of stages that fits into the horizon (`docs/forecast.md`)."""

from prorsa.forecast.survival.forecaster import SurvivalForecaster

__all__ = ["SurvivalForecaster"]
