"""All forgeries of a finished run's folder, which the audit is held against."""

from __future__ import annotations

import tamper_episodes
import tamper_files
import tamper_ledger
import tamper_together
from forging import Tampering

TAMPERINGS: list[Tampering] = [
    *tamper_episodes.ALL,
    *tamper_ledger.ALL,
    *tamper_files.ALL,
    *tamper_together.ALL,
]
