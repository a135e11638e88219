"""Machines, jobs and tables for the planner, and a step simulated rank by rank."""
