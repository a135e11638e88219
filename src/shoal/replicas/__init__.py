"""Replica policies: how islands, groups of ranks that train by themselves for some steps, come to agree."""
