"""Context parallelism: one sequence over several ranks, with exact attention across them."""
