"""Runs that pick tools by themselves: a selector picks from a menu, the runner dispatches and writes it all down.

    from broker import Embedded
    from broker.autopilot import Runner

See examples/autopilot.py for a small real task.
"""

from broker.autopilot.log import RunLog, replay
from broker.autopilot.menu import Menu
from broker.autopilot.runner import Outcome, Runner, Situation
from broker.autopilot.selection import Kind, RunHeader, Selection, parse
from broker.autopilot.selector import ExternalSelector

__all__ = [
    "ExternalSelector",
    "Kind",
    "Menu",
    "Outcome",
    "RunHeader",
    "RunLog",
    "Runner",
    "Selection",
    "Situation",
    "parse",
    "replay",
]
