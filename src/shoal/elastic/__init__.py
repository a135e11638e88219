"""Who takes part in a run: membership and its changes as pure state machines, and the election of the center."""
