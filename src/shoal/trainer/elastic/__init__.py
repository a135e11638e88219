"""Runs that go on when ranks die, on one host: a rank under one view after another, and what it brings along."""
