"""Machina's dispatcher with warm toolhosts behind it: see `broker.machina_dispatch`, which this is.

A Machina tree's own module of this name wins where it comes first on the path, also over an editable install of ours,
which would otherwise stand before every path.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os.path import realpath

_found = PathFinder.find_spec(__name__)
if _found is not None and _found.loader is not None and realpath(_found.origin or "") != realpath(__file__):
    _theirs = sys.modules[__name__] = module_from_spec(_found)
    _found.loader.exec_module(_theirs)
else:
    from broker.machina_dispatch import *  # noqa: F403
    from broker.machina_dispatch import _toolhost_error as _toolhost_error
