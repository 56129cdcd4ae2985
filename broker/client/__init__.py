"""How programs call: over a socket, or with the toolhosts in their own process."""
