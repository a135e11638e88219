"""Runs that a cluster's own launcher starts: SLURM, MPI, Ray and Kubernetes, over one worker entry point."""
