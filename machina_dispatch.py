"""Machina's dispatcher with warm toolhosts behind it: see `broker.machina_dispatch`, which this is."""

from broker.machina_dispatch import *  # noqa: F403
from broker.machina_dispatch import _toolhost_error as _toolhost_error
