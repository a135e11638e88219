"""Documents as programs: the code blocks of a page, and a shell in which ``shoal`` and ``python`` begin in milliseconds."""
