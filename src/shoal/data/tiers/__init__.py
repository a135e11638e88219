"""Blocks of remote data kept near: memory over the local disk over the network, shared by the ranks of a host."""
