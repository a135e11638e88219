"""One file per way of filling a pipeline; each is a pure function from a size to rows."""
