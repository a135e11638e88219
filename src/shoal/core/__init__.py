"""Words and values that every room shares: errors, configuration, plans, events, clocks, seeds and units. No torch."""
