"""Before and beside a run: what a plan will move, hold and take, on a cluster or on this machine, and which plan to use."""
