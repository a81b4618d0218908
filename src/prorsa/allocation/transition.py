"""What goes on while instances change their roles."""

from __future__ import annotations

import numpy as np

from prorsa.forecast.durations import Floats


def staying(before: Floats, after: Floats) -> tuple[Floats, Floats]:
    """Of instances that change from roles to others, those that work meanwhile, in the role that they keep or get; and how
    many of them keep their decodes.

    `before` and `after` are [..., 3]: prefill, decode, mixed. An instance that becomes mixed, and a mixed one that becomes a
    decode instance, goes on with what it has (`engines.protocol.in_place`).
    """
    kept = np.minimum(before, after)
    leaving, joining = before - kept, after - kept
    from_decode = np.minimum(leaving[..., 1], joining[..., 2])
    to_decode = np.minimum(leaving[..., 2], joining[..., 1])
    from_prefill = np.minimum(leaving[..., 0], joining[..., 2] - from_decode)
    decoding = kept[..., 1] + kept[..., 2] + from_decode + to_decode
    kept[..., 1] += to_decode
    kept[..., 2] += from_decode + from_prefill
    return kept, decoding
