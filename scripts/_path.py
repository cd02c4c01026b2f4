"""Makes `python scripts/NAME.py` work from a bare clone: puts the repository's root on the import path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
