"""Egress as a process of its own, impatient where the service is patient: `-m tests.egress_runner FILE`."""

from __future__ import annotations

import asyncio
import sys

from common.service.wiring import load_settings
from egress.service import serve
from tests.egress_bench import QUICK

if __name__ == "__main__":
    sys.exit(asyncio.run(serve(load_settings(sys.argv[1]), tuning=QUICK, reexamine=0.3)))
