"""What the roles of a run with servers need, for the process that they are forked from to import once."""

from shoal.serverrun import centering, closing, role, serving, working

WARMED = (centering, closing, role, serving, working)
"""Nobody calls these here."""
