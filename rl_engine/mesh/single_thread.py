"""Imported first by the process that forks the pool's workers: many ranks, one thread each.

Set before the libraries that read it at their import. Nothing else imports this module.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_name] = "1"
