"""A recipe's run on a cluster: the job that follows from a request, and the run that a cluster's launcher starts for us."""
