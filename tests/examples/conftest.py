"""Make the example's packages importable, as running a script in `examples/` does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
