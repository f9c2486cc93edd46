"""What the models write and the caches read: which experts each token used. Traces are files (file.py); those of other
tools are imported (imports/)."""

from remoe_cli.routing.file import read, write
from remoe_cli.routing.trace import RoutingTrace

__all__ = ["RoutingTrace", "read", "write"]
