"""Nodes of the wire in processes of their own, right and forged messages."""
