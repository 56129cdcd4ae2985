"""Toolhost broker: warm, pooled tool processes behind one policy."""

__version__ = "0.1.0"
