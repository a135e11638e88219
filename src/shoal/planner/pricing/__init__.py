"""Time and memory of a step from layers, a plan and a cluster, by arithmetic."""
