"""The proof of an elastic run: replicas die and come by a script, and the run must end where the undisturbed one does."""
