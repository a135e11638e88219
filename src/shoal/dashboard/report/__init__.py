"""The report of a run: what a person wants to know of it afterwards, as values, as text, and as one page to mail."""
