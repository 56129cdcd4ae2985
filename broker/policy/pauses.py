"""What an operator has told to wait: tools and pools by name, or all of them. Pure."""

from __future__ import annotations

EVERYTHING = "*"


class Pauses:
    def __init__(self) -> None:
        self.names: set[str] = set()  # they stay until they are resumed, also while nothing is called so

    def hold(self, tool: str, pool: str) -> bool:
        """Calls of this tool wait."""
        return not self.names.isdisjoint((EVERYTHING, tool, pool))

    def resume(self, name: str) -> str:
        """Lets it go; `*` lets everything go. Why not, where it cannot be."""
        if name == EVERYTHING:
            self.names.clear()
        elif name in self.names:
            self.names.remove(name)
        elif EVERYTHING in self.names:
            return f"everything is paused, not {name} by itself: resume {EVERYTHING}"
        else:
            paused = ", ".join(sorted(self.names))
            return f"{name} is not paused; " + (f"paused: {paused}" if paused else "nothing is")
        return ""
