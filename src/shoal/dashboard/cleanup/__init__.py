"""Taking away old runs: which ones is a pure decision, and another file removes what it recognises as a run directory."""
