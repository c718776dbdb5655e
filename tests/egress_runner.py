"""Egress as a process of its own, impatient where the service is patient: `-m tests.egress_runner FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from common.service import logs
from common.service.cli import run_async
from common.settings.root import Settings
from egress.service import serve
from tests.egress_bench import QUICK

if __name__ == "__main__":
    # Not through the checks of files: a test may set what users cannot yet.
    settings = Settings.model_validate(yaml.safe_load(Path(sys.argv[1]).read_text()))
    logs.configure(settings.log.level, settings.log.format, instance=settings.instance)
    sys.exit(run_async(serve(settings, tuning=QUICK, reexamine=0.3)))
