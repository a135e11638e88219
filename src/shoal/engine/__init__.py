"""The engine: one model with its optimizer under one plan on this rank, and the hooks on its steps."""
