"""Models and data that recipes of tests name."""
