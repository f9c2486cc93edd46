"""What the models write and the caches read: which experts each token used."""

from remoe_cli.routing.trace import RoutingTrace

__all__ = ["RoutingTrace"]
