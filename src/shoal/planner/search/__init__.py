"""Search for the fastest plan that fits, with estimates of each plan and the reasons for the choice."""
