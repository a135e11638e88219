"""What the roles of a run with servers need, for the process that they are forked from (``elastic/cradle.py``) to import once."""

from shoal.trainer.servers import centering, closing, role, serving, working

WARMED = (centering, closing, role, serving, working)
"""Nobody calls these here."""
