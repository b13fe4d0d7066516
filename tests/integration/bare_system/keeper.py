"""A keeper on a system that is not Linux: `python -I -S keeper.py HEADRACE_KEEPER.py FD`."""

import os
import runpy
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import sitecustomize  # noqa: F401

sys.platform = "darwin"
del sys.argv[0], sys.path[0]
runpy.run_path(sys.argv[0], run_name="__main__")
