"""Open files of this process: connections, pipes of engines and sandboxes, logs and recordings."""

from __future__ import annotations

import logging
import resource
import sys

log = logging.getLogger(__name__)


def raise_open_files() -> int:
    """Raise the soft limit on open files to the hard one, as far as the system lets us. Returns the limit that holds.

    The usual soft limit of 1024 is for programs that use select(); processes that are started later inherit the new one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit on open files stays at %d: %s", soft, error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
