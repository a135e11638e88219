"""The library: ``shoal.Run``, a script's own loop with Shoal's plans, checkpoints and supervision."""
