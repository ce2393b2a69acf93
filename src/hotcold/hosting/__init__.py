"""An engine in a process of its own, and the front that talks with it."""
