"""What the tests on a GPU share with those of the same parts without one."""

from __future__ import annotations

import sys
from pathlib import Path

for part in ("unit/engine", "unit/kernels", "unit/models", "unit/training", "contract", "integration"):
    sys.path.append(str(Path(__file__).parent.parent / part))
