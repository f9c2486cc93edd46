"""Python reads this when a process starts that a test has started: its errors are recorded too (error_sites.py)."""

import os
import sys
from pathlib import Path

if "REMOE_ERRORS_SEEN" in os.environ:
    sys.path.append(str(Path(__file__).parent.parent))
    try:
        import error_sites

        error_sites.record()
    except ImportError:
        pass  # a Python without remoe
    finally:
        sys.path.remove(str(Path(__file__).parent.parent))
