"""What JSON can hold."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """The same with null for every number that is not finite, which JSON has no word for, and lists for tuples."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
