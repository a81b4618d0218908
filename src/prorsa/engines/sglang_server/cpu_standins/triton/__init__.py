"""Stands in for the compiler of GPU kernels: kernels can be declared, but not be run."""

from standin import take_over


def cdiv(dividend: int, divisor: int) -> int:
    return (dividend + divisor - 1) // divisor


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


take_over(__name__, __version__="3.5.0", cdiv=cdiv, next_power_of_2=next_power_of_2)
