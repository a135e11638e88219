"""Ranks on several hosts: a coordinator that starts an agent on each over a remote shell, and stays with them."""
