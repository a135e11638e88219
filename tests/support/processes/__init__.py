"""Commands, ranks and network namespaces as real processes, and what of them a test may count."""
