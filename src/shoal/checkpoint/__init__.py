"""Checkpoints: summed, fsynced, voted on by all ranks, then renamed; read without running code or leaving their folder."""
