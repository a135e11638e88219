"""Where the ranks of a run find each other: a file on one host, and a store that several hosts are relayed to."""
