"""The worker side: the client of the servers, and the rules for steps of a worker's own."""
